"""Whose calls are counted, and what is taken from them."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from act_exporter.rows import Column, Statistics
from tests.keras.models import compile_decoder, decoder, functional, mlp, numbers, tokens
from tests.keras.watched import Watched, watched

WAYS = {
    "graph": {"jit_compile": False},
    "compiled": {"jit_compile": True},
    "eager": {"run_eagerly": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_statistics_are_those_of_the_tensors_themselves(way):
    model = compile_decoder(decoder(), **WAYS[way])
    # One step, whose forward has the weights of now.
    expected = _outputs(model, tokens())
    with watched(model) as exporter:
        model.fit(tokens(), tokens(), batch_size=16, verbose=0)
        for name, values in expected.items():
            row = exporter.row(name)
            taken = Statistics.of(row[None])
            assert row[Column.COUNT] == values.size
            assert taken.absmax[0] == pytest.approx(np.abs(values).max(), rel=1e-5)
            assert taken.mean[0] == pytest.approx(values.mean(), abs=1e-6)
            assert taken.std[0] == pytest.approx(values.std(), rel=1e-5)


def _outputs(model, batch):
    """Name to output of some layers, of a forward without us."""
    outputs = {}
    x = outputs["embedding"] = model.embedding(batch)
    for number, block in enumerate(model.blocks):
        x = outputs[f"blocks.{number}"] = block(x)
    outputs["norm"] = model.norm(x)
    outputs["head"] = model.head(outputs["norm"])
    return {name: np.asarray(value, dtype="float64") for name, value in outputs.items()}


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_half_precision(policy):
    keras.config.set_dtype_policy(policy)
    model = compile_decoder(decoder())
    expected = _outputs(model, tokens())
    with watched(model) as exporter:
        model.fit(tokens(), tokens(), batch_size=16, verbose=0)
        largest = exporter.taken[-1].largest
        assert set(largest) == {float(tf.as_dtype(policy[6:]).max)}
        row = exporter.row("blocks.1")
        absmax = max(-row[Column.MIN], row[Column.MAX])
        assert absmax == pytest.approx(np.abs(expected["blocks.1"]).max(), rel=2e-2)


def test_only_training_counts():
    model = mlp()
    with watched(model) as exporter:
        x, y = numbers()
        model.evaluate(x, y, verbose=0)
        model.predict(x, verbose=0)
        model(x)
        model(x, training=False)
        model.fit(x, y, batch_size=16, verbose=0, validation_data=(x, y))
        assert len(exporter.taken) == 1
        assert exporter.row("first")[Column.CALLS] == 1


@pytest.mark.parametrize("training", [True, 1, np.True_])
def test_training_is_what_keras_takes_for_it(training):
    model = mlp()
    with watched(model) as exporter:
        model(numbers()[0], training=training)
        exporter.step()
        assert exporter.row("first")[Column.CALLS] == 1


def test_a_frozen_part_that_is_never_in_training_is_looked_at():
    """As Keras' guide to transfer learning has it: `base(x, training=False)`."""

    class Head(keras.Model):
        def __init__(self):
            super().__init__()
            self.base = layers.BatchNormalization(trainable=False)
            self.head = layers.Dense(1)

        def call(self, x):
            return self.head(self.base(x, training=False))

    model = Head()
    model(np.ones((1, 4)))
    model.compile("sgd", loss="mse")
    with watched(model, watch="all") as exporter:
        model.fit(np.ones((8, 4)), np.ones((8, 1)), batch_size=8, verbose=0)
        assert exporter.row("base")[Column.CALLS] == exporter.row("head")[Column.CALLS] == 1


def test_a_shared_layer_is_counted_at_each_call():
    given = keras.Input((4,))
    shared = layers.Dense(4, name="shared")
    model = keras.Model(given, layers.Dense(1)(shared(shared(shared(given)))))
    model.compile("sgd", "mse", jit_compile=False)
    with watched(model) as exporter:
        model.fit(*numbers(), batch_size=16, verbose=0)
        assert exporter.row("shared")[[Column.CALLS, Column.COUNT]].tolist() == [3, 3 * 16 * 4]


@pytest.mark.parametrize("way", WAYS)
def test_recomputation_is_not_counted(way):
    class Saving(layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = layers.Dense(4, name="inner")

        def build(self, shape):
            self.inner.build(shape)
            self.recomputed = tf.recompute_grad(lambda x: self.inner(x))

        def call(self, x):
            return self.recomputed(x)

    given = keras.Input((4,))
    model = keras.Model(given, layers.Dense(1)(Saving()(given)))
    model.compile("sgd", "mse", **WAYS[way])
    with watched(model, watch="all") as exporter:
        model.fit(*numbers(), batch_size=8, verbose=0)
        assert exporter.row("saving.inner")[Column.CALLS] == 1


def test_inputs_and_depth():
    model = compile_decoder(functional())
    with watched(model) as exporter:
        model.fit(tokens(), tokens(), batch_size=16, verbose=0)
        depth = dict(zip(exporter.layers, exporter.taken[-1].depth, strict=True))
        order = sorted(depth, key=depth.get)
        assert order[0] == ("embedding", "output")
        assert order.index(("block", "output")) < order.index(("block_1.attention", "input"))
        assert order[-1] == ("dense", "output")
        row = exporter.row("block.attention", "input")
        assert row[Column.MAX] > 0  # the normed input


def test_numbers_that_are_not_finite_are_counted_and_training_goes_on():
    model = mlp()
    x, y = numbers()
    x[0, 0], x[1, 0] = np.nan, np.inf
    with watched(model) as exporter:
        model.fit(x, y, batch_size=16, verbose=0, shuffle=False)
        row = exporter.row("first")
        assert row[Column.NAN] + row[Column.POSINF] + row[Column.NEGINF] == 2 * 8
        assert row[Column.COUNT] == 14 * 8
        assert np.isnan(exporter.values[-1]["loss"])


def test_an_error_of_ours_is_counted_and_the_layer_goes_on(monkeypatch):
    model = mlp()
    with Watched(model) as exporter:

        def broken(*_):
            raise RuntimeError("broken")

        monkeypatch.setattr(exporter._instrumentation._rows, "add", broken)
        history = model.fit(*numbers(), batch_size=8, verbose=0)
        assert np.isfinite(history.history["loss"][-1])
        assert exporter.errors["hook"] == 2  # once a tap, when the graph was made


def test_unsampled_steps_are_not_looked_at():
    model = mlp()
    with watched(model, sample_every=4) as exporter:
        x, y = numbers(16)
        model.fit(x, y, batch_size=2, verbose=0)
        assert [sample.step for sample in exporter.taken] == [1, 5]
        assert exporter.row("first")[Column.CALLS] == 1


def test_a_graph_outlives_the_exporter():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    x, _ = numbers()

    @tf.function
    def forward(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True))
        return tape.gradient(loss, model.trainable_variables)

    with watched(model) as exporter:
        forward(x)
        exporter.step(1)
        assert exporter.row("dense")[Column.CALLS] == 1
    del exporter
    assert np.isfinite(forward(x)[0]).all()
