"""SIGKILL at random moments of training and saving: the next process resumes bit for bit."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

from tests.alerting.recovery.trainer import Trainer, uninterrupted

STEPS = 60
KILLS = 4


def child(folder: Path, log: Path) -> None:
    """Train with a line for each step, slowly enough to be hit anywhere."""
    trainer = Trainer(folder, patient=False)
    with log.open("a") as file:
        for step, batch in trainer.guard.steps(STEPS):
            print(repr(trainer.train_step(step, batch)), file=file, flush=True)
            time.sleep(0.002)


def lines(log: Path) -> list[str]:
    if not log.exists():
        return []
    # The last one may have been cut short.
    return [line for line in log.read_text().split("\n")[:-1] if line.endswith(")")]


def test_killed_at_random_moments_it_resumes_bitwise(tmp_path):
    reference = [repr(r) for r in uninterrupted(tmp_path / "reference", STEPS)]
    chance = random.Random(5)
    log = tmp_path / "steps.log"
    command = [sys.executable, "-m", __name__, str(tmp_path / "run"), str(log)]
    killed = 0
    for attempt in range(KILLS + 1):
        before = len(lines(log))
        # Some die in a step, some in a save: wherever this many steps and microseconds lead.
        goal = before + chance.randint(1, 18)
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        deadline = time.monotonic() + 60
        try:
            while attempt < KILLS and process.poll() is None and len(lines(log)) < goal:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            if attempt < KILLS:
                time.sleep(chance.random() * 0.01)
                process.kill()
            errors = process.communicate(timeout=60)[1].decode()
        finally:
            process.kill()
        killed += process.returncode < 0
        assert process.returncode in (0, -9), errors
        if process.returncode == 0:
            break
    assert killed >= 2
    seen = lines(log)
    assert seen[-1] == reference[-1]
    # Each step, each time it was taken, was the same.
    assert set(seen) == set(reference)
    leftovers = [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()]
    assert not [name for name in leftovers if name.startswith(".")]


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    child(Path(sys.argv[1]), Path(sys.argv[2]))
