"""`act-exporter report`: what stands on the page, for people who were not there."""

from __future__ import annotations

import gzip
import html
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from act_exporter.exceptions import SettingError
from act_exporter.report import reading
from act_exporter.report.incident import find_incidents, look_closely, most_telling
from act_exporter.report.reading import read
from act_exporter.report.report import of_health, of_incident
from act_exporter.report.story import tell
from tests.act_exporter.journals import (
    FAULT_STEP,
    LAYER,
    START,
    lines,
    note,
    record,
    steady,
    train,
    write,
)

LAYERS = ("a", "b", "c")


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "act_exporter.cli", "report", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
    )


def page_of(*places: Path, run: str | None = None, number: int | None = None) -> str:
    """The page, as the command makes it."""
    recording = read(list(places), run)
    incidents = find_incidents(recording)
    if not incidents:
        return of_health(recording).html
    number = number or most_telling(incidents)
    closely, chosen = look_closely(list(places), recording, incidents[number - 1])
    return of_incident(tell(closely, chosen), incidents, recording, number).html


def text_of(page: str) -> str:
    """What a reader sees, but for pictures: tags become spaces."""
    page = re.sub(r"<(svg|style).*?</\1>", "", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())


def heading(page: str) -> str:
    return text_of(page[page.index("<h1>") : page.index("</h1>")])


