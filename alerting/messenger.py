"""Sends what is in the outbox: a thread a target, so that one that hangs delays nobody else.

What a target does not take now is tried again, later and later, and given up in the end: by then
Alertmanager has told it anew, or will within its repeat interval. Of several receivers with a
folder in common one sends each message, whichever claims it first (see `alerting.claims`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from alerting.claims import KEEP_SECONDS, Claim, Claims
from alerting.exceptions import NotSentError
from alerting.metrics import Metrics
from alerting.outbox import Outbox, Result, Sending, compose
from alerting.settings import Settings
from alerting.store import StoreError
from alerting.targets import Target
from alerting.text import Message

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
"""How often the outbox is looked at; people do not notice half a second."""
FIRST_WAIT_SECONDS = 5.0
"""Before the second attempt; each further wait is twice as long."""
LONGEST_WAIT_SECONDS = 300.0
"""A tool that is back is used within 5 minutes."""
MAX_ATTEMPTS = 12
"""With those waits half an hour; longer is the time to Alertmanager's next reminder."""
LONGEST_HOLD_SECONDS = 3600.0
"""A tool that asks for more patience than this is not believed."""
RECHECK_SECONDS = 5.0
"""How soon to look again what became of a message that another receiver is sending."""
SWEEP_SECONDS = 3600.0
STOP_SECONDS = 5.0
"""How long to wait for the threads at the end; a message cut off by that is sent again."""


class Messenger:
    """Sends the messages of the outbox to their targets.

    Args:
        settings: the receiver's; its targets are sent to.
        outbox: where messages come from.
        metrics: counts what was sent and what was not.
        clock: Unix seconds.
    """

    def __init__(
        self,
        settings: Settings,
        outbox: Outbox,
        metrics: Metrics,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._outbox = outbox
        self._metrics = metrics
        self._clock = clock
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(
                target=self._run, args=(target,), name=f"messenger-{target.name}", daemon=True
            )
            for target in settings.notify
        ]
        self._claims: dict[str, Claims] = {}
        if settings.shared is not None:
            # One a target: where the folder hangs, each thread waits for itself.
            self._claims = {target.name: Claims(settings.shared) for target in settings.notify}

    def start(self) -> None:
        """Begin, with what an earlier process left unsent."""
        try:
            if left := self._outbox.abandon_others(self._clock()):
                log.warning("%d messages were for targets that are not configured any more.", left)
        except StoreError as error:
            log.warning("%s", error)
        for thread in self._threads:
            thread.start()
        if (shared := self._settings.shared) is not None:
            threading.Thread(
                target=self._sweep, args=(shared,), name="sweeper", daemon=True
            ).start()

    def is_alive(self) -> bool:
        """Whether messages are being sent to every target."""
        return all(thread.is_alive() for thread in self._threads)

    def stop(self) -> None:
        """End after the message in hand; the rest stays recorded for the next start."""
        self._stopping.set()
        deadline = time.monotonic() + STOP_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self, target: Target) -> None:
        while not self._stopping.is_set():
            wait = POLL_SECONDS
            try:
                wait = self._send_next(target)
            except StoreError as error:
                log.warning("%s It is tried again.", error)
            except Exception:
                # Every later message would be recorded in vain if a bug ended this thread.
                log.exception("The messenger of %s failed; it goes on.", target.name)
            self._stopping.wait(wait)

    def _send_next(self, target: Target) -> float:
        """Send the message that is due, if one is; in how many seconds to look again."""
        sending = self._outbox.next_due(target.name, self._clock(), LONGEST_HOLD_SECONDS)
        if sending is None:
            return POLL_SECONDS
        if sending.attempts >= MAX_ATTEMPTS:
            # Only where this process died with each of them.
            self._end(sending, "failed", "it was begun and not ended too often")
            return 0.0
        if wait := target.notifier.bucket.take():
            return wait
        claim = None
        if (claims := self._claims.get(target.name)) is not None:
            key = f"{sending.key}\n{target.name}"
            claim = claims.take(key, sending.at, sending.since)
            if claim is not None and not claim.mine:
                self._leave(sending, claim)
                return 0.0
        self._outbox.begin(sending, self._clock())
        attempt = sending.attempts + 1
        said = problem = None
        try:
            said = target.notifier.send(self._compose(sending, target))
        except NotSentError as error:
            problem = error
        except Exception as error:
            log.exception("Message %d to %s could not be made.", sending.message_id, target.name)
            sentence = f"an internal error ({type(error).__name__}), see the log"
            problem = NotSentError(sentence, retry=True)
        if claims is not None and claim is not None:
            claims.finish(claim, sent=problem is None)
        if problem is not None:
            return self._not_sent(sending, attempt, problem)
        self._end(sending, "sent", said or "")
        return 0.0

    def _leave(self, sending: Sending, claim: Claim) -> None:
        """To the receiver that has sent it, or that may be sending it."""
        if claim.sent:
            self._end(sending, "other", f"{claim.owner} sent it")
            return
        until = self._clock() + RECHECK_SECONDS
        self._insist(
            lambda: self._outbox.postpone(sending, until, f"{claim.owner} may be sending it")
        )

    def _sweep(self, shared: Path) -> None:
        keep_seconds = max(KEEP_SECONDS, 2 * self._settings.repeat_interval_seconds)
        while not self._stopping.is_set():
            Claims(shared).sweep(keep_seconds)
            self._stopping.wait(SWEEP_SECONDS)

    def _compose(self, sending: Sending, target: Target) -> Message:
        settings = self._settings
        return compose(sending, target.language, settings.dashboard_url, settings.mode)

    def _not_sent(self, sending: Sending, attempt: int, error: NotSentError) -> float:
        if not error.retry or attempt >= MAX_ATTEMPTS:
            self._end(sending, "failed", str(error))
            return 0.0
        wait = min(FIRST_WAIT_SECONDS * 2 ** (attempt - 1), LONGEST_WAIT_SECONDS)
        hold = 0.0
        if error.after is not None:
            # The tool's word holds for every message to it.
            wait = hold = min(error.after, LONGEST_HOLD_SECONDS)
        until = self._clock() + wait
        self._insist(lambda: self._outbox.postpone(sending, until, str(error)))
        self._metrics.notifications.labels(sending.target, "retried").inc()
        log.warning(
            "Message %d to %s was not taken, attempt %d of %d; again in %.0f s: %s",
            sending.message_id,
            sending.target,
            attempt,
            MAX_ATTEMPTS,
            wait,
            error,
        )
        return hold

    def _end(self, sending: Sending, result: Result, detail: str) -> None:
        self._insist(lambda: self._outbox.end(sending, result, detail, self._clock()))
        self._metrics.notifications.labels(sending.target, result).inc()
        log.log(
            logging.ERROR if result == "failed" else logging.INFO,
            "Message %d to %s: %s: %s",
            sending.message_id,
            sending.target,
            result,
            detail,
        )

    def _insist(self, write: Callable[[], None]) -> None:
        """Write until it is written: sending again what was sent would flood the group."""
        while True:
            try:
                return write()
            except StoreError as error:
                if self._stopping.wait(POLL_SECONDS):
                    raise
                log.warning("%s It is tried again.", error)
