"""`act-alerting supervise` with real trainers that crash, hang, halt and are told to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from alerting.exit_codes import GAVE_UP, HALTED, RESTART
from deploy.demo.servers import REPOSITORY, wait_for
from tests.alerting.recovery.trainer import read_json, uninterrupted
from tests.alerting.supervise.child import STEPS

COMMAND = Path(sys.executable).with_name("act-alerting")
CHILD = "tests.alerting.supervise.child"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1")
WAIT_SECONDS = 60
HANGS = ("12", "--stall-seconds", "10")
"""For trainers that hang at step 12; a step with a save on a slow disk takes less."""


class Run:
    """A run folder under a supervisor, and what came of it."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "run"
        self.steps = tmp_path / "steps.log"
        self.said = tmp_path / "said.log"

    @contextmanager
    def started(
        self, fault: str, when: str = "12", *options: str, launcher: tuple[str, ...] = ()
    ) -> Iterator[subprocess.Popen[bytes]]:
        trainer = (*(launcher or (sys.executable,)), "-m", CHILD)
        command = [
            COMMAND, "supervise", "--run-folder", self.folder, "--grace-seconds", "1", *options,
            "--",
            *trainer, self.folder, self.steps, fault, when,
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
        with self.said.open("ab") as said:
            process = subprocess.Popen(
                list(map(str, command)), stdout=said, stderr=said, env=environment
            )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait(WAIT_SECONDS)

    def supervise(self, *arguments: str, launcher: tuple[str, ...] = ()) -> int:
        with self.started(*arguments, launcher=launcher) as process:
            return process.wait(3 * WAIT_SECONDS)

    def words(self) -> str:
        return self.said.read_text()

    def ready(self) -> int:
        """Wait for the trainer to say that it is; its process id."""
        sign = self.folder / "ready"
        return int(wait_for(sign.read_text, "the trainer", timeout=WAIT_SECONDS))

    def starts(self) -> int:
        return self.words().count("Started ")

    def resumed_bitwise(self, tmp_path: Path) -> bool:
        reference = [repr(r) for r in uninterrupted(tmp_path / "reference", STEPS)]
        seen = self.steps.read_text().splitlines()
        return set(seen) == set(reference) and seen[-1] == reference[-1]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class TestRestarts:
    @pytest.mark.parametrize("fault", ["crash", "killed"])
    def test_a_crashed_run_ends_as_if_nothing_had_happened(self, run, tmp_path, fault) -> None:
        assert run.supervise(fault) == 0, run.words()
        assert run.starts() == 2
        assert run.resumed_bitwise(tmp_path)

    @pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["python", "torchrun"])
    def test_a_trainer_that_was_told_to_end_and_has_saved_pays_nothing(
        self, run, tmp_path, launcher
    ) -> None:
        options = ("12", "--max-restarts", "0")
        assert run.supervise("told", *options, launcher=launcher) == 0, run.words()
        assert run.starts() == 2
        assert run.resumed_bitwise(tmp_path)

    def test_a_trainer_that_wants_a_new_process_pays_nothing(self, run) -> None:
        assert run.supervise("restart", "12", "--max-restarts", "0") == 0, run.words()
        assert run.starts() == 2
        assert "started at once" in run.words()

    @pytest.mark.parametrize("fault", ["crash", "sleep"])
    def test_under_torchrun(self, run, tmp_path, fault) -> None:
        assert run.supervise(fault, *HANGS, launcher=TORCHRUN) == 0, run.words()
        assert run.starts() == 2
        assert run.resumed_bitwise(tmp_path)

    def test_a_crash_loop_ends_and_is_remembered_by_the_next_supervisor(self, run) -> None:
        assert run.supervise("import", "1", "--max-restarts", "2") == GAVE_UP
        assert run.starts() == 3
        assert run.supervise("import", "1", "--max-restarts", "2") == GAVE_UP
        assert run.starts() == 4

    def test_a_crash_at_the_same_step_is_no_progress(self, run) -> None:
        assert run.supervise("crash", "2+", "--max-restarts", "1") == GAVE_UP, run.words()
        # The first restart came after progress: no step had ended before.
        assert run.starts() == 3

    def test_progress_makes_the_budget_whole(self, run) -> None:
        run.folder.mkdir()
        (run.folder / "supervise.json").write_text('{"restarts": 3, "furthest": [0, 0]}')
        assert run.supervise("crash") == 0, run.words()
        assert read_json(run.folder / "supervise.json")["restarts"] == 0

    def test_a_mangled_count_is_counted_anew(self, run) -> None:
        run.folder.mkdir()
        (run.folder / "supervise.json").write_text("{")
        assert run.supervise("crash") == 0, run.words()
        assert "counted anew" in run.words()

    def test_a_halted_run_is_left_alone(self, run) -> None:
        assert run.supervise("halted") == HALTED, run.words()
        assert run.starts() == 1


