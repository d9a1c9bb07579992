"""What `act-alerting` lists: a table in a terminal, and plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from alerting.exceptions import ControlError
from alerting.overview import Overview
from alerting.text import clean

COLUMNS = (
    "run",
    "state",
    "step",
    "generation",
    "rollbacks left",
    "open request",
    "last decision",
    "last answer",
    "messages",
)
NOTHING = "-"
_UNITS = (("d", 86_400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))


def print_runs(runs: Iterable[Overview | ControlError], now: float, out: TextIO) -> None:
    """Print a row a run; tab-separated, a header first, where `out` is no terminal.

    Args:
        runs: what to print; an error becomes a line below.
        now: Unix seconds, from which ages are reckoned.
        out: where to.
    """
    found = list(runs)
    print_table(COLUMNS, [_row(r, now) for r in found if isinstance(r, Overview)], out)
    problems = [clean(str(r)) for r in found if isinstance(r, ControlError)]
    for problem in problems:
        out.write(f"{problem}\n")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], out: TextIO) -> None:
    """Print the rows; tab-separated, a header first, where `out` is no terminal."""
    # Names and reasons are what somebody wrote into a file: they must not steer the terminal.
    cleaned = [[clean(cell) for cell in row] for row in rows]
    console = Console(file=out)
    if console.is_terminal:
        table = Table(*columns)
        for row in cleaned:
            table.add_row(*(Text(cell) for cell in row))
        console.print(table)
    else:
        for line in (columns, *cleaned):
            out.write("\t".join(line) + "\n")


def ago(seconds: float) -> str:
    """An age in one rounded unit, such as "3 min ago"."""
    for unit, size in _UNITS:
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return "now"


def _row(run: Overview, now: float) -> list[str]:
    status = run.status
    asked = "; ".join(f"{r.action}, {ago(now - r.created_at)}" for r in run.requests)
    decided = answered = messages = ""
    if run.decision is not None:
        last = run.decision
        decided = f"{last['action']} {last['outcome']}, {ago(now - last['at'])}"
    if run.answer is not None:
        last = run.answer
        step = f" at step {last['step']}" if last["step"] is not None else ""
        answered = f"{last['action']} {last['result']}{step}, {ago(now - last['answered_at'])}"
    if run.waiting or run.failed:
        messages = f"{run.waiting} waiting, {run.failed} failed"
    cells = [
        status.run,
        # What a trainer that was killed wrote last says "running" for ever; its age tells.
        f"{status.state}, {ago(now - status.updated_at)}",
        str(status.step),
        str(status.generation),
        str(status.rollbacks_left),
    ]
    return cells + [cell or NOTHING for cell in (asked, decided, answered, messages)]
