"""The exporter of any trainer: it hands over arrays, or statistics that it has made of them itself.

    from act_exporter.integrations.arrays import start_exporter
    exporter = start_exporter(["embed", "blocks.0", "blocks.1", "head"], port=9460)

For JAX and others, where nothing can be hooked. Statistics, history, metrics, rules, journal and
pages are those of a torch model; updates are not known, and no fault can be injected.
"""

from __future__ import annotations

import functools
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsFloat

import numpy as np

from act_exporter.environment import started
from act_exporter.exceptions import NothingToWatchError, SettingError
from act_exporter.exporter import Exporter
from act_exporter.history import Thresholds
from act_exporter.instrumentation import Instrumentation
from act_exporter.rows import NONFINITE_KINDS, Array, Column, add_exactly, empty, merge
from act_exporter.sample import Sample
from act_exporter.taps import Side, Tap

# Elements that are widened to float64 at a time: 8 MB, which stay in a cache.
_PIECE = 1_048_576

# What numpy itself does not know: the largest finite bfloat16, 2**127 * (2 - 2**-7).
_LARGEST = {"bfloat16": 3.3895313892515355e38}

_NEEDED = ("count", "mean", "std", "min", "max")
_OPTIONAL = ("exceed_ratio", "nan", "posinf", "neginf")


class ArrayExporter(Exporter):
    """What `start_exporter` returns; `observe` and `step` are its trainer's to call."""

    def __init__(
        self, layers: Sequence[str | tuple[str, Side]], *, thresholds: Thresholds, **settings: Any
    ) -> None:
        taps = _taps(layers)

        self._observations = Observations(taps, thresholds.exceed)
        super().__init__(taps, lambda _: self._observations, thresholds=thresholds, **settings)

    @property
    def sampling(self) -> bool:
        """Whether the step under way is sampled; else nothing need be observed."""
        return self._observations.sampling

    def observe(self, layer: str, values: Any, tensor: Side = "output") -> None:
        """Hand over what a layer saw or made in the step under way; again for each micro-batch.

        Never raises: a name that was not given at the start is counted and logged.

        Args:
            layer: one of the names given to `start_exporter`.
            values: an array of any shape, on the host or such that `numpy.asarray` brings it
                there; of anything but floating-point numbers only the call is counted. Or a
                mapping of statistics over its finite elements: "count", "mean", "std" (of the
                population), "min" and "max", and if known "exceed_ratio" (0 to 1, the share above
                `Thresholds.exceed` in absolute value), "nan", "posinf" and "neginf" (elements).
                Where one of the five is not finite they are left out, and one element is taken for
                NaN if none of the last three says more.
            tensor: whether that is the layer's input or its output.
        """
        try:
            self._observations.observe(layer, values, tensor)
        except Exception as error:
            self._count_error("hook", error)

    def record(
        self,
        *,
        loss: SupportsFloat | None = None,
        grad_norm: SupportsFloat | None = None,
        loss_scale: SupportsFloat | None = None,
        learning_rate: SupportsFloat | None = None,
    ) -> None:
        """Expose the step's numbers; of steps that are not sampled none is read.

        Args:
            loss: a number, or an array of one element.
            grad_norm: likewise, before clipping.
            loss_scale: likewise; what the gradients are too large by.
            learning_rate: likewise; while it rises no baseline is learnt.
        """
        if learning_rate is not None:
            try:
                self._observations.rate = float(learning_rate)
            except Exception as error:
                self._count_error("record", error)
        super().record(loss=loss, grad_norm=grad_norm, loss_scale=loss_scale)


def start_exporter(
    layers: Sequence[str | tuple[str, Side]],
    port: int | None = None,
    *,
    host: str | None = None,
    run: str | None = None,
    rank: int | None = None,
    sample_every: int = 1,
    thresholds: Thresholds | None = None,
    max_overhead: float | None = 0.01,
    max_series: int | None = 20_000,
    journal: str | Path | None = None,
    baseline: str | Path | None = None,
    targets: str | Path | None = None,
    web_config: str | Path | None = None,
) -> ArrayExporter:
    """Serve the statistics of what the trainer will hand over on `http://host:port/metrics`.

    Args:
        layers: names of the layers that will be observed, in the order of the model; a pair of a
            name and "input" for a layer's input. Layers whose names differ in numbers alone are
            taken for the same place in several blocks.
        port: as of `act_exporter.start_exporter`, and so are all others.
        host: see there.
        run: see there.
        rank: see there.
        sample_every: see there.
        thresholds: see there.
        max_overhead: see there; what `observe` takes is seen, what the trainer does for it is not.
        max_series: see there.
        journal: see there.
        baseline: see there.
        targets: see there.
        web_config: see there.

    Returns:
        The running exporter; call its `observe` and `record` in a step and `step` at its end.

    Raises:
        NothingToWatchError: `layers` is empty.
        SettingError: an argument or variable cannot serve.
    """
    return started(
        functools.partial(
            ArrayExporter,
            layers,
            sample_every=sample_every,
            thresholds=thresholds or Thresholds(),
            max_overhead=max_overhead,
            max_series=max_series,
        ),
        port=port,
        host=host,
        run=run,
        rank=rank,
        journal=journal,
        baseline=baseline,
        targets=targets,
        web_config=web_config,
    )


