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
    learning_rate,
    linear_attention,
    optimizer_state,
    profile,
)

CHECKS: tuple[ModuleType, ...] = (
    data,
    profile,
    linear_attention,
    attention,
    gradients,
    clipping,
    learning_rate,
    optimizer_state,
)
"""In the order of the path from data to weights, in which a person would walk it."""
