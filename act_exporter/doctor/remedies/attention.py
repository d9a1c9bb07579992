"""Linear attention whose output stays within its values, however long or loud its input is."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.nn import functional as F

# A query that fits no key is answered with next to nothing; divided by less, its gradients would
# have no bound (Qin et al. 2022, The Devil in Linear Transformer).
_LEAST_WEIGHT = 1e-6

# Positions that a causal attention takes at once: the triangle inside costs this many products for
# each position, a pass of its own for each position would cost more.
_CHUNK = 64


def softmax_features(x: torch.Tensor) -> torch.Tensor:
    """(..., d) to (..., 2 d): positive, at most 1, and of sum 2, for any x.

    Hedgehog's, without its learnt matrix (Zhang et al. 2024, The Hedgehog and the Porcupine).
    """
    return torch.cat([x.softmax(dim=-1), (-x).softmax(dim=-1)], dim=-1)


def elu_features(x: torch.Tensor) -> torch.Tensor:
    """(..., d): elu(x) + 1, positive, grows like x (Katharopoulos et al. 2020)."""
    return F.elu(x) + 1


def linear_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool = False,
    feature_map: Callable[[torch.Tensor], torch.Tensor] = softmax_features,
) -> torch.Tensor:
    """Attention in time linear in the sequence, divided by the sum of its weights.

    Without that division the output grows with the length of the sequence; with it, and positive
    features, it is a mean of the values, at most as large as the largest (Katharopoulos et al.
    2020, Transformers are RNNs). Sums are in float32 at least, also under autocast.

    Args:
        query: (..., queries, d), for instance (batch, heads, queries, d).
        key: (..., keys, d); as many as queries where causal.
        value: (..., keys, e).
        causal: whether a query sees only keys at its own place and before.
        feature_map: from (..., d) to positive features.

    Returns:
        (..., queries, e), of the values' dtype.
    """
    dtype = torch.promote_types(value.dtype, torch.float32)
    with torch.autocast(value.device.type, enabled=False):
        q, k = feature_map(query.to(dtype)), feature_map(key.to(dtype))
        # The last column is summed up like the others, to the sum of the weights.
        v = F.pad(value.to(dtype), (0, 1), value=1.0)
        sums = torch.cat(list(_causal(q, k, v)), dim=-2) if causal else q @ (k.mT @ v)
        context = sums[..., :-1] / sums[..., -1:].clamp_min(_LEAST_WEIGHT)
    return context.to(value.dtype)


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Iterator[torch.Tensor]:
    """For each chunk of queries: the weighted values of all chunks before, and of its own."""
    before = torch.zeros_like(k[..., :1, :].mT @ v[..., :1, :])
    chunks = (torch.split(tensor, _CHUNK, dim=-2) for tensor in (q, k, v))
    for queries, keys, values in zip(*chunks, strict=True):
        yield queries @ before + (queries @ keys.mT).tril() @ values
        before = before + keys.mT @ values
