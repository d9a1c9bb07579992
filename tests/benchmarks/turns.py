"""Things that are compared, run in turns in one process: what slows a round down slows all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

Runs = dict[str, Callable[[], object]]


def timed(
    runs: Runs, rounds: int, *, before: Callable[[], object] = lambda: None
) -> dict[str, list[float]]:
    """Seconds of each, run in turns, in another order each second round; the first warms up.

    Args:
        runs: what is compared, by its name.
        rounds: how often each is run.
        before: run before each, and not counted.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        ordered = list(runs.items())
        for name, run in ordered if number % 2 else reversed(ordered):
            before()
            started = time.perf_counter()
            run()
            if number:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def over(seconds: dict[str, list[float]], name: str, other: str) -> float:
    """Median of the quotients of each round."""
    pairs = zip(seconds[name], seconds[other], strict=True)
    return statistics.median(one / another for one, another in pairs)
