"""The checklist: one module a check.

Each has `FAULTS`, which tells what its kinds of finding are, and

    def check(subject: Subject) -> Iterable[Finding]

which raises `NeedsMoreError` where something was not given.
"""

from types import ModuleType

from act_exporter.doctor.checks import (
    clipping,
    data,
    gradients,
    initialisation,
    learning_rate,
    normalisation,
    optimizer_state,
    precision,
    quantisation,
    unexamined,
)

CHECKS: tuple[ModuleType, ...] = (
    data,
    initialisation,
    normalisation,
    gradients,
    clipping,
    learning_rate,
    precision,
    optimizer_state,
    quantisation,
    unexamined,
)
"""In the order of the path from data to weights, in which a person would walk it."""