class Observations(Instrumentation):
    """What a trainer has handed over since the last step.

    Args:
        taps: what it may hand over.
        exceed_threshold: for the share of elements with |x| above it.
    """

    def __init__(self, taps: Sequence[Tap], exceed_threshold: float) -> None:
        self.rate: float | None = None
        self._places = {(tap.layer, tap.tensor): place for place, tap in enumerate(taps)}
        self._threshold = exceed_threshold
        self._rows = empty(len(taps))
        self._depth = np.full(len(taps), np.nan)
        self._largest = np.full(len(taps), np.nan)
        self._values: dict[str, float] = {}
        self._samples: list[Sample] = []
        self._seconds = 0.0
        self._idle = True

    @property
    def learning_rate(self) -> float | None:
        """As it was recorded last."""
        return self.rate

    @property
    def seconds(self) -> float:
        """Spent in `observe`."""
        return self._seconds

    @property
    def idle(self) -> bool:
        """Whether nothing was observed since the last step."""
        return self._idle

    def observe(self, layer: str, values: Any, tensor: Side) -> None:
        """Add to the row of a tap.

        Raises:
            SettingError: there is no such tap, or the statistics cannot be.
        """
        if self.paused:
            return
        self._idle = False
        place = self._places.get((layer, tensor))
        if place is None:
            raise SettingError(f"the {tensor} of {layer!r} was not given to start_exporter")
        if not self.sampling:
            return
        started = time.perf_counter()
        row = self._rows[place]
        if isinstance(values, Mapping):
            self._rows[place] = merge([row[None], _row_of(values)])[0]
        else:
            array = np.asarray(values)
            row[Column.CALLS] += 1
            if _is_floating(array.dtype):
                self._largest[place] = _largest(array.dtype)
                flat = array.reshape(-1)
                for start in range(0, flat.size, _PIECE):
                    piece = flat[start : start + _PIECE].astype(np.float64)
                    add_exactly(piece, row, self._threshold)
        if math.isnan(self._depth[place]):
            self._depth[place] = np.count_nonzero(~np.isnan(self._depth))
        self._seconds += time.perf_counter() - started

    def record(self, values: Mapping[str, Any]) -> None:
        """Keep numbers for the sample of the step under way."""
        if self.sampling:
            self._values |= {name: float(value) for name, value in values.items()}

    def take(self, step: int, *, stepped: bool = True) -> None:
        """Hand out the rows and start empty ones."""
        depth, largest = self._depth.copy(), self._largest.copy()
        self._samples.append(Sample(step, time.time(), self._rows, self._values, depth, largest))
        self._start()

    def end_step(self) -> None:
        """A step has ended."""
        self._idle = True

    def samples(self) -> list[Sample]:
        """What was taken since the last call."""
        samples, self._samples = self._samples, []
        return samples

    def forget(self) -> None:
        """Drop what was not handed out."""
        self._samples = []
        self._start()

    def close(self) -> None:
        """There is nothing to take back."""

    def _start(self) -> None:
        self._rows = empty(len(self._rows))
        self._values = {}
        self._idle = True


def _taps(layers: Sequence[str | tuple[str, Side]]) -> list[Tap]:
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        raise SettingError(f"layers={layers!r} is no list of names")
    taps = [_tap(given) for given in layers]
    if not taps:
        raise NothingToWatchError("layers is empty: there is nothing to watch")
    if len({(tap.layer, tap.tensor) for tap in taps}) < len(taps):
        raise SettingError("layers has a name twice")
    return taps


def _tap(given: Any) -> Tap:
    match given:
        case str(layer):
            tensor: Side = "output"
        case (str(layer), "input" | "output" as tensor):
            pass
        case _:
            raise SettingError(f"{given!r} is neither a layer's name nor a name with its side")
    if not layer:
        raise SettingError("a layer's name is empty")
    # Of the same place in all blocks the names differ in the blocks' numbers.
    place = re.sub(r"[0-9]+", "*", layer)
    return Tap(layer=layer, tensor=tensor, kind=f"{place} {tensor}")


def _is_floating(dtype: np.dtype[Any]) -> bool:
    # JAX's and TensorFlow's 16-bit and 8-bit formats are no `np.floating`.
    return np.issubdtype(dtype, np.floating) or dtype.name.startswith(("bfloat", "float8"))


def _largest(dtype: np.dtype[Any]) -> float:
    if np.issubdtype(dtype, np.floating):
        return float(np.finfo(dtype).max)
    return _LARGEST.get(dtype.name, math.nan)


def _row_of(statistics: Mapping[str, Any]) -> Array:
    """The row (1, COLUMNS) of a tensor of which only its statistics are known."""
    given = {name: float(value) for name, value in statistics.items()}
    missing = [name for name in _NEEDED if name not in given]
    unknown = sorted(given.keys() - {*_NEEDED, *_OPTIONAL})
    if missing or unknown:
        raise SettingError(
            f"statistics need {', '.join(_NEEDED)} and may have {', '.join(_OPTIONAL)};"
            f" missing: {', '.join(missing) or 'none'}; unknown: {', '.join(unknown) or 'none'}"
        )
    row = empty(1)
    row[0, Column.CALLS] = 1
    for kind, column in NONFINITE_KINDS.items():
        row[0, column] = given.get(kind, 0.0)
    count = given["count"]
    if count > 0 and not all(math.isfinite(given[name]) for name in _NEEDED):
        # They were made of all elements, not of the finite ones: so one at least is not.
        if not row[0, list(NONFINITE_KINDS.values())].any():
            row[0, Column.NAN] = 1
    elif count > 0:
        row[0, Column.COUNT] = count
        row[0, Column.SUM] = given["mean"] * count
        row[0, Column.SUM_SQUARES] = (given["std"] ** 2 + given["mean"] ** 2) * count
        row[0, Column.EXCEEDED] = given.get("exceed_ratio", 0.0) * count
        row[0, Column.MIN] = given["min"]
        row[0, Column.MAX] = given["max"]
    return row
