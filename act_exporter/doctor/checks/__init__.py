"""The checklist: one module a check.

Each has `FAULTS`, which tells what its kinds of finding are, and

    def check(subject: Subject) -> Iterable[Finding]

which raises `NeedsMoreError` where something was not given.
"""

from types import ModuleType

from act_exporter.doctor.checks import clipping, data, gradients, learning_rate, optimizer_state

CHECKS: tuple[ModuleType, ...] = (data, gradients, clipping, learning_rate, optimizer_state)
"""In the order of the path from data to weights, in which a person would walk it."""
