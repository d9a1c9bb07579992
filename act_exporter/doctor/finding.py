"""What a check has found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from act_exporter.exceptions import ActExporterError

Severity = Literal["critical", "warning", "info"]
"""critical: training will fail, or fails now; warning: it costs stability; info: good to know."""

SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "info")

CERTAIN = 1e9
"""Strength of what is no matter of degree, a NaN among the weights for one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One fault, where it is, and what to change.

    Attributes:
        fault: its kind, a key of its check's `FAULTS`; the same for ever, for programs that read.
        severity: how bad it is.
        layer: the module's own name in the model; None where it is none's (a learning rate).
        what: one sentence with the figures that a person needs.
        change: one sentence: what to change.
        why: one sentence: why that helps.
        evidence: figures by name, with the unit in the name where there is one.
        strength: how many times over the check's own threshold, at least 1; says which of two
            findings of one severity comes first.
        symptom: whether it is what other faults look like (loud activations, say). It comes after
            those that are none, and is first only where nothing explains it.
    """

    fault: str
    severity: Severity
    layer: str | None
    what: str
    change: str
    why: str
    evidence: Mapping[str, float | int | str] = field(default_factory=dict)
    strength: float = 1.0
    symptom: bool = False

    @property
    def rank(self) -> tuple[int, bool, float]:
        """Sorts findings, the first one first."""
        return SEVERITIES.index(self.severity), self.symptom, -self.strength


class NeedsMoreError(ActExporterError):
    """A check cannot run with what was given; its message says what it needs: "an optimizer"."""


class UnusableBatchError(NeedsMoreError):
    """No forward can be run with the batch, and so no other check; the message is alike."""
