"""Checkpoints and rollbacks, as the guard's metrics in the exporter's registry tell them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from prometheus_client import CollectorRegistry

_NAMES = (
    "act_checkpoints",
    "act_checkpoint_last_step",
    "act_checkpoint_last_success_timestamp_seconds",
    "act_checkpoint_failures_total",
    "act_rollbacks_total",
    "act_rollback_budget_remaining",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Guard:
    """What is known of a guard in this process; None where it has said nothing yet."""

    last_step: float | None = None
    last_success_at: float | None = None
    failures: float = 0
    rollbacks: float = 0
    budget_remaining: float | None = None
    healths: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, registry: CollectorRegistry) -> Self | None:
        """None where no guard has joined the registry.

        Only collectors that describe these names are asked, so that the thousands of series of the
        exporter's own are not made for it.
        """
        samples = [
            sample
            for family in registry.restricted_registry(_NAMES).collect()
            for sample in family.samples
        ]
        if not samples:
            return None
        values = {sample.name: sample.value for sample in samples}
        return cls(
            last_step=values.get("act_checkpoint_last_step"),
            last_success_at=values.get("act_checkpoint_last_success_timestamp_seconds"),
            failures=values.get("act_checkpoint_failures_total", 0),
            rollbacks=values.get("act_rollbacks_total", 0),
            budget_remaining=values.get("act_rollback_budget_remaining"),
            healths={
                sample.labels["health"]: int(sample.value)
                for sample in samples
                if sample.name == "act_checkpoints" and sample.value
            },
        )
