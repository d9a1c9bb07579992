"""The command `act-exporter watch`."""

from __future__ import annotations

import io
import sys

import typer
from rich.console import Console

from act_exporter.environment import DEFAULT_PORT
from act_exporter.exceptions import ActExporterError


def watch(
    urls: list[str] = typer.Argument(
        None,
        metavar="URL",
        help="Exporters, one a rank: host:port, or http://host:port with /metrics or without. By"
        f" default localhost:{DEFAULT_PORT}.",
    ),
    interval: str = typer.Option("2s", help="Seconds from one reading to the next."),
    once: bool = typer.Option(
        False, "--once", help="Print one frame and exit, as a pipe does by itself."
    ),
    layers: int = typer.Option(12, min=1, help="Rows of the table of layers, as room allows."),
) -> None:
    """Show the live page in this terminal: what went bad first, when and how far.

    Ctrl-C ends it, with exit code 0. With --once the exit code is 0 where all is well, 1 where an
    anomaly stands or the condition of an alert for people holds, and 2 where an exporter does not
    answer or an argument is wrong. Steps a second take two readings: one frame has none.

    Example: act-exporter watch node17:9460 node17:9461
    """
    from act_exporter.watch.screen import show

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # names may have what the encoding has not
    try:
        code = show(
            urls or [f"localhost:{DEFAULT_PORT}"],
            interval=interval,
            once=once,
            layers=layers,
            console=Console(highlight=False),
        )
    except ActExporterError as error:
        typer.echo(f"act-exporter: {error}", err=True)
        code = 2
    raise typer.Exit(code)
