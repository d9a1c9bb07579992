"""A request that the trainer does not take up, handed to a command of the operator's.

The command is an argument list and no shell ever sees it. What the request is about comes in the
environment, so nothing that somebody wrote into a label becomes an argument.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping

from alerting.claims import Claims
from alerting.control import Request
from alerting.store import Intent, Store, StoreError

log = logging.getLogger(__name__)

LIMIT_SECONDS = 60.0
"""For a call to a scheduler or a supervisor; what takes longer should go on by itself."""
_SHOWN_BYTES = 300
"""Of what the command wrote on standard error, in the record and the log."""


class Escalation:
    """Runs the command, each time in a thread of its own: another run's rollback must not wait.

    Args:
        command: program and arguments.
        store: what came of it is recorded there.
        claims: where several receivers may run it, by which one of them does; else None.
        limit_seconds: the command and what it started are killed where it has not ended by then.
    """

    def __init__(
        self,
        command: tuple[str, ...],
        store: Store,
        claims: Claims | None = None,
        limit_seconds: float = LIMIT_SECONDS,
    ) -> None:
        self._command = command
        self._store = store
        self._claims = claims
        self._limit_seconds = limit_seconds

    def begin(self, intent: Intent, at: float) -> None:
        """Run it for this request, and return at once; by one of the receivers that know of it.

        Raises:
            StoreError: that it is begun could not be recorded, so it is not.
        """
        request = intent.request
        claim = None
        if self._claims is not None:
            claim = self._claims.take(f"escalate {request.id}", at, since=0.0)
            if claim is not None and not claim.mine:
                if claim.sent:
                    self._store.begin_escalation(request.id, at)
                    self._store.end_escalation(request.id, f"{claim.owner} ran it")
                return
            if claim is None and intent.found:
                # Who made it runs it all the same, and twice would be worse than late.
                return
        self._store.begin_escalation(request.id, at)
        if self._claims is not None and claim is not None:
            # Before it is run: who dies after this has run it, or people have heard anyway.
            self._claims.finish(claim, sent=True)
        threading.Thread(
            target=self._run, args=(request,), name=f"escalation-{request.id}", daemon=True
        ).start()

    def _run(self, request: Request) -> None:
        said = run(self._command, environment(request), self._limit_seconds)
        log.warning("The request %s of run %r was escalated: %s", request.id, request.run, said)
        try:
            self._store.end_escalation(request.id, said)
        except StoreError as error:
            log.warning("%s", error)


def environment(request: Request) -> dict[str, str]:
    """What the command learns of the request, besides our own environment."""
    return {
        # An environment has no place for a NUL, which JSON does have.
        "ACT_RUN": request.run.replace("\0", ""),
        "ACT_ACTION": request.action,
        "ACT_REQUEST": request.id,
    }


def run(command: tuple[str, ...], more: Mapping[str, str], limit_seconds: float) -> str:
    """Run the command to its end or its limit; what came of it, in one sentence."""
    # A file and no pipe: what the command leaves running behind it holds the pipe open.
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env={**os.environ, **more},
                # A group of its own, so that its children end with it.
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            return f"{command[0]} could not be started: {error}"
        try:
            process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            # It is not waited for yet, so the group is still its own.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"{command[0]} did not end within {limit_seconds:g} s and was killed"
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - _SHOWN_BYTES))
        words = " ".join(errors.read().decode(errors="replace").split())
    return f"{command[0]} ended with {process.returncode}" + (f": {words}" if words else "")
