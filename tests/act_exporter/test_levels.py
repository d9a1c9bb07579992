"""Baselines from a small run: what is learnt, what is refused, and what a bad file is told."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from act_exporter.exceptions import SettingError
from act_exporter.levels import Levels, learn_levels, read_levels, write_levels
from act_exporter.records import Reader
from tests.act_exporter.test_backfill import COMMAND, journal, record

START = 1_700_000_000.0


def learn(folder: Path, *records: dict[str, Any], steps: int = 10) -> Levels:
    return learn_levels(Reader(journal(folder, *records)), steps)


def note(kind: str, step: int, **other: Any) -> dict[str, Any]:
    common = {"step": step, "time": START + step, "run": "gpt", "rank": 0, "generation": 0}
    return {"note": kind, **common, **other}


def steps(first: int, last: int, **other: Any) -> list[dict[str, Any]]:
    """Records of one tensor, with an absmax of 4 more than the step."""
    return [record(step, **other) for step in range(first, last + 1)]


class TestLearning:
    def test_takes_the_median_of_the_last_steps(self, tmp_path: Path) -> None:
        other = {"layer": "h.1", "absmax": 0.5}
        levels = learn(tmp_path, *steps(1, 50), *steps(1, 50, **other))
        assert levels.absmax == {("h.0", "output"): 4 + 45.5, ("h.1", "output"): 0.5}
        assert levels.steps == list(range(41, 51))
        assert (levels.run, levels.generation, levels.left_out) == ("gpt", 0, [])

    def test_is_of_the_newest_generation(self, tmp_path: Path) -> None:
        levels = learn(
            tmp_path,
            *steps(1, 50, absmax=1e6),
            note("onset", 40),
            *steps(31, 45, absmax=3, generation=1),
        )
        assert levels.absmax == {("h.0", "output"): 3}
        assert levels.generation == 1
        assert levels.steps == list(range(36, 46))

    def test_passes_over_steps_that_were_not_finite(self, tmp_path: Path) -> None:
        levels = learn(
            tmp_path,
            *steps(1, 20),
            *steps(1, 20, layer="h.1", absmax=7),
            record(21, nan=1),
            record(21, layer="h.1", absmax=1e6),
            record(22, l2norm="Infinity", absmax="Infinity"),
        )
        assert levels.steps == list(range(11, 21))
        assert levels.absmax["h.1", "output"] == 7

    def test_counts_all_ranks(self, tmp_path: Path) -> None:
        for rank in (0, 1, 2):
            journal(tmp_path, *steps(1, 10, rank=rank, absmax=10.0**rank), rank=rank)
        assert learn_levels(Reader(tmp_path), 10).absmax == {("h.0", "output"): 10}

    def test_counts_a_step_that_a_restart_repeated_once(self, tmp_path: Path) -> None:
        first, again = steps(1, 10, absmax=1), steps(2, 10, absmax=2, time=START + 99)
        levels = learn(tmp_path, *first, *again)
        assert levels.absmax == {("h.0", "output"): 2}

    def test_leaves_out_what_has_no_level(self, tmp_path: Path) -> None:
        levels = learn(
            tmp_path,
            *steps(1, 10),
            *steps(1, 10, layer="dead", absmax=0),
            *steps(1, 4, layer="seldom"),
            *steps(1, 10, layer="integers", absmax="NaN"),
        )
        assert list(levels.absmax) == [("h.0", "output")]
        assert {layer for layer, _ in levels.left_out} == {"dead", "seldom", "integers"}


class TestRefusal:
    def test_of_too_few_steps(self, tmp_path: Path) -> None:
        with pytest.raises(SettingError, match="9 finite sampled steps in generation 0 of run gpt"):
            learn(tmp_path, *steps(1, 9))

    def test_of_an_anomaly_in_the_stretch(self, tmp_path: Path) -> None:
        with pytest.raises(SettingError, match=r"began at step 45 .* steps 41 to 50"):
            learn(tmp_path, *steps(1, 50), note("onset", 45))

    def test_of_one_that_began_before_and_did_not_end(self, tmp_path: Path) -> None:
        with pytest.raises(SettingError, match="sick"):
            learn(tmp_path, *steps(1, 50), note("onset", 5))

    def test_of_one_that_ended_on_another_rank_only(self, tmp_path: Path) -> None:
        with pytest.raises(SettingError, match="sick"):
            learn(tmp_path, *steps(1, 50), note("onset", 5), note("clean", 30, rank=1))

    def test_not_of_one_that_was_over(self, tmp_path: Path) -> None:
        levels = learn(tmp_path, *steps(1, 50), note("onset", 5), note("clean", 30))
        assert levels.steps == list(range(41, 51))

    def test_of_several_runs(self, tmp_path: Path) -> None:
        with pytest.raises(SettingError, match=r"several runs \(gpt, other\)"):
            learn(tmp_path, *steps(1, 50), *steps(1, 50, run="other"))

    def test_of_a_journal_of_notes(self, tmp_path: Path) -> None:
        with pytest.raises(SettingError, match="no records"):
            learn(tmp_path, note("onset", 1))

    def test_of_a_run_of_zeros(self, tmp_path: Path) -> None:
        with pytest.raises(SettingError, match="above 0"):
            learn(tmp_path, *steps(1, 50, absmax=0))


class TestFile:
    def test_gives_back_what_was_learnt(self, tmp_path: Path) -> None:
        path = tmp_path / "baseline.json"
        path.write_text("an older one")
        levels = learn(tmp_path / "journal", *steps(1, 50), *steps(1, 50, layer="ä", absmax=1 / 3))
        write_levels(path, levels)
        assert read_levels(path) == levels.absmax
        content = json.loads(path.read_text())
        assert content["run"] == "gpt"
        assert content["steps"] == {"first": 41, "last": 50, "sampled": 10}
        assert content["created"].endswith("Z")
        assert sorted(p.name for p in tmp_path.iterdir()) == ["baseline.json", "journal"]

    def test_may_be_written_by_hand(self, tmp_path: Path) -> None:
        path = tmp_path / "baseline.json"
        entry = {"layer": "h", "tensor": "input", "absmax": 3}
        path.write_text(json.dumps({"version": 1, "entries": [entry]}))
        assert read_levels(path) == {("h", "input"): 3.0}

    @pytest.mark.parametrize(
        ("content", "complaint"),
        [
            (b"\xff", "no JSON"),
            (b'{"version": 1, "entries"', "no JSON"),
            (b"[]", "not a file of"),
            (b'{"version": 1, "entries": {}}', "not a file of"),
            (b'{"version": 2, "entries": []}', "version 2"),
            (b'{"version": 1, "entries": []}', "no entries"),
            (b'{"version": 1, "entries": [3]}', "no layer"),
            (b'{"version": 1, "entries": [{"layer": 1, "tensor": "input"}]}', "no layer"),
        ],
    )
    def test_that_is_bad_is_told_so(self, tmp_path: Path, content: bytes, complaint: str) -> None:
        path = tmp_path / "baseline.json"
        path.write_bytes(content)
        with pytest.raises(SettingError, match=complaint) as caught:
            read_levels(path)
        assert str(path) in str(caught.value)

    @pytest.mark.parametrize(
        "value", ["0", "-1", "NaN", "Infinity", "1e400", "1" * 400, "true", '"3"', "null"]
    )
    def test_with_a_value_that_cannot_be_is_told_so(self, tmp_path: Path, value: str) -> None:
        path = tmp_path / "baseline.json"
        entry = f'{{"layer": "h.3", "tensor": "input", "absmax": {value}}}'
        path.write_text(f'{{"version": 1, "entries": [{entry}]}}')
        with pytest.raises(SettingError, match=r"h\.3 \(input\) is no number above 0"):
            read_levels(path)

    def test_with_a_tensor_twice_is_told_so(self, tmp_path: Path) -> None:
        path = tmp_path / "baseline.json"
        entry = {"layer": "h", "tensor": "input", "absmax": 3}
        path.write_text(json.dumps({"version": 1, "entries": [entry, entry]}))
        with pytest.raises(SettingError, match="twice"):
            read_levels(path)

    def test_that_is_missing_is_told_so(self, tmp_path: Path) -> None:
        with pytest.raises(SettingError, match=r"none\.json: No such file"):
            read_levels(tmp_path / "none.json")


class TestCommand:
    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [COMMAND, "baseline", *arguments],
            env={"COLUMNS": "100", "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def test_writes_the_baselines(self, tmp_path: Path) -> None:
        folder = journal(tmp_path / "journal", *steps(1, 150), *steps(1, 9, layer="seldom"))
        answer = self.run(folder, "-o", tmp_path / "baseline.json")
        assert answer.returncode == 0, answer.stderr
        assert answer.stdout == "1 baselines from steps 51 to 150 of run gpt\n"
        assert read_levels(tmp_path / "baseline.json") == {("h.0", "output"): 104.5}

    def test_refuses_in_one_sentence(self, tmp_path: Path) -> None:
        folder = journal(tmp_path / "journal", *steps(1, 99))
        answer = self.run(folder, "-o", tmp_path / "baseline.json")
        assert answer.returncode == 1
        assert answer.stderr == (
            "act-exporter: 99 finite sampled steps in generation 0 of run gpt;"
            " a baseline needs 100\n"
        )
        assert not (tmp_path / "baseline.json").exists()

    def test_help_teaches_with_an_example(self) -> None:
        assert (
            "act-exporter baseline runs/small/journal -o baseline.json" in self.run("--help").stdout
        )
