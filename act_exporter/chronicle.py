"""What the journal is told of a run in training, and when: each thing once, at its own step.

Everything here runs in the training thread and only hands over; without a journal it does nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from act_exporter.history import Layers
from act_exporter.journal import Journal
from act_exporter.rows import Array
from act_exporter.sample import Sample
from act_exporter.taps import Tap


class Chronicle:
    """Tells a journal of one process.

    Args:
        journal: where to; None for nowhere.
        taps: the taps, in the order of all arrays.
    """

    def __init__(self, journal: Journal | None, taps: Sequence[Tap]) -> None:
        self._journal = journal
        self._taps = [{"layer": tap.layer, "tensor": tap.tensor, "kind": tap.kind} for tap in taps]
        # As last told of.
        self._depth = np.full(len(taps), np.nan)
        self._baseline = np.full(len(taps), np.nan)

    def sample(self, sample: Sample, layers: Layers, generation: int) -> None:
        """A sampled step was judged: its records, and what it has changed of the taps."""
        if self._journal is None:
            return
        self._journal.write(
            sample.step,
            sample.time,
            generation,
            layers.statistics,
            sample.nonfinite,
            sample.called,
            sample.holder,
        )
        at = (sample.step, sample.time, generation)
        self._journal.note_each("depth", *at, self._changed("depth", self._depth, layers.depth))
        self._journal.note_each(
            "baseline", *at, self._changed("absmax", self._baseline, layers.baseline)
        )
        self._depth, self._baseline = layers.depth.copy(), layers.baseline.copy()

    def numbers(
        self, by_step: Mapping[int, Mapping[str, float]], time: float, generation: int
    ) -> None:
        """The run's numbers that have arrived, by the step that they are of.

        Args:
            by_step: the numbers by name; a step may come again with others.
            time: Unix seconds.
            generation: 0, and one more with each rollback.
        """
        if self._journal is not None:
            for step, values in by_step.items():
                self._journal.note("training", step, time, generation, **values)

    def note(self, kind: str, /, step: int, time: float, generation: int, **fields: Any) -> None:
        """Something that happened once; see `act_exporter.records`."""
        if self._journal is not None:
            self._journal.note(kind, step, time, generation, **fields)

    def _changed(self, name: str, before: Array, now: Array) -> list[dict[str, Any]]:
        same = (before == now) | (np.isnan(before) & np.isnan(now))
        return [{**self._taps[tap], name: float(now[tap])} for tap in np.flatnonzero(~same)]
