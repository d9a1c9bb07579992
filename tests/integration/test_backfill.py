"""From a journal to a dashboard: the real promtool, a real Prometheus and the shipped rules."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import requests
import yaml

from act_exporter.journal import Journal
from act_exporter.records import STATISTICS, Reader
from act_exporter.rows import COLUMNS, Column, Statistics
from act_exporter.taps import Tap
from deploy.demo.servers import REPOSITORY, Server, binary, free_port, running

DAY = 86_400
RUN = "gpt"
STEPS = 600
STEP_SECONDS = 20  # more than three hours in all, so more than one block of two
LAYERS = ("h.0.attn", 'h.1."odd"\\name')

Series = dict[tuple[tuple[str, str], ...], dict[float, float]]
"""Labels to the samples by time."""


def write_journal(folder: Path, rank: int, now: float) -> None:
    """A run of three days ago with a rollback, which went bad in the last half hour."""
    taps = [Tap(layer=layer, tensor="output", kind="attn") for layer in LAYERS]
    errors: list[Exception] = []
    journal = Journal(
        folder, run=RUN, rank=rank, taps=taps, on_error=lambda _, error: errors.append(error)
    )
    random = np.random.default_rng(rank)

    def write(step: int, at: float, generation: int, scale: float) -> None:
        rows = np.zeros((len(taps), COLUMNS))
        rows[:, Column.CALLS] = 1
        rows[:, Column.COUNT] = 100
        rows[:, Column.MAX] = scale * random.uniform(1, 2, len(taps))
        rows[:, Column.MIN] = -rows[:, Column.MAX] / 3
        rows[:, Column.SUM] = random.normal(size=len(taps))
        rows[:, Column.SUM_SQUARES] = 50 * rows[:, Column.MAX] ** 2
        nothing = np.zeros((3, len(taps)))
        ran = rows[:, Column.CALLS] > 0
        journal.write(step, at, generation, Statistics.of(rows), nothing, ran)

    begin = now - 3 * DAY
    for step in range(1, STEPS + 1):
        write(step, begin + step * STEP_SECONDS, 0, 1.0)
    for step in range(STEPS - 99, STEPS + 1):  # once more, after a rollback
        write(step, begin + (step + 100) * STEP_SECONDS, 1, 1.0)
    for step in range(STEPS + 1, STEPS + 61):
        write(step, now - (STEPS + 60 - step) * 30, 1, 1e6)
    journal.close()
    assert not errors


def stored(url: str, metric: str, at: float, seconds: int) -> Series:
    """All samples of the journal's series in the `seconds` before `at`, with their own times."""
    answer = requests.get(
        f"{url}/api/v1/query",
        params={"query": f'{metric}{{job="act-journal"}}[{seconds}s]', "time": f"{at:.3f}"},
        timeout=30,
    ).json()
    assert answer["status"] == "success", answer
    found: Series = {}
    for series in answer["data"]["result"]:
        labels = tuple(sorted(series["metric"].items()))
        found[labels] = {round(at, 3): float(value) for at, value in series["values"]}
    return found


def expected(folder: Path, metric: str, until: float) -> Series:
    """The same from the journal."""
    found: Series = defaultdict(dict)
    for record in Reader(folder).records():
        if record.time <= until:
            labels = {
                **{"__name__": metric, "job": "act-journal", "run": record.run},
                **{"rank": str(record.rank), "layer": record.layer, "tensor": record.tensor},
                "generation": str(record.generation),
            }
            value = record.statistics[metric.removeprefix("act_layer_")]
            found[tuple(sorted(labels.items()))][round(record.time, 3)] = value
    return dict(found)


def rules_were_judged(url: str) -> bool:
    """Whether each group of the shipped rules has been evaluated."""
    groups = requests.get(f"{url}/api/v1/rules", timeout=30).json()["data"]["groups"]
    return bool(groups) and not any(group["lastEvaluation"].startswith("0001-") for group in groups)


def prometheus(folder: Path, data: Path, port: int) -> Any:
    """Prometheus on backfilled data, with the shipped rules."""
    config = folder / "prometheus.yml"
    rules = str(REPOSITORY / "prometheus" / "rules" / "*.yml")
    content = {"global": {"evaluation_interval": "1s"}, "rule_files": [rules]}
    config.write_text(yaml.safe_dump(content))
    argv = [
        binary("prometheus"),
        f"--config.file={config}",
        f"--storage.tsdb.path={data}",
        # Of 15 days by default; what is older is deleted at once.
        "--storage.tsdb.retention.time=10y",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    return running("prometheus", argv, folder)


def test_a_dashboard_shows_each_step_and_no_alarm_is_raised(tmp_path: Path) -> None:
    """Every record that is 15 minutes old is found by a query, no younger one is, nothing fires."""
    journal, data, text = tmp_path / "journal", tmp_path / "data", tmp_path / "gpt.om"
    now = time.time()
    for rank in (0, 1):
        write_journal(journal, rank, now)
    started = time.time()
    command = Path(sys.executable).with_name("act-exporter")
    done = subprocess.run(
        [command, "backfill", journal, "-o", text],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    ended = time.time()
    assert "younger than 15 minutes" in done.stderr
    subprocess.run(
        [binary("promtool"), "tsdb", "create-blocks-from", "openmetrics", text, data],
        capture_output=True,
        timeout=120,
        check=True,
    )

    port = free_port()
    url = f"http://127.0.0.1:{port}"
    server: Server
    with prometheus(tmp_path, data, port) as server:
        server.wait_for(lambda: requests.get(f"{url}/-/ready", timeout=2).ok, "an answer")
        for name in STATISTICS:
            metric = f"act_layer_{name}"
            found = stored(url, metric, time.time(), 4 * DAY)
            # The command ran for a moment; a record that came of age in it may be there or not.
            times = {at for samples in found.values() for at in samples}
            assert max(times) <= ended - 900
            assert max(times) > started - 900 - 31
            until = max(times)
            assert found == expected(journal, metric, until), metric
            assert len(found) == len(LAYERS) * 2 * 2  # by rank and generation

        # The last records are a million times the first: on the live page they would be alarms.
        server.wait_for(lambda: rules_were_judged(url), "rules")
        answer = requests.get(
            f"{url}/api/v1/query", params={"query": f'ALERTS{{run="{RUN}"}}'}, timeout=30
        ).json()
        assert answer["data"]["result"] == []
