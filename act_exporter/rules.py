"""The alert rules for thresholds of one's own, rendered from the templates of the shipped ones.

A template is a rule file with `<<hard>>` and the like where a threshold stands, in an expression or
in a sentence: Prometheus' own templates have braces, and YAML takes angle brackets as they are. The
committed files are what the defaults render; a test says so.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path

from act_exporter.assets import assets_folder
from act_exporter.exceptions import SettingError
from act_exporter.history import Thresholds

_HEADER = "# Rendered by `act-exporter rules"
_TRAINER = Thresholds()
_TOKEN = re.compile(r"<<(\w+)>>")
_GROUP = re.compile(r"^  - name: .+\n", re.MULTILINE)

# vmalert evaluates once a minute unless a group says otherwise; prometheus.yml says 15 s for all.
_VMALERT_INTERVAL = "15s"


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleThresholds:
    """What the rules are rendered for; the trainer must judge by the same (`start_exporter`).

    Raises:
        SettingError: one of them is not above 0, or is not a whole number where it must be.
    """

    hard: float = _TRAINER.hard
    """Times the baseline."""

    sigma: float = _TRAINER.sigma
    """Standard deviations above the window's mean."""

    window: int = _TRAINER.window
    """Sampled steps in the window. The rules only speak of it, the trainer keeps it."""

    consecutive: int = 3
    """Bad sampled steps in a row after which a rollback is asked for, or a warning given."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value > 0):
                raise SettingError(f"{field.name}={value!r} must be above 0")
            if field.type == "int" and value != int(value):
                raise SettingError(f"{field.name}={value!r} must be a whole number")


DEFAULTS = RuleThresholds()
"""The trainer's own, for which the shipped files are rendered."""


def write_rules(
    folder: Path, thresholds: RuleThresholds = DEFAULTS, *, vmalert: bool = False
) -> list[Path]:
    """Write the rule files into `folder` and return their paths.

    Args:
        folder: created where missing. Files that were rendered before are replaced.
        thresholds: what stands in the rules.
        vmalert: for VictoriaMetrics' vmalert, 1.79 or later.

    Raises:
        SettingError: a file of that name is there that was not rendered; nothing was written.
    """
    rendered = {
        folder / name: text for name, text in render_rules(thresholds, vmalert=vmalert).items()
    }
    for path in rendered:
        if path.exists() and not path.read_text().startswith(_HEADER):
            raise SettingError(f"{path} exists and was not rendered; nothing was written")
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in rendered.items():
        path.write_text(text)
    return list(rendered)


def render_rules(thresholds: RuleThresholds, *, vmalert: bool = False) -> dict[str, str]:
    """The text of each rule file, by its name."""
    values = {name: f"{value:.15g}" for name, value in dataclasses.asdict(thresholds).items()}
    options = "".join(f" --{name} {value}" for name, value in values.items())
    command = f"{_HEADER}{options}{' --vmalert' if vmalert else ''}`"
    source = assets_folder()
    texts = {}
    for template in sorted((source / "prometheus" / "templates").glob("*.yml")):
        body = _TOKEN.sub(lambda token: values[token[1]], template.read_text())
        if vmalert:
            body = _GROUP.sub(rf"\g<0>    interval: {_VMALERT_INTERVAL}\n", body)
        origin = (
            f"# from prometheus/templates/{template.name}. Comments give the defaults' reasons."
        )
        texts[template.name] = f"{command}\n{origin}\n#\n{body}"
    return texts
