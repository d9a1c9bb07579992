"""The shipped alerts and their limits, taken from the rules themselves.

Rendered for the trainer's own thresholds, so that no limit is spelled a second time.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import yaml

from act_exporter.history import Thresholds
from act_exporter.rows import Array
from act_exporter.rules import RuleThresholds, render_rules

Severity = Literal["critical", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
"""The worst first."""

_COMPARE: dict[str, Callable[[Array, float], npt.NDArray[np.bool_]]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
_CONDITION = r"(>=|<=|>|<) *([0-9.]+)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Alert:
    """A shipped alert.

    Attributes:
        name: as in Prometheus.
        severity: its label.
        action: what the trainer is asked for: "checkpoint", "recover", or "" for nothing.
        wait: how long its condition must hold before it fires, as Prometheus writes it; or "".
        sign: how a value is compared.
        limit: with what.
    """

    name: str
    severity: Severity
    action: str
    wait: str
    sign: str
    limit: float

    def holds(self, values: Array) -> npt.NDArray[np.bool_]:
        """Where the condition holds; nowhere for NaN."""
        with np.errstate(invalid="ignore"):
            return _COMPARE[self.sign](values, self.limit)


class Shipped:
    """The shipped alerts, and limits within their expressions.

    Args:
        thresholds: the trainer's.
    """

    def __init__(self, thresholds: Thresholds) -> None:
        known = RuleThresholds(
            hard=thresholds.hard, sigma=thresholds.sigma, window=thresholds.window
        )
        # The C loader where there is one: 10 ms in place of 130.
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        rules = [
            rule
            for text in render_rules(known).values()
            for group in yaml.load(text, loader)["groups"]  # noqa: S506 - a safe one
            for rule in group["rules"]
        ]
        self.alerts = {rule["alert"]: _alert(rule) for rule in rules if "alert" in rule}
        """By name."""
        self._expressions = "\n".join(str(rule["expr"]) for rule in rules)

    def limit(self, metric: str) -> float:
        """What a metric is compared with inside an expression."""
        found = re.search(rf"\b{metric} +{_CONDITION}", self._expressions)
        if found is None:
            raise LookupError(f"no shipped rule compares {metric}")
        return float(found[2])


def _alert(rule: Mapping[str, Any]) -> Alert:
    # Of `a > 1 or b > 2` both say the same: the last comparison is the alert's.
    sign, limit = (re.findall(_CONDITION, str(rule["expr"])) or [(">", "nan")])[-1]
    labels = rule["labels"]
    return Alert(
        name=rule["alert"],
        severity=labels["severity"],
        action=labels.get("action", ""),
        wait=rule.get("for", ""),
        sign=sign,
        limit=float(limit),
    )
