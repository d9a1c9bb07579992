"""What the recorded runs train: a small GPT in a loop without an end, with all that panels ask for.

    python -m tests.grafana.trainer --run NAME --port PORT --log-dir RUNS [--fault FILE]

As one process it has a guard, a journal and, from the moment that FILE is there, a fault. Started
as torchrun starts ranks it has none of them, and joins its ranks' statistics on one page
(`reduce="global"`): somebody's healthy run, beside the first one in the same Prometheus.
"""

from __future__ import annotations

import argparse
import logging
import os
import sysconfig
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from act_exporter import start_exporter
from alerting.recovery import TrainingGuard
from deploy.demo.text import read_text
from deploy.demo.train import GPT, Windows

log = logging.getLogger("train")

WIDTH, HEADS, CONTEXT, BATCH = 32, 4, 16, 48
SAVE_EVERY = 100
WARMUP = 50
NEVER = 10**9
FAULT_LAYER = "blocks.1.attn.proj"
FAULT_FACTOR = 1000.0
PACE_SECONDS = {True: 0.02, False: 0.005}
"""Slept in each step, with ranks that are joined and without: it leaves the processors to the
servers, and most of them to the run with the fault."""


class Attention(nn.Module):
    """The demo's, with query and key in modules of their own, so that the logits have a bound."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.query, self.key, self.value, self.proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return out


def gpt() -> GPT:
    """The demo's model, small, with that attention in each of its four blocks.

    Without the final norm, which would keep from the loss what grows inside.
    """
    model = GPT(layers=4, width=WIDTH, heads=HEADS, context=CONTEXT)
    model.norm = nn.Identity()  # type: ignore[assignment]
    for block in model.blocks:
        block.attn = Attention()
    return model


def forever(loader: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """Steps from 1 on, without a guard."""
    step = 0
    while True:
        for batch in loader:
            step += 1
            yield step, batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--log-dir", type=Path, required=True)
    parser.add_argument("--fault", type=Path, help="a file that starts the fault when it is there")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    torch.set_num_threads(1)
    joined = int(os.environ.get("WORLD_SIZE", "1")) > 1
    torch.manual_seed(2 if joined else 1)
    model = gpt()
    if joined:
        dist.init_process_group("gloo")
        torch.manual_seed(2 + dist.get_rank())  # of the batches
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: min((done + 1) / WARMUP, 1.0)
    )
    text = read_text(Path(sysconfig.get_path("stdlib")), limit=500_000)
    loader = DataLoader(Windows(text, CONTEXT), BATCH, shuffle=True, drop_last=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    exporter = start_exporter(
        model,
        args.port,
        run=args.run,
        max_overhead=None,  # too small a model for it
        scaler=scaler,
        journal=None if joined else args.log_dir / args.run / "journal",
        reduce="global" if joined else "rank",
    )
    if joined:
        steps = forever(loader)
        trained: nn.Module = DistributedDataParallel(model)
    else:
        trained = model
        steps = TrainingGuard(
            args.log_dir / args.run,
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            scaler=scaler,
            loader=loader,
            exporter=exporter,
            save_every_steps=SAVE_EVERY,
        ).steps(NEVER)
    for step, (inputs, targets) in steps:
        if args.fault and args.fault.exists():
            args.fault.unlink()
            exporter.inject_fault(FAULT_LAYER, FAULT_FACTOR, step)
            log.warning("fault: %s times %g before step %d", FAULT_LAYER, FAULT_FACTOR, step)
        loss = F.cross_entropy(trained(inputs).flatten(0, 1), targets.flatten())
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        exporter.record(loss=loss, grad_norm=norm)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 100 == 0:
            log.info("step %d loss %.3f", step, loss.item())
        time.sleep(PACE_SECONDS[joined])


if __name__ == "__main__":
    main()
