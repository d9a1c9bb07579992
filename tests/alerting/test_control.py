"""The files between receiver and guard: exclusive, whole, and named by nobody's labels."""

from __future__ import annotations

import itertools
import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from alerting.control import Action, Answer, ControlDirectory, Request, new_request_id
from alerting.exceptions import ControlError
from deploy.demo.servers import REPOSITORY
from tests.alerting.deliveries import RUN, register, status

CLAIMANT = """
import sys, time
from pathlib import Path
from alerting.control import ControlDirectory, Request
control, go, name = ControlDirectory(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
print("ready", flush=True)
while not go.exists():
    pass
request = Request(id=name, run="gpt", generation=0, action="recover", alert="A", created_at=1.0)
print(control.claim(request), flush=True)
"""


def request(identifier: str | None = None, action: str = "recover") -> Request:
    return Request(
        id=identifier or new_request_id(),
        run=RUN,
        generation=0,
        action=action,  # type: ignore[arg-type]
        alert="ActRunaway",
        created_at=time.time(),
    )


def answer_to(asked: Request, **fields: object) -> Answer:
    values: dict[str, object] = {
        "id": asked.id,
        "action": asked.action,
        "result": "done",
        "detail": "Rolled back.",
        "step": 1300,
        "onset": 1290,
        "checkpoint": "step-1300-emergency",
        "resumed_from": "step-1000",
        "resumed_step": 1000,
        "generation": 1,
        "answered_at": time.time(),
    }
    return Answer(**(values | fields))  # type: ignore[arg-type]


class TestClaim:
    def test_of_twenty_threads_at_once_exactly_one_wins(self, tmp_path: Path) -> None:
        control = register(tmp_path)
        for round_ in range(10):
            start = threading.Barrier(20)
            won: list[str] = []

            def claim(name: str, start: threading.Barrier = start, won: list[str] = won) -> None:
                mine = request(name)
                start.wait()
                if control.claim(mine):
                    won.append(name)

            threads = [
                threading.Thread(target=claim, args=(f"{round_}-{number}",)) for number in range(20)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

            holder = control.open_request("recover")
            assert holder is not None
            assert won == [holder.id]
            control.answer(answer_to(holder))

    def test_of_several_processes_at_once_exactly_one_wins(self, tmp_path: Path) -> None:
        control, go = register(tmp_path), tmp_path / "go"
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", CLAIMANT, control.path, go, f"p-{number}"],
                cwd=REPOSITORY,
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(6)
        ]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        go.touch()
        answers = [process.communicate(timeout=30)[0].strip() for process in processes]

        assert sorted(answers) == ["False"] * 5 + ["True"]
        holder = control.open_request("recover")
        assert holder is not None
        assert holder.id == f"p-{answers.index('True')}"

    def test_one_kind_does_not_block_the_other(self, tmp_path: Path) -> None:
        control = register(tmp_path)
        assert control.claim(request(action="checkpoint"))
        assert control.claim(request(action="recover"))
        assert not control.claim(request(action="checkpoint"))

    def test_an_answer_opens_the_way_for_the_next(self, tmp_path: Path) -> None:
        control = register(tmp_path)
        first = request()
        assert control.claim(first)
        given = answer_to(first)
        control.answer(given)

        assert control.read_answer(first.id) == given
        assert control.open_request("recover") is None
        assert control.claim(request())

    def test_nothing_but_the_request_is_left_behind(self, tmp_path: Path) -> None:
        control = register(tmp_path)
        control.claim(request())
        control.claim(request())
        names = [path.name for path in (control.path / "requests").iterdir()]
        assert names == ["recover.json"]


