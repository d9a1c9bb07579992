"""A report in a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from act_exporter.doctor.finding import Finding, Severity
from act_exporter.doctor.report import Report, sentences

_STYLES: dict[Severity, str] = {"critical": "bold red", "warning": "yellow", "info": "cyan"}


def rendered(report: Report) -> RenderableType:
    """A row a finding: how bad, where, and what to change; below it what did not run."""
    parts: list[RenderableType] = [Text(report.headline, style="bold")]
    if report.error is not None:
        parts.append(Text(f"The forward failed: {report.error}", style="bold red"))
    if report.findings:
        # Rows of several lines each need the lines between them.
        table = Table(show_lines=True, show_header=False, border_style="dim")
        table.add_column(overflow="fold", ratio=1)
        table.add_column(overflow="fold", ratio=3)
        for finding in report.findings:
            table.add_row(_what_and_where(finding), _sentences(finding))
        parts.append(table)
    if report.not_run:
        parts.append(Text("Not run:", style="dim"))
        parts += [Text(f"  {name}: {why}", style="dim") for name, why in report.not_run.items()]
    return Group(*parts)


def _what_and_where(finding: Finding) -> Text:
    # Text, since a name with brackets would be taken for markup.
    text = Text()
    text.append(f"{finding.severity}\n", style=_STYLES[finding.severity])
    text.append(finding.fault)
    if finding.layer is not None:
        text.append(f"\n{finding.layer}", style="bold")
    return text


def _sentences(finding: Finding) -> Text:
    what, change, *rest = sentences(finding)
    text = Text(what)
    text.append(f"\n{change}", style="bold")
    for sentence in rest:
        text.append(f"\n{sentence}", style="dim")
    return text
