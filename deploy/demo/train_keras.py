"""Trains a small GPT with Keras on the text of Python's own standard library, watched and guarded.

A trainer as a user would write it: everything that this project asks of it stands in the lines
marked (1) and (2). Start it by hand:

    python -m deploy.demo.train_keras --steps 2000 --log-dir runs
"""

from __future__ import annotations

import argparse
import logging
import sysconfig
from pathlib import Path
from typing import Any

import keras
import numpy as np

from act_exporter.integrations.keras import start_exporter
from alerting.exceptions import RecoveryHaltedError
from alerting.recovery.keras import KerasGuard
from deploy.demo.text import BYTES, read_text

log = logging.getLogger("train")


class Block(keras.layers.Layer):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = keras.layers.LayerNormalization()
        self.attn = keras.layers.MultiHeadAttention(heads, width // heads)
        self.norm2 = keras.layers.LayerNormalization()
        self.up = keras.layers.Dense(4 * width, activation="gelu")
        self.down = keras.layers.Dense(width)

    def build(self, shape: Any) -> None:
        for norm in (self.norm1, self.norm2):
            norm.build(shape)
        self.attn.build(shape, shape)
        self.up.build(shape)
        self.down.build(self.up.compute_output_shape(shape))

    def call(self, x: Any) -> Any:
        normed = self.norm1(x)
        x = x + self.attn(normed, normed, use_causal_mask=True)
        return x + self.down(self.up(self.norm2(x)))


class GPT(keras.Model):
    """A decoder over bytes; its output are the logits, (batch, context, bytes)."""

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.embed = keras.layers.Embedding(BYTES, width)
        self.position = keras.layers.Embedding(context, width)
        self.blocks = [Block(width, heads) for _ in range(layers)]
        self.norm = keras.layers.LayerNormalization()
        self.head = keras.layers.Dense(BYTES, use_bias=False)

    def call(self, tokens: Any) -> Any:
        x = self.embed(tokens) + self.position(keras.ops.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Diary(keras.callbacks.Callback):
    """Puts the fault in, once, and logs the loss.

    Args:
        step: before which the weights are multiplied; None for never.
        factor: by which.
    """

    def __init__(self, step: int | None, factor: float) -> None:
        super().__init__()
        self._step = step
        self._factor = factor
        self._injected = False
        self._told = 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        step = int(self.model.optimizer.iterations) + 1
        if step == self._step and not self._injected:
            self._injected = True
            # What a bad kernel or a flipped bit can do to a weight.
            kernel = self.model.blocks[1].attn.value_dense.kernel
            kernel.assign(kernel * self._factor)
            log.warning("fault: %s times %g before step %d", kernel.path, self._factor, step)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        step = int(self.model.optimizer.iterations)
        # After a rollback the epoch is gone through up to its batch, without steps.
        if step % 50 == 0 and step != self._told:
            self._told = step
            log.info("step %d", step)


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
    parser.add_argument("--steps", type=int, default=2000, help="default: %(default)s")
    parser.add_argument("--layers", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--width", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--context", type=int, default=96, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--save-every", type=int, default=500, help="steps (default: %(default)s)")
    parser.add_argument(
        "--fault-step", type=int, help="multiply one inner layer's weights before this step"
    )
    parser.add_argument("--fault-factor", type=float, default=100.0, help="default: %(default)s")
    return parser.parse_args()


def windows(text: bytes, context: int, count: int) -> tuple[Any, Any]:
    """The first `count` windows of a text, (count, context), and the same shifted by one."""
    data = np.frombuffer(text, dtype=np.uint8).astype(np.int32)
    count = min(count, (len(data) - 1) // context)
    end = count * context
    return data[:end].reshape(count, context), data[1 : end + 1].reshape(count, context)


def main() -> None:
    args = arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    keras.utils.set_random_seed(args.seed)

    model = GPT(args.layers, args.width, 4, args.context)
    x, y = windows(read_text(args.data), args.context, args.steps * args.batch)
    model(x[:1])  # its layers are known once it was called
    model.compile(
        optimizer=keras.optimizers.AdamW(1e-3, beta_2=0.95, clipnorm=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )

    # (1) Statistics of each layer on http://localhost:PORT/metrics.
    # (A model this small is over the default budget of a hundredth of each step.)
    exporter = start_exporter(
        model,
        args.port,
        run=args.run,
        max_overhead=None,
        journal=args.log_dir / args.run / "journal",
    )
    # (2) Checkpoints, and back to a healthy one when the receiver asks: in place of `model.fit`.
    guard = KerasGuard(
        args.log_dir / args.run, model=model, exporter=exporter, save_every_steps=args.save_every
    )
    guard.fit(
        x,
        y,
        batch_size=args.batch,
        epochs=-(-args.steps * args.batch // len(x)),
        seed=args.seed,
        verbose=0,
        callbacks=[Diary(args.fault_step, args.fault_factor)],
    )
    exporter.close()
    log.info("finished at step %d", int(model.optimizer.iterations))


if __name__ == "__main__":
    try:
        main()
    except RecoveryHaltedError as error:
        raise SystemExit(f"training was halted: {error}") from None
