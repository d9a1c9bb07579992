"""The newest anomaly that began in a layer, from what was noted and what the last steps were."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from act_exporter.history import Onset
from act_exporter.live.trail import Event, Steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Incident:
    """An anomaly, standing or over.

    Attributes:
        onset: when, where and by which rule it began.
        at: when that was noticed, Unix seconds.
        generation: of the run then.
        after: what has happened since, oldest first.
        first: the tensor's absmax in the first bad step; infinite where it was not finite, NaN
            where that is too long ago to be known.
        worst: the largest since then, until it was over.
    """

    onset: Onset
    at: float
    generation: int
    after: Sequence[Event]
    first: float = math.nan
    worst: float = math.nan

    @classmethod
    def newest(cls, events: Sequence[Event]) -> Incident | None:
        """The last one that was noted."""
        for place in range(len(events) - 1, -1, -1):
            event = events[place]
            if event.kind == "onset":
                fields = event.fields
                onset = Onset(event.step, fields["layer"], fields["tensor"], fields["rule"])
                after = events[place + 1 :]
                return cls(onset=onset, at=event.time, generation=event.generation, after=after)
        return None

    def measured(self, steps: Steps, absmax: npt.NDArray[np.float32]) -> Incident:
        """With the values that its tensor, `absmax` (steps,), had in its steps."""
        ours = (steps.generation == self.generation) & (steps.step >= self.onset.step)
        values = absmax[ours & ~np.isnan(absmax)]
        if not values.size:
            return self
        is_first = (steps.step[ours] == self.onset.step).any()
        return Incident(
            onset=self.onset,
            at=self.at,
            generation=self.generation,
            after=self.after,
            first=float(values[0]) if is_first else math.nan,
            worst=float(values.max()),
        )
