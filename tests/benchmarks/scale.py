"""What 200 exporters of 2,200 series cost Prometheus with the shipped rules, calm and in a storm.

    python -m tests.benchmarks.scale             (15 minutes; --quick a tenth of it, in five)

A process serves simulated exporters (`tests.benchmarks.cluster`); a real Prometheus has the shipped
configuration and rules, 15 s between scrapes and between evaluations, and a real Alertmanager with
the shipped routes behind it. All share the machine. The phases, of 7 minutes, are longer than the
rules look back for but for the forecast's hour: `quiet`, and `storm`, in which each layer of each
rank breaks each rule but that one. Writes build/bench/scale.json:

    quiet, storm  groups         evaluation of each rule group in seconds, `median` and `worst`, and
                                 evaluations `missed`; to be below 5 and below 15
                  slowest_rules  of the last evaluation
                  series         in Prometheus' memory, and of which kinds
                  memory_bytes   of the process, at most (resident)
                  work_seconds   of one core that each server took from one evaluation to the next,
                                 all it does included. No group can take more on a machine that has
                                 a core free, however long it took on this one
                  scrape_seconds `median` and `worst`
                  alerts         that fired at its end; `dropped`, `sent`, and the longest queue
                  load_average   of the last minute
    disk          bytes a sample in a block's chunks and in the write-ahead log, bytes a series in a
                  block's index
    page          of one exporter, as it is and compressed
    reach         whether all of it holds that the project asks for
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import requests
from rich.progress import track

from tests.benchmarks.report import parser_of, setting, write
from tests.benchmarks.watching import Watching, shipped, watching

QUIET_SHARE, STORM_SHARE = 1 / 3, 1
"""Of its interval, what each rule group's evaluation may take."""


def interval() -> float:
    """Seconds between two evaluations, as shipped."""
    text: str = shipped("prometheus/prometheus.yml")["global"]["evaluation_interval"]
    return float(text.removesuffix("s"))


def phase(servers: Watching, name: str, minutes: float) -> dict[str, Any]:
    """Let the time pass, and say what it cost."""
    for _ in track(range(round(minutes * 60)), name):
        time.sleep(1)
    return measured(servers, f"{round(minutes * 60)}s")


def measured(servers: Watching, span: str) -> dict[str, Any]:
    """All figures of the last `span`."""
    own = '{job="prometheus"}'
    duration = f"prometheus_rule_group_last_duration_seconds{own}[{span}]"
    missed = f"increase(prometheus_rule_group_iterations_missed_total{own}[{span}])"
    groups = {
        key.rpartition(";")[2]: {
            "median": round(
                servers.by("rule_group", f"quantile_over_time(0.5, {duration})")[key], 3
            ),
            "worst": round(worst, 3),
            "missed": round(servers.by("rule_group", missed).get(key, 0.0)),
        }
        for key, worst in servers.by("rule_group", f"max_over_time({duration})").items()
    }
    rules = [
        (rule["evaluationTime"], rule["name"])
        for group in servers.get("rules")["groups"]
        for rule in group["rules"]
    ]
    scrapes = f'{{job="act-exporter"}}[{span}]'
    count = "prometheus_notifications"
    return {
        "groups": groups,
        "slowest_rules": {
            name: round(seconds, 3) for seconds, name in sorted(rules, reverse=True)[:8]
        },
        "rule_failures": servers.value(
            f"increase(prometheus_rule_evaluation_failures_total{own}[{span}])"
        ),
        "series": {
            "head": servers.value(f"prometheus_tsdb_head_series{own}"),
            "exporters": servers.value('scrape_samples_post_metric_relabeling{job="act-exporter"}'),
            "layer_recorded": servers.value('count({__name__=~"layer:.+"})'),
            "run_recorded": servers.value('count({__name__=~"run:.+"})'),
            "alerts": servers.value('count({__name__=~"ALERTS.*"})'),
        },
        "samples_per_second": round(
            servers.value(f"rate(prometheus_tsdb_head_samples_appended_total{own}[1m])")
        ),
        "memory_bytes": servers.value(f"max_over_time(process_resident_memory_bytes{own}[{span}])"),
        "heap_bytes": servers.value(f"avg_over_time(go_memstats_heap_inuse_bytes{own}[{span}])"),
        "work_seconds": {
            job: round(
                interval()
                * servers.value(f'rate(process_cpu_seconds_total{{job="{job}"}}[{span}])'),
                2,
            )
            for job in ("prometheus", "alertmanager")
        },
        "scrape_seconds": {
            "median": round(
                servers.value(
                    f"quantile(0.5, quantile_over_time(0.5, scrape_duration_seconds{scrapes}))"
                ),
                4,
            ),
            "worst": round(
                servers.value(f"max(max_over_time(scrape_duration_seconds{scrapes}))"), 4
            ),
            "failed": servers.value(f"count(min_over_time(up{scrapes}) == 0)"),
        },
        "alerts": {
            "firing": servers.by("alertname", 'count by (alertname) (ALERTS{alertstate="firing"})'),
            "sent": round(servers.value(f"increase({count}_sent_total{own}[{span}])")),
            # Within the span: the first ones come before Prometheus has discovered Alertmanager.
            **{
                name: servers.value(
                    f"{count}_{name}_total{own} - min_over_time({count}_{name}_total{own}[{span}])"
                )
                for name in ("dropped", "errors")
            },
            "longest_queue": servers.value(f"max_over_time({count}_queue_length{own}[{span}])"),
            "queue_capacity": servers.value(f"{count}_queue_capacity{own}"),
        },
        "load_average": round(os.getloadavg()[0], 2),
    }


