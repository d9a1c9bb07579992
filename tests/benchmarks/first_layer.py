"""Which layer page, report and watch name first, against the one that a fault was injected into.

    python -m tests.benchmarks.first_layer            (some minutes on two cores)
    python -m tests.benchmarks.first_layer --only fp16

Plays the faults of the detection benchmark once more, each in a fork of the same healthy run, with
a journal. Three sampled steps after the first bad one, when a rollback would be asked for, the
exporter's own page at / and the headline of `act-exporter watch` are asked, and at the end
`act-exporter report`. Writes build/bench/first_layer.json:

    kinds     for each kind of fault: how many there were, in how many a layer went bad, and for
              page, report and watch how many of those named the right one first, and how many not
    wrong     each fault that was named wrongly, by whom, and what was named
    no_culprit  the same where the trainer's verdict is "parameters": all three say then that an
              update broke the weights everywhere and that the layer named first is no culprit
    nowhere   faults in which no layer went bad by any rule that stands for a bad step: nothing was
              named, by design
    no_layer  faults that are injected into no layer (a batch, the learning rate, backward): the
              verdict, and which layer was named, for reading; they count as neither

The right one is measured, not looked up: the watched tensor, first in the order of execution, whose
values differ in the first step that differs at all from the same run without the fault. That is the
first one at or behind the module that was broken. Where several modules are broken alike, the first
one behind any of them is right: which of them goes bad first, their sizes decide.
"""

from __future__ import annotations

import functools
import html
import logging
import multiprocessing
import pickle
import re
import shutil
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from act_exporter.history import Thresholds
from act_exporter.journal import Journal
from act_exporter.layers import find_taps
from act_exporter.report import words as report_words
from act_exporter.report.incident import find_incidents, look_closely, most_telling
from act_exporter.report.reading import read
from act_exporter.report.story import tell
from act_exporter.torch_exporter import TorchExporter
from act_exporter.watch.page import parse
from act_exporter.watch.source import Reading
from act_exporter.watch.words import headline
from deploy.demo.servers import REPOSITORY, end_with_parent
from tests.benchmarks import trainees
from tests.benchmarks.faults import (
    FAULTS,
    Fault,
    exp_feature_map,
    logits_blow_up,
    query_key_growth,
)
from tests.benchmarks.recordings import PREFIXES, START, _in_fork, _one_thread
from tests.benchmarks.report import parser_of, setting, write
from tests.benchmarks.trainees import Training

PACE = 15.0
"""Seconds a step: each is seen by a scrape, as with a large model."""

ASKED_AFTER = 3
"""Sampled steps from the first bad one on, both counted: the third asks for a rollback."""

ASKED = ("page", "report", "watch")

# What is broken there is no layer: a batch, the optimizer, a backward pass whose forward is right.
NO_LAYER = {
    "learning rate",
    "garbage batch",
    "backward only (A09)",
    "gradient spike (A14)",
    "bf16 weights (A11)",
    "stale second moment (A19)",
}

_PAGE = re.compile(r"<h2>(\S+) (input|output) went bad first, at step")
_REPORT = re.compile(r": the (input|output) of (\S+) went bad first, at step")
_WATCH = re.compile(r"First was (\S+) \((input|output)")

Tensor = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Told:
    """What became of one fault.

    Attributes:
        fault: which.
        right: layer and tensor that it changed first, and of several broken modules those behind
            each; none where it is injected into no layer.
        verdict: the trainer's.
        bad: whether a layer went bad.
        named: by page, report and watch; None for no layer.
    """

    fault: Fault
    right: frozenset[Tensor]
    verdict: str | None
    bad: bool
    named: dict[str, Tensor | None]


def has_layer(fault: Fault) -> bool:
    """Whether a layer is what it breaks."""
    if fault.kind == "optimizer state":
        return " " in fault.place  # the moments of one module
    # Before the baseline there are several; the one from the start has no run without it.
    return not ({fault.kind, _inflicted(fault)} & NO_LAYER) and fault.kind != "exp from the start"


def _inflicted(fault: Fault) -> str:
    return fault.inflict.__name__.replace("_", " ")


def behind(model: nn.Module, modules: list[str]) -> frozenset[Tensor]:
    """The first watched tensor at or behind each of the modules, in the order of execution."""
    order: list[Tensor] = []
    handles = []
    for name, module in model.named_modules():
        told = functools.partial(order.append, (name, "input"))
        handles.append(module.register_forward_pre_hook(lambda *_, told=told: told()))
        told = functools.partial(order.append, (name, "output"))
        handles.append(module.register_forward_hook(lambda *_, told=told: told()))
    with torch.no_grad():
        model(next(trainees.batches(0))[:, :-1])
    for handle in handles:
        handle.remove()
    watched = {(tap.layer, tap.tensor) for tap in find_taps(model)}
    found = set()
    for name in modules:
        after = order[order.index((name, "output")) :]
        found.add(next(tensor for tensor in after if tensor in watched))
    return frozenset(found)


