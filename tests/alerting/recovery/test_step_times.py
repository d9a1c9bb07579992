"""From an alert's time to the step that it is about."""

from __future__ import annotations

import pytest

from alerting.recovery.step_times import KEPT, StepTimes
from tests.alerting.recovery.trainer import Trainer


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def train(times, clock, first, last, seconds=5.0):
    for step in range(first, last + 1):
        clock.now += seconds
        times.note(step)


class TestStepTimes:
    def test_the_onset_is_after_a_step_that_had_ended_before(self, tmp_path, clock):
        times = StepTimes(tmp_path / "steps.log", clock)
        times.stand_at(0, 0)
        train(times, clock, 1, 40)  # 200 s
        asked_at = clock.now
        # 60 s ago step 28 ended; every second step is noted.
        assert times.onset(asked_at, 60) == 29
        clock.now += 1000  # taken up much later: what was asked about is as old as ever
        assert times.onset(asked_at, 60) == 29

    def test_a_run_that_is_younger_than_an_alert_knows_nothing(self, tmp_path, clock):
        times = StepTimes(tmp_path / "steps.log", clock)
        times.stand_at(0, 0)
        train(times, clock, 1, 4)
        assert times.onset(clock.now, 60) is None

    @pytest.mark.parametrize("apart", [-86_400, 86_400])
    def test_with_clocks_a_day_apart_its_own_counts(self, tmp_path, clock, apart):
        times = StepTimes(tmp_path / "steps.log", clock)
        times.stand_at(0, 0)
        train(times, clock, 1, 40)
        assert times.onset(clock.now + apart, 60) == 29

    def test_a_new_process_goes_on_with_what_was_noted_up_to_its_step(self, tmp_path, clock):
        times = StepTimes(tmp_path / "steps.log", clock)
        times.stand_at(0, 0)
        train(times, clock, 1, 40)
        with (tmp_path / "steps.log").open("a") as file:
            file.write("0 4")  # cut short by a crash
        again = StepTimes(tmp_path / "steps.log", clock)
        again.stand_at(0, 30)
        assert again.onset(clock.now, 60) == 29
        clock.now += 60
        assert again.onset(clock.now, 60) == 31

    def test_what_was_before_a_rollback_is_forgotten(self, tmp_path, clock):
        times = StepTimes(tmp_path / "steps.log", clock)
        times.stand_at(0, 0)
        train(times, clock, 1, 40)
        times.stand_at(1, 20)
        assert times.onset(clock.now, 60) is None
        clock.now += 60
        assert times.onset(clock.now, 60) == 21

    def test_a_clock_that_is_set_back_loses_nothing(self, tmp_path, clock):
        times = StepTimes(tmp_path / "steps.log", clock)
        times.stand_at(0, 0)
        train(times, clock, 1, 10)
        clock.now -= 3600
        train(times, clock, 11, 40)
        # Noted are now the odd steps.
        assert times.onset(clock.now, 60) == 28

    def test_the_file_does_not_grow_for_ever(self, tmp_path, clock):
        times = StepTimes(tmp_path / "steps.log", clock)
        times.stand_at(0, 0)
        train(times, clock, 1, KEPT + 100, seconds=20)
        StepTimes(tmp_path / "steps.log", clock).stand_at(0, KEPT + 200)
        assert len((tmp_path / "steps.log").read_text().splitlines()) == KEPT

    def test_a_file_that_cannot_be_written_stops_nothing(self, tmp_path, clock, caplog):
        times = StepTimes(tmp_path / "missing" / "steps.log", clock)
        times.stand_at(0, 0)
        train(times, clock, 1, 40)
        assert times.onset(clock.now, 60) == 29
        assert caplog.text.count("cannot be written") == 1


class TestGuard:
    def test_without_a_detector_a_rollback_goes_behind_the_alerts_time(self, tmp_path, clock):
        trainer = Trainer(
            tmp_path,
            settings={"keep": 9, "detection_lag_seconds": 60, "onset_margin_steps": 0},
            watched=False,
        )
        trainer.guard._run._step_times._clock = clock
        asked = None
        for step, batch in trainer.guard.steps(30):
            clock.now += 10
            if step == 24 and asked is None:
                asked = trainer.ask("recover", created_at=clock.now)
            trainer.records.append(trainer.train_step(step, batch))
        # A minute before step 24 had ended, step 18 had: the next one may have been bad.
        answer = trainer.control.read_answer(asked)
        assert (answer.onset, answer.resumed_step) == (19, 15)