@pytest.fixture(scope="module")
def rolled_back(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The journal of a real run: a layer a thousandfold, a request, a rollback, recovery."""
    return train(tmp_path_factory.mktemp("rolled-back"), factor=1000.0)


class TestARunThatWasRolledBack:
    def test_names_the_layer_that_the_fault_was_put_into(self, rolled_back: Path) -> None:
        page = page_of(rolled_back)
        assert heading(page) == (
            f"gpt-report: the output of {LAYER} went bad first, at step {FAULT_STEP}"
        )
        assert "An activation fault: layers went bad while" in text_of(page)
        assert re.search(r"absmax [\d.,]+, [\d.,]+ times its baseline of [\d.]+", text_of(page))

    def test_tells_what_was_asked_saved_and_done(self, rolled_back: Path) -> None:
        text = text_of(page_of(rolled_back))
        for what in (
            "first bad step",
            "a rollback was asked for For the alert Test",
            "emergency checkpoint step-00000088-g0-emergency",
            "rolled back To step-00000060-g0, 28 steps back.",
            "remedy gradients clipped to 0.5 until step 70",
            "first clean step",
            "clean at the step at which it went bad before",
            "100 sampled steps without a bad one",
        ):
            assert what in text
        assert "The run has recovered" in text
        assert "The state of step 88 was kept as step-00000088-g0-emergency." in text

    def test_is_told_in_the_order_in_which_it_happened(self, rolled_back: Path) -> None:
        text = text_of(page_of(rolled_back))
        text = text[text.index("Timeline") : text.index("Step by step")]
        order = [
            "first bad step",
            "asked for",
            "emergency checkpoint",
            "rolled back",
            "first clean",
        ]
        places = [text.index(what) for what in order]
        assert places == sorted(places)

    def test_says_why_that_checkpoint_and_no_newer_one(self, rolled_back: Path) -> None:
        text = text_of(page_of(rolled_back))
        text = text[text.index("Checkpoints") :]
        assert "The run went back to step-00000060-g0" in text
        assert re.search(
            r"step-00000080-g0 80 periodic [\d:.]+ suspect suspect: saved at or after step 74;"
            rf" step {FAULT_STEP} was bad",
            text,
        )
        assert re.search(r"step-00000060-g0 60 periodic [\d:.]+ \w+ chosen: ", text)
        assert "its kind, emergency, is for people only" in text

    def test_without_notes_the_records_say_the_same(
        self, rolled_back: Path, tmp_path: Path
    ) -> None:
        """A journal of an older version, or of a trainer that was killed before it told of it."""
        folder = write(tmp_path, map(json.loads, lines(rolled_back)))
        (path,) = folder.iterdir()
        path.write_text("".join(line for line in lines(rolled_back) if '"note"' not in line))
        page = page_of(folder)
        assert heading(page) == (
            f"gpt-report: the output of {LAYER} went bad first, at step {FAULT_STEP}"
        )
        assert "it was found in the records" in text_of(page)
        assert "The journals have no baselines: they were learnt" in text_of(page)
        assert "rolled back, and clean since" in text_of(page)

    def test_the_command_writes_page_and_picture(self, rolled_back: Path, tmp_path: Path) -> None:
        done = command(rolled_back, "-o", tmp_path / "r.html", "--png", tmp_path / "r.png")
        assert done.returncode == 0, done.stderr
        assert LAYER in done.stdout
        assert "rolled back, and clean since" in done.stdout
        assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
        assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_nan_is_named_as_such(tmp_path: Path) -> None:
    page = page_of(train(tmp_path, factor=math.nan))
    assert f"{LAYER} went bad first, at step {FAULT_STEP}" in heading(page)
    text = text_of(page)
    assert "NaN among its elements" in text
    assert "The loss went from" in text
    assert "to NaN or Inf" in text


def test_a_healthy_run_gives_a_report_of_health(tmp_path: Path) -> None:
    journal = train(tmp_path, steps=60)
    done = command(journal, "-o", tmp_path / "r.html")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "gpt-report: no incident (healthy)\n"
    text = text_of((tmp_path / "r.html").read_text())
    assert "sampled steps, up to step 60, no layer was above 100 times its baseline" in text
    assert "step-00000040-g0" in text


class TestFirst:
    def test_is_the_first_in_the_order_of_execution(self, tmp_path: Path) -> None:
        """b runs before a, whatever the order of the lines."""
        bad = {(150, "a"): 900.0, (150, "b"): 300.0, (151, "c"): 9000.0}
        depths = [
            note("depth", 1, layer=layer, tensor="output", depth=depth)
            for layer, depth in (("a", 2), ("b", 1), ("c", 3))
        ]
        folder = write(tmp_path, depths + steady(LAYERS, range(1, 160), bad))
        assert heading(page_of(folder)) == "hand: the output of b went bad first, at step 150"

    def test_is_held_against_the_baseline_of_its_time(self, tmp_path: Path) -> None:
        told = [
            note("baseline", 1, layer="a", tensor="output", absmax=0.5),
            note("baseline", 100, layer="a", tensor="output", absmax=0.02),
        ]
        folder = write(tmp_path, told + steady(("a",), range(1, 120), {(110, "a"): 3.0}))
        text = text_of(page_of(folder))
        assert "absmax 3, 150 times its baseline of 0.02" in text
        assert "learnt" not in text

    def test_is_of_the_rank_that_had_it(self, tmp_path: Path) -> None:
        write(tmp_path, steady(LAYERS, range(1, 300)))
        write(tmp_path, steady(LAYERS, range(1, 300), {(250, "b"): 500.0}, rank=1), rank=1)
        text = text_of(page_of(tmp_path))
        assert "the output of b was the first to go bad on rank 1" in text
        assert "of 2 ranks" in text

    def test_of_two_folders_is_found_as_of_one(self, tmp_path: Path) -> None:
        one = write(tmp_path / "one", steady(LAYERS, range(1, 200)))
        two = write(
            tmp_path / "two", steady(LAYERS, range(1, 200), {(150, "c"): 500.0}, rank=1), rank=1
        )
        assert "output of c went bad first, at step 150" in heading(page_of(one, two))


class TestIncidents:
    BAD = {(120, "a"): 500.0, (300, "b"): 500.0}  # noqa: RUF012

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return write(tmp_path / "journal", steady(LAYERS, range(1, 420), self.BAD))

    def test_are_listed(self, folder: Path) -> None:
        done = command(folder, "--list")
        assert done.returncode == 0, done.stderr
        assert [" ".join(line.split()) for line in done.stdout.splitlines()] == [
            "1 step 120 2027-01-15 08:02:00.0 UTC the output of a passed",
            "2 step 300 2027-01-15 08:05:00.0 UTC the output of b passed",
        ]

    def test_the_last_one_is_shown_and_all_are_named(self, folder: Path) -> None:
        page = page_of(folder)
        assert "output of b went bad first, at step 300" in heading(page)
        assert "it passed by itself" in text_of(page)
        assert "1 120 2027-01-15 08:02:00.0 UTC the output of a passed" in text_of(page)

    def test_another_one_can_be_asked_for(self, folder: Path, tmp_path: Path) -> None:
        page = tmp_path / "r.html"
        assert command(folder, "-o", page, "--incident", 1).returncode == 0
        assert "output of a went bad first, at step 120" in heading(page.read_text())
        done = command(folder, "-o", page, "--incident", 3)
        assert done.returncode == 2
        assert done.stderr == "act-exporter: --incident 3: run hand has 2, see --list\n"

    def test_a_jump_of_the_loss_does_not_hide_a_layer(self, tmp_path: Path) -> None:
        jump = [note("verdict", 350, verdict="data")]
        folder = write(tmp_path, steady(LAYERS, range(1, 420), self.BAD) + jump)
        assert "output of b went bad first" in heading(page_of(folder))
        alone = write(tmp_path / "alone", steady(LAYERS, range(1, 420)) + jump)
        page = page_of(alone)
        assert heading(page) == "hand: no layer, but the run's numbers went bad at step 350"
        assert "A bad batch:" in text_of(page)

    def test_one_that_ends_with_the_journal_says_so(self, tmp_path: Path) -> None:
        bad = {(step, "a"): 500.0 for step in range(250, 260)}
        folder = write(tmp_path, steady(LAYERS, range(1, 260), bad))
        assert "still bad where the journals end" in text_of(page_of(folder))

    def test_a_restart_by_hand_is_no_rollback(self, tmp_path: Path) -> None:
        """The same steps come again in the same generation, later."""
        again = [
            {**entry, "time": entry["time"] + 500} for entry in steady(LAYERS, range(200, 400))
        ]
        bad = {(step, "a"): 500.0 for step in range(250, 260)}
        folder = write(tmp_path, steady(LAYERS, range(1, 260), bad) + again)
        page = page_of(folder)
        assert "output of a went bad first, at step 250" in heading(page)
        assert "started again, and clean since" in text_of(page)

    def test_a_halt_is_told(self, tmp_path: Path) -> None:
        onset = note("onset", 250, layer="a", tensor="output", rule="hard", verdict="activation")
        halted = note("halted", 252, onset=250, why="the rollback budget is spent (2 used)")
        bad = {(step, "a"): 500.0 for step in range(250, 253)}
        folder = write(tmp_path, [*steady(LAYERS, range(1, 253), bad), onset, halted])
        text = text_of(page_of(folder))
        assert "halted: people must look" in text
        assert "The guard halted: the rollback budget is spent (2 used)." in text


class TestVeryLargeJournals:
    def test_are_read_coarsely_and_the_incident_exactly(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bad = {(step, "b"): 300.0 for step in range(1_503, 1_507)}
        folder = write(tmp_path, steady(LAYERS, range(1, 3_000), bad))
        monkeypatch.setattr(reading, "RECORDS_LIMIT", 1_500)
        recording = read([folder])
        assert recording.width > 4
        assert len(recording.step) < 1_000
        (found,) = find_incidents(recording)
        closely, incident = look_closely([folder], recording, found)
        assert closely.width == 1
        assert (incident.step, incident.tensor) == (1_503, ("b", "output"))
        assert incident.end < len(closely.step) < 3_000


class TestInput:
    def test_torn_and_damaged_lines_are_skipped_and_counted(self, tmp_path: Path) -> None:
        entries = steady(LAYERS, range(1, 200), {(150, "b"): 500.0})
        folder = write(tmp_path / "journal", entries)
        (path,) = folder.iterdir()
        odd: list[Any] = [
            *("{", "no JSON", "[1]", "null", '{"note":"training","step":"x"}'),
            json.dumps({**entries[0], "absmax": None}),
            json.dumps({**entries[0], "layer": 3}),
            json.dumps({**entries[0], "time": "soon"}),
            json.dumps(note("odd", 3) | {"time": None}),
        ]
        path.write_text(path.read_text() + "\n".join(odd) + "\n" + json.dumps(entries[0])[:40])
        done = command(folder, "-o", tmp_path / "r.html")
        assert done.returncode == 0, done.stderr
        assert done.stderr == "10 lines skipped: torn by a crash, or no record\n"
        assert "output of b went bad first, at step 150" in done.stdout
        assert "10 lines skipped" in text_of((tmp_path / "r.html").read_text())

    def test_a_damaged_file_is_read_up_to_the_damage(self, tmp_path: Path) -> None:
        entries = steady(LAYERS, range(1, 3_000), {(150, "b"): 500.0})
        folder = write(tmp_path, entries)
        (path,) = folder.iterdir()
        whole = gzip.compress(path.read_bytes())
        Path(f"{path}.gz").write_bytes(whole[: len(whole) // 2])
        path.unlink()
        recording = read([folder])
        assert recording.skipped >= 1
        assert 0 < recording.records < len(entries)
        assert find_incidents(recording)[0].step == 150

    def test_several_runs_are_refused_until_one_is_chosen(self, tmp_path: Path) -> None:
        other = steady(LAYERS, range(1, 200), run="other")
        folder = write(tmp_path / "journal", steady(LAYERS, range(1, 200)) + other)
        page = tmp_path / "r.html"
        done = command(folder, "-o", page)
        assert done.returncode == 2
        assert done.stderr == (
            "act-exporter: the journals are of several runs, hand, other: choose one with --run\n"
        )
        assert not page.exists()
        assert command(folder, "-o", page, "--run", "other").returncode == 0
        assert heading(page.read_text()) == "other: no incident"
        assert "no run 'third'" in command(folder, "-o", page, "--run", "third").stderr

    def test_one_file_will_do(self, tmp_path: Path) -> None:
        (path,) = write(tmp_path, steady(LAYERS, range(1, 200), {(150, "b"): 500.0})).iterdir()
        assert "output of b" in heading(page_of(path))

    @pytest.mark.parametrize(
        ("name", "sentence"),
        [
            ("missing", "is no folder"),
            ("empty", "holds no journal"),
            ("notes.txt", "is no journal: their names begin with act-journal-rank"),
        ],
    )
    def test_what_is_no_journal_is_refused_in_a_sentence(
        self, tmp_path: Path, name: str, sentence: str
    ) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "notes.txt").touch()
        done = command(tmp_path / name, "-o", tmp_path / "r.html")
        assert done.returncode == 2
        assert done.stderr.startswith(f"act-exporter: {tmp_path / name} {sentence}")
        assert done.stderr.count("\n") == 1

    def test_journals_without_records_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(SettingError, match="hold no records"):
            read([write(tmp_path, [note("training", 1, loss=1.0)])])

    def test_where_to_write_must_be_said(self, tmp_path: Path) -> None:
        done = command(tmp_path)
        assert done.returncode == 2
        assert "say where to write" in done.stderr

    def test_a_page_that_cannot_be_written_is_an_error(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "journal", steady(LAYERS, range(1, 20)))
        done = command(folder, "-o", tmp_path / "missing" / "r.html")
        assert done.returncode == 1
        assert "No such file or directory" in done.stderr


def test_numbers_that_are_not_finite_are_seen(tmp_path: Path) -> None:
    told = [
        note("training", step, loss="NaN" if step >= 150 else 2.0, learning_rate=0.1)
        for step in range(1, 160)
    ]
    bad = {(step, "b"): 500.0 for step in range(150, 160)}
    recording = read([write(tmp_path, told + steady(LAYERS, range(1, 160), bad))])
    (incident,) = find_incidents(recording)
    loss = tell(recording, incident).numbers["loss"]
    assert (loss.before, loss.largest) == (2.0, math.inf)


def test_a_record_after_midnight_keeps_its_time(tmp_path: Path) -> None:
    """Times are UTC, and say so."""
    entry = record(1, "a", 1.0)
    recording = read([write(tmp_path, [entry])])
    assert recording.time.tolist() == [START + 1]
    assert "2027-01-15 08:00:01.0 UTC" in text_of(of_health(recording).html)
