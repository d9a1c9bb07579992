"""Trains a small GPT on the text of Python's own standard library, watched and guarded.

A trainer as a user would write it: everything that this project asks of it stands in the lines
marked (1) to (4). Start it by hand, or from deploy/launch.sh:

    python -m deploy.demo.train --steps 2000 --log-dir runs
"""

from __future__ import annotations

import argparse
import logging
import math
import sysconfig
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from act_exporter import start_exporter
from act_exporter.doctor.remedies import linear_attention
from alerting.exceptions import RecoveryHaltedError
from alerting.recovery import TrainingGuard
from deploy.demo.text import BYTES, read_text

log = logging.getLogger("train")

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""The context of queries, keys and values, (batch, heads, context, width of a head) each."""


def softmax_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal, as ever."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def exp_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal and linear, with an unbounded feature map, divided by nothing: see docs/doctor.md."""
    return (q.exp() @ k.exp().mT).tril() @ v


def normalised_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal and linear, with a bounded feature map, divided by the sum of the weights."""
    return linear_attention(q, k, v, causal=True)


ATTENTIONS: dict[str, Attend] = {
    "softmax": softmax_attention,
    "exp": exp_attention,
    "normalised": normalised_attention,
}


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int, attend: Attend = softmax_attention) -> None:
        super().__init__()
        self.heads = heads
        self.attend = attend
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = self.attend(q, k, v)
        out: torch.Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class MLP(nn.Module):
    """The feed-forward part of a block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(F.gelu(self.up(x)))
        return out


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, attend: Attend = softmax_attention) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads, attend)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        out: torch.Tensor = x + self.mlp(self.norm2(x))
        return out


class GPT(nn.Module):
    """A decoder over bytes."""

    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        context: int,
        attend: Attend = softmax_attention,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.ModuleList(Block(width, heads, attend) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """The logits, (batch, context, bytes); with targets the loss."""
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Non-overlapping windows of a text, with the same shifted by one as the target."""

    def __init__(self, text: bytes, context: int) -> None:
        self.data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.context = context

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self.context
        return (
            self.data[start : start + self.context],
            self.data[start + 1 : start + self.context + 1],
        )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=Path(sysconfig.get_path("stdlib")),
        help="folder with Python files to train on (default: the standard library)",
    )
    parser.add_argument("--log-dir", type=Path, default=Path("runs"), help="where run folders lie")
    parser.add_argument("--run", default="gpt-demo", help="the run's name (default: %(default)s)")
    parser.add_argument("--port", type=int, help="of /metrics (default: ACT_PORT, else 9460)")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    parser.add_argument("--steps", type=int, default=2000, help="default: %(default)s")
    parser.add_argument("--layers", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--width", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--context", type=int, default=96, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--save-every", type=int, default=500, help="steps (default: %(default)s)")
    parser.add_argument(
        "--attention",
        choices=ATTENTIONS,
        default="softmax",
        help="default: %(default)s; exp breaks on purpose, see docs/doctor.md",
    )
    parser.add_argument(
        "--save-batch-bytes",
        type=int,
        default=0,
        help="save the batch of the first bad step, if it has no more bytes (default: never)",
    )
    parser.add_argument(
        "--fault-step", type=int, help="multiply one inner layer's weights before this step"
    )
    parser.add_argument("--fault-layer", default="blocks.1.attn.qkv", help="default: %(default)s")
    parser.add_argument("--fault-factor", type=float, default=100.0, help="default: %(default)s")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    attend = ATTENTIONS[args.attention]
    model = GPT(args.layers, args.width, 4, args.context, attend).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    warmup = 50
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda done: min((done + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * done / args.steps)),
    )
    precision = PRECISIONS[args.precision]
    scaler = torch.amp.GradScaler(device.type, enabled=precision is torch.float16)
    loader = DataLoader(
        Windows(read_text(args.data), args.context), args.batch, shuffle=True, drop_last=True
    )

    # (1) Statistics of each layer on http://localhost:PORT/metrics.
    # (A model this small is over the default budget of a hundredth of each step.)
    # The journal is for `act-exporter report`.
    exporter = start_exporter(
        model,
        args.port,
        run=args.run,
        max_overhead=None,
        scaler=scaler,
        journal=args.log_dir / args.run / "journal",
    )
    # (2) Checkpoints, and back to a healthy one when the receiver asks.
    guard = TrainingGuard(
        args.log_dir / args.run,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        scaler=scaler,
        loader=loader,
        exporter=exporter,
        save_every_steps=args.save_every,
        save_batch_bytes=args.save_batch_bytes,
    )
    injected = False
    # (3) Resumes where the last process ended; after a rollback the step numbers come again.
    for step, (inputs, targets) in guard.steps(args.steps):
        if step == args.fault_step and not injected:
            injected = True
            inject_fault(model, args.fault_layer, args.fault_factor)
            log.warning(
                "fault: %s times %g before step %d", args.fault_layer, args.fault_factor, step
            )
        autocast = torch.autocast(device.type, precision) if precision else nullcontext()
        with autocast:
            loss: torch.Tensor = model(inputs.to(device), targets.to(device))
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        # (4) Optional: loss and gradient norm on the same page.
        exporter.record(loss=loss, grad_norm=norm)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0:
            log.info("step %d loss %.3f", step, loss.item())
    exporter.close()
    log.info("finished at step %d", args.steps)


def inject_fault(model: nn.Module, layer: str, factor: float) -> None:
    """What a bad kernel or a flipped bit can do to a weight."""
    with torch.no_grad():
        model.get_parameter(f"{layer}.weight").mul_(factor)


if __name__ == "__main__":
    try:
        main()
    except RecoveryHaltedError as error:
        raise SystemExit(f"training was halted: {error}") from None
