"""What the article's two blocks really do: the loud tensors are inside, and grow with sequence."""

from __future__ import annotations

import pytest

from tests.act_exporter.doctor.seed_blocks import (
    StableBlock,
    UnstableBlock,
    block_inputs,
    contexts,
    stack,
)


@pytest.mark.parametrize("sequence", [10, 512])
def test_inputs_of_the_unstable_blocks_are_calm_at_every_depth(sequence):
    """The article says that they rise and form a plateau; its post-norm keeps them at 0.8."""
    inputs = block_inputs(*stack(UnstableBlock, sequence))
    assert inputs[0].mean_abs == pytest.approx(0.08, abs=0.005)
    assert [one.mean_abs for one in inputs[1:]] == pytest.approx([0.8] * 5, abs=0.05)


def test_contexts_inside_the_unstable_blocks_are_loud():
    largest = [one.absmax for one in contexts(*stack(UnstableBlock, 10))]
    assert largest[0] == pytest.approx(97, rel=0.02)  # of an input of 0.08
    assert max(largest) == pytest.approx(4_747, rel=0.02)
    assert min(largest[1:]) > 1_500


def test_contexts_grow_with_the_sequence_beyond_half_precision():
    largest = [one.absmax for one in contexts(*stack(UnstableBlock, 512))]
    assert max(largest) == pytest.approx(195_500, rel=0.02)
    assert min(largest[1:]) > 65_504  # float16's largest number, in all blocks but the first


@pytest.mark.parametrize(
    ("sequence", "last", "loudest_context"), [(10, 5.9, 12.3), (512, 301, 623)]
)
def test_the_stable_block_is_not_stable_in_the_sequence(sequence, last, loudest_context):
    """Nothing divides its attention by the sum of its weights."""
    model, x = stack(StableBlock, sequence)
    inputs = [one.mean_abs for one in block_inputs(model, x)]
    assert inputs[0] == pytest.approx(0.08, abs=0.005)
    assert inputs[-1] == pytest.approx(last, rel=0.02)
    assert inputs == sorted(inputs)  # growth with depth
    largest = max(one.absmax for one in contexts(model, x))
    assert largest == pytest.approx(loudest_context, rel=0.02)


@pytest.mark.parametrize("block", [UnstableBlock, StableBlock])
def test_with_softmax_attention_contexts_do_not_grow_with_the_sequence(block):
    short = max(one.absmax for one in contexts(*stack(block, 10, use_linear=False)))
    long = max(one.absmax for one in contexts(*stack(block, 512, use_linear=False)))
    assert long < 1.5 * short
