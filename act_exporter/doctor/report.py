"""What an examination says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from act_exporter.doctor.finding import Finding
from act_exporter.doctor.trace import Seen


@dataclass(frozen=True, slots=True)
class Report:
    """An examination.

    Attributes:
        findings: the worst first; of two alike, the cause before what it looks like.
        not_run: checks that did not run, each with the reason: "needs an optimizer".
        checks: names of all checks, in the order in which they ran.
        profile: the tensors of one forward, in order.
    """

    findings: tuple[Finding, ...]
    not_run: Mapping[str, str]
    checks: tuple[str, ...]
    profile: tuple[Seen, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON knows it."""
        raise NotImplementedError
