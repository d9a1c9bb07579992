"""Why is this model unstable, and what to change: a checklist walked on a model and a batch."""

from act_exporter.doctor.examination import examine
from act_exporter.doctor.finding import Finding, Severity
from act_exporter.doctor.report import Report

__all__ = ["Finding", "Report", "Severity", "examine"]
