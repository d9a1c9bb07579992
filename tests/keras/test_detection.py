"""What the page says of a Keras training that goes wrong, and of one that does not.

The same as `tests/act_exporter/test_exporter.py` and the detection benchmark hold torch to: which
rule is broken at which step, which layer is named first, what kind of fault it is said to be.
"""

from __future__ import annotations

import contextlib
import math
import re
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import keras
import pytest
from prometheus_client.parser import text_string_to_metric_families

from act_exporter import Exporter, Thresholds
from act_exporter.integrations.keras import start_exporter
from tests.keras.trainee import GPT, RATE, batches, gpt

QUICK = Thresholds(window=40, window_minimum=10, baseline_steps=10)
WARMUP = 50
HEALTHY = 90
"""Steps before a fault: baselines are learnt when the learning rate rises no more."""

WAYS: dict[str, dict[str, Any]] = {
    "graph": {"jit_compile": False},
    "compiled": {"jit_compile": True},
    "eager": {"run_eagerly": True},
}

Inflict = Callable[[GPT, Exporter], None]


class Course(keras.callbacks.Callback):
    """A learning rate that rises first, and a fault before one of the steps."""

    def __init__(self, exporter: Exporter, inflict: Inflict | None, after: int) -> None:
        super().__init__()
        self._exporter, self._inflict, self._after = exporter, inflict, after

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch < WARMUP:
            self.model.optimizer.learning_rate = RATE * (batch + 1) / WARMUP
        if batch == self._after and self._inflict is not None:
            self._inflict(self.model, self._exporter)


@contextlib.contextmanager
def trained(
    inflict: Inflict | None = None, *, steps: int = 4, policy: str = "float32", **compiled: Any
) -> Iterator[Exporter]:
    """The exporter of a run that was healthy for `HEALTHY` steps, and then not for `steps`."""
    keras.config.set_dtype_policy(policy)
    try:
        model = gpt(blocks=2, **compiled)
    finally:
        keras.config.set_dtype_policy("float32")
    with start_exporter(model, 0, run="gpt", thresholds=QUICK, max_overhead=None) as exporter:
        course = Course(exporter, inflict, HEALTHY)
        model.fit(batches(HEALTHY + steps), verbose=0, shuffle=False, callbacks=[course])
        yield exporter


def read(exporter: Exporter, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}{path}", timeout=30) as answer:
        body: str = answer.read().decode()
        return body


class Page:
    """One scrape."""

    def __init__(self, exporter: Exporter) -> None:
        families = text_string_to_metric_families(read(exporter, "/metrics"))
        self._samples = [sample for family in families for sample in family.samples]

    def values(self, name: str, **labels: str) -> list[float]:
        return [
            sample.value
            for sample in self._samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]

    def value(self, name: str, **labels: str) -> float:
        (value,) = self.values(name, **labels)
        return value

    @property
    def verdicts(self) -> list[str]:
        return [
            sample.labels["verdict"]
            for sample in self._samples
            if sample.name == "act_diagnosis" and sample.value
        ]

    @property
    def onset(self) -> tuple[str, str, str, float] | None:
        for sample in self._samples:
            if sample.name == "act_onset_step":
                labels = sample.labels
                return labels["layer"], labels["tensor"], labels["rule"], sample.value
        return None

    @property
    def broken(self) -> set[str]:
        """Layers that broke a rule for which a run is stopped."""
        return {
            sample.labels["layer"]
            for sample in self._samples
            if sample.name == "act_layer_exceeded_steps_total"
            and sample.labels["rule"] in ("hard", "nonfinite")
            and sample.value
        }


def weights_times_100(model: GPT, exporter: Exporter) -> None:
    kernel = model.blocks[1].down.kernel
    kernel.assign(100 * kernel)


def nan_weight(model: GPT, exporter: Exporter) -> None:
    kernel = model.blocks[1].down.kernel
    spoilt = kernel.numpy()
    spoilt[1, 1] = math.nan
    kernel.assign(spoilt)


def learning_rate_times_100(model: GPT, exporter: Exporter) -> None:
    model.optimizer.learning_rate = 100 * RATE


def injected(model: GPT, exporter: Exporter) -> None:
    exporter.inject_fault("blocks.1.down", 1000.0, HEALTHY + 1, steps=3)


def beyond_float16(model: GPT, exporter: Exporter) -> None:
    exporter.inject_fault("blocks.1.down", 1e7, HEALTHY + 1)