def disk(servers: Watching) -> dict[str, float]:
    """What the samples so far take as a block, and in the write-ahead log."""
    samples = servers.value('prometheus_tsdb_head_samples_appended_total{job="prometheus"}')
    logged = sum(path.stat().st_size for path in (servers.folder / "data" / "wal").glob("0*"))
    answer = requests.post(f"{servers.url}/api/v1/admin/tsdb/snapshot", timeout=300).json()
    found = [0, 0, 0, 0]
    for meta in (servers.folder / "data" / "snapshots" / answer["data"]["name"]).glob(
        "*/meta.json"
    ):
        stats = json.loads(meta.read_text())["stats"]
        sizes = [
            sum(p.stat().st_size for p in meta.parent.glob(part)) for part in ("chunks/*", "index")
        ]
        new = [*sizes, stats["numSamples"], stats["numSeries"]]
        found = [one + other for one, other in zip(found, new, strict=True)]
    chunks, index, kept, series = found
    return {
        "chunk_bytes_per_sample": round(chunks / kept, 2),
        "index_bytes_per_series": round(index / series, 1),
        "wal_bytes_per_sample": round(logged / samples, 2),
        "samples": kept,
    }


def page(servers: Watching) -> dict[str, int]:
    """One exporter's."""
    (entry,) = json.loads((servers.folder / "targets.json").read_text())
    body = requests.get(f"http://{entry['targets'][0]}/metrics", timeout=10).content
    return {
        "series": sum(not line.startswith(b"#") for line in body.splitlines()),
        "bytes": len(body),
        "gzip_bytes": len(gzip.compress(body, 1)),
    }


def holds(result: dict[str, Any]) -> dict[str, bool]:
    """What is asked for, and whether it is so."""
    parts = {"quiet": QUIET_SHARE * interval(), "storm": STORM_SHARE * interval()}
    return {
        **{
            f"{name}: every group below {limit:g} s": all(
                group["worst"] < limit for group in result[name]["groups"].values()
            )
            for name, limit in parts.items()
        },
        **{
            f"{name}: all work below {limit:g} s of a core": (
                result[name]["work_seconds"]["prometheus"] < limit
            )
            for name, limit in parts.items()
        },
        "no evaluation missed": all(
            group["missed"] == 0 for name in parts for group in result[name]["groups"].values()
        ),
        "no alert dropped": all(result[name]["alerts"]["dropped"] == 0 for name in parts),
    }


def main() -> None:
    parser = parser_of(__doc__, "scale.json", "a tenth of the exporters, shorter phases")
    parser.add_argument("--exporters", type=int, help="how many (200)")
    parser.add_argument("--runs", type=int, default=8, help="that they are the ranks of (8)")
    parser.add_argument("--minutes", type=float, help="of each phase (7)")
    arguments: argparse.Namespace = parser.parse_args()
    exporters = arguments.exporters or (20 if arguments.quick else 200)
    minutes = arguments.minutes or (2 if arguments.quick else 7)
    result = setting(
        ("act-exporter", "prometheus-client"),
        load_average=round(os.getloadavg()[0], 2),
        exporters=exporters,
        runs=arguments.runs,
        minutes=minutes,
    )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.out.parent, prefix="scale-") as place:
        folder = Path(place)
        with watching(folder, exporters, arguments.runs) as started:
            result["page"] = page(started)
            result["quiet"] = phase(started, "quiet", minutes)
            started.begin_storm()
            result["storm"] = phase(started, "storm", minutes)
            result["disk"] = disk(started)
    result["reach"] = holds(result)
    print(json.dumps(result, indent=1))
    write(result, arguments.out)


if __name__ == "__main__":
    main()
