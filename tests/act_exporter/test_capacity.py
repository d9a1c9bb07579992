"""The command `capacity`: its figures against real pages."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from torch import distributed, nn

from act_exporter.capacity.advice import advice, prometheus_needed
from act_exporter.capacity.cost import cost
from act_exporter.capacity.decoder import Decoder
from act_exporter.capacity.series import MAX_SERIES, RUN_SERIES, count
from act_exporter.collector import FAMILIES, LayerPage
from act_exporter.exceptions import NothingToWatchError, SettingError
from act_exporter.history import Thresholds
from act_exporter.layers import find_taps
from act_exporter.torch_exporter import Reduce, TorchExporter

SETTLED_STEPS = 130
"""A baseline is given; growth is known after 100."""


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "act_exporter.cli", "capacity", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )


def page(watch: str, reduce: Reduce, layers: int = 3) -> Counter[str]:
    """Samples by their names, of an exporter that has trained the model that is counted."""
    torch.manual_seed(0)
    model = Decoder(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with TorchExporter(
        model,
        run="gpt",
        rank=0,
        watch=watch,
        sample_every=1,
        thresholds=Thresholds(window=10, window_minimum=5, baseline_steps=3),
        reduce=reduce,
    ) as exporter:
        for _ in range(SETTLED_STEPS):
            tokens = torch.randint(0, 8, (2, 9))
            logits = model(tokens[:, :-1]).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            exporter.record(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
        exporter.onset()  # takes in what has come
        text = exporter._render("")[0].decode()
    return Counter(
        sample.name for family in text_string_to_metric_families(text) for sample in family.samples
    )


def parts(found: Counter[str]) -> tuple[int, int, int]:
    """Samples of layer families, of others by layer, and of the run."""
    layer = sum(found[family.name] for family in FAMILIES)
    by_layer = sum(
        number
        for name, number in found.items()
        if name.startswith(("act_layer_grad", "act_layer_update", "act_attention"))
    )
    return layer, by_layer, found.total() - layer - by_layer


class TestSeries:
    @pytest.mark.parametrize("watch", ["sublayers", "blocks", "all"])
    def test_they_are_those_of_a_real_page(self, watch: str) -> None:
        layer, by_layer, of_the_run = parts(page(watch, "rank"))
        said = count(ranks=4, layers=3, watch=watch, reduce="rank")
        assert said.layer == layer
        assert said.other - RUN_SERIES == by_layer
        assert RUN_SERIES - 30 <= of_the_run <= RUN_SERIES
        assert said.exporters == 4

    def test_a_joined_page_is_one_with_the_rank_of_the_largest(self, tmp_path: Path) -> None:
        distributed.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1
        )
        try:
            layer, by_layer, _ = parts(page("sublayers", "global"))
        finally:
            distributed.destroy_process_group()
        said = count(ranks=1000, layers=3, watch="sublayers", reduce="global")
        assert (said.exporters, said.layer) == (1, layer)
        assert said.other - RUN_SERIES == by_layer

    def test_a_large_model_has_what_its_page_has_place_for(self) -> None:
        said = count(ranks=1, layers=200, watch="sublayers", reduce="rank")
        page = LayerPage(find_taps(Decoder(200)), {}, MAX_SERIES)
        assert said.placeless == len(page.dropped) > 0
        assert said.layer < page.series <= MAX_SERIES

    def test_of_all_ranks_there_are_as_many_times_one(self) -> None:
        one, many = (
            count(ranks=ranks, layers=12, watch="blocks", reduce="rank") for ranks in (1, 500)
        )
        assert many.total - many.recorded == 500 * (one.total - one.recorded)
        assert many.recorded == one.recorded, "the rules aggregate ranks away"

    @pytest.mark.parametrize(
        ("wrong", "error"),
        [
            ({"ranks": 0}, SettingError),
            ({"layers": -1}, SettingError),
            ({"reduce": "node"}, SettingError),
            ({"watch": "nothing.of.this"}, NothingToWatchError),
        ],
    )
    def test_what_cannot_be_is_refused(
        self, wrong: dict[str, object], error: type[Exception]
    ) -> None:
        with pytest.raises(error):
            count(**{"ranks": 1, "layers": 2, "watch": "blocks", "reduce": "rank", **wrong})  # type: ignore[arg-type]


def advised(ranks: int, watch: str = "sublayers", interval: float = 15.0) -> str:
    series = count(ranks=ranks, layers=48, watch=watch, reduce="rank")
    costs = cost(series, interval)
    return "\n".join(advice(series, costs, interval=interval, watch=watch, reduce="rank"))


class TestAdvice:
    def test_a_small_run_needs_none_of_it(self) -> None:
        assert advised(8).startswith("sample_every= ")

    def test_a_large_one_is_told_of_all_three_ways(self) -> None:
        text = advised(4096)
        assert text.index('reduce="global"') < text.index('watch="blocks"')
        assert "Several Prometheus" in text
        assert 'watch="blocks"' not in advised(100_000, watch="blocks")

    def test_more_ranks_never_need_fewer_prometheus(self) -> None:
        needed = [
            prometheus_needed(
                cost(count(ranks=ranks, layers=48, watch="sublayers", reduce="rank"), 15), 15
            )
            for ranks in (1, 64, 1024, 10_000)
        ]
        assert needed == sorted(needed)
        assert needed[0] == 1 < needed[-1]

    def test_an_interval_that_the_rules_cannot_work_with_is_named(self) -> None:
        assert "four scrapes" in advised(8, interval=30.0)
        assert "four scrapes" not in advised(8)


class TestCommand:
    def test_it_says_all_figures_and_what_to_do(self) -> None:
        done = command("--ranks", "1024", "--layers", "96")
        assert done.returncode == 0, done.stderr
        said = count(ranks=1024, layers=96, watch="sublayers", reduce="rank")
        assert f"{said.total:,} in Prometheus" in done.stdout
        for word in ("samples", "disk", "memory", "bandwidth", "rules", "Advice:"):
            assert f"\n{word}" in done.stdout
        assert max(map(len, done.stdout.splitlines())) <= 100

    def test_the_other_settings_stand_beside_the_asked_one(self) -> None:
        done = command("--ranks", "64", "--layers", "4", "--watch", "blocks", "--reduce", "global")
        others = [line.split()[:4] for line in done.stdout.splitlines() if "  --watch" in line]
        assert len(others) == 3
        assert ["--watch", "blocks", "--reduce", "global"] not in others

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            (["--ranks", "0", "--layers", "2"], "ranks=0"),
            (["--ranks", "1", "--layers", "2", "--interval", "soon"], "interval='soon'"),
            (["--ranks", "1", "--layers", "2", "--reduce", "node"], "reduce='node'"),
            (["--ranks", "1", "--layers", "2", "--watch", "x.*"], "watch='x.*'"),
        ],
    )
    def test_an_error_names_what_is_wrong_and_nothing_else_is_said(
        self, arguments: list[str], named: str
    ) -> None:
        done = command(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert named in done.stderr
        assert len(done.stderr.splitlines()) == 1
