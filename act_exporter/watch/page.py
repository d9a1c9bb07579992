"""What one `/metrics` page says, by the metric names that are the contract.

Names on it were chosen by whoever wrote the model: `clean` takes out what could steer a terminal.
"""

from __future__ import annotations

import functools
import math
import unicodedata
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from prometheus_client.parser import text_string_to_metric_families

from act_exporter.exceptions import ActExporterError

# What Python's parser raises on text that is none of its format.
_NOT_PARSED = (ValueError, KeyError, IndexError, TypeError, AttributeError)

_LAYER = "act_layer_"

# Shown as whole numbers.
_STEPS = ("act_step", "act_onset_step")

Samples = Mapping[str, list[tuple[dict[str, str], float]]]
"""By name, (labels, value)."""


class PageError(ActExporterError):
    """There is no page, or none of an exporter; goes on from the exporter's address."""


@dataclass(frozen=True, slots=True)
class Onset:
    """The first bad step of the present anomaly, as a page names it."""

    step: int
    layer: str
    tensor: str
    rule: str


@dataclass(frozen=True, slots=True)
class Layer:
    """One tensor of a layer; NaN where the page has no value.

    Attributes:
        layer: the module's name.
        tensor: "input" or "output".
        values: of families with one sample, by their names without "act_layer_".
        nonfinite: elements that were NaN or infinite since the process began.
        consecutive: bad sampled steps in a row, by rule.
    """

    layer: str
    tensor: str
    values: dict[str, float] = field(default_factory=dict)
    nonfinite: float = 0.0
    consecutive: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.layer} {self.tensor}"

    def value(self, family: str) -> float:
        return self.values.get(family, math.nan)

    def row(self, *rules: str) -> float:
        """The longest row of bad sampled steps by any of the rules; 0 where there is none."""
        return max((self.consecutive.get(rule, 0.0) for rule in rules), default=0.0)

    @property
    def ratio(self) -> float:
        """The peak over the baseline."""
        return _over(self.value("absmax_peak"), self.value("absmax_baseline"))

    @property
    def present(self) -> float:
        """The last sampled step over the baseline."""
        return _over(self.value("absmax"), self.value("absmax_baseline"))

    @property
    def sigma(self) -> float:
        """Deviations of the last sampled step above its window."""
        above = self.value("absmax") - self.value("absmax_window_mean")
        return _over(above, self.value("absmax_window_std"))


@dataclass(frozen=True, slots=True)
class Page:
    """One exporter's page.

    Attributes:
        samples: all of it, with clean labels.
        layers: by layer and tensor.
        time: when it was made, Unix seconds of the trainer's clock.
    """

    samples: Samples
    layers: Mapping[tuple[str, str], Layer]
    time: float

    @property
    def run(self) -> str:
        return self._label("act_step", "run")

    @property
    def rank(self) -> str:
        return self._label("act_step", "rank")

    @property
    def generation(self) -> str:
        return self._label("act_run_info", "generation")

    @property
    def step(self) -> int:
        return int(self.value("act_step"))

    @property
    def age(self) -> float:
        """Seconds from the end of the last step to the page."""
        # Of a page without the family there is no age; clocks are read to the second.
        return max(self.time - self.value("act_last_step_timestamp_seconds"), 0.0)

    @property
    def onset(self) -> Onset | None:
        for labels, step in self.samples.get("act_onset_step", []):
            layer, tensor, rule = (labels.get(name, "?") for name in ("layer", "tensor", "rule"))
            return Onset(int(step), layer, tensor, rule)
        return None

    @property
    def verdict(self) -> str | None:
        """The kind of fault that is in force."""
        verdicts = self.by("act_diagnosis", "verdict")
        return next((verdict for verdict, holds in verdicts.items() if holds > 0), None)

    def value(self, name: str) -> float:
        """The family's only sample, or NaN."""
        found = self.samples.get(name, [])
        return found[0][1] if found else math.nan

    def by(self, name: str, label: str) -> dict[str, float]:
        """The family's samples, by the value of a label."""
        return {labels.get(label, "?"): value for labels, value in self.samples.get(name, [])}

    def _label(self, name: str, label: str) -> str:
        for labels, _ in self.samples.get(name, []):
            return labels.get(label, "?")
        return "?"


def parse(text: str, time: float) -> Page:
    """Read a page in Prometheus' text format.

    Args:
        text: the page.
        time: when it was made, Unix seconds.

    Raises:
        PageError: it is not of that format, or of no exporter.
    """
    samples: defaultdict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = {name: clean(value) for name, value in sample.labels.items()}
                samples[sample.name].append((labels, float(sample.value)))
    except _NOT_PARSED as error:
        raise PageError(f"answers with no page of metrics: {clean(str(error))[:60]}") from error
    if not all(math.isfinite(step) for name in _STEPS for _, step in samples.get(name, [])):
        raise PageError("answers with steps that are no numbers")
    if "act_step" not in samples:
        raise PageError("answers with metrics, but not with an exporter's: there is no act_step")
    return Page(samples, _layers_of(samples), time)


@functools.lru_cache(maxsize=50_000)
def clean(text: str) -> str:
    """One line, without control characters and without what is invisible or turns the text."""
    return " ".join(
        "".join(
            " " if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") else character
            for character in text
        ).split()
    )


def _layers_of(samples: Samples) -> dict[tuple[str, str], Layer]:
    layers: dict[tuple[str, str], Layer] = {}
    nonfinite: defaultdict[tuple[str, str], float] = defaultdict(float)
    for name, own in samples.items():
        if not name.startswith(_LAYER):
            continue
        for labels, value in own:
            if "layer" not in labels or "tensor" not in labels:
                continue  # of a whole layer: its gradient's norm, its update
            key = labels["layer"], labels["tensor"]
            layer = layers.setdefault(key, Layer(*key))
            if name == "act_layer_nonfinite_total":
                nonfinite[key] += value
            elif name == "act_layer_exceeded_consecutive":
                layer.consecutive[labels.get("rule", "?")] = value
            else:
                layer.values[name.removeprefix(_LAYER)] = value
    return {key: replace(layer, nonfinite=nonfinite[key]) for key, layer in layers.items()}


def _over(above: float, below: float) -> float:
    return above / below if below > 0 else math.nan
