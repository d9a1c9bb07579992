"""One SQLite file with durable, grouped writes; what is in it is `alerting.store`'s matter.

A write is on the disk when its future ends (WAL, `synchronous=FULL`). One thread writes: it takes
whatever waits and commits once for all of it, so a burst of deliveries costs few syncs.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from alerting.exceptions import AlertingError, ConfigError

BUSY_TIMEOUT_SECONDS = 5.0
"""How long a write waits for somebody else's lock; then Alertmanager is told to try again."""
MAX_BATCH = 256
"""Writes in one commit: bounds how long the first of them waits for the last."""

T = TypeVar("T")


class StoreError(AlertingError):
    """The database could not be written or read just now."""


@dataclass(frozen=True, slots=True)
class _Write:
    work: Callable[[sqlite3.Connection], Any]
    future: Future[Any]


class Reader:
    """What is committed in a database, for anybody: it takes no lock and writes nothing.

    Args:
        path: the file.
        application_id: as for `Database`.
        version: how many schemas the file must have.

    Raises:
        StoreError: it is not there, another program's or of another version.
    """

    def __init__(self, path: Path, application_id: int, version: int) -> None:
        self.path = path
        self._reading = threading.Lock()
        try:
            self._connection = _connect(f"{path.absolute().as_uri()}?mode=ro")
        except sqlite3.Error as error:
            raise StoreError(f"Could not read {path}: {error}.") from error
        try:
            ((found,),) = self.read("PRAGMA application_id")
            ((has,),) = self.read("PRAGMA user_version")
        except StoreError:
            self._connection.close()
            raise
        if (found, has) != (application_id, version):
            self._connection.close()
            raise StoreError(f"{path} is no database of this version's receiver; start it once.")

    def read(self, statement: str, *values: object) -> list[Any]:
        """All rows of a SELECT over what is committed.

        Raises:
            StoreError: it could not be read.
        """
        try:
            with self._reading:
                return self._connection.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise StoreError(f"Could not read {self.path}: {error}.") from error

    def close(self) -> None:
        """Close the file, once a reading under way has ended."""
        with self._reading:
            self._connection.close()


class Database:
    """An open database; all methods may be called from any thread.

    Args:
        path: the file; made when it does not exist.
        application_id: marks the file as ours, so that another program's is never altered.
        schemas: for each version of the schema, from 1 on, the statements that make it of the one
            before. A file of an older version gets those that it lacks, all or none of them.

    Raises:
        ConfigError: the file is no database, another program's, damaged or of a newer version,
            its folder is missing, or another process uses it.
    """

    def __init__(self, path: Path, *, application_id: int, schemas: Sequence[str]) -> None:
        self.path = path
        self._version = len(schemas)
        self._lock = _lock(path)
        try:
            self._writer = _open(path, application_id, schemas)
            self._reader = Reader(path, application_id, len(schemas))
        except BaseException:
            os.close(self._lock)
            raise
        self._submitting = threading.Lock()
        self._closed = False
        self._waiting: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="database", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[sqlite3.Connection], T]) -> Future[T]:
        """Run `work` in the writer's next transaction.

        Returns:
            A future of what `work` returns, once that is durable; or of a StoreError, and then
            nothing of it was written.
        """
        future: Future[T] = Future()
        with self._submitting:
            if self._closed:
                future.set_exception(StoreError(f"The database {self.path} is closed."))
            else:
                self._waiting.put(_Write(work, future))
        return future

    def read(self, statement: str, *values: object) -> list[Any]:
        """As `Reader.read`."""
        return self._reader.read(statement, *values)

    def check(self) -> Future[None]:
        """A future that ends well once a changeless write was committed to the disk."""

        def work(connection: sqlite3.Connection) -> None:
            # Setting it to the value that it has still writes a page.
            connection.execute(f"PRAGMA user_version = {self._version}")

        return self.submit(work)

    def close(self) -> None:
        """Commit what waits and close; what comes later gets a StoreError."""
        with self._submitting:
            if self._closed:
                return
            self._closed = True
            self._waiting.put(None)
        self._thread.join()
        self._reader.close()
        self._writer.close()
        os.close(self._lock)

    def _write_all(self) -> None:
        closing = False
        while not closing:
            waiting = [self._waiting.get()]
            # Nobody else takes from the queue, so what is not empty does not block.
            while len(waiting) < MAX_BATCH and not self._waiting.empty():
                waiting.append(self._waiting.get())
            closing = None in waiting
            self._commit([write for write in waiting if write is not None])

    def _commit(self, batch: list[_Write]) -> None:
        # A caller that went away may have cancelled its future; from here on it cannot.
        batch = [write for write in batch if write.future.set_running_or_notify_cancel()]
        results: list[tuple[Any, Exception | None]] = []
        connection = self._writer
        try:
            connection.execute("BEGIN IMMEDIATE")
            for write in batch:
                # One caller's bad write must not cost the others theirs.
                connection.execute("SAVEPOINT one")
                try:
                    results.append((write.work(connection), None))
                except Exception as error:
                    if not connection.in_transaction:  # a full disk ends the whole transaction
                        raise
                    connection.execute("ROLLBACK TO one")
                    results.append((None, error))
                connection.execute("RELEASE one")
            connection.execute("COMMIT")
        except Exception as error:  # goes to the callers; this thread must go on
            with contextlib.suppress(sqlite3.Error):
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
            results = [(None, error)] * len(batch)
        for write, (result, failure) in zip(batch, results, strict=True):
            if failure is None:
                write.future.set_result(result)
            elif isinstance(failure, sqlite3.Error):
                sentence = f"Could not write {self.path}: {failure}."
                write.future.set_exception(StoreError(sentence))
            else:
                write.future.set_exception(failure)


