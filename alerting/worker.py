"""The one thread that acts: recorded deliveries become decisions, decisions become requests.

It takes deliveries from the store only, so what a crash left unhandled is taken up at the next
start like everything else. Each step can be repeated: a request is recorded with its id before it
is claimed, so after a crash the control directory tells whether the claim had happened. The same
thread looks for the guards' answers (`alerting.answers`) and whether the watchdog stays away.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from alerting.answers import Answers
from alerting.control import ACTIONS, ControlDirectory, Request, new_request_id
from alerting.exceptions import ControlError
from alerting.metrics import NO_ACTION, Metrics
from alerting.mode import switched_to
from alerting.outbox import news_of_notify_only
from alerting.payload import PayloadError, parse
from alerting.policy import Decision, Outcome, Wish, judge, read
from alerting.settings import Settings
from alerting.store import Delivery, Intent, Store, StoreError
from alerting.watchdog import DeadMansSwitch

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
"""How often answers are looked for; people do not notice half a second."""
STOP_SECONDS = 5.0
"""How long to wait for the thread at the end; a hanging file system would keep it for ever."""


class Worker:
    """Acts on what the store holds.

    Args:
        settings: the receiver's.
        store: where deliveries come from and decisions go to.
        metrics: counts decisions and answers.
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
        self._switch = DeadMansSwitch(store.beats, settings.watchdog_seconds, metrics, clock)
        self._answers = Answers(settings, store, metrics, clock)
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)

    def start(self) -> None:
        """Begin, with what an earlier process left unhandled."""
        self._thread.start()

    def wake(self) -> None:
        """Say that a delivery was recorded."""
        self._wake.set()

    def is_alive(self) -> bool:
        """Whether deliveries are being acted on."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End after the request in hand; the rest stays recorded for the next start."""
        self._stopping.set()
        self._wake.set()
        self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        while not self._stopping.is_set():
            # Cleared before the work: a delivery recorded during it sets it again.
            self._wake.clear()
            try:
                self._handle_recorded()
                self._answers.collect()
                self._switch.look()
            except StoreError as error:
                log.warning("%s It is tried again.", error)
            except Exception:
                # Every later alert would be recorded in vain if a bug ended this thread.
                log.exception("The worker failed; it goes on.")
            self._wake.wait(POLL_SECONDS)

    def _handle_recorded(self) -> None:
        last = 0
        while (delivery := self._store.next_unhandled(after=last)) is not None:
            if self._stopping.is_set():
                return
            last = delivery.id
            try:
                self._handle(delivery)
            except StoreError:
                raise
            except Exception:
                # One delivery that trips over a bug must not hold up all that come after it.
                log.exception("Delivery %d could not be handled.", delivery.id)
                self._finish(delivery.id, [_unhandled("an internal error, see the log")])

    def _handle(self, delivery: Delivery) -> None:
        try:
            wishes, decisions = read(parse(delivery.payload), self._settings.alerts)
        except PayloadError as error:
            # It was accepted once, so by a version with other bounds.
            wishes, decisions = [], [_unhandled(str(error))]
        decided = self._store.decided(delivery.id)
        for wish in wishes:
            if self._stopping.is_set():
                return
            if (wish.run, wish.action) not in decided:
                self._act(delivery.id, wish)
        self._finish(delivery.id, decisions)

    def _finish(self, delivery_id: int, decisions: list[Decision]) -> None:
        self._store.finish_delivery(delivery_id, decisions, self._clock())
        for decision in decisions:
            self._announce(delivery_id, decision)

    def _act(self, delivery_id: int, wish: Wish) -> None:
        intent = self._store.intended(delivery_id, wish.run, wish.action)
        holder: Request | None = None
        try:
            if intent is not None and _was_claimed(intent):
                decision = _requested(intent)
            else:
                if intent is not None:
                    self._store.forget(intent)
                    intent = None
                considered = self._consider(delivery_id, wish)
                if isinstance(considered, Intent):
                    intent = considered
                    self._store.intend(intent)
                    decision, holder = _claim(intent)
                else:
                    decision = considered
        except (ControlError, OSError) as error:
            decision = _decide(wish, "failed", str(error))
        news = None
        if decision.outcome == "notify-only" and self._settings.notify:
            news = news_of_notify_only(decision, self._clock())
        found = None
        if self._settings.shared is not None and intent is not None and holder is not None:
            # Who made it may not live to tell what became of it.
            found = replace(intent, request=holder, found=True)
        self._store.decide(delivery_id, decision, self._clock(), intent, news, found)
        self._announce(delivery_id, decision)

    def _consider(self, delivery_id: int, wish: Wish) -> Intent | Decision:
        control = ControlDirectory.find(self._settings.runs, wish.run)
        status = control.status() if control is not None else None
        if status is None and (problem := _unreadable_status(self._settings.runs)) is not None:
            # It may be this very run's, so "unknown" would be a guess.
            return _decide(wish, "failed", f"no readable status names this run, and {problem}")
        now = self._clock()
        refusal = judge(
            wish,
            status,
            now=now,
            backup_interval_seconds=self._settings.backup_interval_seconds,
        )
        if refusal is not None or control is None or status is None:
            return refusal or _decide(wish, "failed", "the run's status vanished while it was read")
        mode = switched_to(self._store.read) or self._settings.mode
        if mode == "notify-only" and wish.action != "drill":
            reason = f"in mode notify-only the guard of generation {status.generation} is not asked"
            return replace(_decide(wish, "notify-only", reason), generation=status.generation)
        request = Request(
            id=new_request_id(),
            run=wish.run,
            generation=status.generation,
            action=wish.action,
            alert=wish.alertname,
            created_at=now,
        )
        return Intent(request=request, delivery_id=delivery_id, control=control.path)

    def _announce(self, delivery_id: int, decision: Decision) -> None:
        action = decision.action if decision.action in ACTIONS else NO_ACTION
        self._metrics.requests.labels(action, decision.outcome).inc()
        # Labels are shown quoted: they may hold line breaks.
        log.log(
            logging.WARNING if decision.outcome in ("refused", "failed") else logging.INFO,
            "Delivery %d: %s of run %r, asked for by %r: %s: %s",
            delivery_id,
            action,
            decision.run,
            decision.alertname,
            decision.outcome,
            decision.reason,
        )


