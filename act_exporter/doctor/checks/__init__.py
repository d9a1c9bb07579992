"""The checklist: one module a check.

Each has `FAULTS`, which tells what its kinds of finding are, and

    def check(subject: Subject) -> Iterable[Finding]

which raises `NeedsMoreError` where something was not given.
"""

from types import ModuleType

from act_exporter.doctor.checks import (
    attention,
    clipping,
    data,
    gradients,
    initialisation,
    learning_rate,
    linear_attention,
    normalisation,
    optimizer_state,
    precision,
    profile,
    quantisation,
    unexamined,
)

CHECKS: tuple[ModuleType, ...] = (
    data,
    initialisation,
    normalisation,
    profile,
    linear_attention,
    attention,
    gradients,
    clipping,
    learning_rate,
    precision,
    optimizer_state,
    quantisation,
    unexamined,
)
"""In the order of the path from data to weights, in which a person would walk it."""
