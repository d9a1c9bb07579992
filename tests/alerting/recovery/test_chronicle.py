"""What the guard tells of itself, to a detector that keeps a journal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from alerting.exceptions import RecoveryHaltedError
from alerting.recovery import ClipGradients
from tests.alerting.recovery.trainer import FakeDetector, Trainer, uninterrupted

Told = list[tuple[str, dict[str, Any]]]


class Telling(FakeDetector):
    """A detector that has a journal; what it is told must be something that JSON knows."""

    def __init__(self) -> None:
        super().__init__()
        self.told: Told = []

    def note(self, kind: str, /, **fields: Any) -> None:
        self.told.append((kind, json.loads(json.dumps(fields, allow_nan=False))))


class Failing(FakeDetector):
    def note(self, kind: str, /, **fields: Any) -> None:
        raise ArithmeticError("broken on purpose")


def telling(folder: Path, **settings: Any) -> tuple[Trainer, Told]:
    """A trainer, and what its guard will tell its detector."""
    detector = Telling()
    trainer = Trainer(folder, settings={"exporter": detector, **settings})
    trainer.detector = detector
    return trainer, detector.told


def rolled_back(trainer: Trainer, *, at: int = 13, total: int = 30) -> str:
    """Trains with a fault that is seen and asked about at a step; the request's id."""
    request = ""
    for step, batch in trainer.guard.steps(total):
        if step == at and not request:
            trainer.break_model()
        trainer.train_step(step, batch)
        if step == at + 1 and not request:
            request = trainer.ask("recover")
    return request


def kinds(told: Told) -> list[str]:
    return [kind for kind, _ in told]


def only(told: Told, kind: str) -> dict[str, Any]:
    (fields,) = (fields for known, fields in told if known == kind)
    return fields


class TestRollback:
    def test_is_told_with_what_was_asked_saved_and_passed_over(self, tmp_path: Path) -> None:
        trainer, told = telling(tmp_path, onset_margin_steps=4)
        request = rolled_back(trainer)
        assert only(told, "request") == {
            **{"step": 14, "id": request, "action": "recover", "alert": "Test"},
            "created_at": only(told, "request")["created_at"],
        }
        went = only(told, "rollback")
        assert {name: went[name] for name in ("onset", "from_step", "resumed_step")} == {
            **{"onset": 13, "from_step": 14, "resumed_step": 5},
        }
        assert went["resumed_from"] == "step-00000005-g0"
        assert went["why"] == [
            "step-00000014-g0-emergency: its kind, emergency, is for people only",
            "step-00000010-g0: suspect: saved at or after step 9; step 13 was bad",
        ]
        assert went["remedies"] == []
        made = [f for kind, f in told if kind == "checkpoint" and f["kind"] == "emergency"]
        assert [(f["name"], f["step"], f["health"]) for f in made] == [
            ("step-00000014-g0-emergency", 14, "suspect")
        ]
        order = kinds(told)
        assert order.index("request") < order.index("rollback")
        judged = {f["name"]: f["health"] for kind, f in told if kind == "health"}
        assert judged["step-00000010-g0"] == "suspect"

    def test_names_its_remedies(self, tmp_path: Path) -> None:
        remedies = {1: [ClipGradients(0.5, steps=4)]}
        trainer, told = telling(tmp_path, remedies=remedies)
        rolled_back(trainer)
        assert only(told, "rollback")["remedies"] == ["gradients clipped to 0.5 until step 14"]


def test_a_refusal_is_told(tmp_path: Path) -> None:
    trainer, told = telling(tmp_path)
    request = ""
    for step, batch in trainer.guard.steps(10):
        trainer.train_step(step, batch)
        if step == 6:
            request = trainer.ask("recover")
    assert only(told, "refused") == {
        **{"step": 6, "id": request, "action": "recover"},
        "why": "the trainer's own detector has seen no bad step since it resumed",
    }


def test_a_halt_is_told(tmp_path: Path) -> None:
    trainer, told = telling(tmp_path, max_rollbacks=0)
    with pytest.raises(RecoveryHaltedError):
        rolled_back(trainer)
    halted = only(told, "halted")
    assert halted["onset"] == 13
    assert halted["why"].startswith("the rollback budget is spent")


def test_a_detector_that_fails_or_has_no_journal_changes_nothing(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "failing", settings={"exporter": Failing()})
    assert trainer.run(12) == uninterrupted(tmp_path / "without", 12)
