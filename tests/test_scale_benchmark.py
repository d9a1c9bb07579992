"""The benchmark's load on a real Prometheus, small and fast, and what `capacity` says of it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import requests
import yaml

from act_exporter.capacity.decoder import Decoder
from act_exporter.capacity.series import TARGET_SERIES, Series, count
from act_exporter.layers import find_taps
from deploy.demo.servers import REPOSITORY, wait_for
from tests.benchmarks.cluster import BLOCKS
from tests.benchmarks.watching import Watching, watching

RANKS = 3
LAYER_ALERTS = {
    "ActLayerAboveBaseline",
    "ActLayerAboveWindow",
    "ActLayerAboveWindowSustained",
    "ActLayerNonFinite",
    "ActLayerDrift",
    "ActLayerDepthSpike",
    "ActLayerHeadroomLow",
    "ActLayerDead",
    "ActLayerSaturated",
}
"""Those that a storm of seconds raises; the spread of ranks takes minutes, a forecast an hour."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watching]:
    with watching(tmp_path_factory.mktemp("scale"), RANKS, runs=1, interval="1s") as started:
        yield started


@pytest.fixture
def said() -> Series:
    return count(ranks=RANKS, layers=BLOCKS, watch="sublayers", reduce="rank")


def test_a_simulated_page_has_the_layer_series_of_a_real_one(
    servers: Watching, said: Series
) -> None:
    (entry,) = json.loads((servers.folder / "targets.json").read_text())
    for target in entry["targets"]:
        lines = requests.get(f"http://{target}/metrics", timeout=10).text.splitlines()
        series = [line for line in lines if not line.startswith("#")]
        assert said.page - 40 < len(series) <= said.page


def test_what_prometheus_holds_is_what_capacity_says(servers: Watching, said: Series) -> None:
    def recorded() -> float:
        return servers.value('count({__name__=~"(layer|run):.+"})')

    taps = find_taps(Decoder(BLOCKS))
    kinds = {tap.kind for tap in taps}
    # All but the spread over 4 minutes, and of jumps those that have a layer before them.
    expected = 11 * len(taps) - len(kinds)
    wait_for(lambda: recorded() >= expected, f"{expected} recorded series", timeout=60, interval=1)
    assert 0.8 * said.recorded < recorded() <= said.recorded
    scraped = servers.value(
        'sum(scrape_samples_post_metric_relabeling{job="act-exporter"})'
    ) + TARGET_SERIES * servers.value('count(up{job="act-exporter"})')
    most = said.exporters * (said.page + TARGET_SERIES)
    assert 0.95 * most < scraped <= most


def test_in_a_storm_each_tensor_has_each_alert(servers: Watching, said: Series) -> None:
    rules = [
        rule["alert"]
        for path in (REPOSITORY / "prometheus" / "rules").glob("*.yml")
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
        if rule.get("alert", "").startswith(("ActLayer", "ActRankSpread"))
    ]
    assert {*rules} == {*LAYER_ALERTS, "ActRankSpread", "ActLayerHeadroomEnding"}
    # Not 0: the first ones come before Prometheus has discovered Alertmanager.
    dropped = servers.value("prometheus_notifications_dropped_total")
    servers.begin_storm()

    def firing() -> dict[str, float]:
        return servers.by("alertname", 'count by (alertname) (ALERTS{alertstate="firing"})')

    wait_for(lambda: firing().keys() >= LAYER_ALERTS, "all alerts", timeout=60, interval=1)
    # Nothing lies before the first block, so of jumps there are fewer.
    assert all(firing()[name] == said.tensors for name in LAYER_ALERTS - {"ActLayerDepthSpike"})
    storm = servers.value('count({__name__=~"ALERTS.*"})')
    assert 0.7 * said.storm < storm <= said.storm
    assert servers.value("prometheus_notifications_dropped_total") == dropped
