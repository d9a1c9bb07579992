"""One process of an experiment: a trainer that writes down all it does, until its fault comes.

python -m tests.faults.child PLAN      (a pickled plan; the rank is torchrun's)
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from alerting.recovery.training_state import TrainingState
from tests.alerting.recovery.ranked import Ranked
from tests.alerting.recovery.trainer import Trainer
from tests.faults.judge import may_be_resumed
from tests.faults.operations import FileOperations, Strike


@dataclass(frozen=True, kw_only=True, slots=True)
class Act:
    """What happens before a step is taken, once in an experiment.

    Attributes:
        step: the step.
        do: what.
        rank: the rank to which it happens.
    """

    step: int
    do: Callable[[Child], object]
    rank: int = 0


def at(step: int, *doings: Callable[[Child], object]) -> tuple[Act, ...]:
    """These, one after the other, before step `step`, of rank 0."""
    return tuple(Act(step=step, do=do) for do in doings)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a process does.

    Attributes:
        folder: the experiment's; the run folder is in it.
        ranks: processes that train together.
        total: steps.
        settings: the guard's.
        acts: what happens at steps.
        strike: what happens at an operation on a file.
        patient: each step waits for the save in flight, so that saves fall on the same steps.
        step_seconds: a pause after each step.
    """

    folder: Path
    ranks: int = 1
    total: int = 30
    settings: dict[str, Any] = field(default_factory=dict)
    acts: tuple[Act, ...] = ()
    strike: Strike | None = None
    patient: bool = True
    step_seconds: float = 0.0

    @property
    def run_folder(self) -> Path:
        return self.folder / "run"


class Child:
    """The process.

    Attributes:
        trainer: a `Trainer`, or a `Ranked` of several.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank = plan, rank
        self._log = os.open(
            plan.folder / f"rank-{rank}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT
        )
        (plan.folder / f"pid.{rank}").write_text(str(os.getpid()))
        strike = plan.strike if plan.strike is not None and plan.strike.rank == rank else None
        self.operations = FileOperations(plan.run_folder, strike, plan.folder)
        self.trainer: Any
        if plan.ranks == 1:
            self.trainer = Trainer(plan.run_folder, settings=plan.settings, patient=plan.patient)
        else:
            # After its first step DDP orders the gradients' buckets anew, so the sums of more than
            # two ranks are rounded otherwise in the first step of each process.
            kind = "ddp" if plan.ranks == 2 else "fsdp"
            self.trainer = Ranked(plan.run_folder, {"kind": kind, "settings": plan.settings})
        self._note_what_is_loaded()

    def train(self) -> None:
        for step, batch in self.trainer.guard.steps(self.plan.total):
            self._act(step)
            record = self.trainer.train_step(step, batch)
            self.note("step", *record, self._digest())
            time.sleep(self.plan.step_seconds)
        self.note("operations", self.operations.seen)

    def note(self, *event: Any) -> None:
        # One write: a killed process leaves whole lines.
        os.write(self._log, (json.dumps(event) + "\n").encode())

    def _act(self, step: int) -> None:
        for number, act in enumerate(self.plan.acts):
            sign = self.plan.folder / f"done.{number}"
            if (act.step, act.rank) == (step, self.rank) and not sign.exists():
                sign.touch()
                with self.operations.deaf():
                    act.do(self)

    def _digest(self) -> str:
        """Of all weights, buffers and moments, of this rank's part of them where they are dealt."""
        model, optimizer = self.trainer.model, self.trainer.optimizer
        tensors = list(model.state_dict().values())
        for parameter in model.parameters():
            tensors += [value for _, value in sorted(optimizer.state[parameter].items())]
        whole = hashlib.sha256()
        for tensor in tensors:
            own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            whole.update(own.detach().numpy().tobytes())
        return whole.hexdigest()

    def _note_what_is_loaded(self) -> None:
        restore = TrainingState.restore

        def restoring(state: TrainingState, folder: Path, world_size: int) -> None:
            with self.operations.deaf():
                self.note("load", folder.name, may_be_resumed(folder))
            restore(state, folder, world_size)
            self.note("loaded", folder.name)

        TrainingState.restore = restoring  # type: ignore[method-assign]


def train(plan: Plan, rank: int = 0, port: int = 0) -> None:
    """The whole life of a process that was forked for it."""
    said = os.open(plan.folder / f"said-{rank}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    if plan.ranks > 1:
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": plan.ranks}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in (ranks | address).items()}
    _train(plan, rank)


def _train(plan: Plan, rank: int) -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    torch.set_num_threads(1)
    if plan.ranks == 1:
        Child(plan, rank).train()
        return
    dist.init_process_group("gloo")
    Child(plan, rank).train()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    # By its own name: what a plan holds was pickled by names of this module.
    from tests.faults import child

    child._train(pickle.loads(Path(sys.argv[1]).read_bytes()), int(os.environ["RANK"]))
