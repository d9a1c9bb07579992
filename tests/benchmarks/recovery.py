"""What the guard costs, and how soon a run is back: real processes, real files, no network.

    python -m tests.benchmarks.recovery            (ten minutes; --quick in one)

Checkpoints lie in build/bench, so on its disk. Ranks share the machine's cores. Writes
build/bench/recovery.json:

    async_stall_over_sync  time that training stands still for an asynchronous save of 100 million
                           parameters with AdamW's moments (beginning it, and publishing it when its
                           files are complete), over one that is waited for; medians, taken in turn.
                           `first_stall_seconds`: the first save makes the buffers that later ones
                           use again
    agreement              by ranks and `check_every`: `ms` that a step spends in the guard when
                           nothing is to be done (mean), and `share` of the step
    rollback               by million parameters: seconds from the request to the end of the first
                           step after it, rolled back in the process, and by ending it for a new one
                           (`recover_by="restart"`, started again at once); medians, taken in turn
    load_average           of the minute before: well below `cores` if nothing else ran
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import track
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from alerting.exit_codes import RESTART
from alerting.recovery import TrainingGuard
from deploy.demo.servers import REPOSITORY, free_port
from tests.alerting.recovery.trainer import FakeDetector, open_request
from tests.benchmarks.report import parser_of, setting, write

RANKS = (2, 4)
EVERY = (1, 10)
STEPS_LEFT_OUT = 20
"""Of the agreement: the first ones make gloo's buffers and torch's caches."""
BAD_STEP, ASKED_STEP = 26, 28
SAVE_EVERY = 10


def model_of(millions: float, width: int = 1024) -> nn.Sequential:
    """So many million parameters, in square layers."""
    layers = max(1, round(millions * 1e6 / (width * width + width)))
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def measure_saves(folder: Path, millions: float, rounds: int) -> dict[str, Any]:
    """Stalls of an asynchronous save, and of one that is waited for, in turn."""
    model = model_of(millions)
    optimizer = torch.optim.AdamW(model.parameters())
    guard = TrainingGuard(folder, model=model, optimizer=optimizer, exporter=FakeDetector(), keep=2)
    stalls: list[float] = []
    waited: list[float] = []
    step = 0

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(8, 1024)).square().mean().backward()
            optimizer.step()

    train(1)
    with guard._run.entered():
        guard._run.begin()
        saver = guard._run.saver
        for _ in track(range(rounds + 1), description="saves", transient=True):
            step += 1
            train(1)
            began = time.perf_counter()
            saver.begin(step, "periodic")
            stall = time.perf_counter() - began
            while saver.writing:
                train(1)
            began = time.perf_counter()
            saver.publish()
            stalls.append(stall + time.perf_counter() - began)
            step += 1
            began = time.perf_counter()
            saver.save_now(step, "periodic")
            waited.append(time.perf_counter() - began)
    stall, whole = statistics.median(stalls[1:]), statistics.median(waited[1:])
    return {
        "async_stall_over_sync": round(stall / whole, 3),
        "million_parameters": round(sum(p.numel() for p in model.parameters()) / 1e6, 1),
        "stall_seconds": round(stall, 3),
        "first_stall_seconds": round(stalls[0], 3),
        "sync_seconds": round(whole, 3),
        "saves": rounds,
    }


def measure_agreement(folder: Path, ranks: int, every: int, steps: int) -> dict[str, float]:
    """Milliseconds a step in the guard, of rank 0."""
    base = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable, "-m", "tests.benchmarks.recovery", "--child", "agree",
        "--folder", str(folder), "--every", str(every), "--steps", str(steps),
    ]  # fmt: skip
    processes = [
        subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env={**base, "RANK": str(rank)},
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
        )
        for rank in range(ranks)
    ]
    said = processes[0].communicate()[0]
    if any(process.wait() for process in processes):
        raise SystemExit("a rank of the agreement has failed")
    found: dict[str, float] = json.loads(said)
    return found


def agree(folder: Path, every: int, steps: int) -> None:
    """One rank: steps with an all-reduce of gradients, and the guard between them."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model_of(2, 512))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    guard = TrainingGuard(
        folder,
        model=model,
        optimizer=optimizer,
        exporter=FakeDetector(),
        save_every_steps=10 * steps,
        check_every=every,
    )
    inside: list[float] = []
    outside: list[float] = []
    left = time.perf_counter()
    for _ in guard.steps(steps):
        entered = time.perf_counter()
        inside.append(entered - left)
        optimizer.zero_grad()
        model(torch.randn(32, 512)).square().mean().backward()
        optimizer.step()
        left = time.perf_counter()
        outside.append(left - entered)
    spent = statistics.mean(inside[STEPS_LEFT_OUT:])
    whole = spent + statistics.mean(outside[STEPS_LEFT_OUT:])
    if dist.get_rank() == 0:
        print(json.dumps({"ms": round(spent * 1e3, 3), "share": round(spent / whole, 4)}))
    dist.barrier()
    dist.destroy_process_group()


