"""Draws docs/images/watch.svg: a frame of `act-exporter watch` of a run with a fault.

    python -m tests.act_exporter.watch_picture [-o docs/images/watch.svg]

A small GPT trains beside a real exporter; in its 400th step the output of one layer is multiplied
by 300, and the frame is of what was read over HTTP since.
"""

from __future__ import annotations

import argparse
import io
import re
import time
from pathlib import Path

import torch
from rich.console import Console
from torch import nn
from torch.nn import functional as F

from act_exporter.exporter import Exporter
from act_exporter.torch_exporter import TorchExporter
from act_exporter.watch.frame import Frame
from act_exporter.watch.source import Source
from act_exporter.watch.trail import Trail
from deploy.demo.servers import REPOSITORY
from deploy.demo.train import GPT
from tests.act_exporter.watched import QUICK, address

COLUMNS, ROWS = 110, 44
LAYER, FACTOR, FAULT, STEPS, READ_EVERY = "blocks.1.attn.proj", 300.0, 400, 460, 10


def frame() -> Frame:
    """What is shown some steps after the fault."""
    torch.manual_seed(0)
    model = GPT(layers=4, width=32, heads=4, context=32)
    exporter = TorchExporter(
        model, run="gpt", rank=0, watch="sublayers", sample_every=1, thresholds=QUICK
    )
    trail = Trail()
    with exporter:
        exporter.serve("127.0.0.1", 0)
        exporter.inject_fault(LAYER, FACTOR, FAULT)
        source = Source(address(exporter), lambda: None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)
        for step in range(1, STEPS + 1):
            train(model, optimizer, exporter)
            if step % READ_EVERY == 0:
                source.ask(10)
                source.wait(10)
                assert source.reading.page is not None, source.reading.problem
                trail.add([source.reading.page])
    return Frame(
        readings=[source.reading],
        trail=trail,
        now=source.reading.read_at,
        wall=time.time(),
        layers=12,
        height=ROWS,
        corner="every 2 s, Ctrl-C ends",
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, exporter: Exporter) -> None:
    """One step on random bytes."""
    tokens = torch.randint(0, 256, (4, 33))
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    exporter.record(loss=loss)
    optimizer.step()
    optimizer.zero_grad()


def picture() -> str:
    """The frame as SVG, with no font from elsewhere."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(frame())
    svg = console.export_svg(title="act-exporter watch node17:9460")
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    return svg.replace("Fira Code, monospace", "DejaVu Sans Mono, Menlo, Consolas, monospace")


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "-o", "--out", type=Path, default=REPOSITORY / "docs" / "images" / "watch.svg"
    )
    out: Path = parser.parse_args().out
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(picture())


if __name__ == "__main__":
    main()
