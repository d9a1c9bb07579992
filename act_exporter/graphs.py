"""CUDA graphs: what runs now may only be written down, to be run again later without Python.

Sampling cannot be switched inside such a graph. So what is captured by hand (`torch.cuda.graph`,
`make_graphed_callables`) gathers at every replay, sampled or not, and what an unsampled step
gathered is thrown away at its end. Where the optimizer's step is in the graph too, nobody hears of
a step: the loop must say `exporter.step(n)`. Graphs that torch.compile makes are cut around the
operators of `hooks`, which then run as they do without graphs.
"""

from __future__ import annotations

from typing import Any

import torch


def capturing() -> bool:
    """Whether the current stream is being captured: kernels are written down, and none runs."""
    cuda: Any = torch.cuda  # has no types
    return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())
