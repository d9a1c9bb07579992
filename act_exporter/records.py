"""What a journal holds, a line each: the records of samples, and notes beside them.

A line is strict JSON in ASCII, flat, so that `jq` and `pandas.read_json(lines=True)` take it. JSON
has no NaN and no infinities; they are the strings "NaN", "Infinity" and "-Infinity", as in
Protocol Buffers' JSON, and `float` reads them back.

A record is one tensor at one sampled step. A note has its kind under "note", and beside step, time,
run, rank and generation these fields; a reader passes over kinds and fields that it does not know.

    training    the run's numbers at a sampled step, those that are known: loss, grad_norm,
                learning_rate, loss_scale, update_rms, update_ratio, update_unchanged_ratio. A
                step has two such lines where they came from the device at different times
    depth       layer, tensor, kind, depth: the place in the order of execution, once it is known
                and when it changes; kind is the same in all blocks for the same place
    baseline    layer, tensor, kind, absmax: a baseline that was learnt or has changed; "NaN" says
                that it was forgotten
    onset       layer, tensor, rule, verdict: a layer went bad first, and what kind of fault it is
    verdict     verdict: another kind, or null when nothing was wrong for long enough
    clean       no layer was bad for long enough: the onset is over
    rollback    to: of the exporter, the generation from here on; the same one at a mere start

What a guard did, in the journal of rank 0 (`alerting.recovery`; any other may tell likewise):

    request     id, action, alert, created_at: it acts on a request from here on
    checkpoint  name, kind, health, why, seconds: one was published, of which step and health
    health      name, health, why: a verdict on a checkpoint changed
    rollback    onset, from_step, resumed_from, resumed_step, why, remedies: it is carried through;
                why has "name: reason" for each newer checkpoint that was passed over
    refused     id, action, why: a request was not acted on
    halted      onset, why: the run stands until people have looked
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from act_exporter.exceptions import SettingError
from act_exporter.rows import NONFINITE_KINDS, Array, Statistics
from act_exporter.taps import Tap

STATISTICS = tuple(field.name for field in dataclasses.fields(Statistics))

FILE_NAME = re.compile(r"act-journal-rank(\d+)-(\d{8}T\d{6}\.\d{3}Z)\.jsonl(?:\.gz(?:\.part)?)?")
"""A journal's files: rank, when it was begun in UTC; compressed once it is complete."""

# float32 has no more digits, and lines with all of float64's are a third longer.
_VALUES = ",".join(f'"{name}":%.9g' for name in STATISTICS)
_COUNTS = ",".join(f'"{kind}":%d' for kind in NONFINITE_KINDS)


