"""Reads folders of journals, a file a process at a time, and puts one run together."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path

from act_exporter.exceptions import SettingError
from act_exporter.records import Reader, begun, is_journal
from act_exporter.report.piece import Piece, read_piece
from act_exporter.report.recording import Recording, cut, joined

RECORDS_LIMIT = 40_000_000
"""Records that are kept one by one: five bytes each, and as many again while they are put in order.
Of more, several sampled steps become one row, and only the incident's files are read again."""

# A line of a record has 300 bytes, compressed 50.
_BYTES_PLAIN, _BYTES_COMPRESSED = 300, 50

# A file is named when its first lines are written, which wait a second, or for a slow disk.
_LATE_SECONDS = 60

# Below this, starting processes takes longer than reading.
_ALONE_BYTES = 1 << 20

Progress = Callable[[int], AbstractContextManager[Callable[[], None]]]
"""Begins to show progress over so many files; what it yields is called after each."""


def unseen(_: int) -> AbstractContextManager[Callable[[], None]]:
    """Shows none."""
    return contextlib.nullcontext(lambda: None)


def find_files(places: Sequence[Path]) -> list[Path]:
    """The journals at `places`, folders or files, those begun first coming first.

    Raises:
        SettingError: one is neither, or holds none.
    """
    found: dict[Path, None] = {}
    for place in places:
        if place.is_file() and is_journal(place):
            found[place.with_name(place.name.removesuffix(".gz"))] = None
        elif place.exists() and not place.is_dir():
            raise SettingError(
                f"{place} is no journal: their names begin with act-journal-rank and end with"
                " .jsonl or .jsonl.gz"
            )
        else:
            found |= dict.fromkeys(Reader(place).files)
    return sorted(found, key=lambda file: begun(file.name))


def read(places: Sequence[Path], run: str | None = None, progress: Progress = unseen) -> Recording:
    """Read the journals at `places` as one run.

    Args:
        places: folders or files.
        run: its name; needed where there are several.
        progress: of reading.

    Raises:
        SettingError: nothing of that run is there, or several runs are and none is chosen.
    """
    files = find_files(places)
    width = max(-(-_records(files) // RECORDS_LIMIT), 1)
    pieces = list(_pieces(files, width, progress))
    names = sorted({rows.run for piece in pieces for rows in piece.rows})
    if not names:
        skipped = sum(piece.skipped for piece in pieces)
        what = f": {skipped} lines are none" if skipped else ""
        raise SettingError(f"the journals hold no records{what}")
    if run is None and len(names) > 1:
        raise SettingError(
            f"the journals are of several runs, {', '.join(names)}: choose one with --run"
        )
    if run is not None and run not in names:
        raise SettingError(f"the journals hold no run {run!r}; there is {', '.join(names)}")
    return joined(pieces, run or names[0])


def read_closely(
    places: Sequence[Path], recording: Recording, first: float, last: float
) -> Recording:
    """The part of the run between two times, in Unix seconds, a row for each sampled step."""
    if recording.width == 1:
        return recording
    files = _written_between(find_files(places), first, last)
    pieces = [
        dataclasses.replace(cut(piece, first, last), notes=[])
        for piece in _pieces(files, 1, unseen)
    ]
    closely = joined([*pieces, Piece(notes=recording.notes)], recording.run, recording)
    return dataclasses.replace(
        closely, records=recording.records, skipped=recording.skipped, baseline=recording.baseline
    )


def _written_between(files: Sequence[Path], first: float, last: float) -> list[Path]:
    """Those that can hold records of that time; the next of the same rank begins where one ends."""
    chosen, ends = [], dict[int, float]()
    for file in reversed(files):
        stamp, rank = begun(file.name)
        began = datetime.strptime(stamp, "%Y%m%dT%H%M%S.%fZ").replace(tzinfo=UTC).timestamp()
        if began - _LATE_SECONDS <= last and ends.get(rank, math.inf) >= first:
            chosen.append(file)
        ends[rank] = began
    return chosen


def _pieces(files: list[Path], width: int, progress: Progress) -> Iterator[Piece]:
    """The files' content, in any order."""
    alone = sum(_size(file) for file in files) < _ALONE_BYTES or len(files) == 1
    if alone:
        with progress(len(files)) as advance:
            for file in files:
                yield read_piece(file, width)
                advance()
        return
    # Forked: a spawned one would import torch for seconds. No thread runs yet, that of a progress
    # bar neither.
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        tasks = [pool.submit(read_piece, file, width) for file in files]
        try:
            with progress(len(files)) as advance:
                for task in as_completed(tasks):
                    yield task.result()
                    advance()
        except BrokenProcessPool:
            raise SettingError(
                "a process that read journals was killed: too little memory?"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _records(files: list[Path]) -> int:
    return sum(
        _size(file) // (_BYTES_PLAIN if file.exists() else _BYTES_COMPRESSED) for file in files
    )


def _size(file: Path) -> int:
    for path in (file, Path(f"{file}.gz")):
        with contextlib.suppress(FileNotFoundError):
            return path.stat().st_size
    return 0
