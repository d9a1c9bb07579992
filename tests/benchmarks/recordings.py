"""Recordings: runs of small models with the exporter, a page a scrape, on a simulated clock.

A step takes no time but what the clock is moved by (`pace`, seconds a step), for the exporter's
monotonic clock and for `time.time` alike; so peaks are held, pages are scraped and rules with
`time()` see what they would in a run that takes hours. At a pace of 1 s a scrape of 15 s meets one
step in 15; at 15 s it meets each, as with a large model.

Faults begin where a healthy run has settled. That prefix is trained once a kind of training; then
the process is forked for each fault, so that model, optimizer, exporter and random numbers are all
as they were.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import re
import time
import traceback
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import nn

from act_exporter.history import Thresholds
from act_exporter.layers import find_taps
from act_exporter.torch_exporter import TorchExporter
from tests.benchmarks import trainees
from tests.benchmarks.faults import Fault
from tests.benchmarks.trainees import Schedule, Training

SCRAPE_SECONDS = 15
START = 8888 * 194_400
"""Unix seconds at which every recording begins: a multiple of Prometheus' block sizes."""

PREFIX_PAGES = 60
"""Scrapes kept of a healthy prefix: 15 minutes, more than twice what any rule looks back."""

FAR = 0.3
"""Nats of loss that count as far above: perplexity times 1.35, what these models learn between
their 150th and their 600th step."""

Build = Callable[[], nn.Module]

PREFIXES: dict[str, tuple[Build, int]] = {
    "plain": (trainees.plain, 600),
    "split": (trainees.split, 600),
    "linear": (trainees.linear, 600),
    "mixture": (trainees.mixture, 600),
    "capped": (trainees.capped, 600),
    "young": (trainees.plain, 100),
    "unbounded": (trainees.unbounded, 0),
}
"""What faults befall: how the model is built, and healthy steps before the fault. With 600 the
500-step window is full and baselines are 400 steps old."""

HEALTHY: dict[str, tuple[Build, Callable[[int], Schedule], int]] = {
    "seed 1": (trainees.plain, lambda _: trainees.constant(), 1),
    "seed 2": (trainees.plain, lambda _: trainees.constant(), 2),
    "warm-up": (trainees.zeroed, lambda _: trainees.constant(1000), 3),
    "cosine": (trainees.plain, trainees.cosine, 4),
    "dropout": (trainees.dropout, lambda _: trainees.constant(), 5),
    "massive": (trainees.massive, lambda _: trainees.constant(), 6),
    "split": (trainees.split, lambda _: trainees.constant(), 7),
}
"""Healthy runs: model, schedule for a number of steps, seed."""


