"""`act-alerting checkpoints` on the run folders of real guards."""

from __future__ import annotations

import inspect
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from alerting.checkpoint_commands import ONSET_MARGIN_STEPS
from alerting.checkpoint_table import COLUMNS
from alerting.recovery import TrainingGuard
from deploy.demo.servers import REPOSITORY
from tests.alerting.recovery.trainer import Trainer, read_json
from tests.alerting.test_cli import COMMAND, run


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run that was rolled back from step 22 to 15, and was killed at step 33."""
    folder = tmp_path_factory.mktemp("runs") / "toy"
    trainer = Trainer(folder, settings={"keep": 4})
    for step, batch in trainer.guard.steps(40):
        trainer.train_step(step, batch)
        if step == 22 and not trainer.detector.resets[1:]:
            trainer.break_model()
            trainer.ask("recover")
        if step == 33:
            break
    return folder


@pytest.fixture
def folder(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "toy"))


def checkpoints(*arguments):
    return run("checkpoints", *arguments)


def listed(folder):
    """The rows of `list`, by checkpoint."""
    answer = checkpoints("list", folder)
    assert answer.returncode == 0, answer.stderr
    header, *lines = answer.stdout.splitlines()
    assert header.split("\t") == list(COLUMNS)
    rows = [dict(zip(COLUMNS, line.split("\t"), strict=True)) for line in lines]
    return {row["checkpoint"]: row for row in rows}


def content(folder):
    """Every file below `folder` with its bytes and its time."""
    return {
        path: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def damage(folder, name):
    path = folder / "checkpoints" / name / "rank-00000.pt"
    path.write_bytes(path.read_bytes()[:-3])


def resumed(folder, **settings):
    """The step that a new process of the run goes on from."""
    trainer = Trainer(folder, settings={"keep": 4, **settings})
    trainer.run(40)
    return trainer.records[0][0] - 1


class TestList:
    def test_a_row_a_checkpoint_the_newest_first(self, folder):
        rows = listed(folder)
        assert list(rows) == [
            "step-00000030-g1",
            "step-00000025-g1",
            "step-00000020-g1",
            "step-00000022-g0-emergency",
            "step-00000020-g0",
            "step-00000015-g0",
        ]
        row = rows["step-00000020-g1"]
        assert (row["step"], row["generation"], row["kind"]) == ("20", "1", "periodic")
        assert (row["parent"], row["health"]) == ("step-00000015-g0", "confirmed")
        assert row["reason"] == "no bad step in the 10 steps after it"
        assert row["size"].endswith("kB")
        assert row["pinned"] == "-"

    def test_which_are_on_the_line_and_which_the_next_start_takes(self, folder):
        places = {name: row["on line"] for name, row in listed(folder).items()}
        assert places == {
            "step-00000030-g1": "yes, next start",
            "step-00000025-g1": "yes",
            "step-00000020-g1": "yes",
            "step-00000022-g0-emergency": "-",
            "step-00000020-g0": "-",
            "step-00000015-g0": "yes",
        }
        assert resumed(folder) == 30

    def test_json(self, folder):
        document = json.loads(checkpoints("list", folder, "--json").stdout)
        assert document["run"] == "toy"
        assert document["next_start"] == "step-00000030-g1"
        assert document["recovery"] is None
        oldest = document["checkpoints"][-1]
        manifest = read_json(folder / "checkpoints" / "step-00000015-g0" / "manifest.json")
        assert oldest["bytes"] == sum(file["bytes"] for file in manifest["files"].values())
        assert oldest["created_at"] == manifest["created_at"]
        assert (oldest["health"], oldest["by"], oldest["on_line"]) == ("confirmed", "guard", True)

    def test_while_the_trainer_runs(self, tmp_path):
        trainer = Trainer(tmp_path / "toy")
        for step, batch in trainer.guard.steps(8):
            trainer.train_step(step, batch)
            if step == 7:
                assert list(listed(tmp_path / "toy")) == trainer.names()[::-1]

    def test_an_unfinished_recovery_is_said(self, folder):
        ledger = read_json(folder / "guard.json")
        ledger["recovery"] = {
            "request_id": "r",
            "step": 33,
            "onset": 32,
            "generation": 1,
            "paid": True,
            "target": None,
        }
        (folder / "guard.json").write_text(json.dumps(ledger))
        answer = checkpoints("list", folder)
        assert "A recovery from step 33 is not over" in answer.stdout
        assert "plan --onset 32" in answer.stdout
        assert "next start\n" not in answer.stdout

    def test_without_guard_json_as_the_guard_goes_on(self, folder):
        (folder / "guard.json").unlink()
        assert listed(folder)["step-00000030-g1"]["on line"] == "yes, next start"
        assert resumed(folder, run="toy") == 30

    def test_a_mangled_manifest_is_said_and_hides_no_other(self, folder):
        (folder / "checkpoints" / "step-00000025-g1" / "manifest.json").write_text("{")
        answer = checkpoints("list", folder)
        assert "checkpoint step-00000025-g1 is not used" in answer.stderr
        assert "step-00000030-g1" in answer.stdout

    def test_in_a_terminal_it_is_a_table(self, folder):
        master, slave = pty.openpty()
        environment = {"PATH": "/usr/bin:/bin", "COLUMNS": "200", "TERM": "xterm"}
        argv = [COMMAND, "checkpoints", "list", folder]
        subprocess.run(argv, stdout=slave, env=environment, timeout=60, check=True)
        os.close(slave)
        shown = re.sub(r"\x1b\[[\d;]*m", "", os.read(master, 65_536).decode(errors="ignore"))
        os.close(master)
        assert "┃ checkpoint" in shown
        assert "│ step-00000030-g1" in shown


class TestReading:
    """What only looks changes nothing, and needs no torch."""

    def test_nothing_is_changed(self, folder):
        damage(folder, "step-00000030-g1")
        before = content(folder)
        for arguments in (
            ["list"],
            ["list", "--json"],
            ["verify", "--all"],
            ["plan", "--onset", "32"],
            ["plan", "--onset", "32", "--dry-run", "--no-verify"],
        ):
            checkpoints(arguments[0], folder, *arguments[1:])
        assert content(folder) == before

    def test_no_torch_is_imported(self, folder):
        script = (
            "import sys\nfrom alerting.cli import main\n"
            "try:\n    main()\nfinally:\n    print('torch' in sys.modules, file=sys.stderr)"
        )
        for command in (["list", folder], ["verify", folder], ["plan", folder, "--onset", "32"]):
            argv = [sys.executable, "-c", script, "checkpoints", *map(str, command)]
            done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
            assert (done.returncode, done.stderr) == (0, "False\n")


class TestVerify:
    def test_all_are_whole(self, folder):
        answer = checkpoints("verify", folder, "--all")
        assert answer.returncode == 0
        assert answer.stdout.count(": whole, ") == 6

    def test_without_a_name_the_one_that_the_next_start_takes(self, folder):
        answer = checkpoints("verify", folder)
        assert answer.stdout.startswith("step-00000030-g1: whole")
        assert answer.stdout.count("\n") == 1

    def test_a_bad_one_is_1_and_says_which_file_and_how(self, folder):
        damage(folder, "step-00000025-g1")
        path = folder / "checkpoints" / "step-00000030-g1" / "__0_0.distcp"
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        answer = checkpoints(
            "verify", folder, "step-00000030-g1", "step-00000025-g1", "step-00000020-g1"
        )
        assert answer.returncode == 1
        altered, truncated, last = answer.stdout.splitlines()
        assert altered == (
            "step-00000030-g1: __0_0.distcp does not have the hash that its manifest gives"
        )
        assert re.fullmatch(
            r"step-00000025-g1: rank-00000.pt has \d+ bytes, its manifest says \d+", truncated
        )
        assert last.startswith("step-00000020-g1: whole")
        assert answer.stderr == "act-alerting: not whole: 2 of 3 checkpoints.\n"
        assert listed(folder)["step-00000025-g1"]["health"] == "pending"


class TestMark:
    def test_a_suspect_one_is_not_gone_on_from(self, folder):
        answer = checkpoints("mark", folder, "step-00000030-g1", "suspect", "--reason", "shard 17")
        assert answer.returncode == 0, answer.stderr
        assert answer.stdout.splitlines() == [
            "step-00000030-g1 is suspect: shard 17",
            "The next start goes on from step-00000025-g1, if that is whole.",
        ]
        row = listed(folder)["step-00000030-g1"]
        assert (row["health"], row["reason"]) == ("suspect", "operator: shard 17")
        assert resumed(folder) == 25

    def test_an_operator_may_trust_again_what_the_guard_does_not(self, folder):
        first = checkpoints("mark", folder, "step-00000030-g1", "suspect", "--reason", "a")
        second = checkpoints("mark", folder, "step-00000030-g1", "confirmed", "--reason", "b")
        assert first.returncode == second.returncode == 0
        assert listed(folder)["step-00000030-g1"]["health"] == "confirmed"
        assert resumed(folder) == 30

    def test_a_corrupt_one_stays_so_until_it_is_whole(self, folder):
        name = "step-00000030-g1"
        path = folder / "checkpoints" / name / "rank-00000.pt"
        whole = path.read_bytes()
        damage(folder, name)
        assert resumed(folder) == 25
        assert listed(folder)[name]["health"] == "corrupt"
        answer = checkpoints("mark", folder, name, "confirmed", "--reason", "looked at it")
        assert answer.returncode == 1
        assert f"{name} stays corrupt: rank-00000.pt has" in answer.stderr
        assert listed(folder)[name]["health"] == "corrupt"
        path.write_bytes(whole)
        answer = checkpoints("mark", folder, name, "confirmed", "--reason", "brought it back")
        assert answer.returncode == 0
        assert listed(folder)[name]["health"] == "confirmed"

    @pytest.mark.parametrize("name", ["corrupt", "pending", "good"])
    def test_other_verdicts_are_no_persons(self, folder, name):
        answer = checkpoints("mark", folder, "step-00000030-g1", name, "--reason", "x")
        assert answer.returncode == 2
        assert f"must be suspect or confirmed, not '{name}'" in answer.stderr

    def test_a_reason_is_needed(self, folder):
        answer = checkpoints("mark", folder, "step-00000030-g1", "suspect", "--reason", " ")
        assert answer.returncode == 2
        assert "--reason: say why" in answer.stderr

    def test_a_hostile_reason_steers_nothing(self, folder):
        reason = "a\x1b[2J\nb"
        answer = checkpoints("mark", folder, "step-00000030-g1", "suspect", "--reason", reason)
        assert "suspect: a [2J b\n" in answer.stdout
        assert listed(folder)["step-00000030-g1"]["reason"] == "operator: a [2J b"


class TestPin:
    def test_what_is_pinned_stays_until_it_is_unpinned(self, folder):
        name = "step-00000015-g0"
        answer = checkpoints("pin", folder, name, "--reason", "for the paper")
        assert answer.stdout == f"{name} is pinned: it stays until it is unpinned\n"
        assert listed(folder)[name]["pinned"] == "yes: for the paper"
        checkpoints("pin", folder, "step-00000022-g0-emergency")
        resumed(folder, keep=2, save_every_steps=1)
        kept = set(listed(folder))
        assert {name, "step-00000022-g0-emergency"} <= kept
        assert checkpoints("unpin", folder, "step-00000022-g0-emergency").stdout == (
            "step-00000022-g0-emergency is no longer pinned\n"
        )
        assert checkpoints("unpin", folder, name).returncode == 0
        assert checkpoints("unpin", folder, name).stdout == f"{name} was not pinned\n"


class TestPlan:
    def test_each_newer_one_has_its_reason(self, folder):
        damage(folder, "step-00000025-g1")
        answer = checkpoints("plan", folder, "--onset", "31", "--margin", "2", "--dry-run")
        assert answer.returncode == 0
        *refused, corrupt, taken = answer.stdout.splitlines()
        assert refused == ["not step-00000030-g1: saved at or after step 29; step 31 was bad"]
        assert corrupt.startswith("not step-00000025-g1: corrupt: rank-00000.pt has ")
        assert taken == "step-00000020-g1, 11 steps before step 31: a rollback takes this"

    @pytest.mark.parametrize("marked", [False, True])
    def test_the_guard_does_what_was_planned(self, folder, marked):
        if marked:
            checkpoints("mark", folder, "step-00000025-g1", "suspect", "--reason", "x")
        answer = checkpoints("plan", folder, "--onset", "31", "--margin", "2")
        planned = answer.stdout.splitlines()[-1].split(",")[0]
        trainer = Trainer(folder, settings={"keep": 4})
        for step, batch in trainer.guard.steps(40):
            if step == 31 and not trainer.detector.resets[1:]:
                trainer.break_model()
                request = trainer.ask("recover", generation=1)
            trainer.train_step(step, batch)
        answered = read_json(folder / "control" / "answers" / f"{request}.json")
        assert answered["resumed_from"] == planned
        assert planned == ("step-00000020-g1" if marked else "step-00000025-g1")

    def test_from_the_same_place_again_it_goes_one_further_back(self, tmp_path):
        trainer = Trainer(tmp_path / "toy", settings={"keep": 4})
        for step, batch in trainer.guard.steps(40):
            trainer.train_step(step, batch)
            if step == 19:
                if trainer.detector.resets[1:]:
                    break
                trainer.break_model()
                trainer.ask("recover")
        answer = checkpoints("plan", tmp_path / "toy", "--onset", "19", "--margin", "2")
        assert answer.stdout.splitlines()[-2:] == [
            "not step-00000015-g0: the run began again from it, and the anomaly came again",
            "step-00000010-g0, 9 steps before step 19: a rollback takes this",
        ]

    def test_nothing_to_go_back_to_is_1(self, folder):
        answer = checkpoints("plan", folder, "--onset", "1")
        assert answer.returncode == 1
        assert answer.stderr == (
            "act-alerting: nothing to roll back to from step 1: the guard would halt the run.\n"
        )
        assert "not step-00000022-g0-emergency: its kind, emergency, is for people only" in (
            answer.stdout
        )
        assert "not step-00000020-g0: on an abandoned line" in answer.stdout

    def test_a_spent_budget_is_said(self, folder):
        status = read_json(folder / "control" / "status.json")
        (folder / "control" / "status.json").write_text(json.dumps({**status, "rollbacks_left": 0}))
        answer = checkpoints("plan", folder, "--onset", "31")
        assert answer.stdout.endswith(
            "the run has no rollback left: asked for one, the guard halts it\n"
        )

    def test_the_margin_is_the_guards_unless_another_is_given(self):
        guard = inspect.signature(TrainingGuard).parameters
        assert guard["onset_margin_steps"].default == ONSET_MARGIN_STEPS


class TestMistakes:
    def test_a_name_nearly_right_is_2_and_suggested(self, folder):
        for command in (["verify"], ["pin"], ["unpin"], ["mark", "suspect", "--reason", "x"]):
            answer = checkpoints(command[0], folder, "step-00000030-g3", *command[1:])
            assert answer.returncode == 2
            assert "has no checkpoint 'step-00000030-g3'; did you mean step-" in answer.stderr
            assert "step-00000030-g1" in answer.stderr

    def test_what_is_no_run_folder_is_2(self, tmp_path):
        answer = checkpoints("list", tmp_path)
        assert answer.returncode == 2
        assert f"{tmp_path} is no run folder" in answer.stderr
        answer = checkpoints("list", tmp_path / "nowhere")
        assert answer.returncode == 2
        assert "is not there" in answer.stderr

    def test_no_checkpoint_yet_is_1(self, tmp_path):
        (tmp_path / "checkpoints").mkdir()
        answer = checkpoints("list", tmp_path)
        assert answer.returncode == 1
        assert "holds no checkpoint yet" in answer.stderr

    def test_a_mangled_ledger_is_1(self, folder):
        (folder / "guard.json").write_text("{")
        answer = checkpoints("list", folder)
        assert answer.returncode == 1
        assert "guard.json cannot be read" in answer.stderr
        assert "Traceback" not in answer.stderr

    def test_what_cannot_be_written_is_1(self, folder):
        checkpoint = folder / "checkpoints" / "step-00000030-g1"
        (checkpoint / "pinned.json").mkdir()
        answer = checkpoints("pin", folder, checkpoint.name)
        assert answer.returncode == 1
        assert "step-00000030-g1 cannot be changed" in answer.stderr

    def test_help_teaches_with_an_example(self):
        for command in ("list", "verify", "mark", "pin", "unpin", "plan"):
            answer = checkpoints(command, "--help")
            assert answer.returncode == 0
            assert f"act-alerting checkpoints {command} runs/gpt" in answer.stdout
