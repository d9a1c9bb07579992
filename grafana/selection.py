"""Which samples the panels ask for: those of the chosen run, layers, tensors and ranks."""

from __future__ import annotations

RUN = 'run="$run"'
CHOSEN = f'{RUN}, layer=~"$layer", tensor=~"$tensor"'
# Recorded series are of all ranks together; those of single ranks are what the trainers expose.
RANKED = f'{CHOSEN}, rank=~"$rank"'
RATIO = f"layer:act_layer_absmax:baseline_ratio{{{CHOSEN}}}"
NAME = "{{layer}} {{tensor}}"


def worst(count: int, recorded: str, expr: str | None = None) -> str:
    """Of `recorded`, or of `expr`, the same few layers all along.

    They are those whose `recorded` was largest at any time of the range.
    """
    largest = f"topk({count}, max_over_time({recorded}[$__range] @ end()))"
    return f"{expr or recorded} and on (run, layer, tensor) {largest}"


def of_ranks(metric: str) -> str:
    """The largest of the chosen ranks."""
    return f"max by (run, layer, tensor) ({metric}{{{RANKED}}})"


def rate(counter: str, matchers: str) -> str:
    """What a counter grows by in a second."""
    return f"rate({counter}{{{matchers}}}[$__rate_interval])"