class TestHangs:
    def test_a_hung_trainer_is_killed_with_all_that_it_started(self, run, tmp_path) -> None:
        assert run.supervise("sleep", *HANGS) == 0, run.words()
        assert not lives(int((run.folder / "lost").read_text()))
        assert run.starts() == 2
        assert "no step has ended for" in run.words()
        assert run.resumed_bitwise(tmp_path)

    def test_a_stopped_trainer_is_killed(self, run, tmp_path) -> None:
        assert run.supervise("stopped", *HANGS) == 0, run.words()
        assert run.starts() == 2
        assert run.resumed_bitwise(tmp_path)

    def test_a_trainer_that_never_begins(self, run) -> None:
        code = run.supervise("ready", "1+", "--start-seconds", "3", "--max-restarts", "0")
        assert code == GAVE_UP
        assert "after its start" in run.words()

    def test_a_request_that_nobody_takes_up(self, run) -> None:
        assert run.supervise("deaf", "12", "--request-seconds", "1") == 0, run.words()
        assert "has not been taken up" in run.words()
        assert run.starts() == 2
        answers = list((run.folder / "control" / "answers").iterdir())
        # The new process stands on a healthy checkpoint and has seen nothing bad.
        assert [json.loads(path.read_text())["result"] for path in answers] == ["refused"]


class TestSignals:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_the_trainer_ends_with_the_supervisor(self, run, number) -> None:
        with run.started("ready", "1") as process:
            trainer = run.ready()
            process.send_signal(number)
            assert process.wait(WAIT_SECONDS) == RESTART
            assert not lives(trainer)

    def test_usr1_to_the_supervisor_has_the_guard_save_and_all_end(self, run) -> None:
        assert run.supervise("asks to be told") == RESTART, run.words()
        assert run.starts() == 1
        assert (run.folder / "checkpoints" / "step-00000012-g0").is_dir()

    def test_usr1_reaches_the_trainer(self, run) -> None:
        with run.started("ready", "1") as process:
            run.ready()
            process.send_signal(signal.SIGUSR1)
            wait_for((run.folder / "usr1").exists, "the signal", timeout=WAIT_SECONDS)
            assert process.poll() is None

    def test_it_ends_while_it_waits_for_a_restart(self, run) -> None:
        with run.started("import", "1", "--max-restarts", "9") as process:
            wait_for(lambda: "again in 2 s" in run.words(), "a pause", timeout=WAIT_SECONDS)
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_SECONDS) == RESTART

    @pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["plain", "torchrun"])
    def test_the_trainer_does_not_outlive_a_killed_supervisor(self, run, launcher) -> None:
        with run.started("slow", "1", launcher=launcher) as process:
            trainer = run.ready()
            process.kill()
            wait_for(lambda: not lives(trainer), "the trainer's end", timeout=WAIT_SECONDS)
        # It was told to end, and has saved.
        assert (
            json.loads((run.folder / "control" / "status.json").read_text())["state"] == "stopped"
        )


class TestWithoutARunFolder:
    def supervise(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [COMMAND, "supervise", *command], capture_output=True, text=True, timeout=WAIT_SECONDS
        )

    def test_crashes_are_counted_and_said(self) -> None:
        done = self.supervise("--max-restarts", "1", sys.executable, "-c", "raise SystemExit(3)")
        assert done.returncode == GAVE_UP
        assert "only crashes are noticed" in done.stderr
        assert done.stderr.count("ended with exit code 3") == 2

    def test_a_good_end_and_the_trainers_own_arguments(self) -> None:
        done = self.supervise(sys.executable, "-c", "import sys; print(sys.argv)", "--max-restarts")
        assert (done.returncode, done.stdout) == (0, "['-c', '--max-restarts']\n")

    def test_no_such_program(self) -> None:
        done = self.supervise("--", "no-such-program")
        assert done.returncode == 2
        assert done.stderr == "act-alerting: no-such-program is no program that can be started.\n"

    def test_help_has_an_example(self) -> None:
        done = self.supervise("--help")
        assert "act-alerting supervise --run-folder runs/gpt" in done.stdout
        assert "torchrun" in done.stdout


def test_the_supervisor_is_light() -> None:
    code = "import sys, alerting.supervise.supervisor; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
