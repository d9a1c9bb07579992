"""How long a day's journal takes to become a report: a real journal, the real command.

    python -m tests.benchmarks.report_reading      (three minutes; --quick in a quarter of one)

Writes ten million records into build/bench by the journal's own code, of 120 tensors and with a
fault near the end, runs `act-exporter report` on them, and writes build/bench/report_reading.json:

    seconds         from the command's start to its end, page written; the median of the rounds
    peak_mib        the largest sum, over the command and the processes it starts, of memory that
                    is theirs alone and their share of what they have in common (Pss)
    records         in the journal
    load_average    of the minute before the first round: well below `cores` if nothing else ran

The page must name the layer that the fault was put into; otherwise nothing is written and the exit
code is 1.
"""

from __future__ import annotations

import gzip
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from rich.progress import track

from act_exporter.records import Sampled, Writing
from act_exporter.rotation import _LEVEL, Limits
from act_exporter.rows import COLUMNS, Column, Statistics
from act_exporter.taps import Tap
from tests.benchmarks.report import parser_of, setting, write

RECORDS = 10_000_000
TAPS = [
    Tap(layer=f"model.layers.{block}.{place}", tensor="output", kind=place)
    for block in range(24)
    for place in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj", "norm")
]
SICK = 61
FACTOR = 3000.0
SETTLED = 300
"""The step from which on there are baselines."""
SECONDS = 1.0
"""A step; ten million records are then 23 hours."""
START = 1_790_000_000.0
FILE_BYTES = Limits().file_bytes


def steps(count: int) -> Iterator[list[str]]:
    """The lines of each step; from 99 % of them on, for 200 steps, one tensor is too large."""
    writing = Writing("gpt-large", 0, TAPS)
    random = np.random.default_rng(1)
    rows = np.zeros((len(TAPS), COLUMNS))
    rows[:, Column.CALLS] = 1
    rows[:, Column.COUNT] = 2**20
    usual = random.lognormal(1, 1, len(TAPS))
    begins = int(count * 0.99)
    for step in range(1, count + 1):
        absmax = usual * random.lognormal(0, 0.1, len(TAPS))
        if begins <= step < begins + 200:
            absmax[SICK] *= FACTOR
        rows[:, Column.MAX] = absmax
        rows[:, Column.MIN] = -absmax * random.random(len(TAPS))
        rows[:, Column.SUM] = random.normal(0, 1e4, len(TAPS))
        rows[:, Column.SUM_SQUARES] = absmax**2 * 2**15
        ended = START + step * SECONDS
        sampled = Sampled(
            step,
            ended,
            0,
            Statistics.of(rows),
            np.zeros((3, len(TAPS))),
            np.ones(len(TAPS), dtype=np.bool_),
        )
        told = {"note": "training", "step": step, "time": ended, "generation": 0}
        loss = 2 + 3 / step**0.1 + float(random.normal(0, 0.05))
        notes = [{**told, "loss": loss, "grad_norm": 1.0}]
        if step == SETTLED:
            notes += [
                {**told, "note": "baseline", "layer": tap.layer, "tensor": tap.tensor, "absmax": it}
                for tap, it in zip(TAPS, usual.tolist(), strict=True)
            ]
        yield [*writing.lines(sampled), *map(writing.note, notes)]


def make_journal(folder: Path, count: int) -> None:
    """Files as the shipped rotation cuts and compresses them; a day of waiting left out."""
    lines: list[str] = []
    size, began = 0, START
    for number, of_step in enumerate(track(steps(count), "writing the journal", total=count), 1):
        lines += of_step
        size += sum(map(len, of_step))
        if size >= FILE_BYTES or number == count:
            stamp = datetime.fromtimestamp(began, UTC).strftime("%Y%m%dT%H%M%S")
            path = folder / f"act-journal-rank0-{stamp}.000Z.jsonl.gz"
            path.write_bytes(gzip.compress("".join(lines).encode(), _LEVEL, mtime=0))
            lines, size, began = [], 0, START + number * SECONDS


def run_command(folder: Path) -> tuple[float, float]:
    """Seconds, and the most memory in MiB, that the command takes."""
    page = folder / "report.html"
    argv = [sys.executable, "-m", "act_exporter.cli", "report", str(folder), "-o", str(page)]
    began = time.perf_counter()
    command = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    peak = 0.0
    while command.poll() is None:
        peak = max(peak, memory_of(command.pid))
        time.sleep(0.1)
    seconds = time.perf_counter() - began
    if command.returncode != 0 or TAPS[SICK].layer not in page.read_text().partition("</h1>")[0]:
        raise SystemExit("the report does not name the layer that went bad")
    return seconds, peak


def memory_of(pid: int) -> float:
    """MiB of a process and its children, what they share divided among them."""
    total = 0.0
    for process in [pid, *children_of(pid)]:
        try:
            rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
        except OSError:  # it has ended meanwhile
            continue
        total += next(int(line.split()[1]) for line in rollup.splitlines() if "Pss:" in line) / 1024
    return total


def children_of(pid: int) -> list[int]:
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except OSError:
        return []


def main() -> None:
    parser = parser_of(__doc__, "report_reading.json", "a tenth of the records, one round")
    arguments = parser.parse_args()
    count = RECORDS // len(TAPS) // (10 if arguments.quick else 1)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.out.parent) as name:
        folder = Path(name)
        make_journal(folder, count)
        load = os.getloadavg()[0]
        rounds = [run_command(folder) for _ in range(1 if arguments.quick else 3)]
        size = sum(path.stat().st_size for path in folder.glob("*.gz"))
    write(
        {
            **setting(("numpy", "orjson", "matplotlib"), load_average=round(load, 2)),
            "records": count * len(TAPS),
            "compressed_mib": round(size / 2**20, 1),
            "seconds": round(statistics.median(seconds for seconds, _ in rounds), 1),
            "peak_mib": round(max(peak for _, peak in rounds)),
            "rounds": [round(seconds, 1) for seconds, _ in rounds],
        },
        arguments.out,
    )


if __name__ == "__main__":
    main()
