"""The rows of all ranks made one, so that one page and one judgement serve a run of any size.

Each sampled step ends with two collectives of a few kilobytes, on the host, over a gloo group of
their own: sums of what is counted, maxima of what is largest. Nobody waits for them: they are
looked at when the next step ends. All ranks get the same numbers and so judge alike.

Collectives must be entered by all ranks in the same order. One a sampled step is, as long as all
ranks sample the same steps; which step each of them meant is among the maxima, and where ranks turn
out to be at different steps, or do not answer, joining ends for good and is counted as an error.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import hashlib
import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from act_exporter.exceptions import SettingError
from act_exporter.rows import SUMS, Array, Column
from act_exporter.sample import Sample
from act_exporter.taps import Tap

# Samples that may wait for the other ranks. Ranks train in step, give or take a step or two; one
# that is so many behind is not there any more, and a sample takes a few kilobytes.
_WAITING = 64

# Longer than any phase in which one rank alone works (an evaluation, a save): who is late then has
# not failed.
_TIMEOUT = timedelta(days=1)

# At the end the last collectives are let through, so that no thread of gloo is left inside one.
_CLOSE_SECONDS = 5.0
_POLL_SECONDS = 0.01

# A tap's key is the bits of its absmax as a float32, which are in the order of such numbers, and
# below them the rank, the first one largest: 53 bits, which float64 holds exactly.
_RANKS = 2**21
_NO_KEY = -1.0


@dataclass(slots=True)
class _Joining:
    """One sample, and what all ranks make of it once the collectives are through.

    Attributes:
        sample: this rank's; None where nobody wants it any more.
        sums: (taps * sums + 2 * values,).
        maxima: (5 * taps + 2,).
        works: the collectives; none where the sample stays this rank's own.
    """

    sample: Sample | None
    sums: torch.Tensor
    maxima: torch.Tensor
    works: list[Any]

    def done(self) -> bool:
        return all(work.is_completed() for work in self.works)


class Ranks:
    """All ranks of the default process group; made by all of them, as a collective.

    Args:
        taps: what this rank watches, which must be what the others watch.
        values: names of all that a sample's `values` may have; the mean of the ranks counts.
        on_error: told when joining ends for good.

    Attributes:
        rank: this one's number.

    Raises:
        SettingError: there is no process group, or the ranks watch different tensors.
    """

    def __init__(
        self,
        taps: Sequence[Tap],
        values: Sequence[str],
        on_error: Callable[[str, Exception], None],
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise SettingError(
                'reduce="global": call torch.distributed.init_process_group before start_exporter'
            )
        self.rank = dist.get_rank()
        self._values = values
        self._on_error = on_error
        self._group: Any = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        self._joining: deque[_Joining] = deque()
        self._alone = False
        self._compare(taps)
        atexit.register(self.close)

    def _compare(self, taps: Sequence[Tap]) -> None:
        named = json.dumps([(tap.layer, tap.tensor) for tap in taps])
        digests: list[Any] = [None] * dist.get_world_size()
        digest = hashlib.sha256(named.encode()).hexdigest()
        dist.all_gather_object(digests, digest, group=self._group)
        for rank, other in enumerate(digests):
            if other != digests[0]:  # found by all ranks alike
                raise SettingError(
                    f'reduce="global": ranks 0 and {rank} watch different tensors (as the stages'
                    ' of a pipeline do); reduce="rank" gives each rank a page of its own'
                )

    def join(self, samples: Sequence[Sample]) -> list[Sample]:
        """Hand in what this rank has; what all ranks have made of it by now, oldest first.

        Never waits. A joined sample has the step, time, depth and dtypes of this rank's own.
        """
        for sample in samples:
            self._send(sample)
        joined = []
        while self._joining and self._joining[0].done():
            joining = self._joining.popleft()
            if joining.sample is not None:
                joined.append(self._receive(joining, joining.sample))
        return joined

    def forget(self) -> None:
        """Drop what is under way: it belongs to steps that were rolled back."""
        for joining in self._joining:
            joining.sample = None  # the collective goes on, since the others wait for it

    def close(self) -> None:
        """Let the last collectives through, for some seconds at most."""
        atexit.unregister(self.close)
        deadline = time.monotonic() + _CLOSE_SECONDS
        with contextlib.suppress(Exception):  # a group that is gone has nothing under way
            while not all(joining.done() for joining in self._joining):
                if time.monotonic() > deadline:
                    break
                time.sleep(_POLL_SECONDS)
        self._joining.clear()

    def _send(self, sample: Sample) -> None:
        sums = torch.from_numpy(_sums(sample, self._values))
        maxima = torch.from_numpy(_maxima(sample, self.rank))
        joining = _Joining(None if sample.lost else sample, sums, maxima, [])
        self._joining.append(joining)
        if self._alone:
            return
        if len(self._joining) > _WAITING:
            self._end(RuntimeError(f"the other ranks are {_WAITING} samples behind"))
            return
        try:
            for tensor, operation in ((sums, dist.ReduceOp.SUM), (maxima, dist.ReduceOp.MAX)):
                work = dist.all_reduce(tensor, operation, group=self._group, async_op=True)
                joining.works.append(work)
        except Exception as error:
            self._end(error)

    def _receive(self, joining: _Joining, sample: Sample) -> Sample:
        if not joining.works:
            return sample
        try:
            for work in joining.works:
                work.wait()  # is over: at once, but raises where a rank is gone
            numbers = joining.sums.numpy(), joining.maxima.numpy()
            return _joined(sample, *numbers, self._values)
        except Exception as error:
            self._end(error)
            return sample

    def _end(self, error: Exception) -> None:
        """From now on samples are this rank's own: orders that differ can't be mended."""
        self._alone = True
        for joining in self._joining:
            joining.works = []
        self._on_error("ranks", error)


def _sums(sample: Sample, names: Sequence[str]) -> Array:
    """What is added up over the ranks: (taps * sums + 2 * values,)."""
    values = [sample.values.get(name) for name in names]
    known = [value is not None for value in values]
    numbers = [0.0 if value is None else value for value in values]
    return np.concatenate([sample.rows[:, SUMS].ravel(), numbers, known])


def _maxima(sample: Sample, rank: int) -> Array:
    """What is compared over the ranks: (5 * taps + 2,)."""
    rows = sample.rows
    largest = np.abs(np.maximum(rows[:, Column.MAX], -rows[:, Column.MIN]))
    # One that is not finite is more than any number.
    infinite = sample.nonfinite.any(axis=0)
    with np.errstate(over="ignore"):
        bits = np.where(infinite, np.inf, largest).astype(np.float32).view(np.uint32)
    key = bits.astype(np.float64) * _RANKS + (_RANKS - 1 - rank)
    return np.concatenate(
        [
            -rows[:, Column.MIN],
            rows[:, Column.MAX],
            rows[:, Column.ROW_NORM],
            # NaN is in no order; logits with one have no partition function.
            np.nan_to_num(rows[:, Column.LOG_PARTITION], nan=np.inf, neginf=-np.inf),
            np.where(infinite | (rows[:, Column.COUNT] > 0), key, _NO_KEY),
            [-sample.step, sample.step],
        ]
    )


def _joined(sample: Sample, sums: Array, maxima: Array, names: Sequence[str]) -> Sample:
    """`sample` with the numbers of all ranks, those of its values by these names.

    Raises:
        RuntimeError: they were at different steps.
    """
    first, last = -maxima[-2], maxima[-1]
    if first != last:
        raise RuntimeError(f"ranks are at different steps, {first:.0f} to {last:.0f}")
    taps = len(sample.rows)
    rows = np.empty_like(sample.rows)
    numbers, known = sums[-2 * len(names) :].reshape(2, -1)
    rows[:, SUMS] = sums[: -2 * len(names)].reshape(taps, -1)
    low, high, norm, partition, key = maxima[:-2].reshape(5, taps)
    rows[:, Column.MIN], rows[:, Column.MAX] = -low, high
    rows[:, Column.ROW_NORM], rows[:, Column.LOG_PARTITION] = norm, partition
    values = {
        name: number / count
        for name, number, count in zip(names, numbers.tolist(), known.tolist(), strict=True)
        if count
    }
    return dataclasses.replace(
        sample,
        rows=rows,
        values=values,
        holder=np.where(key >= 0, _RANKS - 1 - key % _RANKS, np.nan),
    )
