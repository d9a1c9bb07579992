"""The command `act-exporter capacity`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import cast, get_args

import typer

from act_exporter.capacity.advice import advice, prometheus_needed
from act_exporter.capacity.cost import DAYS, Cost, cost
from act_exporter.capacity.series import RUN_SERIES, Series, count
from act_exporter.exceptions import ActExporterError
from act_exporter.torch_exporter import Reduce
from act_exporter.watch.screen import seconds_of

_WIDTH = 100


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
    try:
        seconds = seconds_of(interval)
        asked = cast("Reduce", reduce)  # `count` looks at it
        series = count(ranks=ranks, layers=layers, watch=watch, reduce=asked)
        costs = cost(series, seconds)
        for name, what in [*_lines(series, costs, seconds), ("", "")]:
            typer.echo(f"{name:<14}{what}".rstrip())
        typer.echo("The same run, otherwise:")
        for other in ("sublayers", "blocks"):
            for joined in get_args(Reduce):
                if (other, joined) != (watch, asked):
                    typer.echo(_otherwise(ranks, layers, other, joined, seconds))
    except ActExporterError as error:
        typer.echo(f"act-exporter: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo("\nAdvice:")
    for sentence in advice(series, costs, interval=seconds, watch=watch, reduce=asked):
        typer.echo(textwrap.fill(sentence, _WIDTH, initial_indent="- ", subsequent_indent="  "))


def _lines(series: Series, costs: Cost, interval: float) -> Iterator[tuple[str, str]]:
    by_layer = series.other - RUN_SERIES
    yield "exporters", f"{series.exporters:,}, each of {series.tensors:,} tensors"
    yield "series", f"{series.page:,} on a page: {series.layer:,} of the layer families,"
    yield "", f"{by_layer:,} of gradients, updates and attentions, {RUN_SERIES} of the run"
    yield "", f"{series.total:,} in Prometheus, {series.recorded:,} of them made by the rules"
    yield "", f"{series.storm:,} more (ALERTS) while each tensor has each alert"
    yield "samples", f"{costs.samples:,.0f} a second"
    yield "disk", f"{_bytes(costs.disk)} for {DAYS} days"
    yield "memory", f"{_bytes(costs.memory)} of Prometheus"
    yield "bandwidth", f"{_bytes(costs.bandwidth)}/s of scrapes, compressed"
    yield (
        "rules",
        f"{costs.quiet:.1f} s of one core each {interval:g} s, scrapes included;"
        f" {costs.storm:.1f} s in a storm",
    )
    yield "Prometheus", f"{prometheus_needed(costs, interval):,} of two cores"


def _otherwise(ranks: int, layers: int, watch: str, reduce: Reduce, interval: float) -> str:
    series = count(ranks=ranks, layers=layers, watch=watch, reduce=reduce)
    costs = cost(series, interval)
    return (
        f"  --watch {watch:<9} --reduce {reduce:<6} {series.total:>12,} series"
        f" {_bytes(costs.disk):>8} disk {_bytes(costs.memory):>7} memory"
        f" {prometheus_needed(costs, interval):>4,} Prometheus"
    )


def _bytes(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"
