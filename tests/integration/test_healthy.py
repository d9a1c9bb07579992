"""A run in which nothing is wrong: the pages, and the silence."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest
import requests
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from deploy.demo.servers import binary
from tests.integration.scene import SETTLED_STEP, Scene, open_scene
from tests.integration.trainer import RUN

STEPS = 600
"""The window of 500 steps is full, and every rule has its operands."""

PROMETHEUS_ACCEPTS = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
"""What Prometheus 2.42 asks for."""


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """One healthy run for all tests here: none changes it."""
    with open_scene(tmp_path_factory.mktemp("healthy")) as opened:
        opened.wait_until_settled()
        yield opened


def test_every_shipped_job_is_scraped(scene: Scene) -> None:
    """The four jobs of prometheus.yml are up, without an error at the last scrape."""
    targets = requests.get(f"{scene.stack.urls['prometheus']}/api/v1/targets", timeout=30).json()
    active = targets["data"]["activeTargets"]
    assert {target["labels"]["job"] for target in active} == {
        "act-exporter",
        "act-receiver",
        "alertmanager",
        "prometheus",
    }
    assert [(target["health"], target["lastError"]) for target in active] == [("up", "")] * 4


@pytest.mark.parametrize("page", ["exporter", "receiver"])
def test_promtool_finds_nothing_in_a_page(scene: Scene, page: str) -> None:
    """`promtool check metrics` has no lint about the names, types and help texts."""
    urls = {"exporter": scene.exporter_url, "receiver": f"{scene.stack.urls['receiver']}/metrics"}
    text = requests.get(urls[page], timeout=30)
    assert text.headers["Content-Type"].startswith("text/plain")
    done = subprocess.run(
        [binary("promtool"), "check", "metrics"],
        input=text.content,
        capture_output=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


def test_prometheus_takes_the_whole_page_as_it_is(scene: Scene) -> None:
    """As OpenMetrics; every sample is stored, under its own labels."""
    scene.wait(lambda: (scene.value("act_step{RUN}") or 0) > SETTLED_STEP, "a few scrapes")
    answer = requests.get(scene.exporter_url, headers={"Accept": PROMETHEUS_ACCEPTS}, timeout=30)
    assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
    samples = [
        sample
        for family in text_string_to_metric_families(answer.text)  # type: ignore[no-untyped-call]
        for sample in family.samples
    ]
    scene.wait(
        lambda: scene.value('scrape_samples_scraped{job="act-exporter"}') == len(samples),
        f"a scrape of {len(samples)} samples",
    )
    stored = scene.query('{job="act-exporter",__name__=~"act_.+"}')
    assert len(stored) == len([sample for sample in samples if sample.name.startswith("act_")])
    for series in stored:
        labels = series["metric"]
        assert not [label for label in labels if label.startswith("exported_")]
        assert labels["run"] == RUN
        assert labels["rank"] == "0"
    # Where it drops a sample, it counts that and says so in its log.
    for counter in (
        "prometheus_target_scrapes_sample_out_of_order_total",
        "prometheus_target_scrapes_sample_duplicate_timestamp_total",
        "prometheus_target_scrapes_sample_out_of_bounds_total",
        "prometheus_target_scrapes_exceeded_sample_limit_total",
        "prometheus_rule_evaluation_failures_total",
    ):
        assert scene.value(f"sum({counter})") == 0
    # The watchdog fires from the first evaluation on, when Alertmanager may not be listening yet.
    dropped = "prometheus_notifications_dropped_total"
    assert scene.value(f"sum(increase({dropped}[30s]))") == 0
    log = scene.stack.prometheus.log.read_text()
    assert [line for line in log.splitlines() if "level=info" not in line] == []


def test_a_healthy_run_is_left_alone(scene: Scene) -> None:
    """No alert that asks for something, no delivery, no request, no message in 600 steps."""
    scene.wait(lambda: (scene.value("act_step{RUN}") or 0) >= STEPS, f"step {STEPS}", timeout=60)
    assert scene.value("count(act_layer_absmax_window_mean{RUN})") == scene.value(
        "count(act_layer_absmax{RUN})"
    )
    scene.assert_nothing_happened()
    assert scene.value('count_over_time(ALERTS{RUN,action!=""}[1h])') is None
