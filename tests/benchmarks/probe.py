"""What looking costs: one tensor's statistics, and a training step with and without the exporter.

    make bench        (or: python -m tests.benchmarks.probe --quick, in a minute)

Everything that is compared is run in turns in one process, and the medians of the rounds' quotients
are taken; ratios mean something on any machine, milliseconds only on the one that the file names.
Writes
build/bench/probe.json:

    tensors   naive_over_ours     the same statistics, one .item() each, over ours
              ours_over_one_sum   ours over a single x.sum()
    steps     probe_share         (step with the exporter) / (step without) - 1, every step sampled
              naive_share         the same with one .item() a statistic, in hooks on those tensors
"""

from __future__ import annotations

import copy
import json
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.progress import track
from torch.nn import functional as F

from act_exporter import start_exporter
from act_exporter.history import Thresholds
from act_exporter.layers import find_taps
from act_exporter.statistics import add_on_cpu, empty_rows
from deploy.demo.train import BYTES, GPT
from tests.benchmarks.report import parser_of, setting, write
from tests.benchmarks.turns import Runs, over, timed

SHAPES = ((4, 512, 768), (8, 512, 1024))
DTYPES = (torch.float32, torch.bfloat16)
MODELS = (
    {"layers": 6, "width": 768, "batch": 4, "context": 512},
    {"layers": 6, "width": 256, "batch": 8, "context": 256},
)
THRESHOLD = Thresholds().exceed
COLD_BYTES = 512 * 2**20
"""More than all last-level caches of a server, of which a virtual machine is shown a part; touched
between two cold runs."""


EVICTING = torch.zeros(COLD_BYTES, dtype=torch.uint8)


def naive(x: torch.Tensor) -> list[float]:
    """The obvious way: each statistic by itself, brought to the host at once."""
    finite = x[torch.isfinite(x)]
    return [
        finite.abs().max().item(),
        finite.min().item(),
        finite.max().item(),
        finite.float().mean().item(),
        finite.float().std().item(),
        finite.float().norm().item(),
        finite.float().square().mean().sqrt().item(),
        (finite.abs() > THRESHOLD).float().mean().item(),
        torch.isnan(x).sum().item(),
        (x == torch.inf).sum().item(),
        (x == -torch.inf).sum().item(),
    ]


def tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Standard normal, 1 % of it beyond the threshold, and one NaN."""
    torch.manual_seed(0)
    x = torch.randn(shape)
    x[torch.rand(shape) < 0.01] *= 3 * THRESHOLD
    x.view(-1)[0] = torch.nan
    return x.to(dtype)


def measure_tensors(rounds: int) -> list[dict[str, Any]]:
    """Ratios for each shape, dtype and state of the cache.

    All of them in each round, so that a busy minute of the machine is not one shape's alone.
    """
    cases = {
        (shape, dtype, cold): runs_of(tensor(shape, dtype))
        for shape in SHAPES
        for dtype in DTYPES
        for cold in (False, True)
    }
    took: dict[Any, dict[str, list[float]]] = {
        case: {name: [] for name in runs} for case, runs in cases.items()
    }
    for _ in track(range(rounds), "tensors"):
        for case, runs in cases.items():
            evict = partial(EVICTING.add_, 1) if case[2] else lambda: None
            for name, seconds in timed(runs, 1, before=evict).items():
                took[case][name] += seconds
    return [
        {
            "shape": list(shape),
            "dtype": str(dtype).removeprefix("torch."),
            "cache": "cold" if cold else "hot",
            "ours_ms": round(statistics.median(seconds["ours"]) * 1e3, 3),
            "naive_over_ours": round(over(seconds, "naive", "ours"), 2),
            "ours_over_one_sum": round(over(seconds, "ours", "sum"), 2),
        }
        for (shape, dtype, cold), seconds in took.items()
    ]


def runs_of(x: torch.Tensor) -> Runs:
    """What is compared on one tensor."""
    row = empty_rows(1, torch.device("cpu"))[0]
    return {
        "ours": lambda: add_on_cpu(x, row, THRESHOLD),
        "sum": x.sum,
        "naive": lambda: naive(x),
    }


def step_of(model: torch.nn.Module, called: Callable[..., Any], batch: int, context: int) -> Any:
    """A function that takes one training step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, BYTES, (batch, context + 1))

    def step() -> None:
        logits = called(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure_steps(shape: dict[str, int], compiled: bool, rounds: int) -> dict[str, Any]:
    """Shares of a step for one model."""
    torch.manual_seed(0)
    plain = GPT(shape["layers"], shape["width"], heads=4, context=shape["context"])
    watched, naively = copy.deepcopy(plain), copy.deepcopy(plain)
    exporter = start_exporter(watched, 0, run="bench", max_overhead=None)

    # A compiler ends its graph at an .item(): here it does once a hook, not once a statistic.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def look(*given: Any) -> None:
        seen.append(naive((given[2] if len(given) > 2 else given[1][0]).detach()))

    seen: list[list[float]] = []
    for tap in find_taps(naively):
        if tap.tensor == "output":
            tap.module.register_forward_hook(look)
        else:
            tap.module.register_forward_pre_hook(look)
    runs = {}
    # Three copies of one model share their code, and so the compiled code of the first, which has
    # no hooks, unless hooks are among what is looked at before it is used again.
    torch._dynamo.config.skip_nnmodule_hook_guards = False
    for name, model in (("plain", plain), ("watched", watched), ("naive", naively)):
        called = torch.compile(model) if compiled else model
        runs[name] = step_of(model, called, shape["batch"], shape["context"])
    # The naive way needs few rounds to be told from the others.
    few = timed(runs, max(rounds // 6, 2))
    took = timed({name: runs[name] for name in ("plain", "watched")}, rounds)
    exporter.close()
    return {
        **shape,
        "vocabulary": BYTES,
        "mode": "compiled" if compiled else "eager",
        "taps": len(find_taps(plain)),
        "rounds": rounds,
        "step_ms": round(statistics.median(took["plain"]) * 1e3, 1),
        "probe_share": round(over(took, "watched", "plain") - 1, 4),
        "naive_share": round(over(few, "naive", "plain") - 1, 4),
    }


def main() -> None:
    """Measure and write the file."""
    parser = parser_of(__doc__, "probe.json", "few rounds, the smaller model only")
    arguments = parser.parse_args()
    tensor_rounds, step_rounds = (5, 10) if arguments.quick else (31, 40)
    models = MODELS[1:] if arguments.quick else MODELS
    result = {
        **setting(("act-exporter", "torch"), threads=torch.get_num_threads()),
        "tensors": measure_tensors(tensor_rounds),
        "steps": [
            measure_steps(shape, compiled, step_rounds)
            for shape, compiled in track(
                [(shape, compiled) for shape in models for compiled in (False, True)],
                "training steps",
            )
        ],
    }
    print(json.dumps(result, indent=1))
    write(result, arguments.out)


if __name__ == "__main__":
    main()