class TestHealth:
    @pytest.mark.parametrize(
        ("policy", "way"),
        [
            ("float32", "graph"),
            ("float32", "compiled"),
            ("mixed_float16", "graph"),
            ("mixed_bfloat16", "graph"),
        ],
    )
    def test_breaks_no_rule_and_has_no_verdict(self, policy: str, way: str) -> None:
        with trained(steps=30, policy=policy, **WAYS[way]) as exporter:
            page = Page(exporter)
            assert page.value("act_step") == HEALTHY + 30
            # There were baselines and a window to break a rule by.
            assert page.value("act_layer_absmax_baseline", layer="norm") > 0
            assert page.value("act_grad_norm_window_mean") > 0
            assert page.broken == set()
            assert page.verdicts == []
            assert page.onset is None
            assert exporter.onset() is None
            assert not any(page.values("act_errors_total"))


class TestActivationFault:
    @pytest.mark.parametrize("way", WAYS)
    def test_is_called_so_and_placed(self, way: str, caplog: pytest.LogCaptureFixture) -> None:
        with trained(weights_times_100, **WAYS[way]) as exporter:
            assert exporter.onset() == HEALTHY + 1
            page = Page(exporter)
            assert page.onset == ("blocks.1.down", "output", "hard", HEALTHY + 1)
            assert page.verdicts == ["activation"]
            where = {"layer": "blocks.1.down", "tensor": "output"}
            assert page.value("act_layer_exceeded_consecutive", rule="hard", **where) == 4
            assert page.value("act_layer_depth_jump_ratio", **where) > 50
            assert not page.broken & {"embed", "blocks.0", "blocks.0.down"}
            assert named_first(exporter) == ("blocks.1.down", "output", str(HEALTHY + 1))
        assert caplog.text.count("blocks.1.down went bad first (rule hard)") == 1

    def test_an_injected_one_is_seen_where_it_is_and_passes(self) -> None:
        with trained(injected, steps=8) as exporter:
            page = Page(exporter)
            assert page.onset == ("blocks.1.down", "output", "hard", HEALTHY + 1)
            assert page.verdicts == ["activation"]
            where = {"layer": "blocks.1.down", "tensor": "output"}
            assert page.value("act_layer_exceeded_steps_total", rule="hard", **where) == 3
            assert page.value("act_step") == HEALTHY + 8
            assert not page.broken & {"embed", "blocks.0"}


class TestLearningRate:
    def test_a_hundred_times_too_high_is_a_gradient_fault(self) -> None:
        """As torch's trainee is said to have; at more than that layers break first, there too."""
        with trained(learning_rate_times_100, steps=20) as exporter:
            page = Page(exporter)
            assert page.verdicts == ["gradient"]
            assert page.value("act_learning_rate") == pytest.approx(100 * RATE)
            assert page.value("act_grad_norm_peak_ratio") > 5


class TestNonFinite:
    @pytest.mark.parametrize("way", ["graph", "compiled"])
    def test_a_nan_is_found_in_its_layer(self, way: str) -> None:
        with trained(nan_weight, steps=3, **WAYS[way]) as exporter:
            assert exporter.onset() == HEALTHY + 1
            page = Page(exporter)
            assert page.onset == ("blocks.1.down", "output", "nonfinite", HEALTHY + 1)
            assert page.verdicts == ["activation"]
            where = {"layer": "blocks.1.down", "tensor": "output"}
            assert page.value("act_layer_nonfinite_total", kind="nan", **where) > 0
            assert page.value("act_layer_exceeded_consecutive", rule="nonfinite", **where) == 3
            assert page.value("act_loss_nonfinite_total") == 3

    def test_an_overflow_is_found_although_the_loss_scale_skips_the_steps(self) -> None:
        with trained(beyond_float16, steps=30, policy="mixed_float16") as exporter:
            assert exporter.onset() == HEALTHY + 1
            page = Page(exporter)
            assert page.onset == ("blocks.1.down", "output", "nonfinite", HEALTHY + 1)
            assert page.verdicts == ["activation"]
            where = {"layer": "blocks.1.down", "tensor": "output"}
            infinite = [
                page.value("act_layer_nonfinite_total", kind=kind, **where)
                for kind in ("posinf", "neginf")
            ]
            assert sum(infinite) > 0
            assert page.value("act_layer_exceeded_consecutive", rule="nonfinite", **where) >= 3
            assert page.value("act_step") == HEALTHY
            assert "blocks.0" not in page.broken


def named_first(exporter: Exporter) -> tuple[str, ...] | None:
    """Layer, side and step that the exporter's own page gives the headline to."""
    found = re.search(
        r"<h2>(\S+) (input|output) went bad first, at step (\d+)", read(exporter, "/")
    )
    return found.groups() if found else None
