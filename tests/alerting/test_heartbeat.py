"""The heartbeat: at most one a second, read whole or not at all, and never in a training's way."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from alerting.heartbeat import HeartbeatFile, read_heartbeat
from tests.alerting.recovery.trainer import Trainer


def test_the_guard_beats_while_it_trains(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    trainer.run(3)
    beat = read_heartbeat(tmp_path / "control")
    assert beat is not None
    assert beat.pid == os.getpid()
    assert beat.generation == 0
    assert 1 <= beat.step <= 3


def test_fast_steps_do_not_each_beat(tmp_path: Path) -> None:
    file = HeartbeatFile(tmp_path)
    file.beat(0, 1)
    file.beat(0, 2)
    beat = read_heartbeat(tmp_path)
    assert beat is not None
    assert beat.position == (0, 1)


def test_one_that_cannot_be_written_stops_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alerting.heartbeat.PACE_SECONDS", 0)
    file = HeartbeatFile(tmp_path / "missing")
    with caplog.at_level(logging.WARNING):
        file.beat(0, 1)
        file.beat(0, 2)
    assert [record.message.split(":")[0] for record in caplog.records] == ["step 1"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"step": 1}', "null"])
def test_a_mangled_one_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "heartbeat.json").write_text(text)
    assert read_heartbeat(tmp_path) is None
