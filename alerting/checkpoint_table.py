"""A run's checkpoints as rows of a table, as JSON, and in a sentence."""

from __future__ import annotations

import dataclasses

from rich.filesize import decimal

from alerting.recovery.lineage import Checkpoint
from alerting.recovery.pins import read_reason
from alerting.recovery.run_folder import RunFolder
from alerting.table import NOTHING, ago

COLUMNS = (
    "checkpoint",
    "step",
    "generation",
    "parent",
    "kind",
    "health",
    "reason",
    "age",
    "size",
    "pinned",
    "on line",
)


def row(checkpoint: Checkpoint, run: RunFolder, now: float) -> list[str]:
    """Its cells; `now` is in Unix seconds."""
    manifest, record = checkpoint.manifest, checkpoint.health
    return [
        checkpoint.name,
        str(checkpoint.step),
        str(manifest.generation),
        manifest.parent or NOTHING,
        manifest.kind,
        record.health,
        f"operator: {record.reason}" if record.by == "operator" else record.reason,
        ago(now - manifest.created_at),
        size(checkpoint),
        _pinned(checkpoint),
        _place(checkpoint, run),
    ]


def _pinned(checkpoint: Checkpoint) -> str:
    if not checkpoint.pinned:
        return NOTHING
    reason = read_reason(checkpoint.folder)
    return f"yes: {reason}" if reason else "yes"


def _place(checkpoint: Checkpoint, run: RunFolder) -> str:
    if checkpoint == run.next_start:
        return "yes, next start"
    return "yes" if checkpoint in run.line else NOTHING


def next_start(run: RunFolder) -> str:
    """What the next process of the run will do."""
    recovery = run.ledger.recovery
    if recovery is not None:
        onset = recovery.step if recovery.onset is None else recovery.onset
        return (
            f"A recovery from step {recovery.step} is not over: the next start carries it through; "
            f"ask plan --onset {onset} where it goes."
        )
    if run.next_start is None:
        return "The next start finds no healthy checkpoint, and halts."
    return f"The next start goes on from {run.next_start.name}, if that is whole."


def document(run: RunFolder) -> dict[str, object]:
    """All of it as what JSON has; times are Unix seconds."""
    following, recovery = run.next_start, run.ledger.recovery
    return {
        "run": run.ledger.run,
        "generation": run.ledger.generation,
        "phase": run.ledger.phase,
        "recovery": None if recovery is None else dataclasses.asdict(recovery),
        "next_start": None if following is None else following.name,
        "checkpoints": [
            {
                "name": c.name,
                "step": c.step,
                "generation": c.manifest.generation,
                "parent": c.manifest.parent,
                "kind": c.manifest.kind,
                **dataclasses.asdict(c.health),
                "remedies": [dataclasses.asdict(remedy) for remedy in c.manifest.remedies],
                "created_at": c.manifest.created_at,
                "bytes": total_bytes(c),
                "pinned": c.pinned,
                "on_line": c in run.line,
            }
            for c in run.checkpoints
        ],
    }


def total_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of all files that its manifest lists."""
    return sum(file.bytes for file in checkpoint.manifest.files.values())


def size(checkpoint: Checkpoint) -> str:
    """Likewise, for people."""
    return decimal(total_bytes(checkpoint))
