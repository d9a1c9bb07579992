"""Whatever breaks inside is counted, and training goes on as it would without us."""

import keras
import numpy as np
import pytest

from act_exporter.integrations.keras import calls, matrix
from act_exporter.integrations.keras.calls import Calls
from act_exporter.integrations.keras.fault import LayerFault
from act_exporter.integrations.keras.gradients import Gradients
from act_exporter.integrations.keras.instrumentation import KerasInstrumentation
from act_exporter.integrations.keras.matrix import Numbers, Rows
from act_exporter.integrations.keras.optimizers import Optimizers
from act_exporter.integrations.keras.training import TrainSteps
from tests.keras.models import mlp, numbers
from tests.keras.watched import Watched

# Every function that runs in training, and the stage at which its error is counted.
INSIDE = [
    (Calls, "_is_training", "hook"),
    (Calls, "end_step", "step"),
    (calls, "_recomputing", "hook"),
    (calls, "keep", "hook"),
    (Rows, "add", "hook"),
    (Rows, "_function", "hook"),
    (matrix, "row_of", "hook"),
    (Numbers, "set", "record"),
    (Numbers, "set", "gradient"),
    (Numbers, "values", "step"),
    (Gradients, "see", "gradient"),
    (Gradients, "norms", "step"),
    (Optimizers, "iterations", "step"),
    (Optimizers, "find", "step"),
    (Optimizers, "_see", "gradient"),
    (TrainSteps, "_end", "step"),
    (KerasInstrumentation, "take", "step"),
    (KerasInstrumentation, "_sample", "step"),
    (KerasInstrumentation, "end_step", "step"),
]


def train(model):
    history = model.fit(*numbers(), batch_size=8, verbose=0, shuffle=False)
    return history.history["loss"], [own.numpy() for own in model.variables]


@pytest.mark.parametrize(("owner", "name", "stage"), INSIDE)
def test_a_broken_function_is_counted_and_nothing_else(owner, name, stage, monkeypatch):
    expected = _trained(None, monkeypatch)
    losses, weights, exporter = _trained((owner, name), monkeypatch)
    assert losses == expected[0]
    for one, other in zip(weights, expected[1], strict=True):
        np.testing.assert_array_equal(one, other)
    assert exporter.errors.get(stage, 0) > 0


def _trained(broken, monkeypatch):
    keras.utils.set_random_seed(3)
    model = mlp(run_eagerly=True)
    exporter = Watched(model) if broken else None
    if broken:

        def fail(*_args, **_kwargs):
            raise RuntimeError("broken")

        monkeypatch.setattr(*broken, fail)
    losses, weights = train(model)
    if exporter is not None:
        monkeypatch.undo()
        exporter.close()
    return losses, weights, exporter


def test_a_broken_fault_leaves_the_output_alone(monkeypatch):
    model = mlp(run_eagerly=True)
    with Watched(model) as exporter:
        exporter.inject_fault("first", 10.0, 1)

        def fail(*_):
            raise RuntimeError("broken")

        monkeypatch.setattr(LayerFault, "multiplied", fail)
        train(model)
        assert exporter.errors["hook"] == 2


def test_a_step_that_fails_is_the_callers_to_see_and_leaves_nothing():
    model = mlp(run_eagerly=True)
    x, y = numbers()
    with Watched(model) as exporter:
        with pytest.raises(Exception, match="incompatible"):
            model.fit(x[:, :3], y, batch_size=8, verbose=0)
        model.fit(x, y, batch_size=16, verbose=0)
        assert exporter.row("first")[0] == 1
        assert [sample.step for sample in exporter.taken] == [1]
