"""The dashboard Exporter health: whether the watchers work, what they cost, what is lost."""

from __future__ import annotations

from grafana_foundation_sdk.builders import stat, statetimeline, table, timeseries
from grafana_foundation_sdk.models.common import BigValueTextMode

from grafana import machines
from grafana.boards import Board, rank
from grafana.panels import Row, instant, lines, number, query, row_query, timeline
from grafana.rules import limit
from grafana.selection import RUN, rate
from grafana.tables import Column, rows

_RANKED = f'{RUN}, rank=~"$rank"'


def board() -> Board:
    """The dashboard."""
    return Board(
        name="exporter",
        description="Whether the watchers work, what they cost, and how their machines are.",
        variables=[rank(), machines.variable()],
        rows=[
            Row(title="Do the watchers work?", panels=[*_state(), _up(), _thresholds()]),
            Row(title="What looking costs", panels=_cost()),
            Row(title="What is lost", panels=_losses()),
            *machines.rows(),
        ],
    )


def _state() -> list[stat.Panel]:
    return [
        number(
            "Trainers that answer",
            "Targets of the job act-exporter that Prometheus reads, of all runs.",
            instant('sum(up{job="act-exporter"})'),
            unit="none",
            color="blue",
            width=4,
        ),
        number(
            "Overhead",
            "Share of the training time that looking costs; known after a thousand steps. Below "
            f"{limit('ActOverheadHigh'):.0%} is good; above it the exporter looks at fewer steps.",
            instant(f"max(act_overhead_ratio{{{_RANKED}}})"),
            unit="percentunit",
            alerts=["ActOverheadHigh"],
            none="not known yet",
            width=4,
        ).decimals(2),
        number(
            "Looks at each so-many-th step",
            "1 is each step. A larger one than `sample_every` was chosen by the exporter, to "
            "keep to its budget.",
            instant(f"max(act_sample_interval_steps{{{_RANKED}}})"),
            unit="none",
            color="blue",
            width=4,
        ),
        number(
            "Series left out",
            "Layer series that have no place on the page, since `max_series` is reached. 0 is "
            "good; the trainer judges them all the same.",
            instant(f"run:act_series_dropped:sum{{{RUN}}}"),
            unit="none",
            alerts=["ActSeriesDropped"],
            width=4,
        ),
        number(
            "Errors within the last minutes",
            "Inside the exporter; the trainer's log has each cause once. None is good: what is "
            "shown may be old else.",
            instant(f"sum(run:act_errors:increase6m{{{RUN}}})"),
            unit="none",
            alerts=["ActExporterErrors"],
            width=4,
        ).decimals(0),
        number(
            "Version",
            "Of the exporter.",
            instant(f"max by (version) (act_build_info{{{RUN}}})", "{{version}}"),
            unit="none",
            color="blue",
            width=4,
        ).text_mode(BigValueTextMode.NAME),
    ]


def _up() -> statetimeline.Panel:
    watchers = "act-exporter|act-receiver|alertmanager|prometheus|node-exporter"
    return timeline(
        "Who answers Prometheus",
        "A row a target: green while it answers. A red trainer is a crash or a run that has ended; "
        "without the receiver nobody makes checkpoints or rolls back at an alert.",
        query(f'up{{job=~"{watchers}"}}', "{{job}} {{instance}}"),
        meanings={0: ("away", "red"), 1: ("answers", "green")},
        alerts=["ActExporterDown", "ActReceiverDown", "ActExporterAbsent", "ActNodeGone"],
    )


def _thresholds() -> table.Panel:
    return rows(
        "Thresholds that the trainer judges by",
        "The rules must have been rendered for the same (`act-exporter rules`), or a rollback "
        "comes for another reason than people read.",
        row_query(f"max by (rule) (act_rule_threshold{{{_RANKED}}})"),
        columns=[
            Column(name="Rule", source="rule"),
            Column(name="Threshold", source="Value", unit="none"),
        ],
        sort_by="Rule",
        alerts=["ActThresholdsDiffer"],
        width=12,
    )


def _cost() -> list[timeseries.Panel]:
    return [
        # An axis that ends near the limit: of a share Grafana would show all up to 100 %.
        lines(
            "Overhead: share of training time",
            "What sampled steps take longer than unsampled ones, per rank. Below the line is good; "
            'above it for long, watch less (`watch="blocks"`) or seldom (`sample_every=`).',
            query(f"act_overhead_ratio{{{_RANKED}}}", "rank {{rank}}"),
            unit="percentunit",
            alerts=["ActOverheadHigh"],
        ).axis_soft_max(2 * limit("ActOverheadHigh")),
        lines(
            "Time in statistics and history",
            "Share of the trainer's time, on its host. Steady is good. Where the overhead is not "
            "known yet this is its upper bound on a CPU.",
            query(rate("act_probe_seconds_total", _RANKED), "rank {{rank}}"),
            unit="percentunit",
        ),
        lines(
            "Time of a scrape",
            "What rendering the page took, and what Prometheus waited for it. Far below its "
            "timeout of 10 s is good; fewer series make it shorter.",
            query(f"act_scrape_duration_seconds{{{_RANKED}}}", "rendering, rank {{rank}}"),
            query('scrape_duration_seconds{job="act-exporter"}', "scrape of {{instance}}"),
            unit="s",
        ),
        lines(
            "Layer series on the page",
            "Level is good. Beyond `max_series` they are left out.",
            query(f"act_series{{{_RANKED}}}", "rank {{rank}}"),
            unit="short",
        ),
        lines(
            "Journal, bytes a second before compression",
            "What each rank writes. Level is good; no line is no journal.",
            query(rate("act_journal_bytes_total", _RANKED), "rank {{rank}}"),
            unit="Bps",
        ),
        lines(
            "Journal, records a second",
            "A record a watched tensor and sampled step. It follows the steps.",
            query(rate("act_journal_records_total", _RANKED), "rank {{rank}}"),
            unit="short",
        ),
    ]


def _losses() -> list[timeseries.Panel]:
    return [
        lines(
            "Errors inside the exporter, a minute",
            "By stage. No lines is good. Training goes on; the log has each cause once. `silent` "
            "is layers that do not run.",
            query(f"60 * sum by (stage) ({rate('act_errors_total', _RANKED)}) > 0", "{{stage}}"),
            unit="short",
            alerts=["ActExporterErrors", "ActHooksSilent"],
            width=8,
        ),
        lines(
            "Journal records lost, a minute",
            "`queue`: the writer is too slow; `write`: the disk did not take them. No lines is "
            "good.",
            query(
                f"60 * sum by (reason) ({rate('act_journal_dropped_total', _RANKED)}) > 0",
                "{{reason}}",
            ),
            unit="short",
            alerts=["ActJournalDropping"],
            width=8,
        ),
        lines(
            "Memory of the trainer's devices, share of the limit",
            "What CUDA tensors of the process take. Where it comes near 1 a longer batch ends the "
            "run.",
            query(
                f"act_memory_allocated_bytes{{{_RANKED}}} / act_memory_limit_bytes{{{_RANKED}}}",
                "{{device}} of rank {{rank}}",
            ),
            unit="percentunit",
            alerts=["ActMemoryNearEnd"],
            width=8,
        ),
    ]
