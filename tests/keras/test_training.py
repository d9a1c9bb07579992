"""Steps, loss, gradients, learning rate and loss scale of `model.fit` and of loops of one's own."""

import copy

import keras
import numpy as np
import pytest
import tensorflow as tf

from act_exporter.rows import Column
from tests.keras.models import compile_decoder, decoder, mlp, numbers, tokens
from tests.keras.watched import Watched, watched


def mean_square(model, x, y):
    """Loss and gradients of one batch, without us."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - y) ** 2)
    return float(loss), tape.gradient(loss, model.trainable_variables)


def norm(gradients):
    return float(np.sqrt(sum((np.asarray(own, "float64") ** 2).sum() for own in gradients)))


class TestSteps:
    def test_each_step_is_a_sample_with_its_own_loss(self):
        model = mlp()
        x, y = numbers()
        losses = []
        with watched(model) as exporter:
            callback = keras.callbacks.LambdaCallback(
                on_train_batch_begin=lambda batch, logs: losses.append(
                    mean_square(model, x[batch * 4 :][:4], y[batch * 4 :][:4])[0]
                )
            )
            model.fit(x, y, batch_size=4, verbose=0, shuffle=False, callbacks=[callback])
            assert [sample.step for sample in exporter.taken] == [1, 2, 3, 4]
            # Not the running mean that fit shows.
            assert [own["loss"] for own in exporter.values] == pytest.approx(losses, rel=1e-6)

    def test_steps_of_one_execution_are_one_sample(self):
        model = mlp(steps_per_execution=3)
        with watched(model) as exporter:
            model.fit(*numbers(), batch_size=4, verbose=0)
            assert [sample.step for sample in exporter.taken] == [3, 4]
            assert [row.rows[0, Column.CALLS] for row in exporter.taken] == [3, 1]

    def test_gathered_batches_are_one_step(self):
        model = mlp()
        optimizer = keras.optimizers.SGD(0.01, gradient_accumulation_steps=2)
        model.compile(optimizer, "mse", jit_compile=False)
        x, y = numbers()
        _, first = mean_square(model, x[:8], y[:8])
        with watched(model) as exporter:
            model.fit(x, y, batch_size=4, verbose=0, shuffle=False)
            assert [sample.step for sample in exporter.taken] == [1, 2]
            assert exporter.row("first")[Column.COUNT] == 2 * 4 * 8
            # That of the mean over both batches.
            assert exporter.gradients[0].total == pytest.approx(norm(first), rel=1e-5)

    def test_attached_after_the_first_fit_and_compiled_again(self):
        model = mlp()
        model.fit(*numbers(), batch_size=8, verbose=0)
        with watched(model) as exporter:
            model.fit(*numbers(), batch_size=8, verbose=0)
            assert [sample.step for sample in exporter.taken] == [1, 2]
            model.compile(keras.optimizers.SGD(0.5), "mse", jit_compile=False)
            model.fit(*numbers(), batch_size=8, verbose=0)
            assert [sample.step for sample in exporter.taken] == [1, 2, 3, 4]
            assert exporter._instrumentation.learning_rate == pytest.approx(0.5)
            assert exporter.gradients[-1].step == 4

    def test_train_on_batch(self):
        model = mlp()
        with watched(model) as exporter:
            model.train_on_batch(*numbers())
            model.train_on_batch(*numbers())
            assert [sample.step for sample in exporter.taken] == [1, 2]

    def test_a_train_step_and_optimizers_of_ones_own(self):
        class Two(keras.Model):
            def __init__(self):
                super().__init__()
                self.first = keras.layers.Dense(8)
                self.second = keras.layers.Dense(1)
                self.slow = keras.optimizers.SGD(0.01)
                self.fast = keras.optimizers.SGD(0.1)

            def call(self, x):
                return self.second(self.first(x))

            def train_step(self, data):
                x, y = data
                with tf.GradientTape(persistent=True) as tape:
                    loss = self.compute_loss(y=y, y_pred=self(x))
                for layer, optimizer in ((self.first, self.slow), (self.second, self.fast)):
                    own = layer.trainable_variables
                    optimizer.apply(tape.gradient(loss, own), own)
                return {"loss": loss}

        model = Two()
        x, y = numbers()
        model(x)
        model.compile(loss="mse", optimizer=None, jit_compile=False)
        loss, gradients = mean_square(model, x, y)
        with watched(model) as exporter:
            model.fit(x, y, batch_size=16, epochs=2, verbose=0, shuffle=False)
            assert [sample.step for sample in exporter.taken] == [1, 2]
            assert exporter.values[0]["loss"] == pytest.approx(loss, rel=1e-6)
            assert exporter.gradients[0].total == pytest.approx(norm(gradients), rel=1e-5)

    def test_a_loop_of_ones_own(self):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.25)
        x, y = numbers()
        with watched(model, optimizer=optimizer) as exporter:

            @tf.function
            def train(x, y):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
                gradients = tape.gradient(loss, model.trainable_variables)
                optimizer.apply(gradients, model.trainable_variables)
                exporter.record(loss=loss)

            exporter.step(100)  # where the run stands
            expected = [mean_square(model, x, y)]
            train(x, y)
            exporter.step(101)
            expected.append(mean_square(model, x, y))
            train(x, y)
            exporter.step(102)
            model(x, training=False)
            assert [sample.step for sample in exporter.taken] == [101, 102]
            assert [own["loss"] for own in exporter.values] == pytest.approx(
                [loss for loss, _ in expected], rel=1e-5
            )
            assert [own.total for own in exporter.gradients] == pytest.approx(
                [norm(own) for _, own in expected], rel=1e-5
            )
            assert exporter.row("dense")[Column.CALLS] == 1
            assert exporter._instrumentation.learning_rate == 0.25

    @pytest.mark.parametrize("compiled", [True, False])
    def test_a_loop_whose_optimizer_is_not_known_is_told_what_is_missing(self, compiled, caplog):
        model = mlp() if compiled else keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        with watched(model) as exporter:
            for _ in range(3):
                model(numbers()[0], training=True)
                exporter.step()
        said = [record.message for record in caplog.records if "optimizer=" in record.message]
        assert len(said) == (0 if compiled else 1)


class TestGradients:
    def test_norms_are_those_before_clipping(self):
        model = mlp()
        model.compile(keras.optimizers.SGD(0.01, global_clipnorm=0.01), "mse", jit_compile=False)
        x, y = numbers()
        _, gradients = mean_square(model, x, y)
        with watched(model) as exporter:
            model.fit(x, y, batch_size=16, verbose=0, shuffle=False)
            taken = exporter.gradients[0]
            assert taken.total == pytest.approx(norm(gradients), rel=1e-5)
            assert taken.layers == {
                "first": pytest.approx(norm(gradients[:2]), rel=1e-5),
                "second": pytest.approx(norm(gradients[2:]), rel=1e-5),
            }

    def test_a_layer_that_is_unfrozen_later_has_a_norm_from_then_on(self):
        model = mlp()
        model.layers[0].trainable = False
        model.compile("sgd", "mse", jit_compile=False)
        with watched(model) as exporter:
            model.fit(*numbers(), batch_size=16, verbose=0)
            assert set(exporter.gradients[-1].layers) == {"second"}
            model.layers[0].trainable = True
            model.compile("sgd", "mse", jit_compile=False)
            model.fit(*numbers(), batch_size=16, verbose=0)
            assert set(exporter.gradients[-1].layers) == {"first", "second"}

    def test_rows_that_are_looked_up_several_times(self):
        model = compile_decoder(decoder())
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        with tf.GradientTape() as tape:
            value = loss(tokens(), model(tokens()))
        gradients = tape.gradient(value, model.trainable_variables)
        whole = [tf.convert_to_tensor(own) for own in gradients]
        with watched(model) as exporter:
            model.fit(tokens(), tokens(), batch_size=16, verbose=0)
            assert exporter.gradients[0].total == pytest.approx(norm(whole), rel=1e-5)
            assert exporter.gradients[0].layers["embedding"] == pytest.approx(
                norm(whole[:1]), rel=1e-5
            )

    def test_none_are_taken_where_none_are_wanted(self):
        model = mlp()
        with watched(model, gradients=False) as exporter:
            model.fit(*numbers(), batch_size=16, verbose=0)
            assert exporter.gradients == []
            assert "loss" in exporter.values[0]


class TestLossScale:
    def test_it_is_not_in_the_norms_and_a_skipped_step_is_none(self):
        keras.config.set_dtype_policy("mixed_float16")
        model = mlp()
        inner = keras.optimizers.SGD(0.001)
        # So large that the first gradients overflow.
        optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**18)
        model.compile(optimizer, "mse", jit_compile=False)
        x, y = numbers()
        _, gradients = mean_square(model, x, y)
        with watched(model) as exporter:
            model.fit(x, y, batch_size=16, epochs=12, verbose=0, shuffle=False)
            steps = int(optimizer.iterations.numpy())
            assert 1 <= steps < 12  # some were skipped
            assert [sample.step for sample in exporter.taken] == list(range(1, steps + 1))
            assert exporter.taken[0].rows[0, Column.CALLS] == 12 - steps + 1
            assert exporter.gradients[0].total == pytest.approx(norm(gradients), rel=2e-2)
            assert exporter.values[0]["loss_scale"] == 2.0 ** (18 - (12 - steps))

    def test_steps_that_are_all_skipped_are_seen(self):
        keras.config.set_dtype_policy("mixed_float16")
        model = mlp()
        x, y = numbers()
        with watched(model) as exporter:
            model.fit(x, y, batch_size=16, epochs=2, verbose=0)
            assert len(exporter.taken) == 2
            model.fit(x * np.nan, y, batch_size=16, epochs=9, verbose=0)
            assert len(exporter.taken) > 2
            assert exporter.row("first")[Column.NAN] > 0


def test_a_schedule_is_the_learning_rate():
    model = mlp()
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([0, 1], [0.3, 0.2, 0.1])
    model.compile(keras.optimizers.SGD(rate), "mse", jit_compile=False)
    rates = []
    with watched(model) as exporter:
        tell = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: rates.append(
                exporter._instrumentation.learning_rate
            )
        )
        model.fit(*numbers(), batch_size=4, verbose=0, callbacks=[tell])
    assert rates == pytest.approx([0.3, 0.2, 0.1, 0.1])


class TestNothingChanges:
    @pytest.mark.parametrize(
        ("policy", "settings"),
        [
            ("float32", {"jit_compile": False}),
            ("float32", {"jit_compile": True}),
            ("float32", {"run_eagerly": True}),
            ("mixed_float16", {"jit_compile": True}),
            ("mixed_bfloat16", {"jit_compile": False}),
            ("float32", {"jit_compile": True, "steps_per_execution": 3}),
        ],
    )
    def test_training_is_bitwise_the_same(self, policy, settings):
        keras.config.set_dtype_policy(policy)

        def train(look):
            keras.utils.set_random_seed(7)
            model = compile_decoder(decoder(), **settings)
            exporter = look(model)
            history = model.fit(tokens(), tokens(), batch_size=4, epochs=2, verbose=0)
            if exporter is not None:
                exporter.close()
            return history.history["loss"], [own.numpy() for own in model.variables]

        losses, weights = train(lambda _: None)
        watched_losses, watched_weights = train(Watched)
        assert watched_losses == losses
        for one, other in zip(watched_weights, weights, strict=True):
            np.testing.assert_array_equal(one, other)

    # Keras' own, of numpy from 2.4 on.
    @pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
    def test_what_is_saved_and_copied_holds_nothing_of_ours(self, tmp_path):
        model = mlp()
        x, y = numbers()
        with watched(model) as exporter:
            model.fit(x, y, batch_size=8, verbose=0)
            taken = len(exporter.taken)
            model.save(tmp_path / "model.keras")
            model.save_weights(tmp_path / "model.weights.h5")
            model.export(tmp_path / "exported", verbose=False)
            loaded = keras.models.load_model(tmp_path / "model.keras")
            others = [loaded, copy.deepcopy(model), keras.models.clone_model(model)]
            others[2].load_weights(tmp_path / "model.weights.h5")
            for other in others:
                np.testing.assert_array_equal(other.predict(x, verbose=0), model(x))
                other.compile("sgd", "mse", jit_compile=False)
                other.fit(x, y, batch_size=8, verbose=0)
            exported = tf.saved_model.load(str(tmp_path / "exported"))
            np.testing.assert_allclose(exported.serve(x), model(x), rtol=1e-5)
            assert len(exporter.taken) == taken

    def test_a_closed_exporter_has_left_the_model(self):
        model = mlp()
        with watched(model):
            model.fit(*numbers(), batch_size=8, verbose=0)
            optimizer = model.optimizer
        ours = {"call", "make_train_function", "train_step", "compute_loss"}
        for owner in (model, *model.layers):
            assert not ours & set(vars(owner))
        assert "_backend_apply_gradients" not in vars(optimizer)
        assert not hasattr(model.train_function, "__wrapped__")
        model.fit(*numbers(), batch_size=8, verbose=0)