def measure_return(folder: Path, millions: float, recover_by: str) -> float:
    """Seconds from the request to the end of the first step after it."""
    command = [
        sys.executable, "-m", "tests.benchmarks.recovery", "--child", "train",
        "--folder", str(folder), "--millions", str(millions), "--by", recover_by,
    ]  # fmt: skip
    while (code := subprocess.run(command, cwd=REPOSITORY, check=False).returncode) == RESTART:
        pass
    if code:
        raise SystemExit("a trainer has failed")
    moments = json.loads((folder / "moments.json").read_text())
    back: float = moments["back"] - moments["asked"]
    return back


def train(folder: Path, millions: float, recover_by: Any) -> None:
    """A trainer that goes bad once, asks for a recovery, and ends a step after it."""
    model = model_of(millions)
    optimizer = torch.optim.AdamW(model.parameters())
    detector = FakeDetector()
    guard = TrainingGuard(
        folder,
        model=model,
        optimizer=optimizer,
        exporter=detector,
        run="toy",
        save_every_steps=SAVE_EVERY,
        onset_margin_steps=2,
        recover_by=recover_by,
    )
    path = folder / "moments.json"
    moments = json.loads(path.read_text()) if path.exists() else {}
    total = ASKED_STEP + SAVE_EVERY
    for step, _ in guard.steps(total):
        optimizer.zero_grad()
        model(torch.randn(4, 1024)).square().mean().backward()
        optimizer.step()
        if "asked" in moments:
            # The monotonic clock is the machine's, the same for a new process.
            moments.setdefault("back", time.monotonic())
            path.write_text(json.dumps(moments))
            return
        while guard._run.saver.writing:
            time.sleep(0.001)
        if step == BAD_STEP:
            detector.see_bad()
        if step == ASKED_STEP:
            moments["asked"] = time.monotonic()
            path.write_text(json.dumps(moments))
            open_request(folder, "recover")


def folders(parent: Path) -> Iterator[Path]:
    """A new folder each time; the one before is removed, for a hundred gigabytes add up."""
    number = 0
    while True:
        folder = parent / str(number)
        yield folder
        shutil.rmtree(folder, ignore_errors=True)
        number += 1


def run(quick: bool, parent: Path) -> dict[str, Any]:
    """All parts, one after the other."""
    load = os.getloadavg()[0]
    fresh = folders(parent)
    saves = measure_saves(next(fresh), 5 if quick else 100, 2 if quick else 5)
    agreement: dict[str, Any] = {}
    combinations = [(ranks, every) for ranks in RANKS for every in EVERY]
    for ranks, every in track(combinations, description="agreement", transient=True):
        found = measure_agreement(next(fresh), ranks, every, 60 if quick else 400)
        agreement.setdefault(f"{ranks} ranks", {})[f"check_every={every}"] = found
    rollback = {}
    for millions in (1,) if quick else (1, 10, 100):
        seconds: dict[str, list[float]] = {"rollback": [], "restart": []}
        # The largest writes 20 GB a round.
        rounds = range(1 if quick else 3 if millions >= 100 else 5)
        for _ in track(rounds, description=f"back with {millions} million", transient=True):
            for way, taken in seconds.items():
                taken.append(measure_return(next(fresh), millions, way))
        medians = {way: statistics.median(taken) for way, taken in seconds.items()}
        rollback[f"{millions} million"] = {
            "rollback_seconds": round(medians["rollback"], 3),
            "restart_seconds": round(medians["restart"], 3),
            "restart_over_rollback": round(medians["restart"] / medians["rollback"], 1),
        }
    return {
        **setting(("act-exporter", "torch"), load_average=round(load, 2)),
        **saves,
        "agreement": agreement,
        "rollback": rollback,
    }


def main() -> None:
    """Measure and write the file, or be one of the measured processes."""
    parser = parser_of(__doc__, "recovery.json", "a few of each")
    for hidden, kind in (("--child", str), ("--folder", Path), ("--by", str)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    for hidden in ("--every", "--steps"):
        parser.add_argument(hidden, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--millions", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child == "agree":
        agree(arguments.folder, arguments.every, arguments.steps)
        return
    if arguments.child == "train":
        train(arguments.folder, arguments.millions, arguments.by)
        return
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.out.parent, prefix="recovery-") as folder:
        result = run(arguments.quick, Path(folder))
    print(json.dumps(result, indent=1))
    write(result, arguments.out)


if __name__ == "__main__":
    main()
