"""The journal: what an operator finds on disk, whatever becomes of disk and process."""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from act_exporter import rotation
from act_exporter.exceptions import SettingError
from act_exporter.journal import Journal
from act_exporter.records import STATISTICS, Reader, Record, Sampled, Writing
from act_exporter.rotation import Limits
from act_exporter.rows import COLUMNS, Column, Statistics
from act_exporter.taps import Tap
from deploy.demo.servers import REPOSITORY, wait_for

MANY = [Tap(layer=f"h.{index}", tensor="output", kind="h") for index in range(1000)]
TAPS = MANY[:3]
DAY = 86_400
START = 1_700_000_000.0


def sample(absmax: float, taps: int = 3) -> dict[str, Any]:
    """A sampled step whose tensors of 10 elements have this absmax."""
    rows = np.zeros((taps, COLUMNS))
    rows[:, Column.CALLS] = 1
    rows[:, Column.COUNT] = 10
    rows[:, Column.SUM_SQUARES] = absmax**2
    rows[:, Column.MIN] = -absmax
    rows[:, Column.MAX] = absmax / 2
    return {
        "statistics": Statistics.of(rows),
        "nonfinite": np.zeros((3, taps)),
        "called": np.ones(taps, dtype=np.bool_),
    }


class Errors(list[tuple[str, Exception]]):
    """What the journal told of."""

    def add(self, stage: str, error: Exception) -> None:
        self.append((stage, error))


@pytest.fixture
def errors() -> Errors:
    return Errors()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "journal"


Open = Callable[..., Journal]


@pytest.fixture
def open_journal(folder: Path, errors: Errors) -> Iterator[Open]:
    """Opens journals in the folder, and closes them in the end."""
    with contextlib.ExitStack() as opened:

        def begin(**settings: Any) -> Journal:
            journal = Journal(
                folder,
                **{"run": "gpt", "rank": 0, "taps": TAPS, "on_error": errors.add, **settings},
            )
            opened.callback(journal.close)
            return journal

        yield begin


def write(journal: Journal, *steps: int, generation: int = 0) -> None:
    for step in steps:
        journal.write(step, START + step, generation, **sample(float(step)))


def written(journal: Journal, lines: int) -> None:
    """Waits until so many lines were written."""
    wait_for(lambda: journal.records >= lines, f"{lines} lines")


