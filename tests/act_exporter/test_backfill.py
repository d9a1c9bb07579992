"""From journals to OpenMetrics: what Prometheus' own parser and a user of the command get."""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from act_exporter.backfill import Written, backfill, parts
from act_exporter.collector import FAMILIES
from act_exporter.records import STATISTICS, Reader

COMMAND = Path(sys.executable).with_name("act-exporter")
START = 1_700_000_000.0
NAMES = {f"act_layer_{name}" for name in STATISTICS}


def record(step: int, **other: Any) -> dict[str, Any]:
    """A record of one tensor, as it stands in a journal."""
    return {
        **{"step": step, "time": START + step, "run": "gpt", "rank": 0, "generation": 0},
        **{"layer": "h.0", "tensor": "output", "absmax": 4.0 + step, "min": -4, "max": 2},
        **{"mean": 0.5, "std": 1, "l2norm": 9, "rms": 1.5, "exceed_ratio": 0.25, **other},
    }


def journal(folder: Path, *records: dict[str, Any], rank: int = 0) -> Path:
    """A journal of these records."""
    folder.mkdir(exist_ok=True)
    name = f"act-journal-rank{rank}-20231114T221320.000Z.jsonl.gz"
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / name).write_bytes(gzip.compress(text.encode()))
    return folder


def openmetrics(folder: Path, now: float = START + 1e6) -> tuple[str, Written]:
    stream = io.StringIO()
    stream.close = lambda: None  # type: ignore[method-assign]
    written = backfill(Reader(folder), lambda: stream, now=now)
    return stream.getvalue(), written


def samples(text: str) -> list[Sample]:
    """As client_python's strict parser sees them: each family and each series in one piece."""
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


class TestText:
    def test_has_the_families_of_the_live_page(self, tmp_path: Path) -> None:
        text, written = openmetrics(journal(tmp_path, record(1), record(2)))
        families = list(text_string_to_metric_families(text))
        assert {family.name for family in families} == NAMES
        live = {family.name: family.help for family in FAMILIES}
        assert {family.name: family.documentation for family in families}.items() <= live.items()
        assert {family.type for family in families} == {"gauge"}
        assert written == Written(records=2, samples=16, young=0, same=0)

    def test_has_each_step_at_its_time(self, tmp_path: Path) -> None:
        folder = journal(tmp_path, record(1, time=START + 0.1234), record(2))
        found = [s for s in samples(openmetrics(folder)[0]) if s.name == "act_layer_absmax"]
        assert [(float(s.timestamp), s.value) for s in found] == [
            (START + 0.123, 5.0),
            (START + 2, 6.0),
        ]
        assert found[0].labels == {
            **{"run": "gpt", "rank": "0", "layer": "h.0", "tensor": "output"},
            **{"generation": "0", "job": "act-journal"},
        }

    def test_keeps_ranks_tensors_and_generations_apart(self, tmp_path: Path) -> None:
        folder = journal(
            tmp_path,
            *(record(step, tensor=tensor) for step in (1, 2, 3) for tensor in ("input", "output")),
            # After a rollback steps come again, later.
            *(record(step, time=START + 10 + step, generation=1) for step in (2, 3)),
        )
        # Of the same times, and not in their order, as a clock that was set back leaves them.
        journal(tmp_path, record(2, rank=1), record(1, rank=1), rank=1)
        text, written = openmetrics(folder)
        found = [sample for sample in samples(text) if sample.name == "act_layer_max"]
        keys = [(tuple(sample.labels.items()), float(sample.timestamp)) for sample in found]
        assert len(keys) == len(set(keys)) == 6 + 2 + 2 == written.records
        for series in {labels for labels, _ in keys}:
            times = [at for labels, at in keys if labels == series]
            assert times == sorted(times)

    def test_leaves_out_what_was_undefined(self, tmp_path: Path) -> None:
        odd = record(1, mean="NaN", l2norm="Infinity", min="-Infinity")
        text, written = openmetrics(journal(tmp_path, odd))
        found = {sample.name: sample.value for sample in samples(text)}
        assert found.keys() == NAMES - {"act_layer_mean"}
        assert found["act_layer_l2norm"] == math.inf
        assert found["act_layer_min"] == -math.inf
        assert " +Inf " in text  # as OpenMetrics writes it
        assert written.samples == 7

    def test_escapes_names(self, tmp_path: Path) -> None:
        name = 'a"b\\c\nd'
        text, _ = openmetrics(journal(tmp_path, record(1, layer=name, run=name)))
        assert {(sample.labels["layer"], sample.labels["run"]) for sample in samples(text)} == {
            (name, name)
        }

    def test_has_one_sample_a_millisecond(self, tmp_path: Path) -> None:
        folder = journal(tmp_path, *(record(step, time=START) for step in (1, 2, 3)))
        text, written = openmetrics(folder)
        assert [s.value for s in samples(text) if s.name == "act_layer_absmax"] == [7.0]
        assert (written.records, written.same) == (1, 2)

    def test_leaves_out_the_last_15_minutes_and_the_future(self, tmp_path: Path) -> None:
        folder = journal(tmp_path, *(record(step) for step in range(2000)))
        text, written = openmetrics(folder, now=START + 1500)
        times = {float(sample.timestamp) for sample in samples(text)}
        assert times == {START + step for step in range(601)}
        assert written.young == 1399

    def test_is_not_begun_where_nothing_is_old_enough(self, tmp_path: Path) -> None:
        def refuse() -> io.StringIO:
            raise AssertionError("opened")

        reader = Reader(journal(tmp_path, record(1)))
        assert backfill(reader, refuse, now=START) == Written(records=0, samples=0, young=1, same=0)