def _connect(name: str) -> sqlite3.Connection:
    # isolation_level None: transactions begin and end where we say so.
    return sqlite3.connect(
        name, uri=True, timeout=BUSY_TIMEOUT_SECONDS, isolation_level=None, check_same_thread=False
    )


def _open(path: Path, application_id: int, schemas: Sequence[str]) -> sqlite3.Connection:
    try:
        connection = _connect(path.absolute().as_uri())
    except sqlite3.Error as error:
        raise ConfigError(f"The database {path} cannot be opened: {error}.") from error
    try:
        _prepare(connection, path, application_id, schemas)
    except sqlite3.Error as error:
        connection.close()
        raise ConfigError(
            f"{path} cannot be used as the receiver's database: {error}. "
            "Move it away to start with a new one."
        ) from error
    except ConfigError:
        connection.close()
        raise
    return connection


def _prepare(
    connection: sqlite3.Connection, path: Path, application_id: int, schemas: Sequence[str]
) -> None:
    def ask(statement: str) -> Any:
        return connection.execute(statement).fetchone()[0]

    # Judged before anything is written: another program's file must stay as it is.
    found = 0
    is_new = not ask("SELECT count(*) FROM sqlite_master") and not ask("PRAGMA application_id")
    if not is_new:
        if ask("PRAGMA application_id") != application_id:
            raise ConfigError(f"{path} is another program's database.")
        found = ask("PRAGMA user_version")
        if not 1 <= found <= len(schemas):
            raise ConfigError(
                f"{path} has schema version {found}; this version of act-alerting uses "
                f"{len(schemas)}."
            )
        if (damage := ask("PRAGMA quick_check(1)")) != "ok":
            raise ConfigError(f"{path} is damaged ({damage}).")
    if ask("PRAGMA journal_mode = WAL") != "wal":
        raise ConfigError(f"{path} lies on a file system on which SQLite cannot use WAL.")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    if found < len(schemas):
        connection.executescript(
            f"BEGIN; {' '.join(schemas[found:])} PRAGMA application_id = {application_id};"
            f" PRAGMA user_version = {len(schemas)}; COMMIT;"
        )


def _lock(path: Path) -> int:
    if not path.parent.is_dir():
        raise ConfigError(f"The database's folder {path.parent} does not exist.")
    lock = path.with_name(f"{path.name}.lock")
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(f"{lock} cannot be opened: {error.strerror}.") from error
    try:
        # The kernel frees it with the process, however that ends.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(f"Another receiver uses the database {path}.") from error
    return descriptor
