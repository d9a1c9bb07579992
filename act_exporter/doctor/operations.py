"""The softmaxes of a model's attentions, with their logits: no module's input or output holds them.

They are seen as torch runs them, below Python's many ways to call them: a written-out attention
("eager"), `scaled_dot_product_attention` with any of its kernels, and `nn.MultiheadAttention` are
all the same there. A fused kernel never makes the matrix of logits; some of its rows are computed
again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from act_exporter.doctor.subject import Subject
from act_exporter.doctor.trace import Place, Trace

# Logits that are read of one softmax, in elements: rows are taken at even distances, of all heads
# and sequences. 16 MiB in float32, and more rows say no more.
_ELEMENTS = 4_194_304

# Masks are added to the logits, -10,000 (BERT's first) being the smallest in use; what is as low is
# taken for masked. Of logits that are really so large, those above zero are still seen.
_MASKED = -10_000.0

# A row whose largest probability is beyond this passes on less than a thousandth of the gradient
# that it gets: the softmax's derivative is p (1 - p).
_SATURATED = 0.999


@dataclass(frozen=True, slots=True)
class Softmax:
    """One softmax of an attention. Figures are over all heads and rows, what is masked left out.

    Attributes:
        layer: the innermost module that ran it; "" outside all named modules.
        before: how many tensors of the trace had been seen when it ran.
        product: largest |query . key| as it was made, before it is scaled, cast and masked: what
            may overflow. None in a fused kernel, which keeps it in float32.
        largest: largest |logit|.
        entropy: mean of the rows' entropies over the logarithm of their keys: 1 where attention
            is uniform, 0 where each row looks at one key. NaN where no row has two keys.
        saturated: share of the rows of at least four keys with a probability beyond 0.999.
        keys: most keys of a row.
    """

    layer: str
    before: int
    product: float | None
    largest: float
    entropy: float
    saturated: float
    keys: int


def softmaxes(subject: Subject) -> tuple[Trace, list[Softmax]]:
    """A forward of the subject's batch, without gradients, and its attentions' softmaxes."""
    watcher = _Watcher()
    with torch.no_grad(), watcher:
        trace = subject.trace(look=watcher.look)
    return trace, watcher.found


class _Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes each softmax over what is the shape of a batched product before it.

    A router's softmax follows a product with a weight, which is not batched.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Softmax] = []
        self._running: list[str] = []
        self._seen = 0
        self._products: dict[tuple[int, ...], float | None] = {}

    def look(self, place: Place, _tensor: torch.Tensor) -> None:
        """Follow which modules run."""
        self._seen += 1
        if place.side == "input":
            self._running.append(place.layer)
        elif place.layer in self._running:
            # Those within that took no floating-point tensor, or gave none, end with it.
            while self._running.pop() != place.layer:
                pass

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name in ("bmm", "baddbmm"):
            self._product(name, args, kwargs or {}, out)
        elif name in ("_softmax", "_safe_softmax"):
            self._softmax(args[0], args[1])
        elif name.startswith("_scaled_dot_product"):
            self._fused(_bound(func, args, kwargs or {}))
        return out

    def _product(self, name: str, args: Any, kwargs: Mapping[str, Any], out: torch.Tensor) -> None:
        left, right = args[-2:]
        if name == "baddbmm":  # what is added may be a mask
            out = torch.bmm(left, right) * kwargs.get("alpha", 1)
        finite = bool(left.isfinite().all()) and bool(right.isfinite().all())
        # What is not finite before the product is no fault of it.
        largest = float(out.abs().max().float()) if finite and out.numel() else None
        self._products[_shape(out)] = largest

    def _softmax(self, logits: torch.Tensor, dim: int) -> None:
        if dim not in (-1, logits.ndim - 1) or _shape(logits) not in self._products:
            return
        product = self._products[_shape(logits)]
        self._products.clear()
        self._note(logits.reshape(-1, logits.shape[-1]), product)

    def _fused(self, given: Mapping[str, Any]) -> None:
        query, key = given["query"], given["key"]
        mask = given.get("attn_mask", given.get("attn_bias"))
        if not query.numel() or not key.numel():
            return
        rows, keys = query.shape[-2], key.shape[-2]
        each = max(1, _ELEMENTS // max(1, query[..., 0].numel() // rows * keys))
        taken = torch.arange(0, rows, -(-rows // each), device=query.device)
        scale = given.get("scale") or 1 / math.sqrt(query.shape[-1])
        if key.shape[-3] != query.shape[-3]:  # a key for a group of queries
            key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
        logits = (query[..., taken, :].float() @ key.float().transpose(-2, -1)) * scale
        if mask is not None:
            part = mask.expand(*mask.shape[:-2], rows, keys)[..., taken, :]
            logits = (
                logits.masked_fill(~part, -math.inf) if part.dtype == torch.bool else logits + part
            )
        if given.get("is_causal"):
            later = torch.arange(keys, device=query.device) > taken[:, None]
            logits = logits.masked_fill(later, -math.inf)
        self._note(logits.reshape(-1, keys), None)

    def _note(self, rows: torch.Tensor, product: float | None) -> None:
        most = max(1, _ELEMENTS // rows.shape[-1])
        rows = rows[:: -(-len(rows) // most)].float()
        rows = rows[~(rows.isnan() | (rows == math.inf)).any(-1)]
        visible = rows > _MASKED
        counts = visible.sum(-1)
        rows, visible, counts = rows[counts > 1], visible[counts > 1], counts[counts > 1]
        if not len(rows):
            if product is not None:
                self.found.append(self._row(product, 0.0, math.nan, 0.0, 0))
            return
        chances = rows.masked_fill(~visible, -math.inf).softmax(-1)
        entropy = torch.special.entr(chances).sum(-1) / counts.log()
        many = chances[counts > 3]
        self.found.append(
            self._row(
                product,
                float(rows.masked_fill(~visible, 0).abs().max()),
                float(entropy.mean()),
                float((many.amax(-1) > _SATURATED).float().mean()) if len(many) else 0.0,
                int(counts.max()),
            )
        )

    def _row(
        self, product: float | None, largest: float, entropy: float, saturated: float, keys: int
    ) -> Softmax:
        layer = self._running[-1] if self._running else ""
        return Softmax(layer, self._seen, product, largest, entropy, saturated, keys)


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The same for a batched product and for the logits that are a view of it, or its scaling."""
    return (tensor.numel(), *sorted(tensor.shape[-2:]))


def _bound(func: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}
