"""What `act-exporter capacity` says, line by line."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import cast, get_args

from act_exporter.capacity.advice import advice, prometheus_needed
from act_exporter.capacity.cost import DAYS, Cost, cost
from act_exporter.capacity.series import RUN_SERIES, Series, count
from act_exporter.torch_exporter import Reduce

_WIDTH = 100


def answer(ranks: int, layers: int, watch: str, reduce: str, interval: float) -> Iterator[str]:
    """What such a run costs, what it would cost otherwise, and advice.

    Args:
        ranks: of the run.
        layers: blocks of its model.
        watch: as `start_exporter`'s.
        reduce: likewise.
        interval: from one scrape to the next, in seconds.

    Raises:
        SettingError: `reduce` or `watch` is not known, or a number cannot be.
    """
    asked = cast("Reduce", reduce)  # `count` looks at it
    series = count(ranks=ranks, layers=layers, watch=watch, reduce=asked)
    costs = cost(series, interval)
    for name, what in [*_lines(series, costs, interval), ("", "")]:
        yield f"{name:<14}{what}".rstrip()
    yield "The same run, otherwise:"
    for other in ("sublayers", "blocks"):
        for joined in get_args(Reduce):
            if (other, joined) != (watch, asked):
                yield _otherwise(ranks, layers, other, joined, interval)
    yield "\nAdvice:"
    for sentence in advice(series, costs, interval=interval, watch=watch, reduce=asked):
        yield textwrap.fill(sentence, _WIDTH, initial_indent="- ", subsequent_indent="  ")


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
