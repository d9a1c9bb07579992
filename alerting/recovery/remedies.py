"""What a rollback changes, so that the same batches and settings do not lead to the same anomaly.

What was applied is recorded, in guard.json and in each manifest, with the steps between which it
holds: training that goes on from there, also in another process, goes on with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from alerting.exceptions import ConfigError
from alerting.recovery.documents import Document
from alerting.recovery.settings import require_whole

PAST_ONSET_STEPS = 100
"""PaLM went back about 100 steps before a spike and skipped 200 to 500 batches, so 100 to 400
behind it. The least of that: data is worth something too."""

Kind = Literal["skip", "learning-rate", "clip", "callback"]


@dataclass(frozen=True, slots=True)
class SkipBatches:
    """Draw batches after the rollback and drop them, as many on each rank.

    Attributes:
        count: batches of the loader, of each rank; None for all from the checkpoint to 100 steps
            behind the first bad one.
    """

    count: int | None = None

    def __post_init__(self) -> None:
        if self.count is not None:
            require_whole("SkipBatches.count", self.count, 1)


@dataclass(frozen=True, slots=True)
class LowerLearningRate:
    """Take steps with a part of the scheduled learning rate; scheduler and checkpoints keep theirs.

    Attributes:
        factor: between 0 and 1.
        steps: for so many steps.
    """

    factor: float
    steps: int

    def __post_init__(self) -> None:
        if not 0 < self.factor < 1:
            raise ConfigError(f"LowerLearningRate.factor is {self.factor}, must be in (0, 1)")
        require_whole("LowerLearningRate.steps", self.steps, 1)


@dataclass(frozen=True, slots=True)
class ClipGradients:
    """Clip the gradients at the optimizer's step, after whatever clipping the loop does itself.

    Attributes:
        max_norm: L2 norm of all gradients of the optimizer's parameters, without the loss scale.
        steps: for so many steps.
    """

    max_norm: float
    steps: int

    def __post_init__(self) -> None:
        if not 0 < self.max_norm < float("inf"):
            raise ConfigError(f"ClipGradients.max_norm is {self.max_norm}, must be above 0")
        require_whole("ClipGradients.steps", self.steps, 1)


@dataclass(frozen=True, slots=True)
class Callback:
    """Something of the trainer's own, on all ranks.

    Attributes:
        function: called with True before the first step and with False after the last; with True
            again in a process that goes on in between. What it raises ends the training.
        steps: for so many steps.
        name: in records and sentences; two need different ones.
    """

    function: Callable[[bool], object]
    steps: int
    name: str = "callback"

    def __post_init__(self) -> None:
        require_whole("Callback.steps", self.steps, 1)


Remedy = SkipBatches | LowerLearningRate | ClipGradients | Callback

DEFAULT: Mapping[int, Sequence[Remedy]] = {2: (SkipBatches(),)}
"""The same place twice is rarely an accident: then the data is passed over (PaLM: the same batches
did no harm from another checkpoint)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied:
    """A remedy as it was applied.

    Attributes:
        kind: which one.
        parameters: of "skip" `first_batch`, `last_batch` (counted from the run's first, which is 1)
            and the `ranks` that each took so many; else `factor`, `max_norm` or `name`.
        since: it holds for the steps after this one,
        until: up to this one; the same as `since` where it holds for none, as skipping does.
    """

    kind: Kind
    parameters: dict[str, Any]
    since: int
    until: int

    @property
    def place(self) -> tuple[Kind, object]:
        """Of two with the same one the newer replaces the other."""
        return self.kind, self.parameters.get("name")

    def __str__(self) -> str:
        values = self.parameters
        if self.kind == "skip":
            first, last = values["first_batch"], values["last_batch"]
            return f"skipping {last - first + 1} batches ({first} to {last})"
        what = {
            "learning-rate": f"learning rate times {values.get('factor')}",
            "clip": f"gradients clipped to {values.get('max_norm')}",
            "callback": f"{values.get('name')}",
        }[self.kind]
        return f"{what} until step {self.until}"


class Remedies:
    """Which remedies are applied at which rollback.

    Args:
        by_rollback: remedies by the number of the rollback, counted since the budget was whole;
            at a number without any those of the nearest lower one.
        has_loader: whether there is data to skip.

    Raises:
        ConfigError: a number is no positive one, two remedies of a rollback exclude each other, or
            data is to be skipped and there is no loader.
    """

    def __init__(self, by_rollback: Mapping[int, Sequence[Remedy]], *, has_loader: bool) -> None:
        self._by_rollback = dict(by_rollback)
        self.functions: dict[str, Callable[[bool], object]] = {}
        if by_rollback is DEFAULT and not has_loader:
            self._by_rollback = {}
        for number, remedies in self._by_rollback.items():
            require_whole("the number of a rollback in remedies", number, 1)
            places = [_applied(r, 0, 0, 0, 1).place for r in remedies]
            if len(set(places)) < len(places):
                raise ConfigError(f"remedies[{number}] has two of a kind, or of a name")
            if "skip" in dict(places) and not has_loader:
                raise ConfigError(f"remedies[{number}] skips batches, and there is no loader")
            self.functions |= {r.name: r.function for r in remedies if isinstance(r, Callback)}

    def at(
        self, number: int, *, step: int, taken: int, bad_until: int, batches_a_step: int, ranks: int
    ) -> tuple[Applied, ...]:
        """What is applied at a rollback.

        Args:
            number: of the rollback.
            step: of the checkpoint that it goes back to.
            taken: batches that a rank had taken there.
            bad_until: batches that a rank had taken once the first bad step's were among them.
            batches_a_step: of the loader.
            ranks: that train now.
        """
        numbers = [known for known in self._by_rollback if known <= number]
        remedies = self._by_rollback[max(numbers)] if numbers else ()
        passed = bad_until + PAST_ONSET_STEPS * batches_a_step
        return tuple(_applied(r, step, taken, passed, ranks) for r in remedies)


def _applied(remedy: Remedy, step: int, taken: int, passed: int, ranks: int) -> Applied:
    kind: Kind
    parameters: dict[str, Any]
    if isinstance(remedy, SkipBatches):
        last = passed if remedy.count is None else taken + remedy.count
        parameters = {"first_batch": taken + 1, "last_batch": last, "ranks": ranks}
        return Applied(kind="skip", parameters=parameters, since=step, until=step)
    if isinstance(remedy, LowerLearningRate):
        kind, parameters = "learning-rate", {"factor": remedy.factor}
    elif isinstance(remedy, ClipGradients):
        kind, parameters = "clip", {"max_norm": remedy.max_norm}
    else:
        kind, parameters = "callback", {"name": remedy.name}
    return Applied(kind=kind, parameters=parameters, since=step, until=step + remedy.steps)


def read_applied(document: Document) -> tuple[Applied, ...]:
    """Those in the field `remedies` of a manifest or of guard.json; none in one of before them.

    Raises:
        CheckpointError: it is mangled.
    """
    return tuple(_read(part) for part in document.parts("remedies"))


def _read(part: Document) -> Applied:
    kind = cast(Kind, part.choice("kind", get_args(Kind)))
    parameters = part.part("parameters")
    needed: dict[Kind, dict[str, type[int | float | str]]] = {
        "skip": {"first_batch": int, "last_batch": int, "ranks": int},
        "learning-rate": {"factor": float},
        "clip": {"max_norm": float},
        "callback": {"name": str},
    }
    return Applied(
        kind=kind,
        parameters={name: parameters.get(name, type_) for name, type_ in needed[kind].items()},
        since=part.get("since", int),
        until=part.get("until", int),
    )