def test_progress_comes_to_its_end(tmp_path: Path) -> None:
    reader = Reader(journal(tmp_path, record(1)))
    calls: list[None] = []
    backfill(reader, io.StringIO, now=START + 1e6, progress=lambda: calls.append(None))
    assert len(calls) == parts(reader)


def test_memory_does_not_grow_with_the_journal(tmp_path: Path) -> None:
    folder = journal(tmp_path, *(record(step) for step in range(30_000)))
    reader = Reader(folder)
    with open(os.devnull, "w") as nothing:  # noqa: PTH123
        tracemalloc.start()
        backfill(reader, lambda: nothing, now=START + 1e6)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    # Holding the records would take 30 MB. SQLite's own memory is not seen here: 64 MiB at most.
    assert peak < 2_000_000


class TestCommand:
    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [COMMAND, "backfill", *arguments],
            env={"COLUMNS": "100", "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def test_writes_a_file_and_says_what_is_in_it(self, tmp_path: Path) -> None:
        young = [record(step, time=time.time()) for step in range(3)]
        folder = journal(tmp_path / "journal", record(1), *young, {"torn": True})
        answer = self.run(folder, "-o", tmp_path / "out.om")
        assert answer.returncode == 0, answer.stderr
        assert answer.stdout == ""
        assert answer.stderr.splitlines() == [
            "1 lines skipped: torn by a crash, or no record",
            "3 records left out: younger than 15 minutes, or of the future; the live rules would"
            " judge them anew",
            "8 samples of 1 records",
        ]
        assert len(samples((tmp_path / "out.om").read_text())) == 8
        # To the standard output goes nothing but OpenMetrics.
        assert self.run(folder).stdout == (tmp_path / "out.om").read_text()

    def test_refuses_when_nothing_is_left(self, tmp_path: Path) -> None:
        folder = journal(tmp_path / "journal", record(1, time=time.time()))
        answer = self.run(folder, "-o", tmp_path / "out.om")
        assert answer.returncode == 1
        assert "1 records left out: younger than 15 minutes" in answer.stderr
        assert "no records are left, nothing was written" in answer.stderr
        assert not (tmp_path / "out.om").exists()

    @pytest.mark.parametrize("missing", ["none", "."])
    def test_says_where_no_journal_is(self, tmp_path: Path, missing: str) -> None:
        answer = self.run(tmp_path / missing)
        assert answer.returncode == 1
        assert answer.stderr.startswith("act-exporter: ")
        assert len(answer.stderr.splitlines()) == 1

    def test_help_teaches_the_next_command(self) -> None:
        answer = self.run("--help")
        assert "promtool tsdb create-blocks-from openmetrics" in answer.stdout
        assert "15 minutes" in answer.stdout
