"""A Hugging Face training in a process of its own, one rank or one of several; see `main`.

python -m tests.alerting.recovery.hugged FOLDER RECORDS [SIGNAL STEP]
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import set_seed

from alerting.recovery.huggingface import HuggingFaceGuard
from alerting.recovery.reentry import Framework, FrameworkState
from alerting.recovery.run import GuardedRun
from tests.alerting.recovery.trainer import FakeDetector, open_request, wait_for_save

GUARDED: dict[str, Any] = {"save_every_steps": 5, "onset_margin_steps": 2}


class Tokens(Dataset):
    """Samples of eight tokens."""

    def __init__(self, length: int = 26) -> None:
        self._tokens = torch.randint(50, (length, 8), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._tokens[index], "labels": self._tokens[index]}


class Recorder(Trainer):
    """Keeps what each micro-batch was: its step, its tokens and its loss."""

    records: list[list[Any]]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if model.training:
            tokens = inputs["input_ids"].sum().item()
            self.records.append([self.state.global_step + 1, tokens, loss.item()])
        return loss


def trainer(output: Path, *callbacks: TrainerCallback, **arguments: Any) -> Recorder:
    """A GPT-2 with dropout; evaluation draws random numbers between the steps."""
    set_seed(0)
    config = GPT2Config(
        vocab_size=50,
        n_positions=8,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
    )
    recorder = Recorder(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(
            **{
                "output_dir": str(output),
                "max_steps": 20,
                "per_device_train_batch_size": 4,
                "learning_rate": 1e-2,
                "save_strategy": "no",
                "eval_strategy": "steps",
                "eval_steps": 5,
                "report_to": "none",
                "use_cpu": True,
                "disable_tqdm": True,
                **arguments,
            }
        ),
        train_dataset=Tokens(),
        eval_dataset=Tokens(4),
        callbacks=list(callbacks),
    )
    recorder.records = []
    return recorder


class Fault(TrainerCallback):
    """A weight a hundredfold at a step, once, which the detector sees and the receiver asks for."""

    def __init__(self, step: int, detector: FakeDetector, folder: Path) -> None:
        self._step, self._detector, self._folder = step, detector, folder

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 != self._step or self._detector.resets[-1] > 0:
            return
        with torch.no_grad():
            kwargs["model"].transformer.h[0].mlp.c_fc.weight.mul_(100)
        self._detector.see_bad()
        if state.is_world_process_zero:
            open_request(self._folder, "recover")


class Signalled(TrainerCallback):
    """Sends this process a signal within a step."""

    def __init__(self, number: int, step: int) -> None:
        self._number, self._step = number, step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == self._step:
            os.kill(os.getpid(), self._number)


class OpenGuard(HuggingFaceGuard):
    """Shows the run that it makes when it trains."""

    made: GuardedRun

    def _guarded(self, framework: Framework) -> tuple[GuardedRun, FrameworkState]:
        self.made, state = super()._guarded(framework)
        return self.made, state


class Patient(TrainerCallback):
    """Waits for each save's files: these steps are faster, and would outrun them."""

    def __init__(self, guard: OpenGuard) -> None:
        self._guard = guard

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        wait_for_save(self._guard.made)


def main(folder: Path, what: str = "", step: str = "0") -> None:
    """Train, with a signal or a fault at a step; write the records at the end, however it comes."""
    torch.set_num_threads(1)
    detector = FakeDetector()
    guard = OpenGuard(folder, exporter=detector, **GUARDED)
    callbacks: list[TrainerCallback] = [Patient(guard)]
    if what == "fault":
        callbacks.append(Fault(int(step), detector, folder))
    elif what:
        callbacks.append(Signalled(getattr(signal, what), int(step)))
    backend = {"ddp_backend": "gloo"} if "RANK" in os.environ else {}
    recorder = trainer(folder / "output", *callbacks, **backend)
    try:
        guard.run(recorder)
    finally:
        rank = recorder.args.process_index
        (folder / f"rank-{rank}.json").write_text(json.dumps(recorder.records))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
