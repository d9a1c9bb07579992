"""Why is this model unstable, and what to change: a checklist walked on a model and a batch."""

from typing import TYPE_CHECKING

from act_exporter.doctor.finding import Finding, Severity
from act_exporter.doctor.report import Report

if TYPE_CHECKING:
    from act_exporter.doctor.examination import examine

__all__ = ["Finding", "Report", "Severity", "examine"]


def __getattr__(name: str) -> object:
    # Imported when used: it needs torch, which the command line has not everywhere.
    if name == "examine":
        from act_exporter.doctor.examination import examine

        return examine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
