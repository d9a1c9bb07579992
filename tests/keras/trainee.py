"""The small transformer that detection and overhead are measured on: the demo's GPT in Keras."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

BYTES = 256  # the vocabulary: text is read as bytes
CONTEXT, BATCH = 32, 8
RATE = 1e-3


def small() -> keras.Initializer:
    """As GPT-2 begins, and the demo: from Keras' own beginning the gradients are others."""
    return keras.initializers.RandomNormal(stddev=0.02)


class Block(keras.layers.Layer):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.norm1 = keras.layers.LayerNormalization()
        self.attn = keras.layers.MultiHeadAttention(
            heads, width // heads, kernel_initializer=small()
        )
        self.norm2 = keras.layers.LayerNormalization()
        self.up = keras.layers.Dense(4 * width, "gelu", kernel_initializer=small())
        self.down = keras.layers.Dense(width, kernel_initializer=small())

    def call(self, x: tf.Tensor) -> tf.Tensor:
        normed = self.norm1(x)
        x = x + self.attn(normed, normed, use_causal_mask=True)
        return x + self.down(self.up(self.norm2(x)))


class GPT(keras.Model):
    """A language model on bytes."""

    def __init__(self, blocks: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.embed = keras.layers.Embedding(BYTES, width, small())
        self.position = keras.layers.Embedding(context, width, small())
        self.blocks = [Block(width, heads) for _ in range(blocks)]
        self.norm = keras.layers.LayerNormalization()
        self.head = keras.layers.Dense(BYTES, use_bias=False, kernel_initializer=small())

    def call(self, tokens: tf.Tensor) -> tf.Tensor:
        x = self.embed(tokens) + self.position(tf.range(tf.shape(tokens)[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt(
    blocks: int = 4, width: int = 32, heads: int = 4, context: int = CONTEXT, **compiled: Any
) -> GPT:
    """A built and compiled one.

    Args:
        blocks: how many.
        width: of the residual stream.
        heads: of an attention.
        context: bytes that it sees.
        compiled: for `Model.compile`, such as `jit_compile`.
    """
    keras.utils.set_random_seed(0)
    model = GPT(blocks, width, heads, context)
    model(np.zeros((1, context), np.int32))
    model.compile(
        keras.optimizers.AdamW(RATE, 0.01, beta_2=0.95, epsilon=1e-8, global_clipnorm=1.0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        **{"jit_compile": False, **compiled},
    )
    return model


def batches(
    steps: int, *, batch: int = BATCH, context: int = CONTEXT, seed: int = 0
) -> tf.data.Dataset:
    """So many batches of random places in the standard library's text, the same for a seed."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"\n".join(path.read_bytes() for path in paths[:60]), np.uint8)
    starts = np.random.default_rng(seed).integers(len(text) - context, size=(steps, batch, 1))
    places = (starts + np.arange(context + 1)).astype(np.int32)
    tokens = text[places].astype(np.int32)
    return tf.data.Dataset.from_tensor_slices((tokens[..., :-1], tokens[..., 1:]))
