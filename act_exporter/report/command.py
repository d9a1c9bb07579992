"""`act-exporter report`; registered by `act_exporter.cli`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from act_exporter.exceptions import ActExporterError, SettingError
from act_exporter.progress import progress

if TYPE_CHECKING:
    from act_exporter.report.incident import Incident
    from act_exporter.report.recording import Recording
    from act_exporter.report.report import Report

HELP = """Show what happened to a run, on one page: which layer went first, how far, what followed.

JOURNAL is a folder of journals, or one of its files; those of several ranks or folders are put
together. Of several incidents the last one is shown in which a layer went bad or the guard acted.
A run without one gives a report of its health. Times are UTC.

Example: act-exporter report runs/gpt/journal -o report.html
"""

_MISSING = "act-exporter report needs its packages: pip install 'act-exporter[report]'"


def report(
    journals: list[Path] = typer.Argument(..., metavar="JOURNAL..."),
    output: Path | None = typer.Option(None, "--output", "-o", help="The page to write, HTML."),
    png: Path | None = typer.Option(None, help="One picture to write, PNG."),
    run: str | None = typer.Option(None, help="Which run, where the journals are of several."),
    incident: int | None = typer.Option(
        None, min=1, help="Which incident, by its number in --list."
    ),
    list_: bool = typer.Option(False, "--list", help="List the incidents, and write nothing."),
) -> None:
    if not (output or png or list_):
        _fail("say where to write: -o report.html, or --png report.png; or --list", 2)
    try:
        from act_exporter.report.incident import find_incidents
        from act_exporter.report.reading import read
    except ImportError:
        _fail(_MISSING, 1)
    try:
        recording = read(journals, run, functools.partial(progress, "reading"))
        incidents = find_incidents(recording)
        if list_:
            _print(incidents, recording)
            return
        made = _made(journals, recording, incidents, incident)
        _write(made, output, png)
    except SettingError as error:
        _fail(str(error), 2)
    except (ActExporterError, OSError) as error:
        _fail(str(error), 1)
    typer.echo(f"{made.title} ({made.outcome})")
    if recording.skipped:
        typer.echo(f"{recording.skipped} lines skipped: torn by a crash, or no record", err=True)


def _made(
    journals: Sequence[Path],
    recording: Recording,
    incidents: Sequence[Incident],
    number: int | None,
) -> Report:
    from act_exporter.report.incident import look_closely, most_telling
    from act_exporter.report.report import of_health, of_incident
    from act_exporter.report.story import tell

    if number is not None and number > len(incidents):
        raise SettingError(
            f"--incident {number}: run {recording.run} has {len(incidents)}, see --list"
        )
    if not incidents:
        return of_health(recording)
    number = number or most_telling(incidents)
    closely, chosen = look_closely(journals, recording, incidents[number - 1])
    return of_incident(tell(closely, chosen), incidents, recording, number)


def _write(made: Report, output: Path | None, png: Path | None) -> None:
    from act_exporter.report.drawing import png as write_png

    if output is not None:
        output.write_text(made.html, encoding="utf-8")
    if png is not None:
        write_png(png, made.title, made.text, made.pictures)


def _print(incidents: Sequence[Incident], recording: Recording) -> None:
    from act_exporter.report import words

    if not incidents:
        typer.echo(f"{recording.run}: no incident")
    for number, incident in enumerate(incidents, 1):
        when = words.clock(float(recording.time[incident.row]), day=True)
        typer.echo(
            f"{number}  step {incident.step}  {when}  {words.listed(incident)}  {incident.ending}"
        )


def _fail(sentence: str, code: int) -> None:
    typer.echo(f"act-exporter: {sentence}", err=True)
    raise typer.Exit(code)
