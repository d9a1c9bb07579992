"""Simulated exporters: real pages, by the real server, of a training that does not take place.

    python -m tests.benchmarks.cluster --exporters 200 --runs 8 FOLDER

Each exporter is a rank with a port of its own on loopback, and writes the targets of all into
FOLDER/targets.json. What it shows is made up at each scrape and moves: a calm training, or, once
a SIGUSR1 has come, one in which each layer of each rank breaks each rule. Names, labels and the
text are those of `LayerPage` and `TrainingCollector`.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np
from prometheus_client import CollectorRegistry

from act_exporter.capacity.decoder import Decoder
from act_exporter.collector import LayerPage, Training, TrainingCollector, constants, render_page
from act_exporter.diagnosis import Verdict
from act_exporter.exporter import _STAGES
from act_exporter.history import RULES, Layers, Onset, Thresholds
from act_exporter.layers import find_taps
from act_exporter.rows import NONFINITE_KINDS, Array, Statistics
from act_exporter.sample import Update
from act_exporter.server import MetricsServer
from act_exporter.training import SIGNALS, Signal

BLOCKS = 8
"""Of each exporter's model: 67 tensors, and 2,200 series."""

WANDER = 0.05
"""Deviation of a healthy tensor's absmax from one sampled step to another, relatively."""

LOUDEST = 20.0
"""What one rank of each run is above the others in a storm, so that they differ as well."""


def single(values: Array) -> Array:
    """As the trainer has extremes: of float32, whose last bits are 0 in Prometheus' float64."""
    return values.astype(np.float32).astype(np.float64)


