"""Trainers that hand over arrays themselves: the page, the rules and the journal are the same."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from act_exporter import NothingToWatchError, SettingError, Thresholds
from act_exporter.integrations.arrays import ArrayExporter, start_exporter
from act_exporter.records import Reader

QUICK = Thresholds(window=40, window_minimum=10, baseline_steps=10)
LAYERS = ["embed", "blocks.0", "blocks.1", ("blocks.1", "input")]


@pytest.fixture
def exporter(tmp_path: Path) -> Iterator[ArrayExporter]:
    with start_exporter(
        LAYERS, 0, run="jax", thresholds=QUICK, journal=tmp_path / "journal", max_overhead=None
    ) as exporter:
        yield exporter


def page(exporter: ArrayExporter) -> dict[tuple[str, str, str], float]:
    """Name, layer and tensor to the value, as a real scrape has it."""
    with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics") as answer:
        text = answer.read().decode()
    return {
        (sample.name, sample.labels.get("layer", ""), sample.labels.get("tensor", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not {"rule", "kind", "stage"} & sample.labels.keys()
    }


def train(exporter: ArrayExporter, steps: int, factor: float = 1.0) -> None:
    numbers = np.random.default_rng(3)
    for _ in range(steps):
        for layer in ("embed", "blocks.0", "blocks.1"):
            x = numbers.normal(size=(4, 32)).astype(np.float32)
            exporter.observe(layer, x * factor if layer == "blocks.1" else x)
        exporter.observe("blocks.1", numbers.normal(size=8), "input")
        exporter.record(loss=2.0, learning_rate=0.1)
        exporter.step()


class TestOneStep:
    def test_statistics_are_numpys(self, exporter: ArrayExporter) -> None:
        x = np.array([[1.0, -250.0, 3.0], [np.nan, np.inf, 0.5]], dtype=np.float32)
        exporter.observe("embed", x)
        exporter.step()
        finite = x[np.isfinite(x)].astype(np.float64)
        seen = page(exporter)
        expected = {
            "absmax": 250.0,
            "min": finite.min(),
            "max": finite.max(),
            "mean": finite.mean(),
            "std": finite.std(),
            "l2norm": np.linalg.norm(finite),
            "exceed_ratio": 0.25,
        }
        for name, value in expected.items():
            assert seen[f"act_layer_{name}", "embed", "output"] == pytest.approx(value)

    def test_micro_batches_are_merged(self, exporter: ArrayExporter) -> None:
        exporter.observe("embed", np.array([1.0, 2.0]))
        exporter.observe("embed", np.array([-7.0]))
        exporter.step()
        assert page(exporter)["act_layer_absmax", "embed", "output"] == 7
        assert page(exporter)["act_layer_mean", "embed", "output"] == pytest.approx(-4 / 3)

    def test_finished_statistics_are_those_of_the_array(self, exporter: ArrayExporter) -> None:
        x = np.random.default_rng(0).normal(3, 2, 1000)
        exporter.observe("blocks.0", x)
        exporter.observe(
            "blocks.1",
            {
                **{"count": x.size, "mean": x.mean(), "std": x.std(), "min": x.min()},
                **{"max": x.max(), "exceed_ratio": 0.0},
            },
        )
        exporter.step()
        seen = page(exporter)
        names = {name for name, layer, _ in seen if layer == "blocks.0" and "_depth" not in name}
        for name in names & {name for name, layer, _ in seen if layer == "blocks.1"}:
            values = [seen[name, layer, "output"] for layer in ("blocks.0", "blocks.1")]
            assert values[0] == pytest.approx(values[1]), name

    @pytest.mark.parametrize("known", [{}, {"nan": 3}])
    def test_statistics_that_are_not_finite_tell_of_elements_that_are_not(
        self, exporter: ArrayExporter, known: dict[str, int]
    ) -> None:
        """The mean of an array with a NaN in it, as `jnp.mean` has it."""
        statistics = dict.fromkeys(("mean", "std", "min", "max"), np.nan)
        exporter.observe("embed", {"count": 8, **statistics, **known})
        exporter.step()
        assert exporter.onset() == 1

    def test_half_precision_has_its_own_headroom(self, exporter: ArrayExporter) -> None:
        exporter.observe("embed", np.array([32_752], dtype=np.float16))
        exporter.step()
        assert page(exporter)["act_layer_headroom_ratio", "embed", "output"] == pytest.approx(0.5)

    def test_whole_numbers_count_as_calls_only(self, exporter: ArrayExporter) -> None:
        exporter.observe("embed", np.arange(5))
        exporter.step()
        seen = page(exporter)
        assert seen["act_layer_calls_total", "embed", "output"] == 1
        assert np.isnan(seen.get(("act_layer_absmax", "embed", "output"), np.nan))


class TestARun:
    def test_breaks_the_hard_rule_where_it_grows(self, exporter: ArrayExporter) -> None:
        train(exporter, 40)
        assert exporter.onset() is None
        train(exporter, 3, factor=1000)
        assert exporter.onset() == 41
        seen = page(exporter)
        assert seen["act_step", "", ""] == 43
        assert seen["act_loss", "", ""] == 2
        assert seen["act_learning_rate", "", ""] == pytest.approx(0.1)

    def test_goes_on_from_a_saved_state(self, exporter: ArrayExporter) -> None:
        train(exporter, 40)
        state = exporter.state_dict()
        with start_exporter(LAYERS, 0, run="jax", thresholds=QUICK) as second:
            second.load_state_dict(state)
            train(second, 1, factor=1000)
            assert second.onset() == 41

    def test_writes_the_journal(self, exporter: ArrayExporter, tmp_path: Path) -> None:
        train(exporter, 5)
        exporter.close()
        records = list(Reader(tmp_path / "journal").records())
        assert {record.step for record in records} == {1, 2, 3, 4, 5}
        assert {(record.layer, record.tensor) for record in records} == {
            *((layer, "output") for layer in ("embed", "blocks.0", "blocks.1")),
            ("blocks.1", "input"),
        }

    def test_steps_that_are_not_sampled_cost_nothing(self) -> None:
        with start_exporter(["a"], 0, sample_every=5, max_overhead=None) as exporter:
            sampled = []
            for step in range(1, 21):
                if exporter.sampling:
                    sampled.append(step)
                # An array that cannot be read, which nobody reads.
                exporter.observe("a", np.ones(3) if exporter.sampling else object())
                exporter.step(step)
        assert len(sampled) == 4
        assert np.diff(sampled).tolist() == [5, 5, 5]


class TestMistakes:
    def test_an_unknown_layer_is_counted_and_said_once(
        self, exporter: ArrayExporter, caplog: pytest.LogCaptureFixture
    ) -> None:
        for _ in range(3):
            exporter.observe("blocks.7", np.ones(3))
            exporter.step()
        said = [record.message for record in caplog.records if "blocks.7" in record.message]
        assert len(said) == 1
        assert "was not given to start_exporter" in said[0]

    def test_statistics_without_their_count_are_refused(
        self, exporter: ArrayExporter, caplog: pytest.LogCaptureFixture
    ) -> None:
        exporter.observe("embed", {"mean": 0.0, "median": 1.0})
        assert "missing: count, std, min, max; unknown: median" in caplog.text

    @pytest.mark.parametrize(
        ("layers", "error", "words"),
        [
            ([], NothingToWatchError, "empty"),
            ("embed", SettingError, "no list of names"),
            (["a", "a"], SettingError, "twice"),
            ([("a", "weight")], SettingError, "neither"),
            ([3], SettingError, "neither"),
        ],
    )
    def test_names_that_cannot_serve(
        self, layers: list[str], error: type[Exception], words: str
    ) -> None:
        with pytest.raises(error, match=words):
            start_exporter(layers, 0)

    def test_a_fault_cannot_be_injected(self, exporter: ArrayExporter) -> None:
        with pytest.raises(SettingError, match="the trainer observes itself"):
            exporter.inject_fault("embed", 10.0, 5)
