"""Baselines in a file: learnt from the journal of a small run, loaded by a large one."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from act_exporter.exceptions import SettingError
from act_exporter.history import Thresholds
from act_exporter.records import Reader

BASELINE_STEPS = Thresholds().baseline_steps

_VERSION = 1

# A tap that ran in fewer of the steps (an expert, a branch) has no median worth the name.
_LEAST_SHARE = 0.5

Tensor = tuple[str, str]
"""Layer and tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Levels:
    """What a run's tensors were like.

    Attributes:
        run: the run's name.
        generation: the generation that the steps are of.
        steps: the sampled steps that were taken, in their order.
        absmax: their median absmax, by layer and tensor; finite and above 0.
        left_out: tensors without one, as they ran too seldom or were 0 throughout.
    """

    run: str
    generation: int
    steps: list[int]
    absmax: dict[Tensor, float]
    left_out: list[Tensor]


def learn_levels(reader: Reader, steps: int = BASELINE_STEPS) -> Levels:
    """The levels over the last `steps` sampled steps of a run's newest generation.

    A step in which anything was not finite, on any rank, is not taken. Ranks count alike: the
    median is over all of theirs.

    Raises:
        SettingError: the journals are of several runs, have too few such steps, or an anomaly
            stood in that stretch.
    """
    run, generation, seen, bad = _survey(reader)
    taken = sorted(seen - bad)[-steps:]
    if len(taken) < steps:
        raise SettingError(
            f"{len(taken)} finite sampled steps in generation {generation} of run {run};"
            f" a baseline needs {steps}"
        )
    _refuse_sick(reader, generation, taken[0], taken[-1])
    chosen = set(taken)
    # By rank and step, so that a step which a restart repeated counts once, as the later one.
    found: dict[Tensor, dict[tuple[int, int], float]] = defaultdict(dict)
    for record in reader.records():
        if record.generation == generation and record.step in chosen:
            values = found[record.layer, record.tensor]
            if not math.isnan(record.statistics["absmax"]):
                values[record.rank, record.step] = record.statistics["absmax"]
    absmax, left_out = {}, []
    for tensor, values in found.items():
        level = median(values.values()) if values else 0.0
        ran = {step for _, step in values}
        if len(ran) >= _LEAST_SHARE * steps and 0 < level < math.inf:
            absmax[tensor] = level
        else:
            left_out.append(tensor)
    if not absmax:
        raise SettingError(
            f"no tensor of run {run} ran in half of the steps {taken[0]} to {taken[-1]} with an"
            " absmax above 0"
        )
    return Levels(run=run, generation=generation, steps=taken, absmax=absmax, left_out=left_out)


def write_levels(path: Path, levels: Levels) -> None:
    """Write the file, whole or not at all."""
    content = {
        "version": _VERSION,
        "run": levels.run,
        "created": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "generation": levels.generation,
        "steps": {
            "first": levels.steps[0],
            "last": levels.steps[-1],
            "sampled": len(levels.steps),
        },
        "entries": [
            {"layer": layer, "tensor": tensor, "absmax": value}
            for (layer, tensor), value in levels.absmax.items()
        ],
    }
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def read_levels(path: Path) -> dict[Tensor, float]:
    """The baselines of a file, by layer and tensor.

    Raises:
        SettingError: it cannot be read or is no such file; says what is wrong with it.
    """
    try:
        # A number may be whole, and larger than a float can be.
        content = json.loads(path.read_bytes(), parse_int=float)
    except OSError as error:
        raise SettingError(f"baseline {path}: {error.strerror}") from error
    except ValueError as error:  # neither JSON nor UTF-8
        raise SettingError(f"baseline {path}: no JSON: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("entries"), list):
        raise SettingError(f"baseline {path}: not a file of `act-exporter baseline`")
    if content.get("version") != _VERSION:
        raise SettingError(f"baseline {path}: version {content.get('version')!r} is not known here")
    found: dict[Tensor, float] = {}
    for entry in content["entries"]:
        tensor, value = _checked(path, entry)
        if tensor in found:
            raise SettingError(f"baseline {path}: {tensor[0]} ({tensor[1]}) is there twice")
        found[tensor] = value
    if not found:
        raise SettingError(f"baseline {path}: has no entries")
    return found


def _survey(reader: Reader) -> tuple[str, int, set[int], set[int]]:
    """The run, its newest generation, and in that the sampled steps and those not finite."""
    runs: set[str] = set()
    generation = -1
    seen: set[int] = set()
    bad: set[int] = set()
    for record in reader.records():
        runs.add(record.run)
        if record.generation > generation:
            generation = record.generation
            seen.clear()
            bad.clear()
        if record.generation == generation:
            seen.add(record.step)
            if any(record.nonfinite.values()) or math.isinf(record.statistics["absmax"]):
                bad.add(record.step)
    if not runs:
        raise SettingError("the journals hold no records")
    if len(runs) > 1:
        names = ", ".join(sorted(runs))
        raise SettingError(f"the journals are of several runs ({names}); a baseline is of one")
    return runs.pop(), generation, seen, bad


def _refuse_sick(reader: Reader, generation: int, first: int, last: int) -> None:
    """Never learn from a sick run: an anomaly lasts until a note says that its rank is clean."""
    standing: dict[int, int] = {}  # rank to the step of its onset
    anomalies: list[tuple[int, float]] = []  # first and last step
    for note in sorted(reader.notes(), key=lambda note: note.time):
        if note.generation != generation:
            continue
        if note.kind == "onset":
            standing.setdefault(note.rank, note.step)
        elif note.kind == "clean" and note.rank in standing:
            anomalies.append((standing.pop(note.rank), note.step))
    anomalies += [(onset, math.inf) for onset in standing.values()]
    for onset, end in sorted(anomalies):
        if onset <= last and end >= first:
            raise SettingError(
                f"an anomaly that began at step {onset} stood in steps {first} to {last}, which"
                " the baseline would be from: none is learnt from a sick run"
            )


def _checked(path: Path, entry: Any) -> tuple[Tensor, float]:
    """An entry's tensor and value."""
    entry = entry if isinstance(entry, dict) else {}
    layer, tensor, value = (entry.get(name) for name in ("layer", "tensor", "absmax"))
    if not isinstance(layer, str) or not isinstance(tensor, str):
        raise SettingError(f"baseline {path}: an entry has no layer or tensor")
    if not isinstance(value, float) or not 0 < value < math.inf:
        raise SettingError(
            f"baseline {path}: absmax {value!r} of {layer} ({tensor}) is no number above 0"
        )
    return (layer, tensor), value
