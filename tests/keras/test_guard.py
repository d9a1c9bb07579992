"""Keras, guarded: rolled back, killed and told to end, it is bitwise the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy
import pytest
import tensorflow as tf

from alerting.control import ControlDirectory
from alerting.exceptions import CheckpointError, ConfigError, RecoveryHaltedError
from alerting.exit_codes import RESTART
from alerting.recovery import Callback, ClipGradients, LowerLearningRate, SkipBatches
from alerting.recovery.keras import KerasGuard
from alerting.recovery.keras_position import KerasPosition
from alerting.recovery.keras_state import KerasState
from tests.keras.guarded import (
    BATCH,
    EPOCH,
    GUARDED,
    SAMPLES,
    At,
    FakeDetector,
    Fault,
    Loop,
    Pairs,
    Patient,
    dataset,
    health,
    last_of,
    model,
    names,
    open_request,
    read_json,
    same,
    samples,
)

SECONDS = 120
REPOSITORY = Path(__file__).parents[2]


class Guarded:
    """A guarded `fit` in a folder of its own."""

    def __init__(self, folder: Path, trained: keras.Model | None = None, **settings: Any) -> None:
        self.folder = folder
        self.model = trained or model()
        self.detector = FakeDetector()
        self.guard = KerasGuard(
            folder, model=self.model, exporter=self.detector, **{**GUARDED, **settings}
        )

    def fit(self, *callbacks: Any, data: Any = (), **arguments: Any) -> Any:
        return self.guard.fit(
            *(data or (dataset(),)),
            **{"epochs": 3, "verbose": 0, **arguments},
            callbacks=[*callbacks, Patient(self.guard)],
        )

    def fault(self, step: int, **arguments: Any) -> Fault:
        return Fault(step, self.detector, self.folder, **arguments)

    def at(self, step: int, act: Any) -> At:
        return At(step, self.detector, act)

    def ask(self, action: Any) -> str:
        return open_request(self.folder, action)

    def answer(self, request: str) -> Any:
        return read_json(self.folder / "control" / "answers" / f"{request}.json")

    @property
    def control(self) -> ControlDirectory:
        return ControlDirectory(self.folder / "control")


@pytest.fixture(scope="module")
def reference() -> Any:
    unguarded = model()
    unguarded.history_of_fit = unguarded.fit(dataset(), epochs=3, verbose=0, shuffle=False).history
    return unguarded


@pytest.fixture(scope="module")
def steps_of_reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return Loop(tmp_path_factory.mktemp("loop")).run()


class TestFit:
    def test_without_a_fault_it_is_bitwise_the_unguarded_one(self, tmp_path, reference):
        run = Guarded(tmp_path)
        history = run.fit()
        assert same(run.model, reference)
        assert history.history == reference.history_of_fit
        assert run.control.status().state == "finished"
        assert type(run.model.train_function).__module__ != "alerting.recovery.keras_fit"

    @pytest.mark.parametrize(
        ("fault", "saves"), [(3, 5), (6, 5), (9, EPOCH), (12, 5), (2 * EPOCH, 5), (18, 3)]
    )
    def test_a_rollback_is_bitwise_as_if_nothing_had_happened(
        self, tmp_path, reference, fault, saves
    ):
        """Into the first epoch, into the one before, and to the last batch of one."""
        run = Guarded(tmp_path, save_every_steps=saves, onset_margin_steps=1)
        history = run.fit(run.fault(fault))
        assert run.detector.resets == [0, 1]
        assert same(run.model, reference)
        assert history.history == reference.history_of_fit
        assert history.epoch == [0, 1, 2]

    def test_the_answer_says_where_it_went(self, tmp_path):
        run = Guarded(tmp_path)
        fault = run.fault(9)
        run.fit(fault)
        answer = run.answer(fault.asked[0])
        assert (answer["result"], answer["onset"], answer["resumed_step"]) == ("done", 9, 5)
        assert answer["checkpoint"] == "step-00000009-g0-emergency"
        assert health(tmp_path, answer["checkpoint"]) == "suspect"

    @pytest.mark.parametrize(
        ("policy", "compiled"),
        [
            ("mixed_float16", {}),
            ("mixed_float16", {"jit_compile": True}),
            ("mixed_bfloat16", {}),
            ("float32", {"jit_compile": True}),
            ("float32", {"run_eagerly": True}),
        ],
    )
    def test_any_way_of_running(self, tmp_path, policy, compiled):
        unguarded = model(policy, **compiled)
        unguarded.fit(dataset(), epochs=2, verbose=0, shuffle=False)
        run = Guarded(tmp_path, model(policy, **compiled))
        run.fit(run.fault(9), epochs=2)
        assert run.detector.resets == [0, 1]
        assert same(run.model, unguarded)

    @pytest.mark.parametrize("shuffle", [True, False])
    def test_arrays(self, tmp_path, shuffle):
        whole = Guarded(tmp_path / "whole")
        whole.fit(data=samples(), batch_size=4, shuffle=shuffle)
        run = Guarded(tmp_path / "faulty")
        run.fit(run.fault(9), data=samples(), batch_size=4, shuffle=shuffle)
        assert run.detector.steps[-1] == 3 * EPOCH
        assert run.detector.resets == [0, 1]
        assert same(run.model, whole.model)

    def test_a_py_dataset(self, tmp_path):
        data = (Pairs(workers=2),)
        whole = Guarded(tmp_path / "whole")
        whole.fit(data=data)
        run = Guarded(tmp_path / "faulty")
        run.fit(run.fault(9), data=data)
        assert run.detector.resets == [0, 1]
        assert same(run.model, whole.model)

    def test_a_py_dataset_whose_batches_have_other_lengths(self, tmp_path):
        class Texts(keras.utils.PyDataset):
            def __len__(self) -> int:
                return 4

            def __getitem__(self, index: int) -> tuple[Any, Any]:
                return numpy.full((2, 3 + index), index), numpy.ones((2, 1))

        def reader() -> keras.Model:
            keras.utils.clear_session()
            keras.utils.set_random_seed(0)
            tokens = keras.Input((None,), dtype="int32")
            embedded = keras.layers.Embedding(4, 2)(tokens)
            pooled = keras.layers.GlobalAveragePooling1D()(embedded)
            made = keras.Model(tokens, keras.layers.Dense(1)(pooled))
            made.compile("adam", loss="mse")
            return made

        unguarded = reader()
        unguarded.fit(Texts(), shuffle=False, epochs=2, verbose=0)
        run = Guarded(tmp_path, reader())
        run.fit(data=(Texts(),), shuffle=False, epochs=2)
        assert same(run.model, unguarded)

    def test_without_callbacks_as_keras_has_it(self, tmp_path):
        KerasGuard(tmp_path, model=model()).fit(dataset(), callbacks=None, verbose=0)
        assert ControlDirectory(tmp_path / "control").status().state == "finished"

    def test_unshuffled_arrays_and_py_datasets_are_keras_own(self, tmp_path):
        x, y = samples()
        unguarded = model()
        unguarded.fit(x, y, batch_size=4, shuffle=False, epochs=1, verbose=0)
        for name, data in (("arrays", (x, y)), ("pairs", (Pairs(),))):
            run = Guarded(tmp_path / name)
            run.fit(data=data, batch_size=4, shuffle=False, epochs=1)
            assert same(run.model, unguarded)

    def test_arrays_of_several_inputs_and_weights(self, tmp_path):
        def two() -> keras.Model:
            keras.utils.clear_session()
            keras.utils.set_random_seed(0)
            inputs = [keras.Input((4,)), keras.Input((4,))]
            made = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Add()(inputs)))
            made.compile("adam", loss="mse")
            return made

        x, y = samples()
        data = ([x.astype("float64"), x], y.astype("float64"))
        weights = numpy.linspace(0, 1, SAMPLES)
        unguarded = two()
        arguments = {"sample_weight": weights, "batch_size": 4, "shuffle": False, "epochs": 1}
        unguarded.fit(*data, **arguments, verbose=0)
        run = Guarded(tmp_path, two())
        run.fit(data=data, **arguments)
        assert same(run.model, unguarded)

    def test_steps_of_an_epoch_that_are_fewer_than_the_data(self, tmp_path):
        def endless() -> tf.data.Dataset:
            return (
                tf.data.Dataset.from_tensor_slices(samples()).shuffle(SAMPLES, 3).repeat().batch(4)
            )

        unguarded = model()
        unguarded.fit(endless(), epochs=3, steps_per_epoch=5, verbose=0, shuffle=False)
        run = Guarded(tmp_path, save_every_steps=7, onset_margin_steps=1)
        run.fit(run.fault(12), data=(endless(),), steps_per_epoch=5)
        assert run.detector.resets == [0, 1]
        assert same(run.model, unguarded)

    def test_a_dataset_of_unknown_length(self, tmp_path):
        def unknown() -> Any:
            return dataset().filter(lambda x, y: True)

        unguarded, run = model(), Guarded(tmp_path)
        # Keras' own words at the end of each such epoch, guarded or not.
        with pytest.warns(UserWarning, match="ran out of data"):
            unguarded.fit(unknown(), epochs=3, verbose=0, shuffle=False)
        with pytest.warns(UserWarning, match="ran out of data"):
            run.fit(run.fault(12), data=(unknown(),))
        assert run.detector.resets == [0, 1]
        assert same(run.model, unguarded)

    def test_validation_follows_each_epoch_once(self, tmp_path):
        run = Guarded(tmp_path)
        history = run.fit(run.fault(9), validation_data=samples())
        assert len(history.history["val_loss"]) == len(history.history["loss"]) == 3

    def test_accumulated_gradients_come_back(self, tmp_path):
        def accumulating() -> keras.Model:
            made = model()
            made.compile(keras.optimizers.SGD(1e-2, gradient_accumulation_steps=3), loss="mse")
            return made

        unguarded = accumulating()
        unguarded.fit(dataset(), epochs=2, verbose=0, shuffle=False)
        run = Guarded(tmp_path, accumulating())
        run.fit(run.fault(9), epochs=2)
        assert same(run.model, unguarded)

    def test_a_model_without_variables_is_built_from_the_data(self, tmp_path):
        unbuilt = keras.Sequential([keras.layers.Dense(2), keras.layers.Dense(1)])
        unbuilt.compile("adam", loss="mse")
        run = Guarded(tmp_path, unbuilt)
        run.fit(epochs=1)
        assert run.control.status().state == "finished"

    def test_an_exporter_has_its_state_back(self, tmp_path):
        run = Guarded(tmp_path)
        run.fit(run.fault(9))
        [loaded] = run.detector.loaded
        assert numpy.array_equal(loaded["window"], [1.0, numpy.nan], equal_nan=True)
        assert loaded["count"] == 6
        assert loaded[3] == ("a", None)


class TestResume:
    def test_it_goes_on_after_a_kill(self, tmp_path, reference):
        killed = child(tmp_path, "fit", signal.SIGKILL, 17)
        assert killed == -signal.SIGKILL
        run = Guarded(tmp_path)
        run.fit()
        assert run.detector.steps[0] == 15
        assert same(run.model, reference)

    def test_told_to_end_it_saves_and_goes_on_from_there(self, tmp_path, reference):
        assert child(tmp_path, "fit", signal.SIGTERM, 12) == RESTART
        assert "step-00000012-g0" in names(tmp_path)
        run = Guarded(tmp_path)
        run.fit()
        assert run.detector.steps[0] == 12
        assert same(run.model, reference)

    def test_a_recovery_by_restart_is_taken_up(self, tmp_path, reference):
        run = Guarded(tmp_path, recover_by="restart")
        with pytest.raises(SystemExit) as ended:
            run.fit(run.fault(9))
        assert ended.value.code == RESTART
        again = Guarded(tmp_path, recover_by="restart")
        again.fit()
        assert again.detector.resets == [1]
        assert same(again.model, reference)

    def test_a_finished_run_takes_no_step(self, tmp_path, reference):
        Guarded(tmp_path).fit()
        run = Guarded(tmp_path)
        run.fit()
        assert run.detector.steps == [3 * EPOCH]
        assert same(run.model, reference)

    def test_more_epochs_go_on_from_the_last(self, tmp_path, reference):
        Guarded(tmp_path).fit(epochs=2)
        run = Guarded(tmp_path)
        run.fit(epochs=3)
        assert run.detector.steps == list(range(2 * EPOCH, 3 * EPOCH + 1))
        assert same(run.model, reference)

    def test_a_model_with_other_shapes_is_refused(self, tmp_path):
        Guarded(tmp_path).fit(epochs=1)
        other = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        other.compile("adam", loss="mse")
        with pytest.raises(CheckpointError, match="does not fit this run"):
            Guarded(tmp_path, other).fit(epochs=2)

    def test_an_optimizer_with_other_variables_of_the_same_shapes_is_refused(self, tmp_path):
        Guarded(tmp_path).fit(epochs=1)
        other = model()
        other.compile(keras.optimizers.Adadelta(), loss="mse", metrics=["mae"])
        with pytest.raises(CheckpointError, match=r"accumulated_grad it has optimizer/.*momentum"):
            Guarded(tmp_path, other).fit(epochs=2)

    def test_an_optimizer_of_the_same_family_goes_on(self, tmp_path):
        Guarded(tmp_path).fit(epochs=1)
        other = model()
        other.compile(keras.optimizers.AdamW(), loss="mse", metrics=["mae"])
        run = Guarded(tmp_path, other)
        run.fit(epochs=2)
        assert run.detector.steps[0] == EPOCH

    def test_data_of_another_length_are_refused(self, tmp_path):
        x, y = samples()
        run = Guarded(tmp_path)
        with pytest.raises(KeyboardInterrupt):
            run.fit(run.at(7, interrupt), data=(x, y), batch_size=BATCH)
        longer = numpy.tile(x, (2, 1)), numpy.tile(y, (2, 1))
        with pytest.raises(CheckpointError, match="dataset of 7 batches, and there are 13 now"):
            Guarded(tmp_path).fit(data=longer, batch_size=BATCH)

    def test_a_checkpoint_that_was_altered_is_passed_over(self, tmp_path):
        Guarded(tmp_path).fit(epochs=1)
        newest = names(tmp_path)[-1]
        data = tmp_path / "checkpoints" / newest / "keras.data-00000-of-00001"
        data.write_bytes(data.read_bytes()[:-1] + b"?")
        run = Guarded(tmp_path)
        run.fit(epochs=2)
        assert health(tmp_path, newest) == "corrupt"
        assert run.detector.steps[0] == 5

    def test_one_of_another_framework_is_refused(self, tmp_path):
        Guarded(tmp_path).fit(epochs=1)
        for folder in (tmp_path / "checkpoints").iterdir():
            manifest = folder / "manifest.json"
            if not manifest.exists():
                continue
            # As another guard's: of other files, and whole.
            content = manifest.read_text()
            (folder / "keras-guard.npz").rename(folder / "rank-00000.pt")
            manifest.write_text(content.replace("keras-guard.npz", "rank-00000.pt"))
        with pytest.raises(CheckpointError, match="was not saved by Keras"):
            Guarded(tmp_path).fit(epochs=2)


class TestRequests:
    def test_a_backup_is_made_and_answered(self, tmp_path):
        run = Guarded(tmp_path)
        asked: list[str] = []
        run.fit(run.at(9, lambda: asked.append(run.ask("checkpoint"))), epochs=2)
        answer = run.answer(asked[0])
        assert (answer["result"], answer["checkpoint"]) == ("done", "step-00000009-g0-backup")
        assert "step-00000009-g0-backup" in names(tmp_path)

    def test_without_a_bad_step_it_is_refused(self, tmp_path, reference):
        run = Guarded(tmp_path)
        asked: list[str] = []
        run.fit(run.at(9, lambda: asked.append(run.ask("recover"))))
        assert run.answer(asked[0])["result"] == "refused"
        assert same(run.model, reference)

    def test_the_budget_is_spent_and_the_run_halts(self, tmp_path):
        run = Guarded(tmp_path, max_rollbacks=1)
        with pytest.raises(RecoveryHaltedError, match="budget is spent"):
            run.fit(run.fault(12, generations=2))
        assert run.control.status().state == "halted"
        assert read_json(tmp_path / "guard.json")["rollbacks_used"] == 1

    def test_the_guards_metrics_are_the_exporters(self, tmp_path):
        run = Guarded(tmp_path)
        seen: dict[str, Any] = {}

        def look() -> None:
            for name in ("act_rollbacks_total", "act_checkpoint_last_step"):
                labels = {"run": "toy", "rank": "0"}
                seen[name] = run.detector.registry.get_sample_value(name, labels)

        run.fit(run.fault(9), run.at(18, look))
        assert seen == {"act_rollbacks_total": 1, "act_checkpoint_last_step": 15}


class TestCheckpoints:
    def test_pending_is_confirmed_and_what_is_old_is_deleted(self, tmp_path):
        run = Guarded(tmp_path, keep=2)
        run.fit(epochs=4)
        healths = {name: health(tmp_path, name) for name in names(tmp_path)}
        assert healths == {
            "step-00000015-g0": "confirmed",
            "step-00000020-g0": "pending",
            "step-00000025-g0": "pending",
            "step-00000028-g0": "pending",
        }

    def test_tensorflow_alone_reads_it(self, tmp_path):
        run = Guarded(tmp_path)
        run.fit(epochs=1)
        folder = tmp_path / "checkpoints" / names(tmp_path)[-1]
        reader = tf.train.load_checkpoint(str(folder / "keras"))
        for variable in run.model.variables:
            assert numpy.array_equal(reader.get_tensor(f"model/{variable.path}"), variable)

    # Keras' own, when it writes or reads a file with this NumPy.
    @pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
    def test_whole_models_can_be_saved_meanwhile(self, tmp_path):
        run = Guarded(tmp_path / "run", remedies={1: [LowerLearningRate(0.5, 2)]})
        kept = tmp_path / "model.keras"
        run.fit(keras.callbacks.ModelCheckpoint(kept), epochs=1)
        weights = keras.models.load_model(kept).get_weights(), run.model.get_weights()
        assert all(numpy.array_equal(*pair) for pair in zip(*weights, strict=True))

    def test_the_manifest_says_where_in_the_data(self, tmp_path):
        run = Guarded(tmp_path)
        run.fit(epochs=2)
        manifest = read_json(tmp_path / "checkpoints" / "step-00000010-g0" / "manifest.json")
        assert manifest["data"] == {"epoch": 1, "batch": 3, "taken": 10}
        assert {"keras", "numpy"} <= manifest["versions"].keys()


class TestSnapshot:
    @pytest.mark.parametrize("compiled", [{}, {"jit_compile": True}, {"run_eagerly": True}])
    @pytest.mark.parametrize("optimizer", ["sgd", "adam", "adagrad"])
    def test_training_changes_nothing_in_it(self, compiled, optimizer):
        """Also where the gradients are those of a few rows, which are changed in place."""
        own = keras.Sequential(
            [keras.Input((3,), dtype="int32"), keras.layers.Embedding(9, 4), keras.layers.Dense(1)]
        )
        own.compile(optimizer, loss="mse", **compiled)
        data = numpy.array([[1, 2, 3]] * 8), numpy.ones((8, 3, 1))
        own.fit(*data, verbose=0)
        snapshot = snapshot_of(own)
        saved = {name: numpy.array(tensor) for name, tensor in snapshot.tensors.items()}
        own.fit(*data, epochs=2, verbose=0)
        for variable in own.trainable_variables:
            assert not numpy.array_equal(saved[f"model/{variable.path}"], variable)
        for name, tensor in snapshot.tensors.items():
            assert numpy.array_equal(tensor, saved[name])

    def test_it_takes_no_second_copy_of_the_state_to_write_it(self, tmp_path):
        """Measured in a process of its own, as the largest memory is told."""
        told = subprocess.run(
            [sys.executable, "-c", SAVE_A_LARGE_MODEL, str(tmp_path)],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            timeout=SECONDS,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        grown, size = map(int, told.split()[-2:])
        assert grown < 0.5 * size


class TestRemedies:
    def test_batches_are_skipped(self, tmp_path, reference):
        run = Guarded(tmp_path, remedies={1: [SkipBatches(4)]})
        run.fit(run.fault(9))
        # From step 5 on behind batch 9 of 21.
        assert run.detector.steps[-1] == 3 * EPOCH - 4
        newest = read_json(tmp_path / "checkpoints" / names(tmp_path)[-1] / "manifest.json")
        assert newest["data"]["taken"] == 3 * EPOCH
        assert not same(run.model, reference)

    def test_after_a_kill_they_are_not_skipped_again(self, tmp_path):
        whole = Guarded(tmp_path / "whole", remedies={1: [SkipBatches(4)]})
        whole.fit(whole.fault(9))
        run = Guarded(tmp_path / "cut", remedies={1: [SkipBatches(4)]})

        def stop() -> None:
            if run.detector.resets[-1]:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run.fit(run.fault(9), run.at(12, stop))
        again = Guarded(tmp_path / "cut", remedies={1: [SkipBatches(4)]})
        again.fit()
        assert same(again.model, whole.model)

    def test_the_learning_rate_is_lowered_for_so_many_steps(self, tmp_path):
        rate = keras.optimizers.SGD(0.5)
        slow = keras.Sequential(
            [keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
        )
        slow.compile(rate, loss=lambda y, p: tf.reduce_mean(p))
        run = Guarded(tmp_path, slow, remedies={1: [LowerLearningRate(0.5, 2)]}, save_every_steps=1)
        weights: dict[int, float] = {}
        watch = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: weights.update(
                {run.detector.steps[-1] + 1: float(slow.layers[0].kernel.numpy().item())}
            )
        )
        ones = numpy.ones((8, 1), "float32")
        asked = run.at(5, lambda: (run.detector.see_bad(), run.ask("recover")))
        run.detector.see_bad = once(run.detector.see_bad)
        run.ask = once(run.ask)
        run.fit(asked, watch, data=(ones, ones), batch_size=1, epochs=1)
        # Back from step 5 to 2, which has -1; two steps of a quarter, then of a half.
        assert [weights[step] for step in range(3, 9)] == [-1.25, -1.5, -2, -2.5, -3, -3.5]
        assert float(rate.learning_rate) == 0.5

    def test_gradients_are_clipped_without_the_loss_scale(self, tmp_path):
        scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0))
        weight = keras.Sequential(
            [keras.Input((2,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
        )
        weight.compile(scaled, loss=lambda y, p: tf.reduce_mean(p))
        run = Guarded(tmp_path, weight, remedies={1: [ClipGradients(0.5, 1)]}, save_every_steps=1)
        run.detector.see_bad = once(run.detector.see_bad)
        run.ask = once(run.ask)
        data = numpy.array([[3.0, 4.0]] * 5, "float32")
        asked = run.at(5, lambda: (run.detector.see_bad(), run.ask("recover")))
        run.fit(asked, data=(data, data[:, :1]), batch_size=1, epochs=1)
        # Five steps of which the one after step 2 is clipped to a tenth.
        assert weight.layers[0].kernel.numpy()[:, 0] == pytest.approx([-12.3, -16.4], rel=1e-5)

    def test_a_callback_is_switched_on_and_off(self, tmp_path):
        told: list[bool] = []
        run = Guarded(tmp_path, remedies={1: [Callback(told.append, 3)]})
        run.fit(run.fault(9))
        assert told == [True, False]


class TestSteps:
    def test_a_rollback_is_bitwise_as_if_nothing_had_happened(self, tmp_path, steps_of_reference):
        loop = Loop(tmp_path)
        loop.run(before=lambda own, step: own.fail() if at_first(own, step, 12) else None)
        assert loop.detector.resets == [0, 1]
        assert len(loop.records) == 20 + 12 - 5
        assert last_of(loop.records) == steps_of_reference

    def test_it_goes_on_after_a_kill(self, tmp_path, steps_of_reference):
        assert child(tmp_path, "steps", signal.SIGKILL, 17) == -signal.SIGKILL
        loop = Loop(tmp_path)
        assert loop.run() == steps_of_reference[15:]

    def test_a_finished_run_yields_nothing(self, tmp_path):
        Loop(tmp_path).run(6)
        assert Loop(tmp_path).run(6) == []

    def test_batches_are_skipped(self, tmp_path, steps_of_reference):
        loop = Loop(tmp_path, remedies={1: [SkipBatches(3)]})
        loop.run(before=lambda own, step: own.fail() if at_first(own, step, 12) else None)
        batches = {record[0]: record[1] for record in loop.records}
        expected = {record[0]: record[1] for record in steps_of_reference}
        assert [batches[step] for step in (11, 12)] == [expected[step] for step in (14, 15)]

    def test_without_a_dataset_the_step_is_all_there_is(self, tmp_path):
        guard = KerasGuard(tmp_path, model=model(), **GUARDED)
        assert list(guard.steps(3)) == [(1, None), (2, None), (3, None)]


class TestRefused:
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ({"validation_split": 0.5}, "validation_split"),
            ({"initial_epoch": 1}, "initial_epoch"),
            ({"epochs": 0}, "epochs is 0"),
            ({"callbacks": [keras.callbacks.BackupAndRestore("here")]}, "BackupAndRestore"),
        ],
    )
    def test_arguments_of_fit(self, tmp_path, arguments, words):
        guard = KerasGuard(tmp_path, model=model(), **GUARDED)
        with pytest.raises(ConfigError, match=words):
            guard.fit(dataset(), **{"verbose": 0, **arguments})

    def test_several_steps_at_once(self, tmp_path):
        guard = KerasGuard(tmp_path, model=model(steps_per_execution=2), **GUARDED)
        with pytest.raises(ConfigError, match="steps_per_execution"):
            guard.fit(dataset())

    @pytest.mark.parametrize(
        ("data", "words"),
        [
            (lambda: iter([samples()]), "cannot be saved"),
            (lambda: dataset().map(lambda x, y: (x + tf.random.normal([]), y)), "cannot be saved"),
            (lambda: dataset().take(0), "empty"),
            (lambda: dataset().repeat(), "right behind shuffle"),
            (lambda: Reordered(), "on_epoch_end"),
        ],
    )
    def test_data_that_nothing_leads_back_to(self, tmp_path, data, words):
        guard = KerasGuard(tmp_path, model=model(), **GUARDED)
        with pytest.raises(ConfigError, match=words):
            guard.fit(data(), verbose=0)

    @pytest.mark.parametrize("argument", ["y", "sample_weight"])
    @pytest.mark.parametrize("data", [dataset, Pairs])
    def test_what_would_be_ignored_beside_a_dataset(self, tmp_path, data, argument):
        guard = KerasGuard(tmp_path, model=model(), **GUARDED)
        with pytest.raises(ConfigError, match="gives them itself"):
            guard.fit(data(), **{argument: numpy.ones(SAMPLES)}, verbose=0)

    @pytest.mark.parametrize("kept", [lambda own: own.scale, lambda own: own.generator.state])
    def test_what_training_changes_and_nobody_saves(self, tmp_path, kept):
        own = Wayward()
        own.compile("adam", loss="mse")
        state = {"one": kept(own)}
        with pytest.raises(ConfigError, match=r"Wayward\.\w+ is not among .* pass it as state"):
            KerasGuard(tmp_path, model=own, state=state).fit(dataset(), verbose=0)
        state = {"scale": own.scale, "generator": own.generator.state}
        run = Guarded(tmp_path, own, state=state)
        run.fit(epochs=1)
        assert run.control.status().state == "finished"

    def test_a_second_optimizer(self, tmp_path):
        own = model()
        second = keras.optimizers.Adam()
        guard = KerasGuard(tmp_path, model=own, state={"second": second})
        with pytest.raises(ConfigError, match=r"state\['second'\] is not built"):
            guard.steps(3)
        second.build(own.trainable_variables)
        assert len(list(guard.steps(3))) == 3

    def test_several_replicas(self, tmp_path):
        devices = tf.config.list_logical_devices("CPU")
        with tf.distribute.MirroredStrategy([device.name for device in devices]).scope():
            mirrored = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            mirrored.compile("adam", loss="mse")
            with pytest.raises(ConfigError, match="not supported"):
                KerasGuard(tmp_path, model=mirrored)

    def test_a_loop_with_another_kind_of_data(self, tmp_path):
        guard = KerasGuard(tmp_path, model=model(), **GUARDED)
        with pytest.raises(ConfigError, match=r"tf\.data\.Dataset"):
            guard.steps(3, [1, 2, 3])

    def test_a_model_without_an_optimizer(self, tmp_path):
        with pytest.raises(ConfigError, match="no optimizer"):
            KerasGuard(tmp_path, model=keras.Sequential([keras.layers.Dense(1)]))


SAVE_A_LARGE_MODEL = """
import pathlib, resource, sys
import keras
from alerting.recovery.ranks import Alone
from tests.keras.test_guard import snapshot_of

