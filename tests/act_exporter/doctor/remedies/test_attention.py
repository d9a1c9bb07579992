"""Linear attention that is bounded: what it computes, and what becomes of the article's fault."""

from __future__ import annotations

import pytest
import torch

from act_exporter.doctor.remedies import elu_features, linear_attention, softmax_features
from tests.act_exporter.doctor.remedies.remedied import (
    Normalised,
    NormalisedStable,
    bound_features,
    remedied,
)
from tests.act_exporter.doctor.seed_blocks import (
    StableBlock,
    UnstableBlock,
    block_inputs,
    contexts,
    stack,
)


def heads(sequence: int, scale: float = 1.0) -> list[torch.Tensor]:
    """Queries, keys and values of two heads of eight."""
    torch.manual_seed(0)
    return [torch.randn(2, 2, sequence, 8) * scale for _ in range(3)]


@pytest.mark.parametrize("features", [elu_features, softmax_features])
@pytest.mark.parametrize("causal", [False, True])
def test_it_is_attention_with_these_weights(features, causal):
    """The same as with the square matrix of weights, over several chunks and a part of one."""
    q, k, v = heads(150)
    weights = features(q) @ features(k).mT
    if causal:
        weights = weights.tril()
    expected = weights / weights.sum(-1, keepdim=True) @ v
    got = linear_attention(q, k, v, causal=causal, feature_map=features)
    torch.testing.assert_close(got, expected)


def test_a_query_sees_no_later_place():
    q, k, v = heads(100)
    before = linear_attention(q, k, v, causal=True)
    k[..., 70:, :], v[..., 70:, :] = 9.0, 9.0
    after = linear_attention(q, k, v, causal=True)
    torch.testing.assert_close(after[..., :70, :], before[..., :70, :])
    assert not torch.allclose(after[..., 70:, :], before[..., 70:, :])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("sequence", [10, 512])
def test_its_output_stays_within_its_values(sequence, scale, causal):
    q, k, v = heads(sequence, scale)
    assert linear_attention(q, k, v, causal=causal).abs().max() <= v.abs().max() * 1.0001


def test_exp_features_overflow_where_bounded_ones_do_not():
    """The division alone does not mend an exp of 100: it is infinite before."""
    q, k, v = heads(10, 100.0)
    assert not linear_attention(q, k, v, feature_map=torch.exp).isfinite().all()
    assert linear_attention(q, k, v).isfinite().all()
    assert softmax_features(q).max() <= 1


def test_half_precision_values_are_summed_up_beyond_its_range():
    q, k, _ = heads(512)
    v = torch.full((2, 2, 512, 8), 60_000.0, dtype=torch.float16)
    for causal in (False, True):
        out = linear_attention(q.half(), k.half(), v, causal=causal)
        assert out.dtype is torch.float16
        torch.testing.assert_close(out, v, rtol=0.01, atol=0)


def test_autocast_does_not_take_precision_from_the_sums():
    q, k, v = heads(512)
    expected = linear_attention(q, k, v, causal=True)
    with torch.autocast("cpu", torch.bfloat16):
        got = linear_attention(q, k, v, causal=True)
    torch.testing.assert_close(got, expected)


def test_a_query_that_fits_no_key_has_finite_gradients():
    q, k, v = heads(10)
    q = (q - 1e3).requires_grad_()  # all features 0
    out = linear_attention(q, k, v, feature_map=elu_features)
    out.sum().backward()
    assert out.isfinite().all()
    assert q.grad is not None
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("sequence", [10, 512])
def test_it_mends_the_unstable_block(sequence):
    """Contexts of 4,747 and 195,000 become 1.9, whatever the sequence."""
    assert max(one.absmax for one in contexts(*stack(UnstableBlock, sequence))) > 4_000
    mended = max(one.absmax for one in contexts(*stack(Normalised, sequence)))
    assert mended == pytest.approx(1.9, abs=0.1)


@pytest.mark.parametrize("sequence", [10, 512])
def test_it_mends_the_stable_block(sequence):
    """The last block's input, 5.9 and 301, becomes 0.29, whatever the sequence."""
    assert block_inputs(*stack(StableBlock, sequence))[-1].mean_abs > 5
    mended = block_inputs(*stack(NormalisedStable, sequence))[-1].mean_abs
    assert mended == pytest.approx(0.29, abs=0.01)


def test_bounded_features_alone_mend_the_explosion_and_not_the_growth():
    """4,000 times less at 512 than with exp, and still some 80 times what it is at 10."""
    largest = {
        sequence: max(
            one.absmax for one in contexts(*remedied(UnstableBlock, sequence, bound_features))
        )
        for sequence in (10, 512)
    }
    assert largest[512] < 195_000 / 4_000
    assert largest[512] > 50 * largest[10]
