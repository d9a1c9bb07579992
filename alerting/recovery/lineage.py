"""Which checkpoint is next in line: pure functions of manifests and healths.

A rollback repeats step numbers and leaves an abandoned branch whose steps are higher than those of
the line that training went on from, so "the newest" is found along the line and never by step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from alerting.recovery.health import HEALTHY, HealthRecord
from alerting.recovery.manifest import RESUMABLE, Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A published checkpoint: its folder, its manifest, its health and pin when it was read."""

    folder: Path
    manifest: Manifest
    health: HealthRecord
    pinned: bool = False

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.manifest.name

    @property
    def step(self) -> int:
        """Optimizer steps finished when it was saved."""
        return self.manifest.step

    @property
    def resumable(self) -> bool:
        """Whether it is of a kind that is ever chosen automatically."""
        return self.manifest.kind in RESUMABLE

    @property
    def healthy(self) -> bool:
        """Whether nothing bad is known of it."""
        return self.health.health in HEALTHY


def line(
    checkpoints: Iterable[Checkpoint], *, generation: int, base: Sequence[str]
) -> list[Checkpoint]:
    """The checkpoints that the present training descends from, newest first, whatever their health.

    Args:
        checkpoints: all of the run folder's.
        generation: the run's.
        base: names of those that this generation started from, newest first: its own first
            checkpoint may not be published yet.
    """
    resumable = {c.name: c for c in checkpoints if c.resumable}
    own = [c for c in resumable.values() if c.manifest.generation == generation]
    names = list(base)
    if own:
        tip = max(own, key=lambda c: c.manifest.number).manifest
        names = [tip.name, *([tip.parent] if tip.parent else []), *tip.ancestors]
    return [resumable[name] for name in names if name in resumable]


def before_onset(step: int, onset: int, margin: int) -> bool:
    """Whether the weights after `step` steps were certainly good when step `onset` was seen bad.

    Nothing was trained yet at step 0, so only a first step that is bad speaks against it.
    """
    return step < onset - margin or (step == 0 and onset > 1)


def too_late(onset: int, margin: int) -> str:
    """Why a checkpoint that is not `before_onset` is not trusted."""
    return f"saved at or after step {max(onset - margin, 0)}; step {onset} was bad"


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What training may go on from.

    Attributes:
        candidates: those that may be taken once they are found whole, the best first.
        refused: why each of the others may not, by name.
        deferred: name of a candidate that is newer than others and yet comes last, or None.
    """

    candidates: tuple[Checkpoint, ...]
    refused: dict[str, str]
    deferred: str | None

    @property
    def reasons(self) -> dict[str, str]:
        """Why each that is not the best may not, or shall not, be taken; by name."""
        if self.deferred is None:
            return dict(self.refused)
        return self.refused | {
            self.deferred: "the run began again from it, and the anomaly came again"
        }


def choose(
    checkpoints: Iterable[Checkpoint],
    *,
    line: Sequence[Checkpoint],
    onset: int | None = None,
    margin: int = 0,
    resumed_from: str | None = None,
) -> Choice:
    """Judge each checkpoint: the one choice of resumes, rollbacks, and of plans for people.

    Args:
        checkpoints: all that there are to say something about.
        line: those that the run descends from, newest first.
        onset: the first bad step, for a rollback; None for a resume.
        margin: a rollback trusts what is older than the onset by more than so many steps.
        resumed_from: the one that the present generation began with, where the rollback is a new
            one: the anomaly came again from the same place, so it is one further back, if there is
            one.
    """
    on_line = {c.name for c in line}
    refused = {
        c.name: reason
        for c in checkpoints
        if (reason := _refusal(c, on_line=c.name in on_line, onset=onset, margin=margin))
    }
    candidates = [c for c in line if c.name not in refused]
    deferred = None
    if onset is not None and len(candidates) > 1 and candidates[0].name == resumed_from:
        deferred = resumed_from
        candidates = [*candidates[1:], candidates[0]]
    return Choice(candidates=tuple(candidates), refused=refused, deferred=deferred)


def _refusal(
    checkpoint: Checkpoint, *, on_line: bool, onset: int | None, margin: int
) -> str | None:
    if not checkpoint.resumable:
        return f"its kind, {checkpoint.manifest.kind}, is for people only"
    if not on_line:
        return "on an abandoned line: training went on from an older one"
    if not checkpoint.healthy:
        return f"{checkpoint.health.health}: {checkpoint.health.reason}"
    if onset is not None and not before_onset(checkpoint.step, onset, margin):
        return too_late(onset, margin)
    return None


def expendable(
    checkpoints: Iterable[Checkpoint],
    *,
    line: Sequence[Checkpoint],
    resumed_from: str | None,
    keep: int,
) -> list[Checkpoint]:
    """What may be deleted, once a newer checkpoint is published.

    Kept are the newest `keep` healthy ones of the line and the one that the generation resumed
    from (the next rollback may need it). Where steps are slow all of those may lie within the
    margin of an onset, so the newest confirmed one stays too, and the oldest pending one, which
    must live to be the next confirmed. Bad ones must not push out good ones, and many suspect
    ones not the backup of the moment when it began, so backups and emergency checkpoints, and the
    rest, each have `keep` places of their own. What is pinned stays and takes none of the places.
    """
    loose = [c for c in checkpoints if not c.pinned]
    newest_first = sorted(loose, key=lambda c: c.manifest.number, reverse=True)
    on_line = {c.name for c in line}
    healthy = [c for c in newest_first if c.name in on_line and c.healthy]
    on_request = [c for c in newest_first if not c.resumable]
    kept = {c.name for c in healthy} | {c.name for c in on_request}
    rest = [c for c in newest_first if c.name not in kept]
    surplus = [*healthy[keep:], *on_request[keep:], *rest[keep:]]
    confirmed = [c.name for c in healthy if c.health.health == "confirmed"]
    pending = [c.name for c in healthy if c.health.health == "pending"]
    needed = {resumed_from, *confirmed[:1], *pending[-1:]}
    return [c for c in surplus if c.name not in needed]
