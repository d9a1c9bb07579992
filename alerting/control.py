"""The control directory: the one way from the receiver to the trainer, made of atomic files.

    RUN_FOLDER/control/status.json           the guard's own words; its presence registers the run
    RUN_FOLDER/control/requests/ACTION.json  the open request of that kind, if there is one
    RUN_FOLDER/control/answers/ID.json       what became of each request

A request is claimed with `os.link`, which fails when the name exists: of any number of receivers
exactly one wins, and while a request is open there is no second of its kind. (`os.replace` lets
every writer believe that it won.) Files are synced before they are named, so a reader sees a whole
file or none, also after a power cut. Standard library only: the trainer imports this module.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from alerting.exceptions import ControlError
from alerting.files import create_whole, sync_folder, write_atomically

log = logging.getLogger(__name__)

Action = Literal["recover", "checkpoint", "drill"]
Result = Literal["done", "refused", "failed"]
_CLAIM_SECONDS = 60
"""A claim takes milliseconds; what is older than this is nobody's any more."""

LIVE = ("running", "recovering")
"""The states of a run that takes up requests."""

ACTIONS: tuple[Action, ...] = get_args(Action)
"""In the order of precedence: the guard looks for a recovery first, and for a drill last."""
ASKED: tuple[Action, ...] = ("recover", "checkpoint")
"""What an alert's label `action` may ask for; a drill is known by its name alone."""
DRILL_ALERT = "ActDrill"
"""The synthetic alert of `act-alerting drill`; no rule has this name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """What the guard says of its run.

    Attributes:
        run: the run's name, as in the `run` label of the metrics.
        generation: 0, and one more with each rollback. (run, generation) is one incident.
        state: "running", "recovering", "stopped" (saved, to be started again), "finished" or
            "halted".
        step: the last finished step when this was written.
        rollbacks_left: how many more rollbacks the budget allows.
        last_backup_at: when a checkpoint was last made on request (Unix seconds), or None.
        updated_at: when this was written, Unix seconds.
    """

    run: str
    generation: int
    state: str
    step: int
    rollbacks_left: int
    last_backup_at: float | None
    updated_at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a receiver asks of the guard, for one incident.

    Attributes:
        id: unique; names the answer's file, so only letters, digits and hyphens.
        run: the run's name.
        generation: the incident's generation, as the receiver read it from the status.
        action: "recover" (roll back), "checkpoint" (make a backup) or "drill" (say what a recovery
            would do, and do nothing; a guard of an older version never looks for it).
        alert: the alert's name, for people.
        created_at: Unix seconds.
    """

    id: str
    run: str
    generation: int
    action: Action
    alert: str
    created_at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What the guard did with a request.

    Attributes:
        id: the request's id.
        action: the request's action.
        result: "done", "refused" (nothing was wrong, or not allowed) or "failed".
        detail: one sentence for people.
        step: the step at which the guard acted.
        onset: the first bad step, as the trainer's detector or the request's time has it, or None.
        checkpoint: name of the backup or emergency checkpoint that was made, or None.
        resumed_from: name of the checkpoint rolled back to, or None.
        resumed_step: the step of that checkpoint, or None.
        generation: the run's generation after the action.
        answered_at: Unix seconds.
    """

    id: str
    action: Action
    result: Result
    detail: str
    step: int
    onset: int | None
    checkpoint: str | None
    resumed_from: str | None
    resumed_step: int | None
    generation: int
    answered_at: float


def new_request_id() -> str:
    """A fresh, file-name-safe request id; they sort by time."""
    return f"{int(time.time() * 1000):013d}-{secrets.token_hex(4)}"


class ControlDirectory:
    """One run's control directory; the guard creates it, receivers only find it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._requests = self.path / "requests"
        self._answers = self.path / "answers"

    @classmethod
    def find(cls, runs: str | Path, run: str) -> ControlDirectory | None:
        """The control directory of `run` among the run folders in `runs`, or None.

        Names are compared with what each guard published; no label ever becomes a path. Of several
        folders with one name the live one is meant, and where none is, the one written to last.

        Raises:
            ControlError: two of them are live.
        """
        named: list[tuple[ControlDirectory, Status]] = []
        for control, status in cls.registered(runs):
            if isinstance(status, ControlError):
                log.warning("%s", status)
            elif status.run == run:
                named.append((control, status))
        live = [(control, status) for control, status in named if status.state in LIVE]
        if len(live) > 1:
            # A trainer that was killed says so for ever, so this may be an old run of that name.
            first, second = (control.path.parent for control, _ in live[:2])
            raise ControlError(
                f"{first} and {second} both say that they are the live run {run!r}: name them "
                "differently, or move the one that has died elsewhere"
            )
        newest = max(live or named, key=lambda found: found[1].updated_at, default=None)
        return newest[0] if newest else None

    @classmethod
    def registered(
        cls, runs: str | Path
    ) -> Iterator[tuple[ControlDirectory, Status | ControlError]]:
        """Each run among the run folders in `runs`, with its status or what is wrong with it."""
        for path in sorted(Path(runs).glob("*/control/status.json")):
            control = cls(path.parent)
            try:
                status = control.status()
            except ControlError as error:
                yield control, error
            else:
                if status is not None:
                    yield control, status

    def create(self) -> None:
        """Make the folders (the guard, once)."""
        self._requests.mkdir(parents=True, exist_ok=True)
        self._answers.mkdir(parents=True, exist_ok=True)
        # A receiver killed between writing and claiming leaves its file behind.
        for left in self._requests.glob(".claim-*"):
            if time.time() - left.stat().st_mtime > _CLAIM_SECONDS:
                left.unlink(missing_ok=True)

    def publish(self, status: Status) -> None:
        """Replace the run's status (the guard)."""
        write_atomically(self.path / "status.json", _to_json(status))

    def status(self) -> Status | None:
        """The run's status, or None where no guard has registered.

        Raises:
            ControlError: the file is mangled.
        """
        return _read(self.path / "status.json", Status)

    def accepts_requests(self) -> bool:
        """Whether this process may write a request (a receiver)."""
        return self._requests.is_dir() and os.access(self._requests, os.W_OK | os.X_OK)

    def claim(self, request: Request) -> bool:
        """Open `request`; False if one of its kind is open already (a receiver).

        Raises:
            OSError: it could not be written, or not be made durable; then `open_request` tells
                whether it is open all the same.
        """
        return create_whole(
            self._request_path(request.action),
            _to_json(request),
            self._requests / f".claim-{request.id}",
        )

    def open_request(self, action: Action) -> Request | None:
        """The open request of that kind, or None; changes nothing.

        Raises:
            ControlError: the file is no request of that kind.
        """
        request = self._read_request(action)
        return None if request is None or self._is_answered(request) else request

    def take_up(self, action: Action) -> Request | None:
        """The same for the guard, which also clears away what would block the kind for ever.

        A request whose answer is there is closed (the guard died between the two); a file that is
        no request of the kind is set aside with a warning. Only the guard does so: a receiver
        might remove a request that was opened since it looked.
        """
        path = self._request_path(action)
        try:
            request = self._read_request(action)
        except ControlError as error:
            aside = path.with_suffix(f".rejected-{time.time_ns()}")
            path.rename(aside)
            log.warning("%s; set aside as %s", error, aside.name)
            return None
        if request is not None and self._is_answered(request):
            self._close(action)
            return None
        return request

    def answer(self, answer: Answer) -> None:
        """Write the answer, then close the request (the guard)."""
        write_atomically(self._answer_path(answer.id), _to_json(answer))
        self._close(answer.action)

    def read_answer(self, request_id: str) -> Answer | None:
        """The guard's answer to that request, or None so far (a receiver)."""
        return _read(self._answer_path(request_id), Answer)

    def _read_request(self, action: Action) -> Request | None:
        path = self._request_path(action)
        request = _read(path, Request)
        if request is not None and request.action != action:
            # Closing it would remove the other kind's open request and leave this file for ever.
            raise ControlError(f"{path}: 'action' is {request.action!r}, expected {action!r}")
        return request

    def _is_answered(self, request: Request) -> bool:
        return self._answer_path(request.id).exists()

    def _close(self, action: Action) -> None:
        self._request_path(action).unlink(missing_ok=True)
        sync_folder(self._requests)

    def _request_path(self, action: Action) -> Path:
        return self._requests / f"{action}.json"

    def _answer_path(self, request_id: str) -> Path:
        return self._answers / f"{request_id}.json"


def _to_json(record: Status | Request | Answer) -> str:
    return json.dumps(dataclasses.asdict(record), indent=1) + "\n"


Record = TypeVar("Record", bound=Status | Request | Answer)

# What each annotation of the records above admits; bool is an int to isinstance, never here.
_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "str | None": (str, type(None)),
    "int": (int,),
    "int | None": (int, type(None)),
    "float": (float, int),
    "float | None": (float, int, type(None)),
}
_CHOICES: dict[str, tuple[str, ...]] = {"Action": ACTIONS, "Result": get_args(Result)}


def _read(path: Path, kind: type[Record]) -> Record | None:
    try:
        content: Any = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ControlError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ControlError(f"{path} holds no JSON object")
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        annotation = str(field.type)
        value = content.get(field.name)
        if annotation in _CHOICES:
            valid = value in _CHOICES[annotation]
        else:
            valid = isinstance(value, _TYPES[annotation]) and not isinstance(value, bool)
        if not valid:
            raise ControlError(f"{path}: {field.name!r} is {value!r}, expected {annotation}")
        values[field.name] = value
    if kind is Request and not values["id"].replace("-", "").isalnum():
        raise ControlError(f"{path}: {values['id']!r} is no request id")
    return kind(**values)