_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(slots=True)
class Recording:
    """One run.

    Attributes:
        name: the `run` label that it is replayed under.
        label: the one on its pages.
        pace: seconds a step.
        fault: what was done to it, or None.
        healthy_steps: steps before the fault; all of them where there is none.
        taps: (layer, tensor) of the columns of `absmax`.
        pages: (Unix seconds, compressed page) for each scrape.
        losses: of each step.
        control: the same without the fault, from the first faulty step on.
        sampled: whether the exporter looked at the step.
        absmax: one row a step; NaN or Inf where the tensor had any, as `x.abs().max()` is.
        baseline: (taps,) as of the last healthy step, NaN where not settled.
    """

    name: str
    label: str
    pace: float
    fault: Fault | None
    healthy_steps: int
    taps: list[tuple[str, str]]
    pages: list[tuple[float, bytes]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    control: list[float] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    absmax: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    baseline: np.ndarray = field(default_factory=lambda: np.zeros(0))

    @property
    def steps(self) -> int:
        return len(self.losses)

    @property
    def end(self) -> float:
        return self.pages[-1][0]

    def step_at(self, when: float) -> int:
        """Steps finished at a time in Unix seconds."""
        return min(int((when - START) / self.pace), self.steps)

    def destroyed(self) -> bool:
        """Whether its loss ends not finite or `FAR` above that of the same run without the fault.

        The median of the last 20 steps. Both runs see the same batches, so that what is easy or
        hard in those cancels out.
        """
        excess = self.excess()[-20:]
        return not np.isfinite(excess).all() or float(np.median(excess)) > FAR

    def harmed(self) -> bool:
        """Whether it was that high in 5 steps in a row (their median) at any time."""
        excess = self.excess()
        medians = [np.median(excess[start : start + 5]) for start in range(len(excess) - 4)]
        return not np.isfinite(excess).all() or bool(np.max(medians) > FAR)

    def excess(self) -> np.ndarray:
        """Loss over that without the fault, for each step since its beginning."""
        losses = np.array(self.losses[self.healthy_steps :])
        return losses - np.array(self.control[: len(losses)])

    def first_bad_step(self, hard: float) -> int | None:
        """The first step from the fault on with a tap not finite or above `hard` baselines."""
        values = self.absmax[self.healthy_steps :]
        with np.errstate(invalid="ignore"):
            bad = ~np.isfinite(values) | (values > hard * self.baseline)
        steps = np.flatnonzero(bad.any(axis=1))
        return self.healthy_steps + int(steps[0]) + 1 if steps.size else None

    def save(self, folder: Path) -> None:
        path = folder / f"{zlib.crc32(self.name.encode()):08x}.pickle.gz"
        part = path.with_suffix(".part")
        with gzip.open(part, "wb", compresslevel=1) as stream:
            pickle.dump(self, stream)
        part.rename(path)


def load(path: Path) -> Recording:
    """A recording that this benchmark has saved."""
    with gzip.open(path) as stream:
        recording: Recording = pickle.load(stream)
    return recording


class _Recorder:
    """Trains and records; can be forked between two steps."""

    def __init__(self, training: Training, label: str, pace: float) -> None:
        self._now = float(START)
        self._training = training
        self._exporter = TorchExporter(
            training.model,
            run=label,
            rank=0,
            watch="sublayers",
            sample_every=1,
            thresholds=Thresholds(),
            clock=self._wall,
        )
        taps = [(tap.layer, tap.tensor) for tap in find_taps(training.model)]
        self.recording = Recording(label, label, pace, None, 0, taps)
        self.recording.baseline = np.full(len(taps), np.nan)
        self._rows: list[np.ndarray] = []
        self._counts: dict[str, np.ndarray] = {}
        self._places: dict[str, int] = {}

    def run(self, steps: int) -> None:
        """Train for so many steps, and scrape whenever it is time."""
        recording = self.recording
        with mock.patch.object(time, "time", self._wall):
            for _ in range(steps):
                loss = self._training.step(self._before_update)
                recording.losses.append(loss)
                page = self._exporter._render("")[0]
                self._keep(page.decode())
                if (self._now - START) % SCRAPE_SECONDS == 0:
                    recording.pages.append((self._now, zlib.compress(page, 1)))

    def finished(self) -> Recording:
        self.recording.absmax = np.array(self._rows, dtype=np.float32)
        return self.recording

    def settle(self) -> None:
        """The healthy part ends here."""
        self.recording.healthy_steps = self.recording.steps
        if self._rows:
            page = self._exporter._render("")[0].decode()
            self.recording.baseline = self._of(page, "act_layer_absmax_baseline", np.nan)

    def _wall(self) -> float:
        return self._now

    def _before_update(self, loss: torch.Tensor) -> None:
        # The step's end is the optimizer's, which comes next: it must find the clock moved.
        self._now += self.recording.pace
        self._exporter.record(loss=loss)

    def _keep(self, page: str) -> None:
        """Take from the page what the comparison needs of each step."""
        row = self._of(page, "act_layer_absmax", np.nan)
        counts = {
            kind: self._of(page, "act_layer_nonfinite_total", 0, f'kind="{kind}"')
            for kind in ("nan", "posinf", "neginf")
        }
        new = {kind: count - self._counts.get(kind, 0) for kind, count in counts.items()}
        row[new["posinf"] + new["neginf"] > 0] = np.inf
        row[new["nan"] > 0] = np.nan
        calls = self._of(page, "act_layer_calls_total", 0)
        self.recording.sampled.append(bool((calls > self._counts.get("calls", 0)).any()))
        self._counts = {**counts, "calls": calls}
        self._rows.append(row)

    def _of(self, page: str, family: str, missing: float, label: str = "") -> np.ndarray:
        """(taps,): the family's values; `missing` where a tap has none."""
        values = np.full(len(self.recording.taps), missing, dtype=float)
        begin = page.find(f"\n{family}{{")
        if begin < 0:
            return values
        # A family's samples stand together.
        end = page.find("\n#", begin)
        for line in page[begin + 1 : end if end > 0 else None].splitlines():
            if label in line:
                series, _, value = line.rpartition(" ")
                if series not in self._places:
                    labels = dict(_LABEL.findall(series))
                    tap = labels["layer"], labels["tensor"]
                    self._places[series] = self.recording.taps.index(tap)
                values[self._places[series]] = float(value)
        return values


def record_healthy(kind: str, pace: float, steps: int, folder: Path) -> None:
    """Record one of `HEALTHY`."""
    _one_thread()
    build, schedule, seed = HEALTHY[kind]
    torch.manual_seed(seed)
    recorder = _Recorder(
        Training(build(), schedule(steps), seed), f"healthy {kind} @{pace:g}s", pace
    )
    recorder.run(steps)
    recorder.settle()
    recorder.finished().save(folder)


def record_faults(trainee: str, pace: float, faults: list[Fault], folder: Path) -> None:
    """Record faults of one kind of training, each in a fork of the same healthy prefix.

    Raises:
        RuntimeError: one could not be recorded; says which and why.
    """
    _one_thread()
    build, steps = PREFIXES[trainee]
    torch.manual_seed(0)
    training = Training(build(), trainees.constant(), seed=0)
    recorder = _Recorder(training, f"{trainee} @{pace:g}s", pace)
    recorder.run(steps)
    recorder.settle()
    path = folder / f"{zlib.crc32(f'{trainee} {pace} {faults[0].name}'.encode()):08x}.control"
    longest = max(fault.steps for fault in faults)
    _in_fork(lambda: _record_control(training, longest, path), "the run without a fault")
    recorder.recording.control = json.loads(path.read_text())
    path.unlink()
    for fault in faults:
        _in_fork(lambda fault=fault: _record_fault(recorder, training, fault, folder), fault.name)


def _record_control(training: Training, steps: int, path: Path) -> None:
    losses = []
    for _ in range(steps):
        losses.append(training.step(lambda _: None))
    path.write_text(json.dumps(losses))


def _record_fault(recorder: _Recorder, training: Training, fault: Fault, folder: Path) -> None:
    training.fault_after = training.done
    fault.inflict(training, fault.place, fault.size)
    recording = recorder.recording
    recording.name, recording.fault = f"{fault.name} @{recording.pace:g}s", fault
    del recording.pages[:-PREFIX_PAGES]
    recorder.run(fault.steps)
    recorder.finished().save(folder)


def _in_fork(run: Callable[[], None], what: str) -> None:
    """Run it in a child that leaves nothing behind in this process."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            run()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)  # no exit handlers: they are the parent's
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError(f"{what} could not be recorded; its traceback stands above")


def _one_thread() -> None:
    # Two processes on two cores; and a forked child has no thread but its own.
    torch.set_num_threads(1)
