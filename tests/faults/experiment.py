"""A run folder, the processes that train in it one after another, and what was lost."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.demo.servers import REPOSITORY, free_port
from tests.faults.child import Plan, train
from tests.faults.deadline import SECONDS
from tests.faults.judge import deleted, is_lost, published

_FORKS = multiprocessing.get_context("forkserver")
# Importing torch takes seconds, and there are hundreds of processes. They are forked from one that
# has done nothing else; the first optimizer of a process would import torch._dynamo.
_FORKS.set_forkserver_preload(["torch._dynamo", "tests.faults.child"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """What faults cost.

    Attributes:
        repeated: steps that were taken again.
        checkpoints: that had been published, and are gone, not whole or said to be corrupt.
        untrusted: loads of a checkpoint that was partial, corrupt or suspect.
        bitwise: data, losses, weights, moments and random numbers of each step are those of a run
            to which nothing happened, each time that it was taken without the bad step itself.
    """

    repeated: int = 0
    checkpoints: int = 0
    untrusted: int = 0
    bitwise: bool = True

    def __add__(self, other: Loss) -> Loss:
        return Loss(
            repeated=self.repeated + other.repeated,
            checkpoints=self.checkpoints + other.checkpoints,
            untrusted=self.untrusted + other.untrusted,
            bitwise=self.bitwise and other.bitwise,
        )


class Experiment:
    """One run.

    Args:
        folder: for all that it leaves.
        ranks: processes that train together.
        total: steps.
        settings: the guard's.
    """

    def __init__(self, folder: Path, *, ranks: int = 1, total: int = 30, **settings: Any) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.run_folder = folder / "run"
        self.checkpoints = self.run_folder / "checkpoints"
        self._plan = functools.partial(
            Plan, folder=folder, ranks=ranks, total=total, settings=settings
        )
        self._ranks, self._total = ranks, total
        self._published: set[str] = set()
        self._settled: Loss | None = None

    def start(self, **plan: Any) -> list[Any]:
        """Start the processes, one a rank."""
        whole, port = self._plan(**plan), free_port()
        processes = [
            _FORKS.Process(target=train, args=(whole, rank, port), daemon=True)
            for rank in range(self._ranks)
        ]
        for process in processes:
            process.start()
        return processes

    def end(self, processes: list[Any]) -> list[int]:
        """Wait for them; their exit codes, negative for a signal."""
        deadline = time.monotonic() + SECONDS
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        hung = [process for process in processes if process.is_alive()]
        for process in hung:
            process.kill()
            process.join()
        assert not hung, f"{len(hung)} processes did not end\n{self.said()}"
        self._published |= published(self.checkpoints)
        return [process.exitcode for process in processes]

    def run(self, **plan: Any) -> list[int]:
        """Start the processes and wait for them."""
        return self.end(self.start(**plan))

    def kill(self, **plan: Any) -> None:
        """Run into a strike that must kill."""
        codes = self.run(**plan)
        assert -signal.SIGKILL in codes, f"nothing was struck: {codes}\n{self.said()}"

    def finish(self) -> None:
        """Start once more, with no fault, and train to the end."""
        codes = self.run()
        assert codes == [0] * self._ranks, f"{codes}\n{self.said()}"

    def supervise(self, **plan: Any) -> str:
        """Train under `act-alerting supervise` and torchrun; what the supervisor said."""
        path = self.folder / "plan.pickle"
        path.write_bytes(pickle.dumps(self._plan(**plan)))
        command = [
            Path(sys.executable).with_name("act-alerting"), "supervise",
            # A step and a save take a tenth of a second here; a start is given its own time.
            "--run-folder", self.run_folder, "--stall-seconds", "6", "--grace-seconds", "2", "--",
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc-per-node={self._ranks}", "-m", "tests.faults.child", path,
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
        done = subprocess.run(
            list(map(str, command)), env=environment, capture_output=True, timeout=SECONDS
        )
        said = done.stderr.decode()
        assert done.returncode == 0, said
        self._published |= published(self.checkpoints)
        return said

    def said(self) -> str:
        """The end of what the processes logged."""
        logs = [path.read_text()[-3000:] for path in sorted(self.folder.glob("said-*.log"))]
        return "\n".join(logs)

    def events(self, rank: int = 0) -> list[list[Any]]:
        """What the processes of a rank wrote down."""
        path = self.folder / f"rank-{rank}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def steps(self) -> list[int]:
        """The steps that rank 0 took, in order."""
        return [event[1] for event in self.events() if event[0] == "step"]

    def loaded(self) -> list[str]:
        """Names of the checkpoints that were loaded, in order."""
        return [event[1] for event in self.events() if event[0] == "loaded"]

    def answers(self) -> list[dict[str, Any]]:
        """What the guard answered, the oldest request first."""
        paths = sorted((self.run_folder / "control" / "answers").glob("*.json"))
        return [json.loads(path.read_text()) for path in paths]

    def health(self, name: str) -> str:
        verdict: str = json.loads((self.checkpoints / name / "health.json").read_text())["health"]
        return verdict

    def settle(self) -> None:
        """Take the loss now, before the disk with the run folder is taken away."""
        self._settled = self.loss()

    def loss(self) -> Loss:
        """What it cost up to now."""
        if self._settled is not None:
            return self._settled
        steps = self.steps()
        gone = self._published - deleted(self.checkpoints)
        events = [event for rank in range(self._ranks) for event in self.events(rank)]
        loads = [event for event in events if event[0] == "load"]
        return Loss(
            repeated=len(steps) - len(set(steps)),
            checkpoints=sum(is_lost(self.checkpoints / name) for name in gone),
            untrusted=sum(not trusted for _, _, trusted in loads),
            bitwise=all(self._is_bitwise(rank) for rank in range(self._ranks)),
        )

    def _is_bitwise(self, rank: int) -> bool:
        expected = uninterrupted(self._ranks, self._total)[rank]
        steps, bad = set(), False
        for kind, *content in self.events(rank):
            if kind in ("bad", "load"):
                bad = kind == "bad"
            elif kind == "step":
                steps.add(content[0])
                if not bad and content != expected[content[0]]:
                    return False
        return steps == set(expected) and not bad


@functools.cache
def uninterrupted(ranks: int, total: int) -> list[dict[int, list[Any]]]:
    """What each rank does in each step when nothing happens to it."""
    with tempfile.TemporaryDirectory() as folder:
        experiment = Experiment(Path(folder) / "reference", ranks=ranks, total=total)
        experiment.finish()
        return [
            {event[1]: event[1:] for event in experiment.events(rank) if event[0] == "step"}
            for rank in range(ranks)
        ]
