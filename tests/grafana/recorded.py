"""A recorded incident in a real Prometheus: what the dashboards' queries are run on.

The shipped servers, fifteen times as fast, watch two runs: one goes bad at a moment that only its
trainer knows and is rolled back, the other stays healthy. Beside them node_exporter tells of this
machine, and a static page stands for dcgm-exporter, since no GPU is here. In the end Prometheus
alone is left.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deploy.demo.servers import REPOSITORY, Server, free_port, running
from deploy.demo.stack import Stack, stack
from tests.grafana.trainer import FAULT_LAYER

RUN, HEALTHY_RUN = "gpt", "gpt-small"
RANKS = 2
"""Of the healthy run, on one page."""

FAULT_STEP = 500
"""At the earliest: baselines and windows are there after 400 steps."""
STEPS_AFTER = 500
"""Beyond the fault's, healthy ones; what looking costs is known after 1,000 in all."""
PATIENCE_SECONDS = 180.0
"""At most for anything that is waited for, on a machine with much else to do."""
CALM_SECONDS = 20.0
"""At least so long before the fault and after the rollback, however fast the machine is."""

_MACHINES = re.compile(r"^  # (?=- job_name: |  )", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """What lies in a Prometheus that is up, and what its trainer knows about it.

    Attributes:
        url: of Prometheus.
        start, end: the recorded time, Unix seconds.
        settled: from here on every layer had its baseline.
        fault, rollback: the last scrape before the fault, and the first one that saw the rollback.
        layer: whose output was made too large.
        fault_step: the first bad step.
    """

    url: str
    start: float
    settled: float
    fault: float
    rollback: float
    end: float
    layer: str
    fault_step: int


def node_exporter() -> str | None:
    """The program, which `make setup` links where it can be had: Debian has it."""
    return shutil.which("node_exporter", path=REPOSITORY / ".servers" / "bin")


@contextlib.contextmanager
def record(folder: Path) -> Iterator[Recording]:
    """Play the incident in `folder`, about a minute; Prometheus is up until leaving."""
    ports = {name: free_port() for name in (RUN, HEALTHY_RUN, "chat", "node", "dcgm")}
    fault = folder / "fault"
    with contextlib.ExitStack() as opened:
        servers = opened.enter_context(
            stack(
                folder / "stack",
                exporter_port=ports[RUN],
                chat_url=f"http://127.0.0.1:{ports['chat']}/",
                # The receiver tells the same stand-in.
                notify=[{"kind": "webhook", "url_file": str(folder / "stack" / "chat-url")}],
            )
        )
        with contextlib.ExitStack() as ended:
            for name, argv in _beside(folder, ports).items():
                ended.enter_context(running(name, argv, folder, cwd=REPOSITORY))
            _scrape_all(servers, ports)
            trainer = _start_trainers(ended, folder, servers.runs, ports, fault)
            times = _play(servers, trainer, fault)
        servers.receiver.stop()
        servers.alertmanager.stop()
        yield Recording(url=servers.urls["prometheus"], layer=FAULT_LAYER, **times)


def _beside(folder: Path, ports: dict[str, int]) -> dict[str, list[str | Path]]:
    """Processes beside servers and trainers, by name."""
    chat = folder / "chat.jsonl"
    chat.touch()
    python = [sys.executable, "-m"]
    loopback = f"--bind=127.0.0.1 --directory={REPOSITORY / 'tests' / 'grafana' / 'dcgm'}".split()
    found: dict[str, list[str | Path]] = {
        "chat": [*python, "deploy.demo.chat", str(ports["chat"]), chat],
        "dcgm": [*python, "http.server", str(ports["dcgm"]), *loopback],
    }
    node = node_exporter()
    if node is not None:
        listen = f"--web.listen-address=127.0.0.1:{ports['node']}"
        # Off are two that Debian's has on and that log an error a scrape without systemd.
        found["node"] = [node, listen, "--no-collector.systemd", "--no-collector.textfile"]
    return found


def _scrape_all(servers: Stack, ports: dict[str, int]) -> None:
    """Have Prometheus scrape the healthy run too, and the machines as prometheus.yml proposes."""
    path = Path(servers.prometheus.log).parent / "prometheus.yml"
    config = yaml.safe_load(path.read_text())
    shipped = (REPOSITORY / "prometheus" / "prometheus.yml").read_text()
    proposed = {
        job["job_name"]: job
        for job in yaml.safe_load(_MACHINES.sub("  ", shipped))["scrape_configs"]
    }
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    for job, names in {
        "act-exporter": [RUN, HEALTHY_RUN],
        "node-exporter": ["node"],
        "dcgm-exporter": ["dcgm"],
    }.items():
        jobs.setdefault(job, proposed[job])["static_configs"] = [
            {"targets": [f"localhost:{ports[name]}" for name in names]}
        ]
    path.write_text(yaml.safe_dump(config | {"scrape_configs": list(jobs.values())}))
    assert servers.prometheus.process is not None
    servers.prometheus.process.send_signal(signal.SIGHUP)
    servers.prometheus.wait_for(
        lambda: servers.value('up{job="dcgm-exporter"}'), "a target of the new configuration"
    )


def _start_trainers(
    ended: contextlib.ExitStack, folder: Path, runs: Path, ports: dict[str, int], fault: Path
) -> Server:
    """Start the run that will go bad, which is returned, and the ranks of the healthy one."""
    command = [sys.executable, "-m", "tests.grafana.trainer", f"--log-dir={runs}"]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for rank in range(RANKS):
        ended.enter_context(
            running(
                f"{HEALTHY_RUN}-{rank}",
                [*command, f"--run={HEALTHY_RUN}", f"--port={ports[HEALTHY_RUN]}"],
                folder,
                env=os.environ
                | meeting
                | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)},
                cwd=REPOSITORY,
            )
        )
    return ended.enter_context(
        running(
            RUN,
            [*command, f"--run={RUN}", f"--port={ports[RUN]}", f"--fault={fault}"],
            folder,
            cwd=REPOSITORY,
        )
    )