class Rank:
    """One exporter.

    Args:
        run: its run.
        rank: its rank.
        stormy: whether there is a storm.
    """

    def __init__(self, run: str, rank: int, stormy: Callable[[], bool]) -> None:
        self._taps = find_taps(Decoder(BLOCKS))
        self._rank, self._stormy = rank, stormy
        self._random = np.random.default_rng([rank, *run.encode()])
        # Of all ranks the same tensors are large.
        self._level = np.random.default_rng(0).lognormal(1.0, 1.0, len(self._taps))
        self._begun, self._stormed = time.time(), 0
        labels = {"run": run, "rank": str(rank)}
        self._page = LayerPage(self._taps, labels)
        self._registry = CollectorRegistry()
        self._now = Training()
        self._registry.register(
            TrainingCollector(
                labels,
                training=lambda: self._now,
                errors=dict.fromkeys(_STAGES, 0),
                facts=constants(Thresholds(), self._page.series),
                series_dropped=0,
                faults=dict,
                scrape_seconds=lambda: 0.004,
                journal=None,
                memory=dict,
            )
        )
        self._server = MetricsServer(
            "127.0.0.1", 0, metrics=self.render, page=str.encode, policy="", tick=lambda: None
        )
        self.target = f"127.0.0.1:{self._server.port}"

    def render(self, accept: str) -> tuple[bytes, str]:
        """The page of now."""
        self._now = self._training()
        return render_page(accept, self._registry, self._page, self._now.layers)

    def _training(self) -> Training:
        stormy = self._stormy()
        self._stormed += stormy
        steps = int(time.time() - self._begun) + 1
        layers = {tap.layer: tap.module for tap in self._taps}
        parts = [name for name, module in layers.items() if list(module.parameters())]
        share = self._random.random(len(parts)).tolist()
        verdict: Verdict | None = get_args(Verdict)[0] if stormy else None
        return Training(
            step=steps,
            steps=steps,
            finished_at=time.time(),
            values={
                "loss": 3.0 + self._random.normal(0, 0.1),
                "grad_norm": float(self._random.lognormal()),
                "learning_rate": 3e-4,
            },
            signals={name: self._signal(stormy) for name in SIGNALS},
            gradients=dict(zip(parts, self._random.lognormal(-3, 0.2, len(parts)), strict=True)),
            update=Update(
                step=steps,
                values={
                    "update_ratio": float(self._random.lognormal(-6, 0.1)),
                    "update_rms": float(self._random.lognormal(-1, 0.1)),
                    "update_unchanged_ratio": 0.9 if stormy else 0.0,
                },
                ratios=dict(zip(parts, self._random.lognormal(-6, 0.1, len(parts)), strict=True)),
                unchanged=dict(zip(parts, share, strict=True)),
            ),
            layers=self._layers(steps, stormy),
            verdict=verdict,
            probe_seconds=steps * 0.004,
            overhead=0.004,
        )

    def _signal(self, stormy: bool) -> Signal:
        return Signal(
            peak=3.0 + self._random.normal(0, 0.1),
            peak_zscore=50.0 if stormy else math.nan,
            peak_ratio=50.0 if stormy else math.nan,
            window_mean=3.0 + self._random.normal(0, 0.001),
            window_std=0.1 + self._random.normal(0, 0.001),
            nonfinite=self._stormed,
            level="high" if stormy else "calm",
            shifted=100.0 if stormy else 0.0,
        )

    def _layers(self, steps: int, stormy: bool) -> Layers:
        count = len(self._taps)
        factor = (1000.0 * (LOUDEST if self._rank == 0 else 1.0)) if stormy else 1.0

        def moving(of: float, deviation: float = WANDER) -> Array:
            wandering: Array = self._level * of * self._random.lognormal(0, deviation, count)
            return wandering

        absmax = single(moving(factor))
        peak = single(np.maximum(absmax, moving(factor)))
        head = self._taps[-1].layer
        attentions = {tap.heads.attention for tap in self._taps if tap.heads is not None}
        bound = 1000.0 if stormy else 10.0
        bad = np.ones(count) * self._stormed
        return Layers(
            statistics=Statistics(
                absmax=absmax,
                min=single(-moving(0.9 * factor)),
                max=absmax,
                mean=self._level * self._random.normal(0, 0.01, count) * factor,
                std=moving(0.2 * factor, 0.01),
                l2norm=moving(200.0 * factor, 0.01),
                rms=moving(0.2 * factor, 0.01),
                exceed_ratio=np.full(count, 0.1) if stormy else np.zeros(count),
            ),
            peak=peak,
            baseline=single(self._level),
            window_mean=moving(1.0, 0.0005),
            window_std=moving(WANDER, 0.001),
            nonfinite=np.outer(np.ones(len(NONFINITE_KINDS)), bad),
            exceeded_steps=np.outer(np.ones(len(RULES)), 15 * bad),
            consecutive=np.outer(np.ones(len(RULES)), 100 * bad),
            calls=np.full(count, float(steps)),
            growth=np.full(count, 0.02) if stormy else self._random.normal(0, 0.0008, count),
            depth=np.arange(count, dtype=np.float64),
            largest=peak / 0.9 if stormy else np.full(count, 3.3895e38),
            holder=np.full(count, np.nan),
            jump_ratio=lambda: self._jump(stormy),
            plateau=lambda: (0.0, float(count - 1)) if stormy else None,
            onset=Onset(steps, head, "output", "hard") if stormy else None,
            bad=count if stormy else 0,
            nonfinite_share=float(stormy),
            log_partitions={head: 200.0 if stormy else 2.0 + self._random.normal(0, 0.1)},
            logit_bounds={
                name: (float(bound * self._random.lognormal(0, WANDER)), 10.0)
                for name in attentions
            },
        )

    def _jump(self, stormy: bool) -> Array:
        """The first of its kind has none to be compared with."""
        jump = self._random.lognormal(math.log(20.0) if stormy else 0.0, WANDER, len(self._taps))
        first = {tap.kind: place for place, tap in reversed(list(enumerate(self._taps)))}
        jump[list(first.values())] = np.nan
        return jump


def main() -> None:
    """Serve until ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--exporters", type=int, default=200)
    parser.add_argument("--runs", type=int, default=8, help="that these are the ranks of")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    storm = threading.Event()
    ranks = [
        Rank(f"run-{number % arguments.runs}", number // arguments.runs, storm.is_set)
        for number in range(arguments.exporters)
    ]
    text = json.dumps([{"targets": [rank.target for rank in ranks]}])
    # Whole, or not there: somebody waits for it.
    (folder / "targets.part").write_text(text)
    (folder / "targets.part").rename(folder / "targets.json")
    signal.signal(signal.SIGUSR1, lambda *_: storm.set())
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