def broken(fault: Fault, model: nn.Module) -> list[str]:
    """The modules that it breaks, where there are several."""
    blocks = [f"blocks.{index}.attn" for index in fault.place.split(",")]
    if fault.place == "all projections":
        return [
            name
            for name, part in model.named_modules()
            if name.startswith("blocks.") and isinstance(part, nn.Linear)
        ]
    if fault.inflict is exp_feature_map:
        return [f"{name}.qkv" for name in blocks]
    if fault.inflict in (logits_blow_up, query_key_growth):
        return [f"{name}.{part}" for name in blocks for part in ("q_proj", "k_proj")]
    return []


class _Run:
    """A training with exporter and journal; can be forked between two steps."""

    def __init__(self, training: Training, folder: Path) -> None:
        self._now = float(START)
        self._training = training
        self._taps = find_taps(training.model)
        self.exporter = TorchExporter(
            training.model,
            run="gpt",
            rank=0,
            watch="sublayers",
            sample_every=1,
            thresholds=Thresholds(),
            journal=folder,
            clock=self._wall,
        )

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.step()

    def step(self) -> np.ndarray:
        """(taps, numbers): what is looked at to see whether a tensor has changed."""
        with mock.patch.object(time, "time", self._wall):
            self._training.step(self._before_update)
        layers = self.exporter._training.layers
        assert layers is not None
        found = layers.statistics
        return np.stack([found.absmax, found.mean, found.l2norm, *layers.nonfinite])

    def leave(self) -> None:
        """All is on the disk, and nothing of it in a thread that a fork would lose."""
        assert self.exporter._journal is not None
        self.exporter._journal.close()

    def go_on(self, folder: Path) -> None:
        """Write into a copy of the journal from here on."""
        journal = Journal(
            folder, run="gpt", rank=0, taps=self._taps, on_error=self.exporter._count_error
        )
        self.exporter._journal = self.exporter._chronicle._journal = journal

    def first_of(self, changed: np.ndarray) -> Tensor:
        """Of the taps that are meant the first in the order of execution."""
        layers = self.exporter._training.layers
        assert layers is not None
        tap = self._taps[min(np.flatnonzero(changed), key=lambda own: layers.depth[own])]
        return tap.layer, tap.tensor

    def ask(self) -> dict[str, Tensor | None]:
        """Page and watch, now."""
        with mock.patch.object(time, "time", self._wall):
            page = self.exporter._show("").decode()
            metrics = self.exporter._render("")[0].decode()
        found = _PAGE.search(html.unescape(page))
        reading = Reading(address="here", page=parse(metrics, self._now), read_at=0.0)
        said = _WATCH.search(" ".join(headline([reading], []).sentences))
        return {
            "page": (found[1], found[2]) if found else None,
            "watch": (said[1], said[2]) if said else None,
        }

    def _wall(self) -> float:
        return self._now

    def _before_update(self, loss: torch.Tensor) -> None:
        self._now += PACE
        self.exporter.record(loss=loss)


def play(trainee: str, faults: list[Fault], folder: Path) -> list[Told]:
    """Play some faults of one kind of training; `folder` is left with their journals."""
    _one_thread()
    logging.disable(logging.WARNING)
    build, steps = PREFIXES[trainee]
    torch.manual_seed(0)
    training = Training(build(), trainees.constant(), seed=0)
    healthy = folder / "healthy"
    run = _Run(training, healthy)
    run.steps(steps)
    run.leave()
    control = folder / "control.npy"
    longest = max(fault.steps for fault in faults)
    _in_fork(
        lambda: np.save(control, np.stack([run.step() for _ in range(longest)])),
        "the run without a fault",
    )
    expected = np.load(control)
    told = []
    for number, fault in enumerate(faults):
        out = folder / f"{number}.pickle"
        own = folder / str(number)
        _in_fork(
            lambda fault=fault, own=own, out=out: out.write_bytes(
                pickle.dumps(_play(run, training, fault, expected, healthy, own))
            ),
            fault.name,
        )
        told.append(pickle.loads(out.read_bytes()))
        shutil.rmtree(own)
    return told


