"""Which modules of a model are watched, and under which names.

`watch="sublayers"` watches inside the blocks, since a block's output is blind to a fault that its
residual stream or norm hides: with an exponential feature map in linear attention the blocks'
inputs were measured to stay at 0.8 at every depth, while the attention's context inside them
reached 195,000.
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from act_exporter.exceptions import NothingToWatchError, SettingError

Side = Literal["input", "output"]
Watch = str | Sequence[str] | Callable[[str, nn.Module], bool]

LOGITS_LIMIT = 16_000_000
"""Largest output of the head, in elements, that is read: a vocabulary of 50,257 costs as much as
120 taps of the model's width."""

_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_NORM = re.compile(r"norm|^ln", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tap:
    """One watched tensor.

    Attributes:
        layer: the module's own name in the model, without wrappers' parts.
        tensor: whether it is the module's input or its output.
        module: the module.
        kind: the same in all blocks for the same place in the block; compares a layer with its
            like.
        limit: tensors of more elements are not read; None for no limit.
    """

    layer: str
    tensor: Side
    module: nn.Module
    kind: str
    limit: int | None = None


def find_taps(model: nn.Module, watch: Watch = "sublayers") -> list[Tap]:
    """The taps of `model`, in registration order.

    Args:
        model: the model, wrapped (DDP, FSDP, torch.compile) or not.
        watch: "sublayers" (each block's output and the ins and outs of its attention and feed-
            forward projections, embedding, final norm, logits), "blocks" (block outputs), "all"
            (each module's output), one or more globs over module names, or a function
            `(name, module) -> bool`.

    Raises:
        NothingToWatchError: nothing in the model is selected.
        SettingError: `watch` is none of the above.
    """
    modules = dict(_named_modules(model))
    if watch == "sublayers":
        taps = list(_sublayers(modules))
    elif watch == "blocks":
        taps = [_tap(name, "output", modules, name) for name in _blocks(modules)]
    else:
        selects = _selector(watch)
        taps = [_tap(name, "output", modules) for name in modules if selects(name, modules[name])]
    unique = list({(tap.layer, tap.tensor): tap for tap in taps}.values())
    if not unique:
        raise NothingToWatchError(
            f"{type(model).__name__} has no module to watch with watch={watch!r};"
            f" its modules are: {', '.join(list(modules)[:20]) or 'none'}"
        )
    return unique


def _selector(watch: Watch) -> Callable[[str, nn.Module], bool]:
    if watch == "all":
        return lambda _name, module: not isinstance(module, nn.ModuleList | nn.ModuleDict)
    if callable(watch):
        return watch
    globs = [watch] if isinstance(watch, str) else list(watch)
    if not globs or not all(isinstance(glob, str) for glob in globs):
        raise SettingError(
            f"watch={watch!r}: expected 'sublayers', 'blocks', 'all', globs or a function"
        )
    return lambda name, _module: any(fnmatch.fnmatchcase(name, glob) for glob in globs)


def _named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Each module once, wrappers and their name parts left out; a bare layer is called "model"."""
    root = _unwrapped(model)
    if isinstance(root, torch.jit.ScriptModule):
        return  # takes no hooks
    if not list(root.children()):
        if list(root.parameters(recurse=False)):
            yield "model", root
        return
    for name, module in root.named_modules():
        clean = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
        scripted = isinstance(module, torch.jit.ScriptModule)
        if name and name.rsplit(".", 1)[-1] not in _WRAPPERS and not scripted:
            yield clean, module


def _unwrapped(module: nn.Module) -> nn.Module:
    """The module that a user wrote, without what was put around it."""
    while True:
        inner: nn.Module | None
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = module.module
        else:
            inner = next(
                (getattr(module, part) for part in _WRAPPERS if hasattr(module, part)), None
            )
        if inner is None:
            return module
        module = inner


def _tap(
    name: str,
    side: Side,
    modules: dict[str, nn.Module],
    block: str | None = None,
    limit: int | None = None,
) -> Tap:
    place = name.removeprefix(block) if block is not None else name
    return Tap(layer=name, tensor=side, module=modules[name], kind=f"{place} {side}", limit=limit)


def _is_leaf(module: nn.Module) -> bool:
    return next(module.children(), None) is None


def _is_projection(module: nn.Module) -> bool:
    """A leaf that multiplies by a matrix (or a convolution); an embedding only looks up."""
    weight = getattr(module, "weight", None)
    return (
        _is_leaf(module)
        and not isinstance(module, nn.Embedding | nn.EmbeddingBag)
        and getattr(weight, "ndim", 0) >= 2
    )


def _blocks(modules: dict[str, nn.Module]) -> list[str]:
    """Names of the children of each outermost container that repeats a class.

    Encoder and decoder, or two towers, both count; experts inside a block do not, being inside.
    """
    names: list[str] = []
    children: dict[str, list[str]] = {}
    for name in modules:
        children.setdefault(name.rpartition(".")[0], []).append(name)
    for parent, inside in children.items():
        nested = any(parent == block or parent.startswith(f"{block}.") for block in names)
        if not nested and _repeats(modules[name] for name in inside):
            names += [name for name in inside if not _is_leaf(modules[name])]
    return names


def _sublayers(modules: dict[str, nn.Module]) -> Iterator[Tap]:
    blocks = _blocks(modules)
    if not blocks:
        # A plain MLP or CNN: every layer that has a weight.
        for name, module in modules.items():
            if _is_projection(module):
                yield _tap(name, "output", modules)
        return
    outside = [
        name
        for name, module in modules.items()
        if _is_leaf(module) and not any(name.startswith(f"{block}.") for block in blocks)
    ]
    embeddings = [name for name in outside if isinstance(modules[name], nn.Embedding)]
    norms = [name for name in outside if _NORM.search(type(modules[name]).__name__)]
    heads = [name for name in outside if _is_projection(modules[name])]
    for name in embeddings[:1]:
        yield _tap(name, "output", modules)
    for block in blocks:
        yield from _inside(block, modules)
        yield _tap(block, "output", modules, block)
    for name in norms[-1:]:
        yield _tap(name, "output", modules)
    for name in heads[-1:]:
        yield _tap(name, "output", modules, limit=LOGITS_LIMIT)


def _inside(block: str, modules: dict[str, nn.Module]) -> Iterator[Tap]:
    inside = [name for name in modules if name.startswith(f"{block}.")]
    attentions: list[str] = []
    for name in inside:
        within = any(name.startswith(f"{outer}.") for outer in attentions)
        if not within and _ATTENTION.search(name.rpartition(".")[2]):
            attentions.append(name)
    # Norms beside the attention are called attention_norm in some models.
    attentions = [name for name in attentions if not _is_leaf(modules[name])]
    projections = [name for name in inside if _is_projection(modules[name])]
    if not attentions:
        # An attention written out in the block itself: its projections are all there is to see.
        for name in projections:
            yield _tap(name, "input", modules, block)
            yield _tap(name, "output", modules, block)
        return
    for attention in attentions:
        yield _tap(attention, "input", modules, block)
        if isinstance(modules[attention], nn.MultiheadAttention):
            # It hands out_proj's weight to a function and never calls the module.
            yield _tap(attention, "output", modules, block)
            continue
        own = [name for name in projections if name.startswith(f"{attention}.")]
        for name in own[-1:]:
            yield _tap(name, "input", modules, block)
            yield _tap(name, "output", modules, block)
    rest = [
        name
        for name in projections
        if not any(name.startswith(f"{attention}.") for attention in attentions)
    ]
    for name in [_outside_experts(block, name, modules) for name in rest[-1:]]:
        yield _tap(name, "input", modules, block)
        yield _tap(name, "output", modules, block)


def _outside_experts(block: str, name: str, modules: dict[str, nn.Module]) -> str:
    """The mixture that `name` is one expert's layer of, or `name` itself."""
    parent = name.rpartition(".")[0]
    while len(parent) > len(block):
        container = parent.rpartition(".")[0]
        if len(container) > len(block) and _repeats(modules[container].children()):
            return container.rpartition(".")[0]
        parent = container
    return name


def _repeats(modules: Iterable[nn.Module]) -> bool:
    """Whether two of them, leaves aside, are of one class."""
    classes = Counter(type(_unwrapped(module)) for module in modules if not _is_leaf(module))
    return bool(classes) and max(classes.values()) >= 2
