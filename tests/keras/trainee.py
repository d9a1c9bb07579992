"""The small transformer that detection and overhead are measured on: the demo's, as torch's is.

Models of Keras begin with other weights than models of torch, and their gradients are others then;
here they begin alike, so that what is said of a fault can be held against what is said with torch.
"""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from deploy.demo.text import read_text
from deploy.demo.train_keras import GPT

CONTEXT, BATCH = 32, 8
RATE = 1e-3


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
    for variable in model.trainable_variables:
        if variable.name in ("kernel", "embeddings"):
            variable.assign(keras.random.normal(variable.shape, stddev=0.02))
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
    text = _text()
    starts = np.random.default_rng(seed).integers(len(text) - context, size=(steps, batch, 1))
    tokens = text[starts + np.arange(context + 1)].astype(np.int32)
    return tf.data.Dataset.from_tensor_slices((tokens[..., :-1], tokens[..., 1:]))


@functools.cache
def _text() -> Any:
    return np.frombuffer(read_text(Path(sysconfig.get_path("stdlib")), limit=1_000_000), np.uint8)