def _claim(intent: Intent) -> tuple[Decision, Request | None]:
    """What came of it, and the request that is open instead."""
    control, request = ControlDirectory(intent.control), intent.request
    try:
        if control.claim(request):
            return _requested(intent), None
    except OSError:
        # It may have failed after the link, in the folder's sync: then the guard will act on it.
        if _was_claimed(intent):
            return _requested(intent), None
        raise
    holder = control.open_request(request.action)
    # Nothing is open any more: it was answered just now.
    if holder is None and control.claim(request):
        return _requested(intent), None
    decision = replace(
        _requested(intent),
        outcome="open",
        reason=(
            f"request {holder.id} for generation {holder.generation} is open already"
            if holder is not None
            else "another receiver's request was opened just now"
        ),
        request_id=holder.id if holder is not None else None,
    )
    return decision, holder


def _was_claimed(intent: Intent) -> bool:
    """Whether the request is open or answered, that is, whether a broken-off claim succeeded."""
    control, request = ControlDirectory(intent.control), intent.request
    holder = control.open_request(request.action)
    # In this order: the guard writes the answer before it closes the request.
    return (holder is not None and holder.id == request.id) or control.read_answer(
        request.id
    ) is not None


def _requested(intent: Intent) -> Decision:
    request = intent.request
    return Decision(
        run=request.run,
        action=request.action,
        alertname=request.alert,
        outcome="requested",
        reason=f"the guard of generation {request.generation} is asked",
        generation=request.generation,
        request_id=request.id,
    )


def _decide(wish: Wish, outcome: Outcome, reason: str) -> Decision:
    return Decision(
        run=wish.run, action=wish.action, alertname=wish.alertname, outcome=outcome, reason=reason
    )


def _unhandled(reason: str) -> Decision:
    return Decision(run="", action="", alertname="", outcome="failed", reason=reason)


def _unreadable_status(runs: Path) -> str | None:
    """What is wrong with the first mangled status file among the run folders, if any is."""
    found = (status for _, status in ControlDirectory.registered(runs))
    return next((str(status) for status in found if isinstance(status, ControlError)), None)
