"""Every shipped alert, firing once on a real Prometheus.

promtool has its own evaluation of rules and templates; here the first firing case of each alert is
written into a real Prometheus, ending now. Holds (`for`) are shortened: how long they are is
promtool's to show.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from deploy.demo.servers import REPOSITORY, binary, free_port, running, wait_for

RULES = sorted((REPOSITORY / "prometheus" / "rules").glob("*.yml"))
CASES = sorted((REPOSITORY / "tests" / "prometheus").glob("*.yml"))
LOOKBACK = "40s"  # two scrapes and a half, and longer than the alerts take to fire
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
NAMES = [
    rule["alert"]
    for path in RULES
    for group in yaml.safe_load(path.read_text())["groups"]
    for rule in group["rules"]
    if "alert" in rule
]


def seconds(duration: str) -> int:
    return sum(int(n) * UNITS[unit] for n, unit in re.findall(r"(\d+)([smhd])", duration))


@dataclass(frozen=True)
class Case:
    """One case of promtool's in which an alert fires."""

    alert: str
    interval: int
    series: dict[str, list[float | None]]
    """Up to the time at which it fires."""

    @property
    def seconds(self) -> int:
        """How long it takes to fire."""
        return max(map(len, self.series.values()), default=0) * self.interval

    @property
    def is_a_runs(self) -> bool:
        """Whether all of it belongs to a run, so that it can be told from other cases'."""
        return bool(self.series) and all('run="' in name for name in self.series)

    def openmetrics(self, now: float, tag: str = "") -> Iterator[tuple[str, str]]:
        """Names and sample lines; the last sample is at `now`."""
        for series, values in self.series.items():
            tagged = re.sub(r'run="', f'run="{tag}', series)
            for number, value in enumerate(values, start=1):
                if value is not None:
                    at = now - (len(values) - number) * self.interval
                    yield series.partition("{")[0], f"{tagged} {value} {at:.3f}"


def expanded(values: str) -> Iterator[float | None]:
    """promtool's notation: `1`, `1x3` (four times), `1+2x3`, `_`, `_x3` (three times), `stale`."""
    for item in values.split():
        body, _, times = item.partition("x")
        if body in ("_", "stale"):
            yield from [None] * int(times or 1)
            continue
        match = re.fullmatch(r"(-?(?:[\d.]+(?:e[+-]?\d+)?|NaN|[+-]?Inf))(?:([+-][\d.e]+))?", body)
        assert match, item
        start, step = float(match[1]), float(match[2] or 0)
        yield from [start + step * number for number in range(int(times or 0) + 1)]


def first_firing(alert: str) -> Case:
    for path in CASES:
        # Without types, as promtool reads them: `0x20` is twenty-one zeros, not a number.
        for test in yaml.load(path.read_text(), Loader=yaml.BaseLoader)["tests"]:
            for expected in test["alert_rule_test"]:
                if expected["alertname"] == alert and expected["exp_alerts"]:
                    interval = seconds(test["interval"])
                    last = seconds(expected["eval_time"]) // interval
                    series = {
                        one["series"]: list(expanded(one["values"]))[: last + 1]
                        for one in test.get("input_series", [])
                    }
                    return Case(alert, interval, series)
    raise AssertionError(f"{alert} has no case in which it fires")


def fired(folder: Path, cases: dict[str, Case], wanted: set[str]) -> dict[str, Any]:
    """Run Prometheus on the cases until all wanted alerts fire; those that do, by name and run."""
    now = time.time()
    lines: dict[str, list[str]] = {}
    for tag, case in cases.items():
        for name, line in case.openmetrics(now, tag):
            lines.setdefault(name, []).append(line)
    text = folder / "samples.om"
    parts = [f"# TYPE {name} unknown\n" + "\n".join(own) for name, own in sorted(lines.items())]
    text.write_text("\n".join([*parts, "# EOF"]) + "\n")
    data = folder / "data"
    data.mkdir()
    if lines:
        promtool("tsdb", "create-blocks-from", "openmetrics", text, data)
    rules = folder / "rules"
    rules.mkdir()
    for path in RULES:
        held = re.sub(r"^( +)for: .*$", r"\1for: 1s", path.read_text(), flags=re.MULTILINE)
        (rules / path.name).write_text(held)
    # What the rules would have recorded meanwhile, by themselves.
    with prometheus(folder, data, []) as url:
        start = now - max(case.seconds for case in cases.values())
        promtool(
            *("tsdb", "create-blocks-from", "rules", "--eval-interval=15s", f"--url={url}"),
            *(f"--start={start:.0f}", f"--end={now:.0f}", f"--output-dir={data}"),
            *sorted(rules.glob("*.yml")),
        )
    found: dict[str, Any] = {}
    with prometheus(folder, data, [str(rules / "*.yml")]) as url:

        def all_fire() -> bool:
            answer = requests.get(f"{url}/api/v1/alerts", timeout=30).json()
            for alert in answer["data"]["alerts"]:
                if alert["state"] == "firing":
                    labels = alert["labels"]
                    found[labels["alertname"] + "@" + labels.get("run", "").partition(":")[0]] = (
                        alert
                    )
            return wanted <= found.keys()

        try:
            wait_for(all_fire, "all to fire", timeout=60)
        except TimeoutError:
            pytest.fail(f"not firing: {sorted(wanted - found.keys())}")
    return found


@contextlib.contextmanager
def prometheus(folder: Path, data: Path, rule_files: list[str]) -> Iterator[str]:
    """Prometheus on that data, ready; its address."""
    config = folder / "prometheus.yml"
    content = {"global": {"evaluation_interval": "1s"}, "rule_files": rule_files}
    config.write_text(yaml.safe_dump(content))
    url = f"127.0.0.1:{free_port()}"
    argv = [
        binary("prometheus"),
        f"--config.file={config}",
        f"--storage.tsdb.path={data}",
        f"--web.listen-address={url}",
        # There are no stale marks in OpenMetrics: a series that ended is gone after this.
        f"--query.lookback-delta={LOOKBACK}",
    ]
    with running("prometheus", argv, folder):
        ready = f"http://{url}/-/ready"
        wait_for(lambda: requests.get(ready, timeout=30).ok, "Prometheus")
        yield f"http://{url}"


def promtool(*arguments: object) -> None:
    command = [str(binary("promtool")), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


RUNS = [name for name in NAMES if first_firing(name).is_a_runs]


def test_all_that_is_said_of_runs(tmp_path: Path) -> None:
    cases = {f"{name}:": first_firing(name) for name in RUNS}
    found = fired(tmp_path, cases, {f"{name}@{name}" for name in RUNS})
    for name in RUNS:
        annotations = found[f"{name}@{name}"]["annotations"]
        # A template that fails puts its error where the text should be.
        assert "<error" not in str(annotations)


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(RUNS)))
def test_what_is_said_of_servers_and_targets(name: str, tmp_path: Path) -> None:
    fired(tmp_path, {"": first_firing(name)}, {f"{name}@"})
