"""The guard's metric families, read from a snapshot that the training thread replaces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from alerting.recovery.health import HEALTHS, Health
from alerting.recovery.lineage import Checkpoint

# One process trains; the label is there so that rules read the same for many ranks.
RANK = "0"


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardSnapshot:
    """What a scrape sees; None leaves the sample out, as there is no such thing yet."""

    last_step: int | None = None
    last_success_at: float | None = None
    save_seconds: float | None = None
    failures: int = 0
    rollbacks: int = 0
    budget_remaining: int | None = None
    healths: Mapping[Health, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        checkpoints: Sequence[Checkpoint],
        *,
        save_seconds: float | None,
        failures: int,
        rollbacks: int,
        budget_remaining: int,
    ) -> GuardSnapshot:
        """What there is to see with these checkpoints (all of them, oldest first) on disk."""
        newest = next((c for c in reversed(checkpoints) if c.resumable), None)
        return cls(
            last_step=newest.step if newest else None,
            last_success_at=newest.manifest.created_at if newest else None,
            save_seconds=save_seconds,
            failures=failures,
            rollbacks=rollbacks,
            budget_remaining=budget_remaining,
            healths=Counter(c.health.health for c in checkpoints),
        )


class GuardMetrics:
    """A collector for prometheus_client."""

    def __init__(self, run: str) -> None:
        self._run = run
        self.snapshot = GuardSnapshot()

    def register(self, registry: CollectorRegistry) -> None:
        """Expose the families there."""
        registry.register(self)

    def unregister(self, registry: CollectorRegistry) -> None:
        """Take them out, so that a later guard of this process can register."""
        registry.unregister(self)

    def describe(self) -> Iterator[Metric]:
        """The families without samples."""
        for family in self._families():
            family.samples = []
            yield family

    def collect(self) -> Iterator[Metric]:
        """The families of now."""
        return self._families()

    def _families(self) -> Iterator[Metric]:
        now = self.snapshot
        labels = ["run", "rank"]
        own = [self._run, RANK]
        gauges: list[tuple[str, str, float | None]] = [
            (
                "act_checkpoint_last_step",
                "Step of the newest published checkpoint that a run can go on from.",
                now.last_step,
            ),
            (
                "act_checkpoint_last_success_timestamp_seconds",
                "When that checkpoint was taken, Unix time.",
                now.last_success_at,
            ),
            (
                "act_checkpoint_save_seconds",
                "Seconds from the step boundary to complete files, of the last save.",
                now.save_seconds,
            ),
            (
                "act_rollback_budget_remaining",
                "Rollbacks left before the guard halts the run.",
                now.budget_remaining,
            ),
        ]
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(name, text, labels=labels)
            if value is not None:
                gauge.add_metric(own, value)
            yield gauge
        counters = [
            ("act_checkpoint_failures", "Saves that failed.", now.failures),
            ("act_rollbacks", "Rollbacks to a healthy checkpoint.", now.rollbacks),
        ]
        for name, text, count in counters:
            counter = CounterMetricFamily(name, text, labels=labels)
            counter.add_metric(own, count)
            yield counter
        by_health = GaugeMetricFamily(
            "act_checkpoints", "Checkpoints on disk by health.", labels=[*labels, "health"]
        )
        for health in HEALTHS:
            by_health.add_metric([*own, health], now.healths.get(health, 0))
        yield by_health
