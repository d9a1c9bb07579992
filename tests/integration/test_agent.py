"""Agents on the nodes and a central store: what outages cost, counted against what was served."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests
import yaml

from act_exporter.rules import DEFAULTS, write_rules
from deploy.demo.servers import REPOSITORY, Server, binary, free_port, running
from tests.grafana.recorded import node_exporter
from tests.integration import node
from tests.integration.node import AGENT, NODE, Centre, Page, environment, listed
from tests.integration.scene import Scene
from tests.integration.trainer import RUN

# Eight seconds. Three minutes: ACT_OUTAGE_SCRAPES=180 ACT_SCRAPE_SECONDS=1.
OUTAGE_SCRAPES = int(os.environ.get("ACT_OUTAGE_SCRAPES", "40"))
VMAGENT_CRASH_SECONDS = 3.0
"""docs/agent.md: one block of a second that was on its way, and the last two seconds; and one more,
since here an agent waits for a processor that others use."""

AGENTS = {"vmagent": node.vmagent, "agent mode": node.agent_mode}

pytestmark = pytest.mark.skipif(
    not (REPOSITORY / ".servers" / "bin" / "victoria-metrics").exists(),
    reason="no VictoriaMetrics: Debian's victoria-metrics has it",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenery:
    """A counted page, an agent that scrapes it, and the centre."""

    page: Page
    agent: Server
    centre: Centre

    def missing(self, until: int, after: int = 0) -> set[node.Sample]:
        """What was served in those scrapes and is not at the centre, which got a newer one.

        What it has just taken can be asked for a second later, so this looks for a while.
        """
        self.centre.wait_until(until)

        def look() -> set[node.Sample]:
            return self.page.samples(after, until) - set(self.centre.samples())

        with contextlib.suppress(TimeoutError):
            self.centre.server.wait_for(lambda: not look(), "all samples", 20)
        return look()


@contextlib.contextmanager
def scenery(folder: Path, agent: str) -> Iterator[Scenery]:
    page, centre = Page(), Centre(folder)
    with page.up(), listed(folder, page.port):
        server = AGENTS[agent](folder, centre.url, {})
        try:
            centre.start()
            server.start()
            centre.wait_until(10)
            yield Scenery(page=page, agent=server, centre=centre)
        except BaseException as error:
            error.add_note(server.tail())
            raise
        finally:
            server.stop()
            centre.server.stop()


@contextlib.contextmanager
def hung(centre: Centre) -> Iterator[None]:
    """It takes connections, and answers none: a store that waits for its disk."""
    assert centre.server.process is not None
    centre.server.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        centre.server.process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def ended(centre: Centre) -> Iterator[None]:
    """It was shut down in order."""
    centre.server.stop()
    yield
    centre.start()


@contextlib.contextmanager
def killed(centre: Centre) -> Iterator[None]:
    """It crashed."""
    centre.server.kill()
    yield
    centre.start()


class TestOutage:
    @pytest.mark.parametrize("away", [hung, ended], ids=lambda it: it.__name__)
    @pytest.mark.parametrize("agent", AGENTS)
    def test_no_sample_is_missing_and_none_is_there_twice(
        self,
        tmp_path: Path,
        agent: str,
        away: Callable[[Centre], contextlib.AbstractContextManager],
    ) -> None:
        with scenery(tmp_path, agent) as found:
            with away(found.centre):
                found.page.wait_for_more(OUTAGE_SCRAPES)
            assert found.missing(found.page.wait_for_more(5)) == set()
            assert set(found.centre.samples().values()) == {1}

    @pytest.mark.parametrize("agent", AGENTS)
    def test_none_of_the_outage_is_missing_after_a_crash_of_the_centre(
        self, tmp_path: Path, agent: str
    ) -> None:
        """What it had taken a few seconds before is its own to lose (docs/agent.md)."""
        with scenery(tmp_path, agent) as found:
            with killed(found.centre):
                before = found.page.count
                found.page.wait_for_more(OUTAGE_SCRAPES)
            assert found.missing(found.page.wait_for_more(5), before) == set()


class TestAgentThatDiesInAnOutage:
    @contextlib.contextmanager
    def outage(self, found: Scenery, death: Callable[[Server], None]) -> Iterator[tuple[int, int]]:
        """The centre goes, the agent dies later, both come back; the last scrape before each."""
        with ended(found.centre):
            gone = found.page.count
            found.page.wait_for_more(2 * OUTAGE_SCRAPES)
            death(found.agent)
            last = found.page.count
        found.agent.start()
        found.centre.wait_until(found.page.wait_for_more(5))
        yield gone, last

    def test_vmagent_loses_what_was_on_its_way_and_the_last_seconds(self, tmp_path: Path) -> None:
        with scenery(tmp_path, "vmagent") as found:
            begun = found.page.count
            with self.outage(found, Server.kill) as (_, last):
                served = found.page.served
                times = {served[number] for _, number in found.missing(last)}
                start, end = served[begun], served[last]
                middle = {
                    at
                    for at in times
                    if start + VMAGENT_CRASH_SECONDS < at < end - VMAGENT_CRASH_SECONDS
                }
                assert middle == set()
                # The page of docs/agent.md would promise too little.
                assert times

    def test_vmagent_that_is_ended_in_order_loses_nothing(self, tmp_path: Path) -> None:
        with (
            scenery(tmp_path, "vmagent") as found,
            self.outage(found, Server.stop) as (_, last),
        ):
            assert found.missing(last) == set()

    def test_agent_mode_loses_all_that_was_not_sent(self, tmp_path: Path) -> None:
        """Where this fails since a newer one keeps them, docs/agent.md has to change."""
        with (
            scenery(tmp_path, "agent mode") as found,
            self.outage(found, Server.kill) as (gone, last),
        ):
            assert found.page.samples(gone, last) <= found.missing(last)


class TestNode:
    @pytest.mark.skipif(node_exporter() is None, reason="no node_exporter")
    @pytest.mark.parametrize("agent", AGENTS)
    def test_its_machine_is_seen_under_its_name(self, tmp_path: Path, agent: str) -> None:
        ports = {"node-exporter": free_port(), "dcgm-exporter": free_port()}
        program = node_exporter()
        assert program is not None
        listen = f"--web.listen-address=127.0.0.1:{ports['node-exporter']}"
        pages = REPOSITORY / "tests" / "grafana" / "dcgm"
        gpus = f"http.server {ports['dcgm-exporter']} --bind=127.0.0.1 --directory={pages}".split()
        page, centre = Page(), Centre(tmp_path)
        with contextlib.ExitStack() as opened:
            opened.enter_context(page.up())
            opened.enter_context(listed(tmp_path, page.port))
            argv = [program, listen, "--no-collector.systemd", "--no-collector.textfile"]
            opened.enter_context(running("machine", argv, tmp_path))
            opened.enter_context(running("gpus", [sys.executable, "-m", *gpus], tmp_path))
            opened.callback(centre.server.stop)
            centre.start()
            server = AGENTS[agent](tmp_path, centre.url, ports)
            opened.callback(server.stop)
            server.start()
            expected = {
                "node_memory_MemTotal_bytes": ports["node-exporter"],
                "DCGM_FI_DEV_GPU_UTIL": ports["dcgm-exporter"],
                node.METRIC: page.port,
            }
            for metric, port in expected.items():
                found = server.wait_for(lambda metric=metric: centre.export(metric), metric)
                labels = [series["metric"] for series in found]
                assert {label["instance"] for label in labels} == {f"{NODE}:{port}"}
                assert {label["cluster"] for label in labels} == {"train-a"}


class TestCentre:
    @pytest.fixture
    def centre(self, tmp_path: Path) -> Iterator[Centre]:
        centre = Centre(tmp_path)
        try:
            centre.start()
            yield centre
        finally:
            centre.server.stop()

    def take(self, centre: Centre, *lines: str) -> None:
        url = f"{centre.url}/api/v1/import/prometheus"
        requests.post(url, data="\n".join(lines), timeout=30).raise_for_status()

    def test_samples_are_kept_for_30_days(self, centre: Centre) -> None:
        now = time.time()
        ages = {days: (now - days * 86400) * 1000 for days in (29, 31)}
        self.take(centre, *(f'age{{days="{days}"}} 1 {at:.0f}' for days, at in ages.items()))
        kept = centre.server.wait_for(lambda: centre.export("age"), "a sample")
        assert [series["metric"]["days"] for series in kept] == ["29"]

    def test_what_is_sent_twice_is_kept_once(self, centre: Centre) -> None:
        """An agent whose request timed out does not know whether it was taken."""
        now = round(time.time() * 1000)
        for _ in range(2):
            self.take(centre, f"sent 1 {now - 200}", f"sent 2 {now}")
        (series,) = centre.server.wait_for(
            lambda: [each for each in centre.export("sent") if 2 in each["values"]], "both samples"
        )
        assert series["values"] == [1, 2]


class TestLocalRules:
    """A Prometheus near the trainers judges by itself, and writes to the centre besides."""

    def test_a_run_is_rolled_back_while_the_centre_is_away(self, scene: Scene) -> None:
        folder = scene.stack.database.parent
        centre = Centre(folder)
        with contextlib.ExitStack() as opened:
            opened.callback(centre.server.stop)
            centre.start()
            own = folder / "prometheus.yml"
            own.write_text(own.read_text() + yaml.safe_dump(node.remote_write(centre.url)))
            assert scene.stack.prometheus.process is not None
            scene.stack.prometheus.process.send_signal(signal.SIGHUP)
            ours = f'{{run="{RUN}",cluster="train-a"}}'
            scene.wait(lambda: centre.export(f"act_step{ours}"), "samples at the centre")

            with ended(centre):
                fault = scene.start_fault()
                rollback = scene.wait(lambda: scene.recoveries("done"), "a rollback", timeout=60)[0]
                scene.assert_went_back_before(fault, rollback)
                scene.wait(scene.messages, "people's message")
                scene.wait_until_healthy_again(rollback)

            # What the rules recorded is there too, and each sample of the outage.
            local = scene.query("act_step{RUN}[10m]")[0]["values"]
            expected = {round(at * 1000) for at, _ in local}

            def stored() -> set[int]:
                (series,) = centre.export(f"act_step{ours}")
                return set(series["timestamps"])

            scene.wait(lambda: max(stored()) >= max(expected), "the newest sample")
            since = min(stored())
            assert {at for at in expected if at >= since} - stored() == set()
            assert centre.export(f"layer:act_layer_absmax:baseline_ratio{ours}")
            assert centre.export(f'ALERTS{{alertname="ActRunaway",run="{RUN}"}}')


class TestRulesAtTheCentre:
    """Agents alone on the nodes: vmalert judges what the centre has."""

    def test_a_run_is_rolled_back(self, scene: Scene) -> None:
        folder = scene.stack.database.parent
        centre = Centre(folder)
        rules = folder / "rules"
        write_rules(rules, DEFAULTS, vmalert=True)
        for path in rules.glob("*.yml"):  # as fast as the stage
            path.write_text(re.sub(r"interval: 15s", "interval: 1s", path.read_text()))
        port = int(scene.exporter_url.rpartition(":")[2].partition("/")[0])
        argv = [
            binary("vmalert"),
            "-envflag.enable",
            f"-rule={rules}/*.yml",
            *(f"-{name}.url={centre.url}" for name in ("datasource", "remoteWrite", "remoteRead")),
            f"-notifier.url={scene.stack.urls['alertmanager']}",
            f"-httpListenAddr=127.0.0.1:{free_port()}",
        ]
        scene.stack.prometheus.stop()
        with contextlib.ExitStack() as opened:
            opened.callback(centre.server.stop)
            centre.start()
            opened.enter_context(listed(folder, port))
            agent = node.vmagent(folder, centre.url, {})
            opened.callback(agent.stop)
            agent.start()
            given = os.environ | environment("vmalert.env")
            opened.enter_context(running("vmalert", argv, folder, env=given))
            ours = f'{{run="{RUN}",cluster="train-a"}}'
            scene.wait(
                lambda: centre.export(f"layer:act_layer_absmax:baseline_ratio{ours}"),
                "what a rule recorded",
            )
            fault = scene.start_fault()
            rollback = scene.wait(lambda: scene.recoveries("done"), "a rollback", timeout=90)[0]
            scene.assert_went_back_before(fault, rollback)
            scene.wait(scene.messages, "people's message")


class TestFiles:
    def test_promtool_takes_an_agents_and_a_local_prometheus(self, tmp_path: Path) -> None:
        """As docs/agent.md has them made, with `cat`."""
        remote = (AGENT / "remote-write.yml").read_text()
        agent = tmp_path / "agent.yml"
        agent.write_text((AGENT / "scrape.yml").read_text() + remote)
        local = tmp_path / "local.yml"
        local.write_text((REPOSITORY / "prometheus" / "prometheus.yml").read_text() + remote)
        for options in (["--agent", agent], ["--syntax-only", local]):
            done = subprocess.run(
                [binary("promtool"), "check", "config", *options], capture_output=True, text=True
            )
            assert done.returncode == 0, done.stderr

    def test_vmagent_knows_every_key(self) -> None:
        argv = ["-promscrape.config.dryRun", f"-promscrape.config={AGENT / 'scrape.yml'}"]
        done = subprocess.run(
            [binary("vmagent"), *argv, "-remoteWrite.url=http://localhost:1"], capture_output=True
        )
        assert done.returncode == 0, done.stderr.decode()

    def test_the_trainers_are_scraped_as_prometheus_yml_says(self) -> None:
        """The rules count on the job's name, the labels and the interval."""
        ours = yaml.safe_load((AGENT / "scrape.yml").read_text())
        shipped = yaml.safe_load((REPOSITORY / "prometheus" / "prometheus.yml").read_text())
        trainers, *_ = ours["scrape_configs"]
        job, *_ = shipped["scrape_configs"]
        for key in ("job_name", "honor_labels"):
            assert trainers[key] == job[key]
        for key in ("scrape_interval", "scrape_timeout"):
            assert ours["global"][key] == shipped["global"][key]