def strictly(line: str) -> dict[str, Any]:
    """JSON as the standard has it, without NaN."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    content: dict[str, Any] = json.loads(line, parse_constant=refuse)
    return content


def lines(folder: Path) -> list[str]:
    """All lines, of compressed files first."""
    found = []
    for path in sorted(folder.iterdir(), key=lambda path: path.suffix == ".jsonl"):
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        found += data.decode("ascii").splitlines()
    return found


class TestLines:
    def test_are_one_a_tensor_that_ran(self, folder: Path, open_journal: Open) -> None:
        journal = open_journal(rank=2)
        step = sample(4.0)
        step["called"][1] = False
        journal.write(7, 1_700_000_000.1234, 3, **step)
        journal.close()
        assert [strictly(line)["layer"] for line in lines(folder)] == ["h.0", "h.2"]
        assert strictly(lines(folder)[0]) == {
            **{"step": 7, "time": 1_700_000_000.123, "run": "gpt", "rank": 2, "generation": 3},
            **{"layer": "h.0", "tensor": "output", "absmax": 4, "min": -4, "max": 2, "mean": 0},
            **{"std": 1.26491106, "l2norm": 4, "rms": 1.26491106, "exceed_ratio": 0},
            **{"nan": 0, "posinf": 0, "neginf": 0},
        }

    def test_have_words_for_nan_and_infinities(self, folder: Path, open_journal: Open) -> None:
        step = sample(1.0)
        step["statistics"].absmax[:] = [np.nan, np.inf, 1]
        step["statistics"].min[:] = [np.nan, -np.inf, -1]
        step["nonfinite"][:, 0] = [4, 5, 6]
        journal = open_journal()
        journal.write(1, START, 0, **step)
        journal.close()
        assert strictly(lines(folder)[0])["absmax"] == "NaN"
        first, second, third = Reader(folder).records()
        assert np.isnan(first.statistics["absmax"])
        assert first.nonfinite == {"nan": 4, "posinf": 5, "neginf": 6}
        assert second.statistics["absmax"] == np.inf
        assert second.statistics["min"] == -np.inf
        assert third.statistics["absmax"] == 1

    def test_names_of_any_kind_survive(self, folder: Path, open_journal: Open) -> None:
        name = 'ä"\n\u2028\\'
        tap = Tap(layer=name, tensor="input", kind="")
        journal = open_journal(run=name, taps=[tap])
        journal.write(1, START, 0, **sample(1.0, taps=1))
        journal.close()
        (record,) = Reader(folder).records()
        assert (record.run, record.layer, record.tensor) == (name, name, "input")

    def test_are_there_a_second_later(self, folder: Path, open_journal: Open) -> None:
        write(open_journal(), 1)
        wait_for(lambda: len(lines(folder)) == 3, "the lines, without closing")

    def test_generations_tell_repeated_steps_apart(self, folder: Path, open_journal: Open) -> None:
        journal = open_journal()
        write(journal, 1, 2, 3)
        write(journal, 2, 3, generation=1)
        journal.close()
        steps = [(r.generation, r.step) for r in Reader(folder).records() if r.layer == "h.0"]
        assert steps == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3)]

    def test_notes_are_beside_the_records(self, folder: Path, open_journal: Open) -> None:
        journal = open_journal()
        write(journal, 1)
        journal.note("onset", 1, START, 0, layer="h.1", rule="hard")
        journal.close()
        assert len(list(Reader(folder).records())) == 3
        (note,) = Reader(folder).notes()
        assert (note.kind, note.step, note.run) == ("onset", 1, "gpt")
        assert note.fields == {"layer": "h.1", "rule": "hard"}

    def test_a_note_that_is_no_json_costs_only_itself(
        self, folder: Path, open_journal: Open, errors: Errors
    ) -> None:
        journal = open_journal()
        journal.note("odd", 1, START, 0, what=object())
        write(journal, 1)
        journal.close()
        assert len(lines(folder)) == 3
        assert journal.dropped == {"queue": 0, "write": 1}
        assert [type(error) for _, error in errors] == [TypeError]


class TestTrainer:
    def test_hands_a_step_over_without_making_lines_of_it(
        self, open_journal: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        makers = set()
        make = Writing.lines

        def lines(writing: Writing, sampled: Sampled) -> list[str]:
            makers.add(threading.current_thread())
            return make(writing, sampled)

        monkeypatch.setattr(Writing, "lines", lines)
        journal = open_journal(taps=MANY)
        journal.write(0, START, 0, **sample(1.0, taps=len(MANY)))
        journal.close()
        assert makers
        assert threading.current_thread() not in makers

    def test_is_not_held_by_a_disk_that_hangs(
        self, folder: Path, open_journal: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hangs, works = threading.Event(), threading.Event()
        write_really = os.write

        def hang(descriptor: int, data: bytes) -> int:
            hangs.set()
            assert works.wait(60)
            return write_really(descriptor, data)

        journal = open_journal(taps=MANY)
        step = sample(1.0, taps=1000)
        monkeypatch.setattr(rotation.os, "write", hang)
        try:
            journal.write(0, START, 0, **step)
            assert hangs.wait(30)
            for number in range(1, 151):  # 100 of them can wait
                journal.write(number, START, 0, **step)
            assert journal.dropped == {"queue": 50_000, "write": 0}
            closing = threading.Thread(target=journal.close, args=(0.2,))
            closing.start()
            closing.join(30)
            assert not closing.is_alive()
        finally:
            works.set()
        written(journal, 101_000)
        assert len({record.step for record in Reader(folder).records()}) == 101

    def test_that_ends_without_closing_loses_nothing(self, folder: Path) -> None:
        run_script("for step in range(1, 101): write(journal, step)", folder)
        assert sorted({record.step for record in Reader(folder).records()}) == list(range(1, 101))

    def test_whose_worker_is_forked_has_each_line_once(self, folder: Path) -> None:
        run_script(
            "write(journal, 1)\n"
            "while journal._queue.qsize(): time.sleep(0.001)\n"
            "child = os.fork()\n"
            "write(journal, 2)\n"
            "assert child or not journal._queue.qsize(), 'nobody takes it out of there'\n"
            "journal.close()\n"
            "assert not child or os.waitpid(child, 0)[1] == 0",
            folder,
        )
        steps = [record.step for record in Reader(folder).records()]
        assert steps == [1, 1, 1, 2, 2, 2]


class TestRights:
    @pytest.mark.parametrize("umask", [0o000, 0o077])
    def test_are_the_same_whatever_the_umask(
        self, folder: Path, open_journal: Open, umask: int
    ) -> None:
        before = os.umask(umask)
        try:
            journal = open_journal(limits=Limits(file_bytes=2000))
            write(journal, *range(400))
            written(journal, 1200)
        finally:
            os.umask(before)
        assert folder.stat().st_mode & 0o7777 == 0o750
        assert {path.stat().st_mode & 0o7777 for path in folder.iterdir()} == {0o640}
        assert {path.suffix for path in folder.iterdir()} >= {".gz"}


@contextlib.contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file of this process may grow beyond `size`, as if the disk were full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class TestDisk:
    def test_that_is_full_costs_records_until_there_is_room(
        self, folder: Path, open_journal: Open, errors: Errors
    ) -> None:
        journal = open_journal()
        write(journal, *range(100))
        written(journal, 300)
        # In the middle of a batch, so that a part of it is written.
        with full_disk(journal.bytes + 1000):
            write(journal, *range(100, 300))
            wait_for(lambda: journal.dropped["write"] == 600, "dropped lines")
        write(journal, *range(300, 400))
        journal.close()
        reader = Reader(folder)
        kept = {record.step for record in reader.records()}
        assert kept == set(range(100)) | set(range(300, 400))
        assert reader.skipped == 0
        assert journal.records == 600
        assert journal.bytes == sum(path.stat().st_size for path in folder.iterdir())
        assert [(stage, type(error)) for stage, error in errors] == [("journal", OSError)]

    def test_that_cannot_be_written_to_costs_records_until_it_can(
        self, tmp_path: Path, folder: Path, open_journal: Open, errors: Errors
    ) -> None:
        folder.parent.touch()  # a file where a folder must be
        journal = open_journal()
        for steps in (range(100), range(100, 200)):
            write(journal, *steps)
            wait_for(lambda: not journal._queue.qsize(), "the queue's end")
        wait_for(lambda: journal.dropped["write"] == 600, "dropped lines")
        folder.parent.unlink()
        write(journal, 200)
        journal.close()
        assert {record.step for record in Reader(folder).records()} == {200}
        assert len(errors) == 1
        assert str(folder) in str(errors[0][1])

    def test_whose_folder_was_removed_gets_it_again(
        self, folder: Path, open_journal: Open, errors: Errors
    ) -> None:
        journal = open_journal()
        write(journal, 1)
        written(journal, 3)
        shutil.rmtree(folder)
        write(journal, 2)
        journal.close()
        assert {record.step for record in Reader(folder).records()} == {2}
        assert folder.stat().st_mode & 0o7777 == 0o750
        assert not errors


class TestFiles:
    def test_are_compressed_when_they_are_large(self, folder: Path, open_journal: Open) -> None:
        journal = open_journal(limits=Limits(file_bytes=50_000))
        write(journal, *range(1000))
        journal.close()
        compressed = [path for path in folder.iterdir() if path.suffix == ".gz"]
        plain = [path for path in folder.iterdir() if path.suffix == ".jsonl"]
        assert len(compressed) > 5
        assert len(plain) <= 1
        assert len(plain) + len(compressed) == len(list(folder.iterdir()))
        reader = Reader(folder)
        assert [r.step for r in reader.records() if r.layer == "h.0"] == list(range(1000))
        assert reader.skipped == 0

    def test_are_new_each_day(self, folder: Path, open_journal: Open) -> None:
        now = START
        journal = open_journal(clock=lambda: now)
        write(journal, 1)
        written(journal, 3)
        now += DAY
        write(journal, 2)
        written(journal, 6)
        write(journal, 3)
        journal.close()
        assert sorted(path.name for path in folder.iterdir()) == [
            "act-journal-rank0-20231114T221320.000Z.jsonl.gz",
            "act-journal-rank0-20231115T221320.000Z.jsonl",
        ]
        assert [record.step for record in Reader(folder).records()][::3] == [1, 2, 3]

    def test_of_a_restart_are_new(self, folder: Path, open_journal: Open) -> None:
        for step in (1, 2):
            journal = open_journal(clock=lambda: START)  # even within one millisecond
            write(journal, step)
            journal.close()
        assert len(list(folder.iterdir())) == 2
        assert [record.step for record in Reader(folder).records()] == [1, 1, 1, 2, 2, 2]

    def test_are_never_written_over(self, folder: Path, open_journal: Open) -> None:
        journal = open_journal(clock=lambda: START, limits=Limits(file_bytes=1))
        write(journal, *range(300))
        journal.close()
        assert len(list(folder.iterdir())) >= 3
        assert len(list(Reader(folder).records())) == 900

    def test_that_are_old_are_deleted_and_nothing_else(
        self, folder: Path, open_journal: Open, caplog: pytest.LogCaptureFixture
    ) -> None:
        folder.mkdir(parents=True)
        old = folder / "act-journal-rank1-20200101T000000.000Z.jsonl.gz"
        young = folder / "act-journal-rank1-20200102T000000.000Z.jsonl.gz"
        others = [
            folder / name
            for name in ("notes.jsonl", "act-journal.txt", f"{old.name}.bak", f"my-{old.name}")
        ]
        for path in (old, young, *others):
            path.write_bytes(b"x")
            os.utime(path, (0, time.time() - 31 * DAY))
        os.utime(young, (0, time.time() - 29 * DAY))
        with caplog.at_level(logging.INFO, "act_exporter"):
            open_journal().close()
        assert not old.exists()
        assert all(path.exists() for path in (young, *others))
        (deletion,) = [r.getMessage() for r in caplog.records if "deleted" in r.getMessage()]
        assert str(old) in deletion
        assert "30 days" in deletion

    def test_are_deleted_beyond_a_size_oldest_first(
        self, folder: Path, open_journal: Open, caplog: pytest.LogCaptureFixture
    ) -> None:
        limits = Limits(file_bytes=50_000, total_bytes=30_000)
        with caplog.at_level(logging.INFO, "act_exporter"):
            journal = open_journal(limits=limits)
            write(journal, *range(3000))
            journal.close()
        # What is being written comes on top.
        assert sum(path.stat().st_size for path in folder.iterdir()) < 30_000 + 150_000
        assert any("deleted" in record.getMessage() for record in caplog.records)
        steps = [record.step for record in Reader(folder).records() if record.layer == "h.0"]
        assert steps == list(range(steps[0], 3000))
        assert steps[0] > 0

    def test_that_another_rank_writes_are_left_alone(
        self, folder: Path, open_journal: Open
    ) -> None:
        other = open_journal(rank=1)
        write(other, 1)
        written(other, 3)
        (path,) = folder.iterdir()
        os.utime(path, (0, 0))  # as if nothing was written for years
        open_journal(rank=0, limits=Limits(total_bytes=1)).close()
        assert path.exists()
        write(other, 2)
        other.close()
        assert [record.step for record in Reader(folder).records()] == [1, 1, 1, 2, 2, 2]

    @pytest.mark.parametrize("name", ["file_bytes", "days", "total_bytes"])
    def test_limits_are_checked(self, name: str) -> None:
        with pytest.raises(SettingError, match=name):
            Limits(**{name: 0})


class TestCrash:
    def test_leaves_at_most_one_torn_line(self, folder: Path, open_journal: Open) -> None:
        # Steps of 700 kB each, without an end: the signal comes in the middle of one.
        process = start_script(
            "for step in range(1, 10**9):\n"
            "    write(journal, step)\n"
            "    while journal._queue.qsize() > 5: time.sleep(0.001)",
            folder,
            taps=2000,
        )
        try:
            wait_for(lambda: sum(p.stat().st_size for p in folder.iterdir()) > 5_000_000, "lines")
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        reader = Reader(folder)
        found = [(record.step, int(record.layer[2:])) for record in reader.records()]
        assert reader.skipped <= 1
        assert found == [(1 + n // 2000, n % 2000) for n in range(len(found))]
        assert len(found) > 10_000

        (left,) = folder.iterdir()
        torn = left.read_bytes()[:-50]
        left.write_bytes(torn)
        os.utime(left, (0, time.time() - 3600))
        journal = open_journal()
        write(journal, 1)
        journal.close()
        compressed = left.with_name(f"{left.name}.gz")
        assert gzip.decompress(compressed.read_bytes()) == torn
        assert time.time() - compressed.stat().st_mtime > 3500  # its age is that of its lines
        assert not left.exists()
        assert len(list(reader.records())) == len(torn.splitlines()) - 1
        assert reader.skipped == 1


class TestReader:
    def test_skips_what_is_torn_or_foreign(self, folder: Path, open_journal: Open) -> None:
        journal = open_journal()
        write(journal, 1)
        journal.close()
        (path,) = folder.iterdir()
        whole = path.read_bytes()
        record = strictly(whole.decode().splitlines()[0])
        foreign: list[Any] = [1, None, [], {}, "x", {"step": 1}, {**record, "absmax": []}]
        foreign += [{**record, "time": "NaN"}, {key: record[key] for key in list(record)[:6]}]
        with path.open("ab") as stream:
            for line in foreign:
                stream.write(json.dumps(line).encode() + b"\n")
            stream.write(b"\xff\x00\n\n" + whole[:100])
        reader = Reader(folder)
        assert len(list(reader.records())) == 3
        assert reader.skipped == len(foreign) + 3
        assert list(reader.notes()) == []
        assert reader.skipped == len(foreign) + 3

    def test_goes_on_after_a_damaged_file(self, folder: Path, open_journal: Open) -> None:
        folder.mkdir(parents=True)
        good = gzip.compress(b"")
        for day, content in enumerate([b"no gzip", good[:-3], good]):
            name = f"act-journal-rank0-2020010{day + 1}T000000.000Z.jsonl.gz"
            (folder / name).write_bytes(content)
        journal = open_journal()
        write(journal, 1)
        journal.close()
        reader = Reader(folder)
        assert len(list(reader.records())) == 3
        assert reader.skipped == 2

    def test_finds_a_file_that_was_compressed_meanwhile(
        self, folder: Path, open_journal: Open
    ) -> None:
        journal = open_journal()
        write(journal, 1)
        journal.close()
        reader = Reader(folder)
        (path,) = folder.iterdir()
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        assert len(reader.files) == len(Reader(folder).files) == 1
        path.unlink()
        assert len(list(reader.records())) == 3

    def test_knows_records_of_an_older_version(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        old = {"step": 1, "time": 2.5, "run": "gpt", "rank": 0, "generation": 0}
        old |= {"layer": "h", "tensor": "output", "absmax": 3}
        name = "act-journal-rank0-20200101T000000.000Z.jsonl"
        (folder / name).write_text(json.dumps(old) + "\n")
        (record,) = Reader(folder).records()
        assert isinstance(record, Record)
        assert record.statistics.keys() == set(STATISTICS)
        assert record.statistics["absmax"] == 3
        assert np.isnan(record.statistics["rms"])

    def test_says_where_nothing_is(self, tmp_path: Path) -> None:
        with pytest.raises(SettingError, match="holds no journal"):
            Reader(tmp_path)
        with pytest.raises(SettingError, match="is no folder"):
            Reader(tmp_path / "none")


def start_script(body: str, folder: Path, taps: int = 3) -> subprocess.Popen[bytes]:
    """A process that opens a journal in `folder` and does `body`."""
    script = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from act_exporter.journal import Journal\n"
        "from act_exporter.taps import Tap\n"
        "from tests.act_exporter.test_journal import sample\n"
        f"taps = [Tap(layer=f'h.{{i}}', tensor='output', kind='')"
        f" for i in range({taps})]\n"
        f"def write(journal, step): journal.write(step, 1e9, 0, **sample(float(step), {taps}))\n"
        "journal = Journal(Path(sys.argv[1]), run='gpt', rank=0, taps=taps,"
        " on_error=lambda stage, error: print(stage, error, file=sys.stderr))\n"
    )
    folder.mkdir(parents=True, exist_ok=True)
    return subprocess.Popen([sys.executable, "-c", script + body, folder], cwd=REPOSITORY)


def run_script(body: str, folder: Path) -> None:
    assert start_script(body, folder).wait(60) == 0
