"""What a batch's ids are looked up in, seen before it happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from act_exporter.doctor.finding import CERTAIN, Finding
from act_exporter.doctor.recorder import named_parameters
from act_exporter.doctor.subject import Batch, Subject, called

# Rows of a mask, or of token types, are alike in healthy batches, and so are positions.
_NOT_CONTENT = ("mask", "position", "type", "label", "cache", "segment")


def leaves(batch: Batch, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a batch, by where they are in it: "input_ids", "0"."""
    if isinstance(batch, torch.Tensor):
        yield path or "batch", batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(batch, tuple | list):
        for place, value in enumerate(batch):
            yield from leaves(value, f"{path}.{place}" if path else str(place))


@dataclass
class Lookups(TorchFunctionMode):
    """What a forward looks up, and the first id that is not there; raises before that."""

    model: nn.Module
    batch: Batch
    rows: dict[str, int] = field(default_factory=dict)  # by the ids' path in the batch
    layers: dict[str, str] = field(default_factory=dict)
    beyond: Finding | None = None
    findings: list[Finding] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._names = {id(own): name for name, own in named_parameters(self.model).items()}
        # A view of the batch is of its own storage: labels shifted by one, say.
        self._paths: dict[int, list[str]] = {}
        for path, tensor in leaves(self.batch):
            self._paths.setdefault(tensor.untyped_storage().data_ptr(), []).append(path)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (F.embedding, F.embedding_bag):
            self._embedding(*args[:2])
        elif func in (F.cross_entropy, F.nll_loss):
            self._labels(*args, **kwargs)
        return func(*args, **kwargs)

    def is_content(self, path: str, tensor: torch.Tensor) -> bool:
        """Whether it is what the model reads, and no mask, label or the like."""
        if any(word in path.lower() for word in _NOT_CONTENT) or tensor.ndim < 2:
            return False
        if tensor.is_floating_point():
            return True
        most = max(self.rows.values(), default=0)
        return self.rows.get(path) == most > 0

    def _embedding(self, ids: torch.Tensor, weight: torch.Tensor) -> None:
        rows = weight.shape[0]
        layer = self._names.get(id(weight), "").rpartition(".")[0] or None
        paths = self._paths.get(ids.untyped_storage().data_ptr(), [])
        for path in paths:
            self.rows[path] = rows
            self.layers[path] = layer or ""
        bad = (ids < 0) | (ids >= rows)
        if not bool(bad.any()):
            return
        if not paths and _is_counted(ids):
            self.beyond = _too_long(ids.shape[-1], rows, layer)
        else:
            self.beyond = beyond(ids, bad, rows, layer, paths[0] if paths else None)
        raise IndexError(self.beyond.what)

    def _labels(
        self,
        logits: torch.Tensor,
        target: torch.Tensor,
        weight: Any = None,
        size_average: Any = None,
        ignore_index: int = -100,
        *_args: Any,
        **_kwargs: Any,
    ) -> None:
        if target.is_floating_point() or not target.numel():
            return
        classes = logits.shape[1] if logits.ndim > 1 else logits.shape[0]
        counted = target != ignore_index
        bad = counted & ((target < 0) | (target >= classes))
        if bool(bad.any()):
            self.beyond = beyond(target, bad, classes, None, "the labels")
            raise IndexError(self.beyond.what)
        if not bool(counted.any()):
            self.findings.append(
                empty(f"no label that counts: all are {ignore_index}", {"labels": target.numel()})
            )


def look_up(subject: Subject) -> Lookups:
    lookups = Lookups(subject.model, subject.batch)
    with subject.kept(weights=False), subject.seeded(), torch.no_grad():
        try:
            with lookups:
                called(subject.model, subject.batch)
        except Exception:
            # What else a forward raises is told by what the other checks see of it.
            length, limit = _longest(subject.batch), positions_of(subject.model)
            if lookups.beyond is None and limit is not None and length > limit:
                lookups.beyond = _too_long(length, limit, None)
    return lookups


def positions_of(model: nn.Module) -> int | None:
    """How long a sequence the model was made for, where its configuration says so."""
    for module in model.modules():
        limit = getattr(getattr(module, "config", None), "max_position_embeddings", None)
        if isinstance(limit, int) and limit > 0:
            return limit
    return None


def _longest(batch: Batch) -> int:
    tokens = (own for _, own in leaves(batch) if own.ndim == 2 and not own.is_floating_point())
    return max((own.shape[1] for own in tokens), default=0)


def _is_counted(ids: torch.Tensor) -> bool:
    """Whether they are positions: each one more than the one before."""
    return ids.shape[-1] > 1 and bool(((ids[..., 1:] - ids[..., :-1]) == 1).float().mean() > 0.5)


def beyond(
    ids: torch.Tensor, bad: torch.Tensor, rows: int, layer: str | None, path: str | None
) -> Finding:
    place = bad.nonzero()[0].tolist()
    found = int(ids[bad][0])
    where = f'"{path}"' if path is not None and path != "the labels" else path or "the ids"
    table = f"{layer} has {rows} rows" if layer is not None else f"there are {rows} classes"
    count = int(bad.sum())
    return Finding(
        fault="token-out-of-range",
        severity="critical",
        layer=layer,
        what=f"Id {found} at {place} of {where} does not exist: {table} ({count} such ids).",
        change="Use the tokenizer that the model was made with, or resize the table to it; labels"
        " that must not count are -100.",
        why="A lookup beyond its table ends the process, on CUDA without telling where.",
        evidence={"id": found, "rows": rows, "count": count},
        strength=CERTAIN,
    )


def _too_long(length: int, rows: int, layer: str | None) -> Finding:
    return Finding(
        fault="odd-length",
        severity="critical",
        layer=layer,
        what=f"Sequences have {length} tokens; {layer or 'the model'} has positions for {rows}.",
        change="Cut or pack sequences where data is read, or give the model more positions.",
        why="A position that has no row cannot be looked up; on CUDA the process ends.",
        evidence={"length": length, "positions": rows},
        strength=CERTAIN,
    )


def empty(what: str, evidence: dict[str, int]) -> Finding:
    return Finding(
        fault="empty-batch",
        severity="critical",
        layer=None,
        what=f"The batch has {what}.",
        change="Leave such batches out where data is read.",
        why="The mean over nothing is NaN, and one NaN loss makes all weights NaN.",
        evidence=evidence,
        strength=CERTAIN,
    )
