"""What a delivery asks for, and whether it may have it: where a webhook becomes a decision.

Pure: no files, no clock. `read` sorts a delivery's alerts into at most one wish a run and the
refusals; `judge` holds a wish against the run's published status. Whether a request of the kind is
open already is not judged here: only claiming it can tell (see `alerting.control`).
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Literal, get_args

from alerting.control import ACTIONS, ASKED, DRILL_ALERT, LIVE, Action, Status
from alerting.payload import Alert, Payload

Outcome = Literal["requested", "open", "limited", "covered", "refused", "failed", "notify-only"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
"""What a decision can end in:

- requested: a request was made;
- open: there is an open request of that kind already, so none was made;
- limited: a backup was made less than the backup interval ago;
- covered: another alert of the same delivery asks for as much or more for this run;
- refused: not for us (unknown run, not on the allow-list, resolved, a run that has ended);
- notify-only: a request would have been made, but in this mode none is;
- failed: a file or the payload could not be read or written; judged again at the next delivery.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """What one delivery asks for one run.

    Attributes:
        run: the alert's `run` label; only ever compared, never part of a path.
        action: the alert's `action` label; of `ActDrill` it is "drill", whatever its label says.
        alertname: the first alert of the delivery that asks for it.
    """

    run: str
    action: Action
    alertname: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What was decided about one alert, or about alerts that differ in nothing that counts.

    Attributes:
        run: the `run` label, "" where there is none.
        action: the `action` label, "" where there is none.
        alertname: the alert's name, "" where there is none.
        outcome: see `OUTCOMES`.
        reason: one sentence for people.
        generation: the run's generation that was judged, None where no status was read.
        request_id: the request that was made or is open already, else None.
    """

    run: str
    action: str
    alertname: str
    outcome: Outcome
    reason: str
    generation: int | None = None
    request_id: str | None = None


def read(payload: Payload, allowed: Container[str]) -> tuple[list[Wish], list[Decision]]:
    """Sort a delivery's alerts: at most one wish a run, and a decision for all that ask in vain.

    A drill is a wish of its own beside it: it neither covers what is real nor is covered by it.

    Args:
        payload: the delivery.
        allowed: the names of the alerts that may ask for anything.

    Returns:
        Wishes, recoveries first, and decisions that are "refused" or "covered". Alerts with equal
        run, action, name and outcome (one alert a layer) share one.
    """
    asking: dict[Wish, None] = {}  # dict, not set: the order of the delivery decides who is first
    refused: dict[Decision, None] = {}
    for alert in payload.alerts:
        verdict = _read_alert(alert, allowed)
        if isinstance(verdict, Wish):
            asking[verdict] = None
        else:
            refused[verdict] = None
    by_run: dict[tuple[str, bool], Wish] = {}
    for wish in sorted(asking, key=lambda wish: ACTIONS.index(wish.action)):
        first = by_run.setdefault((wish.run, wish.action == "drill"), wish)
        if first is not wish:
            refused[
                _refuse(
                    wish.run,
                    wish.action,
                    wish.alertname,
                    f"{first.alertname} of the same delivery asks for {first.action}, "
                    "which covers it",
                    outcome="covered",
                )
            ] = None
    return list(by_run.values()), list(refused)


def judge(
    wish: Wish, status: Status | None, *, now: float, backup_interval_seconds: float
) -> Decision | None:
    """Whether `wish` must not become a request, and why; None means that it may be claimed.

    Args:
        wish: what is asked for.
        status: what the guard published, None where no guard registered such a run.
        now: Unix seconds.
        backup_interval_seconds: least time between two backups of one run. The guard's own
            `last_backup_at` is what counts, so the limit holds over restarts and for any number
            of receivers.
    """
    if status is None:
        return _refuse(
            wish.run,
            wish.action,
            wish.alertname,
            f"no run {wish.run!r} is registered: the name must be the one that its guard published",
        )
    if status.state not in LIVE:
        # Nobody would take it up, and a request that lies open blocks the next one of its kind.
        return _refuse(
            wish.run,
            wish.action,
            wish.alertname,
            f"the run is {status.state} at step {status.step}",
            generation=status.generation,
        )
    if wish.action == "checkpoint" and status.last_backup_at is not None:
        age = now - status.last_backup_at
        # A backup "in the future" is a clock that was set back: it limits nothing, since otherwise
        # no backup would be made until the clock has caught up.
        if 0 <= age < backup_interval_seconds:
            return _refuse(
                wish.run,
                wish.action,
                wish.alertname,
                f"the last backup is {age:.0f} s old, less than the interval of "
                f"{backup_interval_seconds:g} s",
                outcome="limited",
                generation=status.generation,
            )
    return None


def _read_alert(alert: Alert, allowed: Container[str]) -> Wish | Decision:
    name = alert.labels.get("alertname", "")
    run = alert.labels.get("run", "")
    action = alert.labels.get("action", "")
    is_drill = name == DRILL_ALERT
    if not is_drill and name not in allowed:
        return _refuse(run, action, name, f"the alert {name!r} is not on the allow-list")
    if alert.status != "firing":
        return _refuse(run, action, name, "the alert is resolved, which asks for nothing")
    if not run:
        return _refuse(run, action, name, "the alert has no `run` label")
    if is_drill:
        # Needs no place on the allow-list, since nothing is done, and no limit: one is open at a
        # time, and a guard answers at most one a step, from the checkpoints' manifests alone.
        return Wish(run=run, action="drill", alertname=name)
    for known in ASKED:
        if action == known:
            return Wish(run=run, action=known, alertname=name)
    return _refuse(run, action, name, f"its `action` label {action!r} is none of {ASKED}")


def _refuse(
    run: str,
    action: str,
    alertname: str,
    reason: str,
    *,
    outcome: Outcome = "refused",
    generation: int | None = None,
) -> Decision:
    return Decision(
        run=run,
        action=action,
        alertname=alertname,
        outcome=outcome,
        reason=reason,
        generation=generation,
    )
