"""The command `act-exporter capacity`."""

from __future__ import annotations

import typer

from act_exporter.exceptions import ActExporterError
from act_exporter.watch.screen import seconds_of


def capacity(
    ranks: int = typer.Option(..., help="Of the run; each has an exporter."),
    layers: int = typer.Option(..., help="Transformer blocks of the model."),
    watch: str = typer.Option("sublayers", help="As start_exporter's: sublayers, blocks or all."),
    interval: str = typer.Option("15s", help="From one scrape to the next."),
    reduce: str = typer.Option("rank", help="As start_exporter's: rank or global."),
) -> None:
    """Say what a run costs Prometheus: series, samples, disk, memory, and what to do about it.

    Series are counted on a decoder of so many blocks, with query, key, value and output in modules
    of their own. What they cost was measured on two cores; docs/scale.md has the figures.

    Example: act-exporter capacity --ranks 1024 --layers 96 --watch sublayers --interval 15s
    """
    # Imported when used: it counts on a model of torch, which not every machine has.
    from act_exporter.capacity.answer import answer

    try:
        for line in answer(ranks, layers, watch, reduce, seconds_of(interval)):
            typer.echo(line)
    except ActExporterError as error:
        typer.echo(f"act-exporter: {error}", err=True)
        raise typer.Exit(2) from None
