"""A trainer that goes bad when it is told to, and stays bad: started by the tests as a process.

    python -m tests.integration.trainer --log-dir RUNS --port PORT --knobs FOLDER

It is deploy/demo/train.py's model, small, in a loop without an end. What only it looks at are two
files in FOLDER:

    fault  taken away when it is seen: from then on one inner layer's output is 1,000 times what it
           would be, until the guard goes back to an earlier step
    hold   while it is there, the step in hand does not end, as a long step of a large model; the
           metrics page goes on answering
"""

from __future__ import annotations

import argparse
import logging
import sysconfig
import time
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from act_exporter import start_exporter
from alerting.recovery import TrainingGuard
from deploy.demo.text import read_text
from deploy.demo.train import GPT, Windows

log = logging.getLogger("train")

RUN = "gpt-test"
SAVE_EVERY = 50
CONTEXT = 32
BATCH = 4
NEVER = 10**9
FAULT_LAYER = "blocks.1.attn.proj"
FAULT_FACTOR = 1000.0
PACE_SECONDS = 0.005
"""Slept in each step: 100 steps a second are enough, and leave the processor to the servers."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log-dir", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--knobs", type=Path, required=True)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = GPT(layers=2, width=32, heads=4, context=CONTEXT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    text = read_text(Path(sysconfig.get_path("stdlib")), limit=500_000)
    loader = DataLoader(Windows(text, CONTEXT), BATCH, shuffle=True, drop_last=True)
    exporter = start_exporter(
        model, args.port, run=RUN, max_overhead=None
    )  # too small a model for it
    guard = TrainingGuard(
        args.log_dir / RUN,
        model=model,
        optimizer=optimizer,
        loader=loader,
        exporter=exporter,
        save_every_steps=SAVE_EVERY,
    )
    for step, (inputs, targets) in guard.steps(NEVER):
        if (args.knobs / "fault").exists():
            (args.knobs / "fault").unlink()
            exporter.inject_fault(FAULT_LAYER, FAULT_FACTOR, step)
            log.warning("fault: %s times %g before step %d", FAULT_LAYER, FAULT_FACTOR, step)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        exporter.record(loss=loss, grad_norm=norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0:
            log.info("step %d loss %.3f", step, loss.item())
        time.sleep(PACE_SECONDS)
        while (args.knobs / "hold").exists():
            time.sleep(PACE_SECONDS)


if __name__ == "__main__":
    main()