def _play(servers: Stack, trainer: Server, fault: Path) -> dict[str, Any]:
    """The incident, from the first scrape to healthy steps after the rollback: when was what."""
    ratio = f'layer:act_layer_absmax:baseline_ratio{{run="{RUN}"}}'

    def now(metric: str) -> float:
        return servers.value(f'{metric}{{run="{RUN}"}}') or 0

    def seen(metric: str) -> float:
        """When it was last scraped."""
        return servers.value(f'timestamp({metric}{{run="{RUN}"}})') or 0

    def reached(step: int, since: float) -> bool:
        return now("act_step") >= step and seen("act_step") - since >= CALM_SECONDS

    def settled() -> float | None:
        taps = servers.value(f'count(act_layer_absmax{{run="{RUN}"}})')
        known = servers.value(f"count({ratio})")
        return servers.value(f"max(timestamp({ratio}))") if taps and known == taps else None

    def peers_settled() -> float | None:
        return servers.value(ratio.replace(RUN, HEALTHY_RUN, 1))

    times = {"start": trainer.wait_for(lambda: seen("act_step"), "a first step")}
    times["settled"] = trainer.wait_for(settled, "a baseline of every layer", PATIENCE_SECONDS)
    trainer.wait_for(
        lambda: reached(FAULT_STEP, times["start"]), f"step {FAULT_STEP}", PATIENCE_SECONDS
    )
    trainer.wait_for(peers_settled, "a baseline of the healthy run", PATIENCE_SECONDS)
    times["fault"] = seen("act_step")
    fault.touch()
    trainer.wait_for(lambda: now("act_rollbacks_total") == 1, "a rollback", PATIENCE_SECONDS)
    times["rollback"] = seen("act_rollbacks_total")
    begun = re.search(
        r"WARNING fault: .* before step (\d+)$", trainer.log.read_text(), re.MULTILINE
    )
    assert begun is not None
    goal = int(begun[1]) + STEPS_AFTER
    trainer.wait_for(lambda: reached(goal, times["rollback"]), f"step {goal}", PATIENCE_SECONDS)
    times["end"] = seen("act_step")
    return times | {"fault_step": int(begun[1])}
