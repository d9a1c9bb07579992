"""Resumes that went wrong in other people's trainings, as the guard must not let them go wrong.

Each case names its source. Where a fault can be put into the loaded state, the same comparison is
shown to see it.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from alerting.exceptions import CheckpointError
from alerting.recovery import LowerLearningRate, TrainingGuard
from tests.alerting.recovery.trainer import (
    FakeDetector,
    Numbered,
    Trainer,
    open_request,
    read_json,
)


def update_norm(model, before):
    moved = [
        (p.detach() - b).square().sum() for p, b in zip(model.parameters(), before, strict=True)
    ]
    return torch.stack(moved).sum().sqrt().item()


class TestOptimizer:
    """bigscience tr8b-104B: Adam's step count was not saved (C02)."""

    SAVED = 20

    def first_update(self, folder, spoil=lambda optimizer: None):
        """How far the first step after a resume moves the weights."""
        trainer = Trainer(folder)
        step, batch = next(steps := trainer.guard.steps(self.SAVED + 1))
        assert step == self.SAVED + 1
        spoil(trainer.optimizer)
        before = [p.detach().clone() for p in trainer.model.parameters()]
        trainer.train_step(step, batch)
        # Left before the step's boundary: nothing of it is saved.
        steps.close()
        return update_norm(trainer.model, before)

    def test_the_first_update_after_a_resume_is_the_right_one(self, tmp_path):
        whole = Trainer(tmp_path / "whole")
        for step, batch in whole.guard.steps(self.SAVED + 1):
            before = [p.detach().clone() for p in whole.model.parameters()]
            whole.train_step(step, batch)
        right = update_norm(whole.model, before)
        Trainer(tmp_path / "run").run(self.SAVED)

        def forget_the_count(optimizer):
            for state in optimizer.state.values():
                state["step"].zero_()

        assert self.first_update(tmp_path / "run", forget_the_count) > 1.3 * right
        assert self.first_update(tmp_path / "run") == right


