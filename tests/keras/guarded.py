"""A small Keras training with everything that must come back bit for bit, and what asks for it.

python -m tests.keras.guarded FOLDER LOOP [SIGNAL STEP]    in a process of its own; see `main`
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy
import tensorflow as tf
from prometheus_client import CollectorRegistry

from alerting.control import Action, ControlDirectory, Request, new_request_id
from alerting.recovery.keras import KerasGuard

SAMPLES, BATCH = 26, 4
EPOCH = 7  # batches
GUARDED: dict[str, Any] = {
    "run": "toy",
    "save_every_steps": 5,
    "onset_margin_steps": 2,
    "confirm_after_steps": 10,
}


class FakeDetector:
    """Sees a bad step when the test says so; keeps a record of what the guard told it."""

    def __init__(self, run: str = "toy") -> None:
        self.run = run
        self.registry = CollectorRegistry()
        self.steps: list[int] = []
        self.resets: list[int] = []
        self.loaded: list[dict[str, Any]] = []
        self._bad = False
        self._onset: int | None = None

    def see_bad(self) -> None:
        self._bad = True

    def step(self, step: int) -> None:
        self.steps.append(step)
        if self._bad and self._onset is None:
            self._onset = step
        self._bad = False

    def onset(self) -> int | None:
        return self._onset

    def reset(self, generation: int) -> None:
        self.resets.append(generation)
        self._onset = None
        self._bad = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        yield

    def state_dict(self) -> dict[str, Any]:
        return {"window": numpy.array([1.0, numpy.nan]), "count": len(self.steps), 3: ("a", None)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded.append(state)


def samples() -> tuple[Any, Any]:
    generator = numpy.random.default_rng(7)
    x = generator.normal(size=(SAMPLES, 4)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


def dataset(**shuffle: Any) -> tf.data.Dataset:
    """Shuffled anew each epoch."""
    pairs = tf.data.Dataset.from_tensor_slices(samples())
    return pairs.shuffle(SAMPLES, **{"seed": 3, **shuffle}).batch(BATCH).prefetch(2)


class Pairs(keras.utils.PyDataset):
    """The same by the number of a batch."""

    def __len__(self) -> int:
        return EPOCH

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        x, y = samples()
        chosen = slice(index * BATCH, (index + 1) * BATCH)
        return x[chosen], y[chosen]


def model(policy: str = "float32", **compiled: Any) -> keras.Model:
    """With dropout, running means, a loss scale where the policy has one, and a metric."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Dense(8, activation="tanh", dtype=policy),
        keras.layers.BatchNormalization(dtype=policy),
        keras.layers.Dropout(0.2, dtype=policy),
        keras.layers.Dense(1, dtype=policy),
    ]
    made = keras.Sequential([keras.Input((4,)), *layers])
    optimizer: Any = keras.optimizers.Adam(1e-2)
    if policy == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, dynamic_growth_steps=3)
    made.compile(optimizer, loss="mse", metrics=["mae"], **compiled)
    return made


def state_of(trained: keras.Model) -> list[Any]:
    """All that training has changed."""
    variables = [*trained.variables, *trained.optimizer.variables]
    return [numpy.array(variable.numpy()) for variable in variables]


def same(one: keras.Model, other: keras.Model) -> bool:
    states = state_of(one), state_of(other)
    return len(states[0]) == len(states[1]) and all(
        a.tobytes() == b.tobytes() for a, b in zip(*states, strict=True)
    )


class Fault(keras.callbacks.Callback):
    """A weight a hundredfold at a step, once a generation, which the detector sees."""

    def __init__(
        self, step: int, detector: FakeDetector, folder: Path, *, generations: int = 1
    ) -> None:
        super().__init__()
        self._step, self._detector, self._folder = step, detector, folder
        self._generations = generations
        self.asked: list[str] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        generation = self._detector.resets[-1] if self._detector.resets else 0
        # A batch that is only gone through has no step: the detector stands behind it.
        if self._detector.steps[-1:] != [self._step - 1] or generation >= self._generations:
            return
        self.break_model()
        self._detector.see_bad()
        self.asked.append(open_request(self._folder, "recover", generation))

    def break_model(self) -> None:
        kernel = self.model.layers[0].kernel
        kernel.assign(kernel * 100)


