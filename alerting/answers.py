"""What becomes of requests: the guards' answers, and requests that are lost or not taken up.

Each end is recorded together with the message about it, for those who are told.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from alerting.claims import Claims
from alerting.control import Answer, ControlDirectory, Request
from alerting.escalation import Escalation
from alerting.exceptions import ControlError
from alerting.metrics import Metrics
from alerting.outbox import News, news_of_answer, news_of_overdue
from alerting.settings import Settings
from alerting.store import Intent, Store

log = logging.getLogger(__name__)

LOST_AFTER_SECONDS = 120.0
"""A request with neither file nor answer for this long is lost. Over a network file system the
answer may become visible up to a minute after the request has gone."""


class Answers:
    """Collects answers; whoever owns it calls `collect` again and again, from one thread.

    Args:
        settings: the receiver's.
        store: has the requests, and takes their ends.
        metrics: counts answers.
        clock: Unix seconds.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        metrics: Metrics,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._store = store
        self._metrics = metrics
        self._clock = clock
        claims = Claims(settings.shared) if settings.shared is not None else None
        self._escalation = Escalation(settings.escalate, store, claims)
        self._missing_since: dict[str, float] = {}

    def collect(self) -> None:
        """Look for each answer that is not recorded yet, and for how long it is not there.

        Raises:
            StoreError: the database could not be read or written just now.
        """
        for intent in self._store.unanswered():
            request = intent.request
            control = ControlDirectory(intent.control)
            try:
                answer = control.read_answer(request.id)
                if answer is None:
                    loss = _loss(control, request)
                    self._watch_for_loss(intent, loss)
                    if loss is None:
                        self._watch_for_deadline(intent)
                    continue
            except (ControlError, OSError) as error:
                self._watch_for_loss(intent, str(error))
                continue
            # By the id that was asked under, whatever the file says, or it would be read for ever.
            answer = replace(answer, id=request.id)
            self._store.record_answer(answer, self._news(control, request, answer))
            self._missing_since.pop(request.id, None)
            # Each is counted by who made it.
            if not intent.found:
                self._metrics.answers.labels(request.action, answer.result).inc()
            log.info(
                "Run %r answered the request %s (%s): %s: %s",
                request.run,
                request.id,
                request.action,
                answer.result,
                answer.detail,
            )

    def _news(self, control: ControlDirectory, request: Request, answer: Answer) -> News | None:
        if not self._tells_of(request):
            return None
        left = None
        try:
            status = control.status()
            # The guard publishes before it answers; what it has published since is not about this.
            if status is not None and status.generation == answer.generation:
                left = status.rollbacks_left
        except ControlError as error:
            log.warning("%s", error)
        return news_of_answer(request, answer, self._clock(), rollbacks_left=left)

    def _tells_of(self, request: Request) -> bool:
        return bool(self._settings.notify) and request.action != "drill"

    def _watch_for_deadline(self, intent: Intent) -> None:
        """Tell people of an open request that the trainer does not take up, and hand it on."""
        request, now = intent.request, self._clock()
        if request.action == "drill":
            # Who began it waits for it and says so; nobody else is to be woken or restarted.
            return
        open_seconds = now - request.created_at
        if intent.overdue_at is None:
            if open_seconds < self._settings.request_deadline_seconds:
                return
            news = news_of_overdue(request, open_seconds, now)
            self._store.record_overdue(request.id, now, news if self._settings.notify else None)
            log.warning(
                "The request %s (%s) to run %r is open for %.0f s: nobody takes it up.",
                request.id,
                request.action,
                request.run,
                open_seconds,
            )
        if self._settings.escalate and intent.escalated_at is None:
            self._escalation.begin(intent, now)

    def _watch_for_loss(self, intent: Intent, problem: str | None) -> None:
        request = intent.request
        if problem is None:
            self._missing_since.pop(request.id, None)
            return
        now = self._clock()
        # A clock that was set back starts the wait anew.
        since = self._missing_since.setdefault(request.id, now)
        if now < since:
            self._missing_since[request.id] = now
        if now - since < LOST_AFTER_SECONDS:
            return
        news = news_of_answer(request, None, now, detail=problem)
        self._store.record_lost(request.id, problem, now, news if self._tells_of(request) else None)
        del self._missing_since[request.id]
        if not intent.found:
            self._metrics.answers.labels(request.action, "lost").inc()
        log.warning(
            "The request %s (%s) to run %r is lost: %s",
            request.id,
            request.action,
            request.run,
            problem,
        )


def _loss(control: ControlDirectory, request: Request) -> str | None:
    """Why an unanswered request will never be answered, or None while it is open."""
    holder = control.open_request(request.action)
    if holder is not None and holder.id == request.id:
        return None
    return f"it is no longer in {control.path} and has no answer"
