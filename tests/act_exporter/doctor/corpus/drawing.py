"""The kinds, and how an example is drawn."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Literal

import torch

from tests.act_exporter.doctor.corpus import (
    attention,
    bodies,
    data,
    gradients,
    habits,
    precision,
    training,
    weights,
)
from tests.act_exporter.doctor.corpus.patient import NotShownError, Patient

Half = Literal["tuning", "held-out"]
HALVES: tuple[Half, ...] = ("tuning", "held-out")
"""Thresholds are tuned on the first; nobody looks at the second before they are."""

KINDS: tuple[Callable[[Random], Patient], ...] = (
    data.token_out_of_range,
    data.nonfinite_input,
    data.empty_batch,
    data.constant_batch,
    data.repeated_batches,
    data.odd_length,
    weights.nonfinite_weight,
    weights.odd_weight,
    weights.norm_free,
    weights.missing_norm,
    weights.large_gain,
    weights.small_epsilon,
    attention.unbounded,
    attention.unnormalised,
    attention.large_logits,
    attention.loud_qk_norm,
    attention.softmax_overflow,
    gradients.exploding,
    gradients.amplifying,
    gradients.vanishing,
    gradients.nonfinite,
    gradients.dead,
    training.clip_before_unscale,
    training.clip_after_step,
    training.high_rate,
    training.no_warm_up,
    training.rate_jump,
    precision.loud_part,
    precision.raw_input,
    precision.residual_sum,
    training.nonfinite_moments,
    training.large_moments,
    training.stale_moments,
    training.lost_step,
    training.epsilon,
    training.left_out,
    weights.outlier_channels,
)

# A kind whose fault shows in fewer draws than this is no fault, and its generator is to be mended.
_DRAWS = 20


def draw(kind: Callable[[Random], Patient], half: Half, number: int) -> Patient:
    """The example of that number, always the same."""
    refused = ""
    for attempt in range(_DRAWS):
        try:
            return _seeded(kind, f"{half} {kind.__module__} {kind.__name__} {number} {attempt}")
        except NotShownError as error:
            refused = str(error)
    raise AssertionError(f"{kind.__name__} {half} {number} shows no fault: {refused}")


def healthy(half: Half, number: int) -> Patient:
    """A healthy one: each architecture in turns, with different parts of a training."""
    build = bodies.BODIES[number % len(bodies.BODIES)]
    return _seeded(lambda random: habits.healthy(random, build), f"{half} healthy {number}")


def _seeded(make: Callable[[Random], Patient], seed: str) -> Patient:
    random = Random(seed)
    with torch.random.fork_rng():
        torch.manual_seed(random.randrange(2**31))
        return make(random)
