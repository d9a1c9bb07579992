"""From journals to OpenMetrics, so that a dashboard can show the steps that no scrape saw.

The families are those of the live page with `job="act-journal"` beside its labels: with the live
job and recent times, backfilled samples fired real alarms when that was tried.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from typing import TextIO

from act_exporter.collector import FAMILIES, sample_prefix
from act_exporter.records import STATISTICS, Reader, Record

JOB = "act-journal"

YOUNGEST_SECONDS = 900
"""Younger samples are left out. Alerts for people look back 6 minutes and instant queries 5; the
rest is for clocks that differ and for a block that is loaded while it still counts."""

_FAMILIES = {
    name: family for name in STATISTICS for family in FAMILIES if family.name == f"act_layer_{name}"
}

# Memory for sorting; what is more lies in a temporary file, which no crash leaves behind.
_CACHE_KIB = 65_536


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What became of the records.

    Attributes:
        records: records that were written.
        samples: samples that they made.
        young: records that were left out as younger than `YOUNGEST_SECONDS`.
        same: records that were left out since one of the same tensor has the same millisecond.
    """

    records: int
    samples: int
    young: int
    same: int


def backfill(
    reader: Reader,
    output: Callable[[], AbstractContextManager[TextIO]],
    *,
    now: float,
    progress: Callable[[], None] = lambda: None,
) -> Written:
    """Write the journals' samples as OpenMetrics, for `promtool tsdb create-blocks-from`.

    OpenMetrics wants each family and in it each series in one piece, while journals go by steps;
    so the records are sorted on disk, in 64 MiB of memory however large the journals are.

    Args:
        reader: the journals.
        output: opens what is written to; not called where there is nothing to write.
        now: Unix seconds; what is not `YOUNGEST_SECONDS` older is left out.
        progress: called once a file that was read and once a family that was written, see `parts`.
    """
    # An empty name is SQLite's for a file of this connection's own, deleted when it closes.
    with closing(sqlite3.connect("", isolation_level=None)) as database:
        database.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        database.execute("PRAGMA journal_mode = OFF")
        columns = ", ".join(f'"{name}" REAL' for name in _FAMILIES)
        database.execute(
            f"CREATE TABLE samples (series INTEGER, milliseconds INTEGER, {columns},"
            " PRIMARY KEY (series, milliseconds)) WITHOUT ROWID"
        )
        sorting = _Sorting(now)
        # The later of two records of one millisecond stays: there is no third digit to tell them.
        places = ", ".join("?" * (len(_FAMILIES) + 2))
        database.execute("BEGIN")
        database.executemany(
            f"INSERT OR REPLACE INTO samples VALUES ({places})",  # noqa: S608
            sorting.rows(reader.records(progress)),
        )
        database.execute("COMMIT")
        (records,) = database.execute("SELECT count(*) FROM samples").fetchone()
        samples = _write(database, list(sorting.series), output, progress) if records else 0
    return Written(
        records=records,
        samples=samples,
        young=sorting.young,
        same=sorting.taken - records,
    )


def parts(reader: Reader) -> int:
    """How often `progress` is called."""
    return len(reader.files) + len(_FAMILIES)


class _Sorting:
    """Numbers the series and makes rows of the records that are old enough."""

    def __init__(self, now: float) -> None:
        self._before = now - YOUNGEST_SECONDS
        self.series: dict[tuple[tuple[str, str], ...], int] = {}
        self.taken = 0
        self.young = 0

    def rows(self, records: Iterator[Record]) -> Iterator[tuple[float, ...]]:
        for record in records:
            if record.time > self._before:
                self.young += 1
                continue
            self.taken += 1
            labels = (
                ("run", record.run),
                ("rank", str(record.rank)),
                ("layer", record.layer),
                ("tensor", record.tensor),
                # Steps after a rollback come again; so they are series of their own.
                ("generation", str(record.generation)),
                ("job", JOB),
            )
            number = self.series.setdefault(labels, len(self.series))
            values = [record.statistics[name] for name in _FAMILIES]
            yield (number, round(record.time * 1000), *values)


def _write(
    database: sqlite3.Connection,
    series: list[tuple[tuple[str, str], ...]],
    output: Callable[[], AbstractContextManager[TextIO]],
    progress: Callable[[], None],
) -> int:
    """Write the sorted samples; how many they were."""
    samples = 0
    with output() as stream:
        for column, family in _FAMILIES.items():
            stream.write(
                f"# HELP {family.name} {family.help}\n# TYPE {family.name} {family.kind}\n"
            )
            prefixes = [sample_prefix(family.name, dict(labels), {}) for labels in series]
            # What was undefined is NULL here, as SQLite has no NaN.
            found = database.execute(
                f'SELECT series, milliseconds, "{column}" FROM samples'  # noqa: S608
                f' WHERE "{column}" IS NOT NULL ORDER BY series, milliseconds'
            )
            for number, at, value in found:
                stream.write(f"{prefixes[number]}{_number(value)} {at / 1000:.3f}\n")
                samples += 1
            progress()
        stream.write("# EOF\n")
    return samples


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)