class Sampled(NamedTuple):
    """All taps at one sampled step; its arrays are not written to any more.

    Attributes:
        step: the step.
        time: when it ended, Unix seconds.
        generation: 0, and one more with each rollback.
        statistics: arrays (taps,).
        nonfinite: this step's elements by kind, (kinds, taps).
        called: which taps ran, (taps,).
        holder: (taps,) the rank that has the absmax, where ranks were joined; NaN for none.
    """

    step: int
    time: float
    generation: int
    statistics: Statistics
    nonfinite: Array
    called: npt.NDArray[np.bool_]
    holder: Array | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One watched tensor at one sampled step.

    Attributes:
        step: the step; after a rollback or a restart it may come a second time.
        time: when it ended, Unix seconds.
        run: the run's name.
        rank: the process' rank.
        generation: 0, and one more with each rollback.
        layer: the module's name.
        tensor: "input" or "output".
        statistics: by name, see `Statistics`; NaN where undefined.
        nonfinite: elements by kind.
    """

    step: int
    time: float
    run: str
    rank: int
    generation: int
    layer: str
    tensor: str
    statistics: dict[str, float]
    nonfinite: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """What happened once, or the run's numbers: see the top of this module.

    Attributes:
        kind: its name.
        step: the step, with the meaning of `time`, `run`, `rank` and `generation` as in `Record`.
        fields: whatever else was said.
    """

    kind: str
    step: int
    time: float
    run: str
    rank: int
    generation: int
    fields: dict[str, Any]

    def number(self, name: str, default: float = math.nan) -> float:
        """A field as a number, or `default` where there is none, or none that is a number."""
        try:
            return float(self.fields[name])
        except (KeyError, TypeError, ValueError):
            return default


class Writing:
    """Puts records into words.

    Args:
        run: the run's name.
        rank: the process' rank.
        taps: the taps, in the order of the arrays.
    """

    def __init__(self, run: str, rank: int, taps: Sequence[Tap]) -> None:
        self._run = {"run": run, "rank": rank}
        # Once, not at each step: names are most of a line.
        self._names = [
            json.dumps({"layer": tap.layer, "tensor": tap.tensor}, separators=(",", ":"))[1:-1]
            for tap in taps
        ]

    def lines(self, sampled: Sampled) -> list[str]:
        """A line for each tap that ran."""
        common = {"step": sampled.step, "time": round(sampled.time, 3), **self._run}
        common["generation"] = sampled.generation
        head = json.dumps(common, separators=(",", ":"), allow_nan=False)[:-1]
        taps = np.flatnonzero(sampled.called)
        table = np.stack([getattr(sampled.statistics, name)[taps] for name in STATISTICS], axis=1)
        counts = sampled.nonfinite[:, taps].T.tolist()
        whole = np.isfinite(table).all(axis=1).tolist()
        ends = ["}\n"] * len(taps)
        if sampled.holder is not None:
            held = sampled.holder[taps].tolist()
            ends = [f',"absmax_rank":{rank:.0f}}}\n' if rank >= 0 else "}\n" for rank in held]
        return [
            f"{head},{self._names[tap]},"
            f"{_VALUES % tuple(row) if finite else _with_words(row)},{_COUNTS % tuple(count)}{end}"
            for tap, row, finite, count, end in zip(
                taps.tolist(), table.tolist(), whole, counts, ends, strict=True
            )
        ]

    def note(self, note: dict[str, Any]) -> str:
        """A note's line.

        Raises:
            TypeError: a field is nothing that JSON knows.
            ValueError: NaN or an infinity lies within a field, where no word can stand for it.
        """
        said = {name: spelled(value) for name, value in note.items()}
        return json.dumps({**self._run, **said}, separators=(",", ":"), allow_nan=False) + "\n"


def _with_words(row: list[float]) -> str:
    """The statistics of a row with NaN or infinities."""
    pairs = zip(STATISTICS, row, strict=True)
    return ",".join(
        f'"{name}":%.9g' % value if math.isfinite(value) else f'"{name}":"{_word(value)}"'
        for name, value in pairs
    )


def spelled(value: Any) -> Any:
    """A value as JSON has it: a word for what is no number."""
    if isinstance(value, float) and not math.isfinite(value):
        return _word(value)
    return value


def _word(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


class Reader:
    """Reads a folder's journals, whole or torn, compressed or not, while they are written or later.

    Attributes:
        files: the journals, those begun first coming first.
        skipped: lines of the last reading that are neither record nor note: torn by a crash, or
            not ours.

    Raises:
        SettingError: there is no such folder, or no journal in it.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise SettingError(f"{folder} is no folder")
        # Compressed and plain for a moment exist both: one name each.
        names = {path.name.removesuffix(".gz") for path in folder.iterdir() if is_journal(path)}
        if not names:
            raise SettingError(f"{folder} holds no journal")
        self.files = [folder / name for name in sorted(names, key=begun)]
        self.skipped = 0

    def records(self, on_file: Callable[[], None] = lambda: None) -> Iterator[Record]:
        """The records of all files, a line at a time; `on_file` is called after each file."""
        for file in self.files:
            for entry in self._entries(file):
                if isinstance(entry, Record):
                    yield entry
            on_file()

    def notes(self) -> Iterator[Note]:
        """The notes of all files."""
        for file in self.files:
            for entry in self._entries(file):
                if isinstance(entry, Note):
                    yield entry

    def _entries(self, file: Path) -> Iterator[Record | Note]:
        if file == self.files[0]:
            self.skipped = 0
        try:
            for line in _lines(file):
                entry = parsed(line)
                if entry is None:
                    self.skipped += 1
                else:
                    yield entry
        except FileNotFoundError:
            pass  # deleted meanwhile, as its time had come
        except (EOFError, gzip.BadGzipFile, zlib.error):
            self.skipped += 1  # the rest of a damaged file


def is_journal(path: Path) -> bool:
    """Whether that is the name of a journal, compressed or not."""
    return FILE_NAME.fullmatch(path.name) is not None and path.suffix != ".part"


def begun(name: str) -> tuple[str, int]:
    """What orders the names of journals by their beginning: its time, and the rank."""
    match = FILE_NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is no journal's name")
    return match[2], int(match[1])


def _lines(file: Path) -> Iterator[bytes]:
    """The lines of a journal, which may be compressed at any moment."""
    try:
        with file.open("rb") as stream:
            yield from stream
    except FileNotFoundError:
        with gzip.open(f"{file}.gz", "rb") as stream:
            yield from stream


def parsed(line: bytes) -> Record | Note | None:
    """What a line says, or None where it is torn or not ours."""
    try:
        said = json.loads(line)
        common: dict[str, Any] = {
            "step": int(said.pop("step")),
            "time": float(said.pop("time")),
            "run": str(said.pop("run")),
            "rank": int(said.pop("rank")),
            "generation": int(said.pop("generation")),
        }
        if not math.isfinite(common["time"]):
            return None
        if "note" in said:
            return Note(kind=str(said.pop("note")), **common, fields=said)
        return Record(
            **common,
            layer=str(said["layer"]),
            tensor=str(said["tensor"]),
            # One that an older version did not write is undefined.
            statistics={name: float(said.get(name, "NaN")) for name in STATISTICS},
            nonfinite={kind: int(said.get(kind, 0)) for kind in NONFINITE_KINDS},
        )
    # No JSON, no object, a name missing, no number where one must be.
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError):
        return None
