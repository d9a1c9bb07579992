"""The dashboard Exporter health: what looking costs, whether it works, and the machines below."""

from __future__ import annotations

from grafana_foundation_sdk.builders import stat, statetimeline, table, timeseries

from grafana.boards import Board, rank, several
from grafana.panels import Row, instant, lines, number, query, row_query, timeline
from grafana.tables import Column, rows

_RUN = 'run="$run"'
_RANKED = f'{_RUN}, rank=~"$rank"'
# Exporters of one machine differ in their ports.
_NODE = 'instance=~"$node(:.*)?"'


def board() -> Board:
    """The dashboard."""
    machines = 'label_values({__name__=~"node_uname_info|DCGM_FI_DEV_GPU_UTIL"}, instance)'
    node = several("node", "Machine", machines, "By the host part of its exporters' addresses.")
    return Board(
        name="exporter",
        description="Whether the watchers work, what they cost, and how their machines are.",
        variables=[rank(), node.regex("/^([^:]+)/")],
        rows=[
            Row(title="Do the watchers work?", panels=[*_state(), _up(), _thresholds()]),
            Row(title="What looking costs", panels=_cost()),
            Row(title="What is lost", panels=_losses()),
            Row(
                title="Machines: CPU, memory, disk, network (node_exporter)",
                panels=_machines(),
            ),
            Row(title="GPUs (dcgm-exporter)", panels=_gpus()),
        ],
    )


def _rate(counter: str, matchers: str = _RANKED) -> str:
    return f"rate({counter}{{{matchers}}}[$__rate_interval])"


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
            "1 % is good; above it the exporter looks at fewer steps by itself.",
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
            instant(f"run:act_series_dropped:sum{{{_RUN}}}"),
            unit="none",
            alerts=["ActSeriesDropped"],
            width=4,
        ),
        number(
            "Errors within the last minutes",
            "Inside the exporter; the trainer's log has each cause once. None is good: what is "
            "shown may be old else.",
            instant(f"sum(run:act_errors:increase6m{{{_RUN}}})"),
            unit="none",
            alerts=["ActExporterErrors"],
            width=4,
        ).decimals(0),
        number(
            "Version",
            "Of the exporter.",
            instant(f"max by (version) (act_build_info{{{_RUN}}})", "{{version}}"),
            unit="none",
            color="blue",
            named=True,
            width=4,
        ),
    ]


def _up() -> statetimeline.Panel:
    watchers = "act-exporter|act-receiver|alertmanager|prometheus"
    return timeline(
        "Who answers Prometheus",
        "A row a target: green while it answers. A red trainer is a crash or a run that has ended; "
        "without the receiver nobody makes checkpoints or rolls back at an alert.",
        query(f'up{{job=~"{watchers}"}}', "{{job}} {{instance}}"),
        meanings={0: ("away", "red"), 1: ("answers", "green")},
        alerts=["ActExporterDown", "ActReceiverDown", "ActExporterAbsent"],
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
        lines(
            "Overhead: share of training time",
            "What sampled steps take longer than unsampled ones, per rank. Below the line is good; "
            'above it for long, watch less (`watch="blocks"`) or seldom (`sample_every=`).',
            query(f"act_overhead_ratio{{{_RANKED}}}", "rank {{rank}}"),
            unit="percentunit",
            alerts=["ActOverheadHigh"],
        ),
        lines(
            "Time in statistics and history",
            "Of the trainer's host, a second of it. Steady is good. Where overhead is not known "
            "yet this is its upper bound on a CPU.",
            query(_rate("act_probe_seconds_total"), "rank {{rank}}"),
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
            query(_rate("act_journal_bytes_total"), "rank {{rank}}"),
            unit="Bps",
        ),
        lines(
            "Journal, records a second",
            "A record a watched tensor and sampled step. It follows the steps.",
            query(_rate("act_journal_records_total"), "rank {{rank}}"),
            unit="short",
        ),
    ]


