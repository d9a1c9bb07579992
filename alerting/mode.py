"""Whether trainers are asked for anything: `mode:` of the config, or what was switched to since.

It is a row in the receiver's database, which the running receiver reads before each request. So it
can be switched from outside without a restart, and stays switched over one.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

from alerting.database import BUSY_TIMEOUT_SECONDS, StoreError

Mode = Literal["act", "notify-only"]
MODES: tuple[Mode, ...] = get_args(Mode)
"""act: backups and rollbacks are asked for; notify-only: people are told what would have been."""

SCHEMA = """
CREATE TABLE mode (id INTEGER PRIMARY KEY CHECK (id = 1), mode TEXT NOT NULL, at REAL NOT NULL)
STRICT;
"""


def switched_to(read: Callable[[str], list[Any]]) -> Mode | None:
    """The mode that was switched to, or None where the config's is in force.

    Args:
        read: reads the database, as `Reader.read`.
    """
    rows = read("SELECT mode FROM mode")
    return rows[0][0] if rows else None


def switch(database: Path, mode: Mode, at: float) -> None:
    """Switch to `mode`, for the receiver that runs and for those after it.

    Args:
        database: of this version; see `store.open_reader`, which checks it.
        mode: from now on, whatever the config says.
        at: Unix seconds.

    Raises:
        StoreError: it could not be written.
    """
    name = f"{database.absolute().as_uri()}?mode=rw"
    try:
        with contextlib.closing(
            sqlite3.connect(name, uri=True, timeout=BUSY_TIMEOUT_SECONDS)
        ) as connection:
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute(
                "INSERT INTO mode (id, mode, at) VALUES (1, ?, ?) ON CONFLICT (id)"
                " DO UPDATE SET mode = excluded.mode, at = excluded.at",
                (mode, at),
            )
            connection.commit()
    except sqlite3.Error as error:
        raise StoreError(f"Could not write {database}: {error}.") from error