def _play(
    run: _Run, training: Training, fault: Fault, expected: np.ndarray, healthy: Path, own: Path
) -> Told:
    if healthy.exists():
        shutil.copytree(healthy, own)
    run.go_on(own)
    training.fault_after = training.done
    fault.inflict(training, fault.place, fault.size)
    right: Tensor | None = None
    bad = 0
    named: dict[str, Tensor | None] = dict.fromkeys(ASKED)
    verdict = None
    for number in range(fault.steps):
        row = run.step()
        differs = ~((row == expected[number]) | (np.isnan(row) & np.isnan(expected[number])))
        if right is None and differs.any():
            right = run.first_of(differs.any(axis=0))
        now = run.exporter._training
        verdict = verdict or now.verdict
        bad += bad > 0 or (now.layers is not None and now.layers.onset is not None)
        if bad == ASKED_AFTER:
            named |= run.ask()
    run.leave()
    named["report"] = _reported(own)
    return Told(fault, _right(fault, right), verdict, bad > 0, named)


def _right(fault: Fault, changed: Tensor | None) -> frozenset[Tensor]:
    if not has_layer(fault):
        return frozenset()
    model = PREFIXES[fault.trainee][0]()
    return behind(model, broken(fault, model)) | ({changed} if changed else set())


def _reported(journal: Path) -> Tensor | None:
    """What the title of the report names."""
    recording = read([journal])
    incidents = find_incidents(recording)
    if not incidents:
        return None
    chosen = incidents[most_telling(incidents) - 1]
    story = tell(*look_closely([journal], recording, chosen))
    found = _REPORT.search(report_words.title("gpt", story))
    return (found[2], found[1]) if found else None


def judged(told: list[Told]) -> dict[str, Any]:
    """The file's content."""
    kinds: dict[str, dict[str, Any]] = {}
    result: dict[str, Any] = {"kinds": kinds}
    lists: dict[str, list[Any]] = {
        name: result.setdefault(name, []) for name in ("wrong", "no_culprit", "nowhere", "no_layer")
    }
    for one in told:
        named = {who: _said(one.named[who]) for who in ASKED}
        listed = {"fault": one.fault.name, "verdict": one.verdict, **named}
        if not one.right:
            lists["no_layer"].append(listed)
            continue
        counts = {"right": 0, "wrong": 0}
        kind = kinds.setdefault(
            one.fault.kind,
            {"faults": 0, "went_bad": 0, **{who: counts.copy() for who in ASKED}},
        )
        kind["faults"] += 1
        kind["went_bad"] += one.bad
        if not one.bad and not any(named.values()):
            lists["nowhere"].append(one.fault.name)
            continue
        right = {who: one.named[who] in one.right for who in ASKED}
        if all(right.values()) or one.verdict != "parameters":
            for who in ASKED:
                kind[who]["right" if right[who] else "wrong"] += 1
        if not all(right.values()):
            listed["right"] = sorted(" ".join(tensor) for tensor in one.right)
            lists["no_culprit" if one.verdict == "parameters" else "wrong"].append(listed)
    return result


def _said(tensor: Tensor | None) -> str | None:
    return None if tensor is None else " ".join(tensor)


def main() -> None:
    """Play, compare, write the file."""
    parser = parser_of(__doc__, "first_layer.json", "one fault a kind")
    parser.add_argument("--only", metavar="KIND", help="only kinds with this in their name")
    parser.add_argument("--workers", type=int, default=2, help="processes (%(default)s)")
    arguments = parser.parse_args()
    started = time.monotonic()
    faults = [fault for fault in FAULTS if not arguments.only or arguments.only in fault.kind]
    if arguments.quick:
        faults = list({fault.kind: fault for fault in reversed(faults)}.values())
    if not faults:
        raise SystemExit(f"--only {arguments.only}: no such kind")
    folder = REPOSITORY / "build" / "bench" / "first_layer"
    shutil.rmtree(folder, ignore_errors=True)
    alike: dict[str, list[Fault]] = defaultdict(list)
    for fault in faults:
        alike[fault.trainee].append(fault)
    parts = [
        (trainee, own[start : start + 20], folder / f"{trainee}-{start}")
        for trainee, own in alike.items()
        for start in range(0, len(own), 20)
    ]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.workers, context, end_with_parent) as pool:
        futures = []
        for trainee, own, place in parts:
            place.mkdir(parents=True)
            futures.append(pool.submit(play, trainee, own, place))
        told = []
        for future in as_completed(futures):
            told += future.result()
            print(f"{len(told)} of {len(faults)} faults")
    order = {fault.name: place for place, fault in enumerate(FAULTS)}
    told.sort(key=lambda one: order[one.fault.name])
    result = {
        **setting(
            ("act-exporter", "torch"),
            threads=arguments.workers,
            seconds=round(time.monotonic() - started),
        ),
        **judged(told),
    }
    for kind, own in result["kinds"].items():
        print(f"{kind}: {own}")
    for one in [*result["wrong"], *result["no_culprit"]]:
        print(one)
    write(result, arguments.out)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