class TestOpenRequest:
    @pytest.mark.parametrize(
        "content",
        [
            "",
            "{",
            "[]",
            '{"id": "../../etc/passwd"}',
            json.dumps(
                {
                    "id": "../x",
                    "run": "gpt",
                    "generation": 0,
                    "action": "recover",
                    "alert": "A",
                    "created_at": 1.0,
                }
            ),
            json.dumps(
                {
                    "id": "1-a",
                    "run": "gpt",
                    "generation": True,
                    "action": "recover",
                    "alert": "A",
                    "created_at": 1.0,
                }
            ),
        ],
    )
    def test_a_mangled_request_is_set_aside_and_blocks_nobody(
        self, tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        control = register(tmp_path)
        (control.path / "requests" / "recover.json").write_text(content)

        with pytest.raises(ControlError, match=r"recover\.json"):
            control.open_request("recover")
        with caplog.at_level(logging.WARNING):
            assert control.take_up("recover") is None

        assert "set aside" in caplog.text
        assert len(list((control.path / "requests").glob("*.rejected-*"))) == 1
        assert control.claim(request())

    @pytest.mark.parametrize(
        ("name", "says"), [("checkpoint", "recover"), ("recover", "checkpoint")]
    )
    def test_one_that_asks_for_the_other_kind_is_mangled_and_the_other_kind_untouched(
        self, tmp_path: Path, name: Action, says: Action
    ) -> None:
        control = register(tmp_path)
        other = request(action=says)
        control.claim(other)
        requests = control.path / "requests"
        (requests / f"{name}.json").write_text((requests / f"{says}.json").read_text())

        with pytest.raises(ControlError, match=rf"{name}\.json: 'action' is '{says}'"):
            control.open_request(name)
        assert control.take_up(name) is None
        assert len(list(requests.glob(f"{name}.rejected-*"))) == 1
        assert control.take_up(says) == other
        assert control.claim(request(action=name))

    def test_one_that_is_answered_but_not_closed_is_closed(self, tmp_path: Path) -> None:
        control = register(tmp_path)
        asked = request()
        control.claim(asked)
        content = (control.path / "requests" / "recover.json").read_text()
        control.answer(answer_to(asked))
        # The guard died between the answer and the end of the request.
        (control.path / "requests" / "recover.json").write_text(content)

        assert control.open_request("recover") is None
        assert not control.claim(request())
        assert control.take_up("recover") is None
        assert control.claim(request())

    def test_claims_that_a_crash_left_are_swept_when_the_guard_starts(self, tmp_path: Path) -> None:
        control = register(tmp_path)
        old, new = (control.path / "requests" / f".claim-{name}" for name in ("old", "new"))
        old.touch()
        new.touch()
        os.utime(old, (0, 0))
        control.create()
        assert not old.exists()
        assert new.exists()


class TestStatus:
    def test_comes_back_as_published(self, tmp_path: Path) -> None:
        published = status(generation=2, last_backup_at=1700000000.5, state="recovering")
        control = register(tmp_path)
        control.publish(published)
        assert control.status() == published

    def test_is_none_where_no_guard_registered(self, tmp_path: Path) -> None:
        assert ControlDirectory(tmp_path / "nothing").status() is None

    def test_half_written_is_never_seen(self, tmp_path: Path) -> None:
        control = register(tmp_path)
        enough = threading.Event()

        def publish() -> None:
            for number in itertools.count():
                # Long and short by turns: a file overwritten in place would show a mixture.
                control.publish(status(state="x" * (40_000 * (number % 2) + 1), step=number))
                if enough.is_set():
                    return

        publisher = threading.Thread(target=publish)
        publisher.start()
        try:
            steps = []
            while len(set(steps)) < 50:
                seen = control.status()
                assert seen is not None
                assert len(seen.state) in (1, 7, 40_001)
                steps.append(seen.step)
        finally:
            enough.set()
            publisher.join()

    @pytest.mark.parametrize(
        ("field", "value"),
        [("run", 5), ("generation", "0"), ("generation", 0.5), ("step", None), ("step", True)],
    )
    def test_of_the_wrong_shape_names_the_field(
        self, tmp_path: Path, field: str, value: object
    ) -> None:
        control = register(tmp_path)
        path = control.path / "status.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
        with pytest.raises(ControlError, match=f"status.json: '{field}' is"):
            control.status()

    def test_fields_of_a_newer_guard_are_ignored(self, tmp_path: Path) -> None:
        control = register(tmp_path)
        path = control.path / "status.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"mood": "fine"}))
        assert control.status() is not None


class TestFind:
    def test_goes_by_the_published_name_not_by_the_folder(self, tmp_path: Path) -> None:
        wanted = register(tmp_path, folder="17", run="gpt")
        register(tmp_path, folder="gpt", run="llama")
        found = ControlDirectory.find(tmp_path, "gpt")
        assert found is not None
        assert found.path == wanted.path

    def test_where_none_is_live_the_folder_written_to_last(self, tmp_path: Path) -> None:
        register(tmp_path, folder="a", state="finished", updated_at=200.0)
        register(tmp_path, folder="b", state="halted", updated_at=300.0)
        register(tmp_path, folder="c", state="finished", updated_at=100.0)
        found = ControlDirectory.find(tmp_path, RUN)
        assert found is not None
        assert found.path == tmp_path / "b" / "control"

    @pytest.mark.parametrize("state", ["running", "recovering"])
    def test_the_live_folder_comes_before_newer_ones_that_have_ended(
        self, tmp_path: Path, state: str
    ) -> None:
        register(tmp_path, folder="a", state="finished", updated_at=200.0)
        live = register(tmp_path, folder="b", state=state, updated_at=100.0)
        register(tmp_path, folder="c", state="halted", updated_at=300.0)
        found = ControlDirectory.find(tmp_path, RUN)
        assert found is not None
        assert found.path == live.path

    def test_two_live_folders_of_one_name_are_refused_by_name(self, tmp_path: Path) -> None:
        register(tmp_path, folder="seed-1", updated_at=200.0)
        register(tmp_path, folder="seed-2", state="recovering", updated_at=300.0)
        register(tmp_path, folder="seed-3", run="other", updated_at=300.0)
        register(tmp_path, folder="seed-4", state="finished", updated_at=400.0)
        with pytest.raises(ControlError, match=r"seed-1 and .*seed-2 both .* 'gpt'"):
            ControlDirectory.find(tmp_path, RUN)

    @pytest.mark.parametrize(
        "label", ["../../etc", "..", "/etc", "*", "gpt/../other", "", "gpt\x00", "outside"]
    )
    def test_a_label_is_no_path(self, tmp_path: Path, label: str) -> None:
        runs = tmp_path / "runs"
        register(runs)
        # What a label that worked as a path would reach.
        register(tmp_path, folder="outside", run="somebody else")
        before = sorted(tmp_path.rglob("*"))
        assert ControlDirectory.find(runs, label) is None
        assert sorted(tmp_path.rglob("*")) == before

    def test_one_mangled_status_hides_no_other_run(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        wanted = register(tmp_path, folder="good")
        mangled = register(tmp_path, folder="bad", run="other")
        (mangled.path / "status.json").write_text('{"run": "gp')
        found = ControlDirectory.find(tmp_path, RUN)
        assert found is not None
        assert found.path == wanted.path
        assert "status.json" in caplog.text

    def test_a_missing_runs_folder_has_no_runs(self, tmp_path: Path) -> None:
        assert ControlDirectory.find(tmp_path / "none", RUN) is None
