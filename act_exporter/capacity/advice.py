"""What to do where a run is too much for one Prometheus, and what it gives up."""

from __future__ import annotations

import math

from act_exporter.capacity.cost import Cost
from act_exporter.capacity.series import MAX_SERIES, Series
from act_exporter.layers import Watch
from act_exporter.torch_exporter import Reduce

# Of its interval, what all work of Prometheus may take of one core in health. No rule group can
# take more then, since each is evaluated on one; storms, queries and compaction have the rest.
_SHARE = 1 / 3

# Prometheus reads its write-ahead log before it answers, and a log of more takes it many minutes.
_MEMORY = 64 * 2**30

# The rules' shortest range is a minute, in which there must be four scrapes.
_LONGEST_INTERVAL = 15.0

# Alerts that Prometheus keeps for Alertmanager unless it is told otherwise; of more it drops some.
_QUEUE = 10_000


def prometheus_needed(cost: Cost, interval: float) -> int:
    """How many Prometheus of two cores it takes, `interval` seconds between evaluations."""
    by_rules = max(cost.quiet / (_SHARE * interval), cost.storm / interval)
    return math.ceil(max(by_rules, cost.memory / _MEMORY, 1e-9))


def advice(
    series: Series, cost: Cost, *, interval: float, watch: Watch, reduce: Reduce
) -> list[str]:
    """Sentences for people, what helps most first; each says why."""
    found = []
    needed = prometheus_needed(cost, interval)
    if needed > 1:
        if reduce == "rank":
            found.append(
                f'reduce="global": one page for the whole run in place of {series.exporters:,}. It'
                " says which rank has the largest value, but ActRankSpread can no longer compare"
                " ranks, all need the same layers (no pipeline stages), and it was not tried with"
                " more than four ranks."
            )
        if watch != "blocks":
            found.append(
                'watch="blocks": one tensor a block. A fault inside a block is then seen when it'
                " leaves the block, and not where its residual stream or norm hides it."
            )
        found.append(
            f"Several Prometheus: {needed:,}. More cores do not help one for long, since the rules"
            " of a group are evaluated one after the other. Give whole runs to each. Of one run's"
            " ranks on several, each judges its own under the same labels, so that Alertmanager"
            " still makes one alert of them; but ActRankSpread then compares only the ranks of one."
        )
    if series.alerts > _QUEUE:
        found.append(
            f"--alertmanager.notification-queue-capacity={2 * series.alerts}: where each tensor has"
            f" each alert there are {series.alerts:,}; of more than {_QUEUE:,} that wait for"
            " Alertmanager, Prometheus drops the oldest."
        )
    if series.placeless:
        found.append(
            f"max_series={MAX_SERIES:,} leaves {series.placeless:,} of {series.tensors:,} tensors"
            " without a place on the page; the worst of them are shown by turns. Raise it, or watch"
            " fewer."
        )
    if interval > _LONGEST_INTERVAL:
        found.append(
            f"interval: the shipped rules look back a minute and want four scrapes in it, so none"
            f" beyond {_LONGEST_INTERVAL:g}s; the trainer holds its peaks for 120 s."
        )
    found.append(
        "sample_every= saves the trainer's time and no series. Only where sampled steps are further"
        f" apart than {interval:g} s, values stay as they were, and those take next to no disk."
    )
    return found