def _losses() -> list[timeseries.Panel]:
    return [
        lines(
            "Errors inside the exporter, a minute",
            "By stage. No lines is good. Training goes on; the log has each cause once. `silent` "
            "is layers that do not run.",
            query(f"60 * sum by (stage) ({_rate('act_errors_total')}) > 0", "{{stage}}"),
            unit="short",
            alerts=["ActExporterErrors", "ActHooksSilent"],
            width=8,
        ),
        lines(
            "Journal records lost, a minute",
            "`queue`: the writer is too slow; `write`: the disk did not take them. No lines is "
            "good.",
            query(f"60 * sum by (reason) ({_rate('act_journal_dropped_total')}) > 0", "{{reason}}"),
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


def _machines() -> list[timeseries.Panel]:
    names = {"receive": "in", "transmit": "out"}
    idle = _rate("node_cpu_seconds_total", f'{_NODE}, mode="idle"')
    outer = f'{_NODE}, device!~"lo|veth.*|docker.*|br-.*"'
    return [
        lines(
            "CPU in use",
            "Of all cores. A data loader that starves the trainer shows as 1 here, or as a GPU "
            "that waits below.",
            query(f"1 - avg by (instance) ({idle})", "{{instance}}"),
            unit="percentunit",
        ),
        lines(
            "Memory in use",
            "What is not available. Where it comes to 1 the kernel ends a process, mostly the "
            "trainer.",
            query(
                f"1 - node_memory_MemAvailable_bytes{{{_NODE}}} "
                f"/ node_memory_MemTotal_bytes{{{_NODE}}}",
                "{{instance}}",
            ),
            unit="percentunit",
        ),
        lines(
            "Network",
            "In, and out, without loopback and containers. All ranks alike is good.",
            *(
                query(
                    f"sum by (instance) ({_rate(f'node_network_{way}_bytes_total', outer)})",
                    f"{{{{instance}}}} {name}",
                )
                for way, name in names.items()
            ),
            unit="Bps",
        ),
        lines(
            "Disks in use",
            "The fullest file systems. A full one fails checkpoints and costs journal records.",
            query(
                f"""
                topk(5, 1 - node_filesystem_avail_bytes{{{_NODE}, fstype!~"tmpfs|ramfs|overlay"}}
                / node_filesystem_size_bytes{{{_NODE}, fstype!~"tmpfs|ramfs|overlay"}})
                """,
                "{{instance}} {{mountpoint}}",
            ),
            unit="percentunit",
        ),
    ]


def _gpus() -> list[timeseries.Panel]:
    gpu = "{{Hostname}} {{gpu}}"
    used, free = (f"DCGM_FI_DEV_FB_{part}{{{_NODE}}}" for part in ("USED", "FREE"))
    plain = {
        "GPU in use": (
            "DCGM_FI_DEV_GPU_UTIL",
            "percent",
            "Share of the time in which a kernel ran. High and alike is good; one below the others "
            "makes all wait. In percent: from its version 4.9 on dcgm-exporter has shares instead.",
        ),
        "GPU temperature": (
            "DCGM_FI_DEV_GPU_TEMP",
            "celsius",
            "Alike is good. One that is hotter is throttled, and slows all ranks.",
        ),
        "GPU power": (
            "DCGM_FI_DEV_POWER_USAGE",
            "watt",
            "Follows the work. A fall on one is a rank that waits or has ended.",
        ),
        "GPU errors: the last XID": (
            "DCGM_FI_DEV_XID_ERRORS",
            "none",
            "0 is good. Another number is the driver's last error: look it up in NVIDIA's list of "
            "XIDs; 48, 63, 64, 74, 79, 94 and 95 are hardware.",
        ),
    }
    return [
        *(
            lines(title, text, query(f"{metric}{{{_NODE}}}", gpu), unit=unit)
            for title, (metric, unit, text) in plain.items()
        ),
        lines(
            "GPU memory in use",
            "Share of the frame buffer. Level is good; where it comes to 1, see the memory of the "
            "trainer's devices above.",
            query(f"{used} / ({used} + {free})", gpu),
            unit="percentunit",
            width=24,
        ),
    ]