class Tied(nn.Module):
    """An embedding with a norm after it, which is the head too."""

    def __init__(self, *, norm: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(26, 8)
        if norm:
            self.embed_norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 26, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        hidden = self.embed(ids)
        return self.head(self.embed_norm(hidden) if hasattr(self, "embed_norm") else hidden)


class TestIncomplete:
    """bigscience tr11-176B: the embedding's norm went back to defaults, the tie was lost (C03)."""

    def guard(self, folder, model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        loader = DataLoader(Numbered(), batch_size=4, shuffle=True)
        return optimizer, TrainingGuard(folder, model=model, optimizer=optimizer, loader=loader)

    def losses(self, folder, model, total):
        optimizer, guard = self.guard(folder, model)
        losses = {}
        for step, (ids, _) in guard.steps(total):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(ids), ids)
            loss.backward()
            optimizer.step()
            losses[step] = loss.item()
        return losses

    def test_tie_and_norm_come_back(self, tmp_path):
        torch.manual_seed(0)
        whole = self.losses(tmp_path / "whole", Tied(), 20)
        torch.manual_seed(0)
        self.losses(tmp_path / "run", Tied(), 12)
        again = Tied()
        resumed = self.losses(tmp_path / "run", again, 20)
        assert resumed == {step: whole[step] for step in range(13, 21)}
        assert again.head.weight is again.embed.weight

    def test_a_checkpoint_without_the_norm_is_refused_by_name(self, tmp_path):
        self.losses(tmp_path, Tied(norm=False), 3)
        with pytest.raises(CheckpointError, match=r"embed_norm\.(weight|bias)"):
            self.losses(tmp_path, Tied(), 6)


class TestData:
    """Streams that began anew or repeated their tail (C08, C09), epochs that went back (C10)."""

    EPOCH = 125

    def ids(self, folder, total, stop=None):
        loader = DataLoader(Numbered(self.EPOCH * 4), batch_size=4, shuffle=True)
        trainer = Trainer(folder, patient=False, settings={"loader": loader})
        return [r[1] for r in trainer.run(total, stop_after=stop)]

    def test_each_sample_comes_once_an_epoch_over_two_resumes(self, tmp_path):
        whole = self.ids(tmp_path / "whole", 2 * self.EPOCH)
        seen = self.ids(tmp_path / "run", 60)
        # In the first epoch, and within the second one: step 200 of 125 an epoch.
        seen += self.ids(tmp_path / "run", 200)
        seen += self.ids(tmp_path / "run", 2 * self.EPOCH)
        assert seen == whole
        for epoch in (seen[: self.EPOCH], seen[self.EPOCH :]):
            assert sorted(i for batch in epoch for i in batch) == list(range(self.EPOCH * 4))


class TestAccumulation:
    """Tencent/YOLO-Master#263: after a replay no optimizer step came for an epoch (C11)."""

    def test_the_first_step_after_a_rollback_moves_the_weights(self, tmp_path):
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        detector = FakeDetector()
        guard = TrainingGuard(
            tmp_path,
            model=model,
            optimizer=optimizer,
            loader=DataLoader(Numbered(64), batch_size=2, shuffle=True),
            exporter=detector,
            save_every_steps=10,
            onset_margin_steps=2,
        )
        taken, moved = [], []
        for step, batches in guard.steps(30, micro_batches=4):
            if len(taken) == 22:
                detector.see_bad()
                open_request(tmp_path, "recover")
            before = model.weight.detach().clone()
            assert all(p.grad is None or not p.grad.any() for p in model.parameters())
            for _, inputs in batches:
                (model(inputs) - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            taken.append(step)
            moved.append(not torch.equal(before, model.weight))
        # These steps take no time, so which save was published by then is a matter of chance.
        [answer] = (tmp_path / "control" / "answers").glob("*.json")
        back_to = read_json(answer)["resumed_step"]
        assert taken == [*range(1, 24), *range(back_to + 1, 31)]
        assert all(moved)


class Masters:
    """float32 copies that the optimizer steps, and the bfloat16 model that follows them."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.copies = [p.detach().float().requires_grad_() for p in model.parameters()]

    def step(self, optimizer):
        for copied, parameter in zip(self.copies, self.model.parameters(), strict=True):
            copied.grad = parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            for copied, parameter in zip(self.copies, self.model.parameters(), strict=True):
                parameter.copy_(copied)
                parameter.grad = None

    def state_dict(self):
        return {"copies": [c.detach() for c in self.copies]}

    def load_state_dict(self, state):
        with torch.no_grad():
            for copied, saved in zip(self.copies, state["copies"], strict=True):
                copied.copy_(saved)


class Watched(torch.optim.AdamW):
    """Notes the rate that each step is really taken with."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.rates = []

    def step(self, closure=None):
        self.rates.append(self.param_groups[0]["lr"])
        return super().step(closure)


class TestRemedy:
    """metaseq: what was to be tried after a rollback was overwritten by the load (C12)."""

    def test_the_steps_after_the_load_are_taken_with_the_remedy(self, tmp_path):
        trainer = Trainer(
            tmp_path,
            settings={"remedies": {1: [LowerLearningRate(0.5, steps=3)]}},
            optimizer_kind=Watched,
        )
        for step, batch in trainer.guard.steps(20):
            if step == 13 and not trainer.detector.resets[1:]:
                trainer.break_model()
                trainer.ask("recover")
            trainer.records.append(trainer.train_step(step, batch))
        # Step 13 was bad and 10 the last good checkpoint: 11, 12 and 13 came again, and slower.
        # Left out is the step at a rate of 0 by which torch makes a state to load into.
        rates = [rate for rate in trainer.optimizer.rates if rate]
        before, again = rates[10:13], rates[13:17]
        assert again[:3] == [pytest.approx(rate / 2) for rate in before]
        assert again[3] == trainer.records[15][3]  # what the scheduler left after the third of them
        # What people see of it: the answer and the manifest of the next checkpoint.
        [answer] = (tmp_path / "control" / "answers").glob("*.json")
        assert "learning rate times 0.5 until step 13" in read_json(answer)["detail"]


class TestMasters:
    """Megatron-LM#1842, apex#480: masters not loaded, so the second step jumped (C13)."""

    def losses(self, folder, total, lose=False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).bfloat16()
        masters = Masters(model)
        initial = copy.deepcopy(masters.state_dict())
        optimizer = torch.optim.SGD(masters.copies, lr=0.1)
        guard = TrainingGuard(
            folder,
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loader=DataLoader(Numbered(), batch_size=4, shuffle=True),
            state={"masters": masters, "optimizer of the masters": optimizer},
        )
        losses = {}
        for step, (_, inputs) in guard.steps(total):
            if lose and not losses:
                masters.load_state_dict(initial)
            loss = (model(inputs.bfloat16()) - 1).square().mean()
            loss.backward()
            masters.step(optimizer)
            losses[step] = loss.item()
            if lose and len(losses) == 2:
                break
        return losses

    def test_both_steps_after_a_resume_are_bitwise_right(self, tmp_path):
        whole = self.losses(tmp_path / "whole", 32)
        self.losses(tmp_path / "run", 30)
        # The tell: the first loss is right, the second is not.
        lost = self.losses(tmp_path / "run", 40, lose=True)
        assert lost[31] == whole[31]
        assert lost[32] != whole[32]
        assert self.losses(tmp_path / "run", 32) == {step: whole[step] for step in (31, 32)}