def largest():  # bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

own = keras.Sequential([keras.Input((4000,)), keras.layers.Dense(8000, "relu")])
own.compile("adam", loss="mse")
own.optimizer.build(own.trainable_variables)
size = sum(v.numpy().nbytes for v in own.optimizer.variables)
before = largest()
snapshot_of(own).write(pathlib.Path(sys.argv[1]), Alone())
print(largest() - before, size)
"""


def snapshot_of(trained: keras.Model) -> Any:
    """What a guard copies at a step boundary."""
    state = KerasState(
        model=trained,
        optimizer=trained.optimizer,
        extra={},
        position=KerasPosition(None),
        detector=FakeDetector(),
    )
    return state.capture(1, Path())


class Wayward(keras.Model):
    """Keeps what is no variable of Keras."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.scale = tf.Variable(1.0)
        self.generator = tf.random.Generator.from_seed(1)

    def call(self, x: Any) -> Any:
        return self.dense(x) * self.scale


class Reordered(Pairs):
    def on_epoch_end(self) -> None:
        """Changes the data."""


def interrupt() -> None:
    raise KeyboardInterrupt


def at_first(loop: Loop, step: int, fault: int) -> bool:
    return step == fault and loop.detector.resets[-1] == 0


def once(act: Any) -> Any:
    """`act`, at its first call alone."""
    called: list[Any] = []

    def acted(*arguments: Any) -> Any:
        if not called:
            called.append(True)
            return act(*arguments)
        return None

    return acted


def child(folder: Path, loop: str, number: signal.Signals, step: int) -> int:
    """The exit code of a training in a process of its own, with a signal before a step."""
    command = [sys.executable, "-m", "tests.keras.guarded"]
    return subprocess.run(
        [*command, str(folder), loop, str(int(number)), str(step)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        timeout=SECONDS,
        check=False,
        stderr=subprocess.DEVNULL,
    ).returncode
