"""`act-alerting` with one fault in it, as a process of its own for tests.test_faults.

    python -m tests.alerting.faulty FAULT[=ARGUMENT][+FAULT ...] serve --config receiver.yml

A step of `DEATHS` ends the process there by SIGKILL, as the kernel would. Nothing but the place is
chosen here: the process is the shipped one up to that point.
"""

from __future__ import annotations

import functools
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NoReturn

import alerting.claims
import alerting.messenger
import alerting.receiver
import alerting.worker
from alerting.claims import Claims
from alerting.cli import main
from alerting.control import ControlDirectory
from alerting.database import Database
from alerting.outbox import Outbox
from alerting.store import Store
from alerting.worker import Worker

SLOW_SECONDS = 13.0
"""Alertmanager waits 10 s, or its group_interval where that is more, and then cuts."""
RETRIED_SECONDS = 600.0
"""Nothing else that a test waits for takes so long."""
LOCKED_SECONDS = 7.0
"""Longer than a write waits for somebody else's lock (5 s)."""

LOCK = """
import sqlite3, sys, time
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
time.sleep(float(sys.argv[2]))
"""


def die(*_: object, **__: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def die_before_commit(owner: type[Store] | type[Outbox], method: str) -> None:
    """With the row written and its transaction open."""
    record = getattr(owner, method)

    def recording(self: Any, *arguments: Any) -> Any:
        database: Database = self._database

        def submit(work: Callable[[Any], Any]) -> Any:
            return Database.submit(database, lambda connection: (work(connection), die()))

        database.submit = submit  # type: ignore[method-assign]
        return record(self, *arguments)

    setattr(owner, method, recording)


def die_before_the_answer(name: str) -> None:
    """With what is acknowledged on the disk."""
    respond = alerting.receiver.JSONResponse

    def responding(content: dict[str, Any], *arguments: Any, **options: Any) -> Any:
        return die() if name in content else respond(content, *arguments, **options)

    alerting.receiver.JSONResponse = responding  # type: ignore[assignment, misc]


def die_after_the_answer() -> None:
    """Before the worker has done anything about the delivery."""
    answered = threading.Event()
    Worker.wake = lambda _self: answered.set()  # type: ignore[method-assign]

    def handling(_self: Worker, _delivery: object) -> None:
        answered.wait()
        die()

    Worker._handle = handling  # type: ignore[method-assign]


def die_after(owner: type, method: str) -> None:
    """When the method is through."""
    original = getattr(owner, method)

    def calling(*arguments: Any, **options: Any) -> None:
        original(*arguments, **options)
        die()

    setattr(owner, method, calling)


def die_after_the_link() -> None:
    """With the request open, and the file that it was linked from still there."""
    link = os.link

    def linking(*arguments: Any) -> None:
        link(*arguments)
        die()

    os.link = linking


DEATHS: dict[str, Callable[[], None]] = {
    "before-commit": lambda: die_before_commit(Store, "add_delivery"),
    "after-commit": lambda: die_before_the_answer("delivery"),
    "after-answer": die_after_the_answer,
    "before-intent": lambda: setattr(Store, "intend", die),
    "before-request": lambda: setattr(ControlDirectory, "claim", die),
    "at-the-link": die_after_the_link,
    "after-request": lambda: setattr(Store, "decide", die),
    "after-decision": lambda: setattr(Store, "finish_delivery", die),
    "before-outcome": lambda: setattr(Store, "record_answer", die),
    "after-outcome": lambda: die_after(Store, "record_answer"),
    "message-before-commit": lambda: die_before_commit(Outbox, "add"),
    "message-after-commit": lambda: die_before_the_answer("message"),
    "message-before-sending": lambda: setattr(Outbox, "begin", die),
    "message-after-sending": lambda: setattr(Outbox, "end", die),
}

CLAIM_DEATHS: dict[str, Callable[[], None]] = {
    "before-the-claim": lambda: setattr(alerting.claims, "create_whole", die),
    "at-the-claims-link": die_after_the_link,
    "after-the-claim": lambda: setattr(Outbox, "begin", die),
    "before-the-claims-end": lambda: setattr(Claims, "finish", die),
    "after-the-claims-end": lambda: die_after(Claims, "finish"),
}
"""Of a message, where receivers have a folder in common."""


def look_often() -> None:
    """At what another receiver is sending; what a tool did not take is sent again much later."""
    alerting.messenger.RECHECK_SECONDS = 0.2
    alerting.messenger.FIRST_WAIT_SECONDS = RETRIED_SECONDS


def never_look() -> None:
    """The worker acts only when it is told of a delivery."""
    alerting.worker.POLL_SECONDS = 600.0


def wait_briefly() -> None:
    """What a dead receiver was sending is taken over soon, and so is what a slow one sends."""
    alerting.claims.PATIENCE_SECONDS = 1.0
    look_often()


def answer_slowly() -> None:
    """The first delivery and the first message are recorded at once and answered much later."""

    def slow(record: Callable[..., Future[int]]) -> Callable[..., Future[int]]:
        pending = True

        def recording(*arguments: Any) -> Future[int]:
            nonlocal pending
            future = record(*arguments)
            if not pending:
                return future
            pending = False
            late: Future[int] = Future()
            timer = threading.Timer(SLOW_SECONDS, lambda: late.set_result(future.result()))
            timer.daemon = True
            timer.start()
            return late

        return recording

    Store.add_delivery = slow(Store.add_delivery)  # type: ignore[method-assign]
    Outbox.add = slow(Outbox.add)  # type: ignore[method-assign]


def fill_the_disk_at_the_request() -> None:
    """From the first request on no file grows, for as long as the test leaves it so."""
    claim = ControlDirectory.claim

    def claiming(self: ControlDirectory, request: Any) -> bool:
        ControlDirectory.claim = claim  # type: ignore[method-assign]
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
        return claim(self, request)

    ControlDirectory.claim = claiming  # type: ignore[method-assign]


def lock_after_the_request(database: str) -> None:
    """Another process locks the database when the request is open and not yet recorded as such."""
    claim = ControlDirectory.claim

    def claiming(self: ControlDirectory, request: Any) -> bool:
        ControlDirectory.claim = claim  # type: ignore[method-assign]
        claimed = claim(self, request)
        argv = [sys.executable, "-c", LOCK, database, str(LOCKED_SECONDS)]
        locking = subprocess.Popen(argv, stdout=subprocess.PIPE)
        assert locking.stdout is not None
        locking.stdout.readline()
        threading.Thread(target=locking.wait, daemon=True).start()
        return claimed

    ControlDirectory.claim = claiming  # type: ignore[method-assign]


def shift_the_clock(path: str) -> None:
    """The receiver's clock is off by the seconds that a file holds."""

    def clock() -> float:
        return time.time() + float(Path(path).read_text())

    alerting.receiver.create_app = functools.partial(alerting.receiver.create_app, clock=clock)


FAULTS: dict[str, Callable[..., None]] = {
    **DEATHS,
    **CLAIM_DEATHS,
    "woken": never_look,
    "attentive": look_often,
    "impatient": wait_briefly,
    "slow": answer_slowly,
    "full": fill_the_disk_at_the_request,
    "locked": lock_after_the_request,
    "clock": shift_the_clock,
}

if __name__ == "__main__":
    for chosen in sys.argv.pop(1).split("+"):
        fault, _, argument = chosen.partition("=")
        FAULTS[fault](*([argument] if argument else []))
    main()
