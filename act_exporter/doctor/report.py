"""What an examination says."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from act_exporter.doctor.finding import SEVERITIES, Finding

if TYPE_CHECKING:
    from act_exporter.doctor.trace import Seen
from act_exporter.records import spelled

_WIDTH = 100
_INDENT = "    "


@dataclass(frozen=True, slots=True)
class Report:
    """An examination.

    Attributes:
        findings: the worst first; of two alike, the cause before what it looks like.
        not_run: checks that did not run, each with the reason: "needs an optimizer".
        checks: names of all checks, in the order in which they ran.
        profile: the tensors of one forward, in order.
        error: what the forward of the batch raised, in one line; None where it came to its end.
    """

    findings: tuple[Finding, ...]
    not_run: Mapping[str, str]
    checks: tuple[str, ...]
    profile: tuple[Seen, ...]
    error: str | None = None

    @property
    def exit_code(self) -> int:
        """A process's: 1 with a critical finding, else 2 where the forward failed, else 0."""
        if any(finding.severity == "critical" for finding in self.findings):
            return 1
        return 0 if self.error is None else 2

    @property
    def headline(self) -> str:
        """How much was found, in one line."""
        counts = Counter(finding.severity for finding in self.findings)
        found = [f"{counts[severity]} {severity}" for severity in SEVERITIES if counts[severity]]
        ran = len(self.checks) - len(self.not_run)
        return f"{', '.join(found) or 'nothing found'}; {ran} of {len(self.checks)} checks ran"

    def to_dict(self) -> dict[str, Any]:
        """As JSON knows it; numbers that are none are "NaN", "Infinity" and "-Infinity"."""
        return {
            "findings": [_plain(dataclasses.asdict(finding)) for finding in self.findings],
            "not_run": dict(self.not_run),
            "checks": list(self.checks),
            "error": self.error,
            "profile": [_of_tensor(seen) for seen in self.profile],
        }

    def to_json(self) -> str:
        """`to_dict` as text, a line at its end."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    def __str__(self) -> str:
        lines = [self.headline]
        if self.error is not None:
            lines.append(f"The forward failed: {self.error}")
        for finding in self.findings:
            lines += ["", heading(finding)]
            lines += _wrapped(sentences(finding))
        if self.not_run:
            lines += ["", "Not run:"]
            lines += _wrapped(f"{name}: {reason}" for name, reason in self.not_run.items())
        return "\n".join(lines)


def heading(finding: Finding) -> str:
    """How bad, what and where."""
    where = "" if finding.layer is None else f"  {finding.layer}"
    return f"{finding.severity}  {finding.fault}{where}"


def sentences(finding: Finding) -> Iterator[str]:
    """What is the matter, what to change, why, and the figures."""
    yield finding.what
    yield f"Change: {finding.change}"
    yield f"Why: {finding.why}"
    if finding.evidence:
        figures = (f"{name} {_figure(value)}" for name, value in finding.evidence.items())
        yield f"Evidence: {', '.join(figures)}"


def _wrapped(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield from textwrap.wrap(text, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)


def _figure(value: float | int | str) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def _of_tensor(seen: Seen) -> dict[str, Any]:
    numbers = {
        field.name: getattr(seen, field.name)
        for field in dataclasses.fields(seen)
        if field.name not in ("place", "shape", "dtype")
    }
    return {
        "layer": seen.layer,
        "side": seen.place.side,
        "call": seen.place.call,
        "shape": list(seen.shape),
        "dtype": str(seen.dtype).removeprefix("torch."),
        **_plain(numbers),
    }


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _plain(value) if isinstance(value, Mapping) else spelled(value)
        for name, value in fields.items()
    }
