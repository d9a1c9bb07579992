"""Small models of Keras, in the ways in which people write them."""

import keras
import numpy as np
from keras import layers

VOCABULARY = 20
LENGTH = 6


class Block(layers.Layer):
    """A transformer block."""

    def __init__(self, width=16, **settings):
        super().__init__(**settings)
        self.norm_1 = layers.LayerNormalization()
        self.attention = layers.MultiHeadAttention(2, width // 2)
        self.norm_2 = layers.LayerNormalization()
        self.feed_forward = keras.Sequential(
            [layers.Dense(2 * width, activation="gelu"), layers.Dense(width)]
        )

    def call(self, x):
        normed = self.norm_1(x)
        x = x + self.attention(normed, normed, use_causal_mask=True)
        return x + self.feed_forward(self.norm_2(x))


class Decoder(keras.Model):
    """A subclassed language model whose `call` takes no `training`."""

    def __init__(self, blocks=2, width=16):
        super().__init__()
        self.embedding = layers.Embedding(VOCABULARY, width)
        self.blocks = [Block(width) for _ in range(blocks)]
        self.norm = layers.LayerNormalization()
        self.head = layers.Dense(VOCABULARY)

    def call(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def decoder(blocks=2):
    """A built one."""
    model = Decoder(blocks)
    model(tokens(1))
    return model


def functional(blocks=2):
    """The same of blocks that are layers in a functional model."""
    given = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, 16)(given)
    for _ in range(blocks):
        x = Block()(x)
    x = layers.LayerNormalization()(x)
    return keras.Model(given, layers.Dense(VOCABULARY)(x))


def written_out(blocks=2):
    """The same without any layer of one's own."""
    given = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, 16)(given)
    for _ in range(blocks):
        normed = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(2, 8)(normed, normed)])
        normed = layers.LayerNormalization()(x)
        wide = layers.Dense(32, activation="relu")(normed)
        x = layers.Add()([x, layers.Dense(16)(wide)])
    x = layers.LayerNormalization()(x)
    return keras.Model(given, layers.Dense(VOCABULARY)(x))


def mlp(**settings):
    """Two layers, 4 numbers to 1, compiled with plain SGD."""
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(8, name="first"), layers.Dense(1, name="second")]
    )
    model.compile(keras.optimizers.SGD(0.01), "mse", **{"jit_compile": False, **settings})
    return model


def compile_decoder(model, optimizer=None, **settings):
    """For next-token prediction."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = optimizer or keras.optimizers.Adam(1e-2)
    model.compile(optimizer, loss, **{"jit_compile": False, **settings})
    return model


def tokens(rows=16):
    """(rows, LENGTH) of tokens, the same each time."""
    return np.random.RandomState(0).randint(0, VOCABULARY, (rows, LENGTH)).astype("int32")


def numbers(rows=16):
    """(rows, 4) to (rows, 1), the same each time."""
    generator = np.random.RandomState(0)
    return generator.randn(rows, 4).astype("float32"), generator.randn(rows, 1).astype("float32")
