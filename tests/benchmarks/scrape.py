"""What a scrape costs the training process: rendering the page, and what a step feels of it.

    python -m tests.benchmarks.scrape        (four minutes)

Writes build/bench/scrape.json:

    pages     client_python_over_ours  the layer families of one snapshot through client_python,
                                       over our rendering of them, run in turns
              ours_ms                  of the interpreter's time, which the training thread lacks
              page_ms                  the whole page, with all other families
              bytes, gzip_bytes, gzip_ms
    stepping  largest_gap_ms           between two ends of a loop's 1 ms steps, the largest of all
                                       rounds, while a process of its own scrapes a page of 10,000
                                       series: not at all, once a second, 20 a second, or badly
              median_gap_ms            the median of each round's largest
              lost_share               of the loop's steps, against the round without a scraper
"""

from __future__ import annotations

import gzip
import multiprocessing
import socket
import statistics
import time
from typing import Any

import numpy as np
import requests
import torch
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from rich.progress import track
from torch import nn

from act_exporter.collector import FAMILIES
from act_exporter.exporter import Exporter
from act_exporter.history import Layers, Thresholds
from act_exporter.torch_exporter import TorchExporter
from tests.benchmarks.report import parser_of, setting, write
from tests.benchmarks.turns import over, timed

SERIES = (1_000, 10_000, 50_000)
STEPPING_SERIES = 10_000
STEP_SECONDS = 0.001
ROUND_SECONDS = 5.0
MANNERS = ("not at all", "once a second", "20 a second", "badly")
HANGING = 10
"""Clients that send half a request, and as many that ask and read nothing."""
WIDTH = 8
TRAINED_STEPS = 250
"""By then windows and baselines have values, and nearly each series has a sample."""


class Chain(nn.Module):
    """So many small layers, one after the other."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class Naive(Collector):
    """The same families as anybody would write them with client_python."""

    def __init__(self, exporter: Exporter) -> None:
        self._taps = exporter._page._taps
        self._labels = exporter._page._labels
        self.layers: Layers | None = None

    def collect(self) -> list[Metric]:
        found: list[Metric] = []
        for family in FAMILIES:
            more, named = family.label or ("", ("",))
            kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            labels = [*self._labels, "layer", "tensor", *([more] if more else [])]
            metric = kind(family.name, family.help, labels=labels)
            values = np.atleast_2d(family.value(self.layers)).tolist()
            for name, row in zip(named, values, strict=True):
                for tap, value in zip(self._taps, row, strict=True):
                    if value == value:
                        own = [*self._labels.values(), tap.layer, tap.tensor]
                        metric.add_metric([*own, *([name] if more else [])], value)
            found.append(metric)
        return found


def exporter_of(series: int) -> Exporter:
    """An exporter with about so many layer series, after some training."""
    each = sum(len(family.label[1]) if family.label else 1 for family in FAMILIES)
    model = Chain(max(series // each, 1))
    exporter = TorchExporter(
        model, run="scrape", rank=0, watch="all", sample_every=1, thresholds=Thresholds()
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(TRAINED_STEPS):
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return exporter


def page_of(series: int, rounds: int) -> dict[str, Any]:
    """One size of page: ours against client_python's."""
    exporter = exporter_of(series)
    naive, registry = Naive(exporter), CollectorRegistry()
    naive.layers = layers = exporter._training.layers
    assert layers is not None
    registry.register(naive)
    ours = exporter._page.render(layers, openmetrics=False)
    same_samples(ours, generate_latest(registry).decode())
    page, _ = exporter._render("")
    took = timed(
        {
            "ours": lambda: exporter._page.render(layers, openmetrics=False).encode(),
            "client_python": lambda: generate_latest(registry),
            "page": lambda: exporter._render(""),
            "gzip": lambda: gzip.compress(page, 1),
        },
        rounds,
    )
    exporter.close()
    return {
        "series": sum(not line.startswith("#") for line in ours.splitlines()),
        "client_python_over_ours": round(over(took, "client_python", "ours"), 1),
        **{f"{name}_ms": round(statistics.median(took[name]) * 1e3, 2) for name in took},
        "bytes": len(page),
        "gzip_bytes": len(gzip.compress(page, 1)),
    }


def same_samples(ours: str, theirs: str) -> None:
    """A comparison of pages that say different things would say nothing."""
    one, other = (
        sorted(
            (sample.name, sorted(sample.labels.items()), sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        )
        for text in (ours, theirs)
    )
    if one != other:
        raise SystemExit("the two pages differ")


def scrape(port: int, manner: Any, stop: Any) -> None:
    """In a process of its own: as `manner` (a shared number, a place in MANNERS) says."""
    url = f"http://127.0.0.1:{port}/metrics"
    hanging: list[socket.socket] = []
    while not stop.is_set():
        name = MANNERS[manner.value]
        if name != "badly":
            while hanging:
                hanging.pop().close()
        if name == "once a second" or name == "20 a second":
            requests.get(url, timeout=10).raise_for_status()
        elif name == "badly" and not hanging:
            for request in (b"GET /me", b"GET /metrics HTTP/1.0\r\n\r\n"):
                for _ in range(HANGING):
                    hanging.append(socket.create_connection(("127.0.0.1", port)))
                    hanging[-1].sendall(request)  # half of one; or all, and nothing is read
        stop.wait(0.05 if name == "20 a second" else 1.0)


def stepping(rounds: int) -> dict[str, Any]:
    """A loop of 1 ms steps, in turns with scrapers of each manner in another process."""
    exporter = exporter_of(STEPPING_SERIES)
    exporter.serve("127.0.0.1", 0)
    context = multiprocessing.get_context("spawn")
    manner, stop = context.Value("i", 0), context.Event()
    scraper = context.Process(target=scrape, args=(exporter.port, manner, stop))
    scraper.start()
    gaps: dict[str, list[float]] = {name: [] for name in MANNERS}
    lost: dict[str, list[float]] = {name: [] for name in MANNERS}
    try:
        for _ in track(range(rounds), "stepping"):
            for number, name in enumerate(MANNERS):
                manner.value = number
                time.sleep(2.0)  # longer than the scraper's pause: it has seen the change
                steps, gap = loop(ROUND_SECONDS)
                gaps[name].append(gap)
                if not number:
                    undisturbed = steps
                lost[name].append(1 - steps / undisturbed)
    finally:
        stop.set()
        scraper.join()
        exporter.close()
    return {
        name: {
            "largest_gap_ms": round(max(gaps[name]) * 1e3, 2),
            "median_gap_ms": round(statistics.median(gaps[name]) * 1e3, 2),
            "lost_share": round(statistics.median(lost[name]), 4),
        }
        for name in MANNERS
    }


def loop(seconds: float) -> tuple[int, float]:
    """Steps of pure Python for so long: how many, and the largest gap between two ends."""
    end = last = time.perf_counter()
    end += seconds
    steps, gap = 0, 0.0
    while last < end:
        due = last + STEP_SECONDS
        while (now := time.perf_counter()) < due:
            pass  # holds the interpreter, as the host's part of a training step does
        gap = max(gap, now - last)
        last = now
        steps += 1
    return steps, gap


def main() -> None:
    arguments = parser_of(__doc__, "scrape.json", "few rounds").parse_args()
    torch.set_num_threads(1)
    rounds = 3 if arguments.quick else 15
    result = setting(("torch", "numpy", "prometheus-client"))
    result["pages"] = [page_of(series, rounds) for series in track(SERIES, "pages")]
    result["stepping"] = stepping(2 if arguments.quick else 6)
    write(result, arguments.out)


if __name__ == "__main__":
    main()
