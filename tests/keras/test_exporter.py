"""The one line in a Keras trainer: its page, a fault on purpose, and what it refuses."""

import json
import logging
import sys
import urllib.request

import keras
import numpy as np
import pytest
import tensorflow as tf

from act_exporter import SettingError
from act_exporter.integrations.keras import start_exporter
from act_exporter.rows import Column
from tests.keras.models import compile_decoder, decoder, mlp, numbers, tokens
from tests.keras.watched import watched


def page(exporter):
    url = f"http://127.0.0.1:{exporter.port}/metrics"
    with urllib.request.urlopen(url, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))


def test_the_page_has_layers_loss_gradients_and_rate(tmp_path):
    model = compile_decoder(decoder())
    with start_exporter(model, 0, run="tiny", journal=tmp_path) as exporter:
        model.fit(tokens(), tokens(), batch_size=8, verbose=0)
        samples = page(exporter)
    at = 'rank="0",run="tiny"'
    assert samples[f"act_step{{{at}}}"] == "2.0"
    assert float(samples[f"act_loss{{{at}}}"]) > 0
    assert float(samples[f"act_grad_norm{{{at}}}"]) > 0
    assert float(samples[f"act_learning_rate{{{at}}}"]) == pytest.approx(0.01)
    layers = [key for key in samples if key.startswith("act_layer_absmax{")]
    assert any('layer="blocks.1.attention.attention_output"' in key for key in layers)
    bounds = [key for key in samples if key.startswith("act_attention_logit_bound{")]
    assert any('layer="blocks.0.attention"' in key for key in bounds)
    norms = [key for key in samples if key.startswith("act_layer_grad_norm{")]
    assert any('layer="head"' in key for key in norms)
    files = list(tmp_path.glob("**/*.jsonl*"))
    assert files
    assert all(json.loads(line) for line in files[0].read_text().splitlines())


@pytest.mark.parametrize("settings", [{"jit_compile": True}, {"run_eagerly": True}])
def test_a_fault_is_in_the_steps_that_were_asked_for_and_in_no_other(settings, caplog):
    model = mlp(**settings)
    with watched(model) as exporter:
        x, y = numbers()
        zero = np.zeros_like(y)
        model.fit(x, zero, batch_size=16, verbose=0)
        exporter.inject_fault("first", 1000.0, 3, steps=1)
        with caplog.at_level(logging.WARNING):
            model.fit(x, zero, batch_size=16, epochs=3, verbose=0)
        absmax = [
            np.abs(sample.rows[0, [Column.MIN, Column.MAX]]).max() for sample in exporter.taken
        ]
        assert absmax[2] > 500 * absmax[1]
        assert absmax[0] == pytest.approx(absmax[1], rel=0.5)
        assert [sample.step for sample in exporter.taken] == [1, 2, 3, 4]
    assert "injected fault: the output of first times 1000 from step 3 on" in caplog.text
    assert "the fault of first has ended: step 4 begins" in caplog.text


def test_nothing_counts_while_it_is_paused():
    model = mlp()
    with watched(model) as exporter:
        with exporter.paused():
            model.fit(*numbers(), batch_size=8, verbose=0)
        assert exporter.taken == []
        model.fit(*numbers(), batch_size=16, verbose=0)
        assert [sample.step for sample in exporter.taken] == [1]
        assert exporter.row("first")[Column.CALLS] == 1


def test_a_state_goes_on_where_it_was():
    model = mlp()
    with watched(model) as exporter:
        model.fit(*numbers(), batch_size=8, verbose=0)
        state = exporter.state_dict()
    assert state["learning_rate"] == pytest.approx(0.01)
    with watched(model) as exporter:
        exporter.load_state_dict(state)
        model.fit(*numbers(), batch_size=8, verbose=0)
        assert [sample.step for sample in exporter.taken] == [3, 4]


def test_two_exporters_see_the_same():
    model = mlp()
    with watched(model) as one, watched(model, watch="first") as other:
        model.fit(*numbers(), batch_size=8, verbose=0)
        assert [sample.step for sample in other.taken] == [1, 2]
        np.testing.assert_array_equal(other.row("first"), one.row("first"))


class TestRefusals:
    def test_several_devices(self):
        with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
            model = mlp()
        with pytest.raises(SettingError, match="made under MirroredStrategy"):
            start_exporter(model, 0)

    def test_no_model(self):
        with pytest.raises(SettingError, match=r"must be a keras\.Model, not Dense"):
            start_exporter(keras.layers.Dense(1), 0)

    def test_another_backend(self, monkeypatch):
        model = mlp()
        # Neither JAX nor scipy, which Keras on numpy needs, is there to really run it on.
        monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
        with pytest.raises(SettingError, match="Keras runs on jax"):
            start_exporter(model, 0)


def test_torch_is_never_imported():
    assert "torch" not in sys.modules
