"""The checkpoints that the journals tell of, and what part each had in a rollback."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from act_exporter.records import Note


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A checkpoint.

    Attributes:
        name: its folder's.
        step: of the state in it.
        kind: "periodic", "backup", "emergency" or "final".
        time: when it was published, Unix seconds.
        health: the last verdict on it.
        why: the reason of that, and of its being passed over, where it was.
        chosen: whether the run went back to it.
    """

    name: str
    step: int
    kind: str
    time: float
    health: str
    why: str
    chosen: bool = False


def checkpoints(notes: Iterable[Note], rollback: Note | None) -> list[Saved]:
    """Those that were there at the rollback, or at the end where there was none; by time.

    Args:
        notes: the run's, by time.
        rollback: the guard's account of it.
    """
    found: dict[str, Saved] = {}
    until = rollback.time if rollback else math.inf
    for note in notes:
        name, fields = str(note.fields.get("name")), note.fields
        if note.time > until:
            break
        if note.kind == "checkpoint":
            found[name] = Saved(
                name=name,
                step=note.step,
                kind=str(fields.get("kind", "")),
                time=note.time,
                health=str(fields.get("health", "")),
                why=str(fields.get("why", "")),
            )
        elif note.kind == "health" and name in found:
            found[name] = replace(
                found[name], health=str(fields.get("health", "")), why=str(fields.get("why", ""))
            )
    if rollback is None:
        return list(found.values())
    for name, reason in reasons(rollback).items():
        if name in found:
            found[name] = replace(found[name], why=reason)
    chosen = str(rollback.fields.get("resumed_from"))
    if chosen in found:
        found[chosen] = replace(found[chosen], chosen=True)
    return list(found.values())


def reasons(rollback: Note) -> dict[str, str]:
    """Why newer checkpoints were passed over, by name."""
    said = rollback.fields.get("why")
    pairs = (str(one).partition(": ") for one in (said if isinstance(said, list) else []))
    return {name: reason for name, _, reason in pairs}
