"""Journals for tests of the report: of a real run with a guard, and written by hand."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from act_exporter import Thresholds, start_exporter
from act_exporter.records import STATISTICS
from alerting.recovery import ClipGradients, TrainingGuard
from tests.act_exporter.models import gpt
from tests.alerting.recovery.trainer import open_request, wait_for_save

RUN = "gpt-report"
LAYER = "blocks.1.attn.proj"
FAULT_STEP = 84
ASKED_AFTER = 88
STEPS = 190
START = 1_800_000_000.0

QUICK = Thresholds(window=40, window_minimum=10, baseline_steps=10)


def train(folder: Path, *, factor: float | None = None, steps: int = STEPS) -> Path:
    """Train a small GPT under a guard, with a fault that is rolled back; its journal's folder."""
    torch.manual_seed(3)
    model = gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    journal = folder / "journal"
    with start_exporter(model, 0, run=RUN, thresholds=QUICK, journal=journal) as exporter:
        guard = TrainingGuard(
            folder / "run",
            model=model,
            optimizer=optimizer,
            exporter=exporter,
            save_every_steps=20,
            remedies={1: [ClipGradients(0.5, steps=10)]},
        )
        asked = False
        if factor is not None:
            exporter.inject_fault(LAYER, factor, FAULT_STEP)
        for step, _ in guard.steps(steps):
            tokens = torch.randint(0, 256, (2, 9))
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            exporter.record(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
            wait_for_save(guard._run)
            if step == ASKED_AFTER and factor is not None and not asked:
                asked = True
                open_request(folder / "run", "recover", run=RUN)
    return journal


def record(
    step: int, layer: str, absmax: float, *, generation: int = 0, rank: int = 0, **fields: Any
) -> dict[str, Any]:
    """A record, a second a step."""
    return {
        **{"step": step, "time": START + step, "run": "hand", "rank": rank},
        **{"generation": generation, "layer": layer, "tensor": "output"},
        **dict.fromkeys(STATISTICS, 0),
        **{"absmax": absmax, "nan": 0, "posinf": 0, "neginf": 0, **fields},
    }


def note(kind: str, /, step: int, **fields: Any) -> dict[str, Any]:
    """A note of rank 0, at the time of the step."""
    common = {"run": "hand", "rank": 0, "note": kind, "step": step, "time": START + step}
    return {**common, "generation": 0, **fields}


def steady(
    layers: Sequence[str],
    steps: Iterable[int],
    but: Mapping[tuple[int, str], float] = {},
    **fields: Any,
) -> list[dict[str, Any]]:
    """Records of layers that stay near 1, but for some."""
    return [
        record(step, layer, but.get((step, layer), 1 + 0.01 * (step % 7)), **fields)
        for step in steps
        for layer in layers
    ]


def write(folder: Path, entries: Iterable[dict[str, Any]], *, rank: int = 0) -> Path:
    """A journal of those entries, the folder returned."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"act-journal-rank{rank}-20270115T080000.000Z.jsonl"
    path.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    return folder


def lines(folder: Path) -> list[str]:
    """All lines of a folder's journals."""
    found = []
    for path in sorted(folder.iterdir()):
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        found += data.decode().splitlines(keepends=True)
    return found