class At(keras.callbacks.Callback):
    """Does something before a step is taken."""

    def __init__(self, step: int, detector: FakeDetector, act: Any) -> None:
        super().__init__()
        self._step, self._detector, self._act = step, detector, act

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._detector.steps[-1:] == [self._step - 1]:
            self._act()


class Patient(keras.callbacks.Callback):
    """Waits for each save's files: these steps are faster, and would outrun them."""

    def __init__(self, guard: KerasGuard) -> None:
        super().__init__()
        self._guard = guard

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        wait_for_files(self._guard)


def wait_for_files(guard: KerasGuard) -> None:
    deadline = time.monotonic() + 60
    while guard._run.saver.writing:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def open_request(
    folder: Path, action: Action, generation: int = 0, created_at: float | None = None
) -> str:
    """Ask the guard of the run folder, as the receiver does."""
    request = Request(
        id=new_request_id(),
        run="toy",
        generation=generation,
        action=action,
        alert="Test",
        created_at=time.time() if created_at is None else created_at,
    )
    assert ControlDirectory(folder / "control").claim(request)
    return request.id


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def names(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob("checkpoints/*/manifest.json"))


def health(folder: Path, name: str) -> str:
    return read_json(folder / "checkpoints" / name / "health.json")["health"]


Record = tuple[int, list[float], float, float, float]


class Loop:
    """A loop of one's own, in a tf.function."""

    def __init__(self, folder: Path, detector: FakeDetector | None = None, **settings: Any) -> None:
        self.folder = folder
        self.model = model()
        self.optimizer = self.model.optimizer
        self.detector = detector or FakeDetector()
        self.average = tf.Variable(0.0)
        self.guard = KerasGuard(
            folder,
            model=self.model,
            state={"average": self.average},
            exporter=self.detector,
            **{**GUARDED, **settings},
        )
        self.records: list[Record] = []

        @tf.function
        def train(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self.model(x, training=True) - y))
            weights = self.model.trainable_variables
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            self.average.assign(0.9 * self.average + 0.1 * loss)
            return loss

        self._train = train

    def run(self, total: int = 20, before: Any = lambda loop, step: None) -> list[Record]:
        for step, (x, y) in self.guard.steps(total, dataset()):
            before(self, step)
            loss = float(self._train(x, y))
            drawn = random.random(), float(numpy.random.normal())
            self.records.append((step, x.numpy()[:, 0].tolist(), loss, *drawn))
            wait_for_files(self.guard)
        return self.records

    def fail(self) -> None:
        """A weight a hundredfold, which the detector sees and the receiver asks for."""
        kernel = self.model.layers[0].kernel
        kernel.assign(kernel * 100)
        self.detector.see_bad()
        open_request(self.folder, "recover", self.detector.resets[-1])


def last_of(records: list[Record]) -> list[Record]:
    """Each step as it was at its last time."""
    return list({record[0]: record for record in records}.values())


def main(folder: Path, loop: str, number: str = "0", step: str = "0") -> None:
    """Train, with a signal to this process before a step; write what came of it at the end."""
    detector = FakeDetector()

    def strike() -> None:
        os.kill(os.getpid(), int(number))

    if loop == "steps":
        own = Loop(folder, detector)
        own.run(before=lambda _, at: strike() if at == int(step) else None)
        (folder / "records.json").write_text(json.dumps(own.records))
        return
    trained = model()
    guard = KerasGuard(folder, model=trained, exporter=detector, **GUARDED)
    guard.fit(
        dataset(),
        epochs=3,
        verbose=0,
        callbacks=[Patient(guard), At(int(step), detector, strike)],
    )
    numpy.savez(folder / "state.npz", *state_of(trained))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    main(Path(sys.argv[1]), *sys.argv[2:])
