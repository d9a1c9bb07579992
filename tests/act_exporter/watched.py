"""Exporters for `act-exporter watch` to look at: real ones over HTTP, and a server of any text."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from torch import nn

from act_exporter import Thresholds
from act_exporter.exporter import Exporter
from act_exporter.torch_exporter import TorchExporter
from tests.act_exporter.models import gpt, train

# Baselines after 20 steps, windows after 10.
QUICK = Thresholds(window=40, window_minimum=10, baseline_steps=10)

LEARNT = 40
"""Steps after which all of that is learnt."""

FAULTY = "blocks.0.mlp.down"
"""The layer that `exporting(fault=...)` makes too large, from step `LEARNT` + 1 on."""


@contextlib.contextmanager
def exporting(
    *, fault: float | None = None, run: str = "gpt", rank: int = 0, model: nn.Module | None = None
) -> Iterator[Exporter]:
    """A small GPT in training, its page served; a few steps into the fault, where there is one."""
    torch.manual_seed(rank)
    model = model or gpt()
    exporter = TorchExporter(
        model, run=run, rank=rank, watch="sublayers", sample_every=1, thresholds=QUICK
    )
    with exporter:
        exporter.serve("127.0.0.1", 0)
        if fault is not None:
            exporter.inject_fault(FAULTY, fault, LEARNT + 1)
        train(model, LEARNT)
        if fault is not None:
            train(model, 5)
        yield exporter


def address(exporter: Exporter) -> str:
    return f"127.0.0.1:{exporter.port}"


class Answering:
    """Serves what it is told to, and counts.

    Attributes:
        address: host and port.
        asked: requests so far.
        most: the largest number of them at a time.
    """

    def __init__(self, answer: Callable[[], tuple[int, bytes]]) -> None:
        self.asked = self.most = self._now = 0
        self.paths: list[str] = []
        lock = threading.Lock()
        counts = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                with lock:
                    counts.asked += 1
                    counts.paths.append(self.path)
                    counts._now += 1
                    counts.most = max(counts.most, counts._now)
                try:
                    status, body = answer()
                    self.send_response(status)
                    self.end_headers()
                    with contextlib.suppress(OSError):  # who asked may be gone
                        self.wfile.write(body)
                finally:
                    with lock:
                        counts._now -= 1

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.address = f"127.0.0.1:{self.server.server_address[1]}"


@contextlib.contextmanager
def answering(answer: Callable[[], tuple[int, bytes]]) -> Iterator[Answering]:
    """A server whose answers, status and body, are the function's."""
    served = Answering(answer)
    thread = threading.Thread(target=served.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        served.server.shutdown()
        served.server.server_close()
        thread.join()
