"""The machines below the trainers: rows of node_exporter's and dcgm-exporter's numbers."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard, timeseries

from grafana.boards import several
from grafana.panels import Row, lines, query
from grafana.selection import rate

# Exporters of one machine differ in their ports.
_NODE = 'instance=~"$node(:.*)?"'


def variable() -> dashboard.QueryVariable:
    """The machines, of those that one of the two exporters runs on."""
    names = 'label_values({__name__=~"node_uname_info|DCGM_FI_DEV_GPU_UTIL"}, instance)'
    text = "By the host part of its exporters' addresses."
    return several("node", "Machine", names, text).regex("/^([^:]+)/")


def rows() -> list[Row]:
    """A row each."""
    return [
        Row(title="Machines: CPU, memory, disk, network (node_exporter)", panels=_machines()),
        Row(title="GPUs (dcgm-exporter)", panels=_gpus()),
    ]


def _machines() -> list[timeseries.Panel]:
    names = {"receive": "in", "transmit": "out"}
    idle = rate("node_cpu_seconds_total", f'{_NODE}, mode="idle"')
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
                    f"sum by (instance) ({rate(f'node_network_{way}_bytes_total', outer)})",
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
