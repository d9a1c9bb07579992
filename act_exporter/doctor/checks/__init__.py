"""The checklist: one module a check.

Each has `FAULTS`, which tells what its kinds of finding are, and

    def check(subject: Subject) -> Iterable[Finding]

which raises `NeedsMoreError` where something was not given.
"""

from types import ModuleType

from act_exporter.doctor.checks import attention, linear_attention, profile

CHECKS: tuple[ModuleType, ...] = (profile, linear_attention, attention)
"""In the order of the path from data to weights, in which a person would walk it."""
