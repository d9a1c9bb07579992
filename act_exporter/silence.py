"""Watched modules whose hooks never run, which must not look like health."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from act_exporter.rows import Array
from act_exporter.taps import Tap

# Nothing ran at all. One step may be a phase without the model; five are not.
_ALL_STEPS = 5

# Some did not run while others did: as many steps as a baseline is learnt from, in which a mixture
# sends something to each of its experts and every layer that is dropped at random has its turn.
_SOME_STEPS = 100

# Names in one message.
_NAMED = 5


class Silence:
    """Counts sampled steps in which watched modules did not run.

    Args:
        taps: the taps, in the order of the counts.
    """

    def __init__(self, taps: Sequence[Tap]) -> None:
        self._layers = [tap.layer for tap in taps]
        self._quiet = np.zeros(len(taps), dtype=np.int64)  # sampled steps in a row, by tap
        self._all = 0  # the same of all taps together

    def observe(self, calls: Array) -> str | None:
        """Take in how often each tap ran (taps,) in a sampled step; what is newly wrong, if any."""
        if not calls.any():
            self._all += 1
            return self._nothing_ran() if self._all == _ALL_STEPS else None
        self._all = 0
        self._quiet = np.where(calls > 0, 0, self._quiet + 1)
        silent = np.flatnonzero(self._quiet == _SOME_STEPS)
        return self._some_did_not(silent.tolist()) if silent.size else None

    def _nothing_ran(self) -> str:
        return (
            f"no watched layer ran in training mode in {_ALL_STEPS} steps. Start the exporter on"
            " the model that is called, before its first compiled call; in a loop of your own call"
            " a Keras model with training=True."
        )

    def _some_did_not(self, silent: list[int]) -> str:
        layers = list(dict.fromkeys(self._layers[tap] for tap in silent))
        more = f" and {len(layers) - _NAMED} more" if len(layers) > _NAMED else ""
        return (
            f"{', '.join(layers[:_NAMED])}{more} did not run in {_SOME_STEPS} sampled steps in"
            " which others did, and cannot be judged. Replaced, compiled before the exporter"
            " started, or never used?"
        )
