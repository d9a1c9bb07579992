"""What the alert rules say, for panels to show: the number, the severity, the runbook's heading.

Read from the committed rule files, so that a panel turns red at the number at which the rule fires.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

_FOLDER = Path(__file__).parent.parent / "prometheus" / "rules"
_COMPARISON = re.compile(r"\s([<>]=?|==)\s([\d.]+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One alert.

    Attributes:
        severity: "critical", "warning" or "info".
        sign: of the first comparison in its expression: ">", ">=", "<", "<=" or "==".
        limit: the number after it; None where it compares with none.
        runbook: address of its heading.
    """

    name: str
    severity: str
    sign: str
    limit: float | None
    runbook: str

    def __str__(self) -> str:
        firing = "" if self.limit is None else f", {self.sign} {self.limit:g}"
        return f"{self.name} ({self.severity}{firing})"


def rule(alert: str) -> Rule:
    """The alert of that name.

    Raises:
        KeyError: no rule file has it.
    """
    return _rules()[alert]


def limit(alert: str) -> float:
    """The number from which on it fires.

    Raises:
        KeyError: it compares with none, or no rule file has it.
    """
    found = rule(alert).limit
    if found is None:
        raise KeyError(alert)
    return found


@cache
def _rules() -> dict[str, Rule]:
    found = {}
    for path in sorted(_FOLDER.glob("*.yml")):
        for group in yaml.safe_load(path.read_text())["groups"]:
            for each in group["rules"]:
                comparison = _COMPARISON.search(each["expr"])
                if "alert" in each:
                    found[each["alert"]] = Rule(
                        name=each["alert"],
                        severity=each["labels"]["severity"],
                        sign="" if comparison is None else comparison[1],
                        limit=None if comparison is None else float(comparison[2]),
                        runbook=each["annotations"]["runbook_url"],
                    )
    return found
