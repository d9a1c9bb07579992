"""What the exporter costs in Keras' `model.fit`, on the CPU: a step with it over a step without.

    python -m tests.benchmarks.keras_fit           (in the environment of `make test-keras`)
    python -m tests.benchmarks.keras_fit --quick   (the small model only)

A small and a medium transformer on the standard library's text, each in a plain graph and in a
compiled one (`jit_compile`): without the exporter, and with it at each step and at each tenth, with
gradient norms and without. In each round all of them fit ten steps, in turns in one process, and
the medians of the rounds' quotients are taken; ratios mean something on any machine, milliseconds
only on the one that the file names. Writes build/bench/keras_fit.json, for each of them:

    step        mean step over that without the exporter, sampled or not
    sampled     median step that was looked at, over the median one without the exporter
    unsampled   median step that was not; null where each is but one in fifty
    first_step  seconds of the first one, in which the graph is made; without the exporter it takes
                plain_first_step_s
"""

from __future__ import annotations

import json
import os
import statistics
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf

from act_exporter import Exporter
from act_exporter.integrations.keras import start_exporter
from act_exporter.integrations.keras.layers import find_taps
from tests.benchmarks.report import parser_of, setting, write
from tests.benchmarks.turns import timed
from tests.keras.trainee import batches, gpt

MODELS = (
    {"blocks": 2, "width": 64, "context": 64, "batch": 8},
    {"blocks": 2, "width": 256, "context": 128, "batch": 4},
)
STEPS = 10
"""Of one fit: one of them is looked at where each tenth is."""

WATCHED = {
    f"each {every}. step, {'with' if gradients else 'without'} gradients": (every, gradients)
    for every in (1, 10)
    for gradients in (True, False)
}


@dataclass
class Round:
    """Seconds of the steps of one fit."""

    sampled: list[float] = field(default_factory=list)
    unsampled: list[float] = field(default_factory=list)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.sampled + self.unsampled)


class Clock(keras.callbacks.Callback):
    """Times the steps, from the beginning of one to that of the next; a fit is a round."""

    def __init__(self, exporter: Exporter | None) -> None:
        super().__init__()
        self.rounds: list[Round] = []
        self._exporter = exporter
        self._began: float | None = None
        self._sampled = False

    def on_train_begin(self, logs: Any = None) -> None:
        self.rounds.append(Round())
        self._began = None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        now = time.perf_counter()
        if self._began is not None:
            taken = self.rounds[-1].sampled if self._sampled else self.rounds[-1].unsampled
            taken.append(now - self._began)
        self._sampled = self._exporter is not None and self._exporter._instrumentation.sampling
        self._began = now


@dataclass
class Fit:
    """One model that is trained in turns with others."""

    model: keras.Model
    exporter: Exporter | None
    clock: Clock
    first: float

    def rounds(self) -> list[Round]:
        return self.clock.rounds[1:]  # the first one warms up


def fit_of(
    shape: dict[str, int], compiled: bool, watched: tuple[int, bool] | None, data: tf.data.Dataset
) -> Fit:
    """A model that has made its first step."""
    sizes = {name: shape[name] for name in ("blocks", "width", "context")}
    model = gpt(**sizes, jit_compile=compiled)
    exporter = None
    if watched is not None:
        every, gradients = watched
        exporter = start_exporter(
            model, 0, run="bench", sample_every=every, gradients=gradients, max_overhead=None
        )
    started = time.perf_counter()
    model.fit(data.take(1), verbose=0, shuffle=False)
    return Fit(model, exporter, Clock(exporter), time.perf_counter() - started)


def measure(shape: dict[str, int], compiled: bool, rounds: int) -> dict[str, Any]:
    """The ratios of one model in one mode."""
    # One more, since a step ends where the next one begins.
    data = batches(STEPS + 1, batch=shape["batch"], context=shape["context"]).cache()
    plain = fit_of(shape, compiled, None, data)
    fits = {name: fit_of(shape, compiled, watched, data) for name, watched in WATCHED.items()}
    runs = {
        name: partial(one.model.fit, data, verbose=0, shuffle=False, callbacks=[one.clock])
        for name, one in {"plain": plain, **fits}.items()
    }
    timed(runs, rounds)
    result = {
        **shape,
        "mode": "compiled" if compiled else "graph",
        "taps": len(find_taps(plain.model)),
        "rounds": rounds,
        "plain_step_ms": round(statistics.median(own.mean for own in plain.rounds()) * 1e3, 2),
        "plain_first_step_s": round(plain.first, 1),
        "watched": {name: ratios(one, plain) for name, one in fits.items()},
    }
    for one in fits.values():
        one.exporter.close()
    return result


def ratios(one: Fit, plain: Fit) -> dict[str, float | None]:
    """Medians of the rounds' quotients."""
    pairs = list(zip(one.rounds(), plain.rounds(), strict=True))

    def against(kind: str) -> float | None:
        quotients = [
            statistics.median(getattr(own, kind)) / statistics.median(other.unsampled)
            for own, other in pairs
            if getattr(own, kind)
        ]
        # Where each step is looked at, a few rounds have one that is not.
        return round(statistics.median(quotients), 3) if len(quotients) == len(pairs) else None

    return {
        "step": round(statistics.median(own.mean / other.mean for own, other in pairs), 3),
        "sampled": against("sampled"),
        "unsampled": against("unsampled"),
        "first_step_s": round(one.first, 1),
    }


def main() -> None:
    """Measure and write the file."""
    parser = parser_of(__doc__, "keras_fit.json", "few rounds, the small model only")
    arguments = parser.parse_args()
    models, rounds = (MODELS[:1], 3) if arguments.quick else (MODELS, 8)
    started = time.monotonic()
    fits = []
    for shape in models:
        for compiled in (False, True):
            fits.append(measure(shape, compiled, rounds))
            print(json.dumps(fits[-1], indent=1))
    result = {
        **setting(
            ("keras", "tensorflow-cpu"),
            load_average=os.getloadavg()[0],
            seconds=round(time.monotonic() - started),
        ),
        "fits": fits,
    }
    write(result, arguments.out)


if __name__ == "__main__":
    main()
