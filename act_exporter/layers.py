"""Which modules of a model are watched, and under which names.

`watch="sublayers"` watches inside the blocks, since a block's output is blind to a fault that its
residual stream or norm hides: with an exponential feature map in linear attention the blocks'
inputs were measured to stay at 0.8 at every depth, while the attention's context inside them
reached 195,000.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from act_exporter.exceptions import NothingToWatchError
from act_exporter.names import ATTENTION, NORM, heads, query_or_key, selector
from act_exporter.taps import LOGITS_LIMIT, Heads, Side, Tap

Watch = str | Sequence[str] | Callable[[str, nn.Module], bool]

_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleTap(Tap):
    """A tap on a module of torch.

    Attributes:
        module: the module.
    """

    module: nn.Module


def find_taps(model: nn.Module, watch: Watch = "sublayers") -> list[ModuleTap]:
    """The taps of `model`, in registration order.

    Args:
        model: the model, wrapped (DDP, FSDP, torch.compile) or not.
        watch: "sublayers" (each block's output, the ins and outs of its attention and feed-forward
            projections, query and key where they have modules of their own; embedding, final norm,
            logits), "blocks" (block outputs), "all" (each module's output), one or more globs over
            module names, or a function `(name, module) -> bool`.

    Raises:
        NothingToWatchError: nothing in the model is selected.
        SettingError: `watch` is none of the above.
    """
    modules = dict(named_modules(model))
    if watch == "sublayers":
        taps = list(_sublayers(_without_adapters(modules)))
    elif watch == "blocks":
        taps = [tap for block in _blocks(modules) for tap in _output(block, modules)]
    else:
        selects = selector(watch)
        taps = [
            _tap(name, "output", modules)
            for name, module in modules.items()
            if _is_called(module) and selects(name, module)
        ]
    unique = list({(tap.layer, tap.tensor): tap for tap in taps}.values())
    if not unique:
        raise NothingToWatchError(
            f"{type(model).__name__} has no module to watch with watch={watch!r};"
            f" its modules are: {', '.join(list(modules)[:20]) or 'none'}"
        )
    return unique


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Each module once, wrappers and their name parts left out; a bare layer is called "model"."""
    root = _unwrapped(model)
    if isinstance(root, torch.jit.ScriptModule):
        return  # takes no hooks
    if _is_leaf(root) and list(root.parameters(recurse=False)):
        yield "model", root
    for name, module in root.named_modules():
        clean = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
        scripted = isinstance(module, torch.jit.ScriptModule)
        parts = name.split(".")
        # What computes a weight (torch.nn.utils.parametrize) puts out no activations.
        if name and parts[-1] not in _WRAPPERS and "parametrizations" not in parts and not scripted:
            yield clean, module


def find_blocks(model: nn.Module) -> list[str]:
    """Names of the blocks of `model`, the modules of one class that follow each other; or none."""
    return _blocks(dict(named_modules(model)))


def _unwrapped(module: nn.Module) -> nn.Module:
    """The module that a user wrote, without what was put around it."""
    while True:
        parallel = isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel)
        parts = {"module"} if parallel else _WRAPPERS
        inner = next((getattr(module, part) for part in parts if hasattr(module, part)), None)
        if inner is None:
            return module
        module = inner


def _without_adapters(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """All but what lies inside a layer, an adapter's low-rank matrices for one."""
    kept: dict[str, nn.Module] = {}
    layer = ""
    for name, module in modules.items():  # a module before its parts
        if not layer or not name.startswith(f"{layer}."):
            kept[name] = module
            layer = name if _is_leaf(module) else ""
    return kept


def _tap(
    name: str,
    side: Side,
    modules: dict[str, nn.Module],
    block: str | None = None,
    limit: int | None = None,
) -> ModuleTap:
    place = name.removeprefix(block) if block is not None else name
    return ModuleTap(
        layer=name, tensor=side, module=modules[name], kind=f"{place} {side}", limit=limit
    )


def _is_leaf(module: nn.Module) -> bool:
    """Whether it is not taken apart: one layer, with the adapter (LoRA and its like) around it."""
    bare = all(name == "parametrizations" for name, _ in module.named_children())
    return bare or _ndim(getattr(_adapted(module), "weight", None)) >= 2


def _is_called(module: nn.Module) -> bool:
    """Whether a forward can run it: a hook on a list of modules would stay silent for ever."""
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return False  # nn.MultiheadAttention's out_proj: its weight is handed to a function
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def is_projection(module: nn.Module) -> bool:
    """Whether it multiplies by a matrix or convolves; an embedding only looks up.

    `nn.MultiheadAttention` is one as a whole, and so is a mixture with all experts in one tensor.
    """
    if isinstance(module, nn.MultiheadAttention) or _is_fused_mixture(module):
        return True
    layer = _adapted(module)
    return (
        _is_leaf(module)
        and _is_called(module)
        and not isinstance(layer, nn.Embedding | nn.EmbeddingBag)
        and _ndim(getattr(layer, "weight", None)) >= 2
    )


def _adapted(module: nn.Module) -> nn.Module:
    """The layer that an adapter was put around as peft does it; another module is that itself."""
    base = getattr(module, "base_layer", None)
    return base if isinstance(base, nn.Module) else module


def _is_fused_mixture(module: nn.Module) -> bool:
    """Whether it holds all experts of a mixture in one tensor, (experts, in, out)."""
    # A position table is (1, n, d), a depthwise filter (d, 1, n).
    return not isinstance(module, nn.modules.conv._ConvNd | nn.Bilinear) and any(
        _ndim(own) == 3 and min(own.shape) > 1 for own in module.parameters(recurse=False)
    )


def _ndim(weight: object) -> int:
    """A lazy layer has no shape yet, but is there to be multiplied with."""
    if isinstance(weight, nn.UninitializedParameter):
        return 2
    return weight.ndim if isinstance(weight, torch.Tensor) else 0


def _blocks(modules: dict[str, nn.Module]) -> list[str]:
    """Names of the children of each outermost container that repeats a class.

    Encoder and decoder, or two towers, both count; experts inside a block do not, being inside.
    """
    names: list[str] = []
    children: dict[str, list[str]] = {}
    for name in modules:
        children.setdefault(name.rpartition(".")[0], []).append(name)
    for parent, inside in children.items():
        nested = any(f"{parent}.".startswith(f"{block}.") for block in names)
        if not nested and _repeats(modules[name] for name in inside):
            composite = [name for name in inside if not _is_leaf(modules[name])]
            names += [name for name in composite if not _is_tower(modules[name])]
    return names


def _is_tower(module: nn.Module) -> bool:
    """Whether it is a stack of blocks and hardly more: a stage, or one of two alike towers."""
    module = _unwrapped(module)
    for stack in (module, *map(_unwrapped, module.children())):
        if isinstance(stack, nn.ModuleList | nn.Sequential) and _repeats(stack.children()):
            blocks = [_projections(block) for block in stack.children()]
            # A convolution with its norm is no block; a stage may end in a projection of its own.
            return min(blocks) >= 2 and _projections(module) - sum(blocks) <= 1
    return False


def _projections(module: nn.Module) -> int:
    return sum(map(is_projection, module.modules()))


def _output(block: str, modules: dict[str, nn.Module]) -> list[ModuleTap]:
    """A block's output; of one that is a mere list of parts, its last part's."""
    parts = [name for name in modules if name.rpartition(".")[0] == block]
    called = [name for name in [*parts, block] if _is_called(modules[name])]
    return [_tap(name, "output", modules, block) for name in called[-1:]]


def _sublayers(modules: dict[str, nn.Module]) -> Iterator[ModuleTap]:
    blocks = _blocks(modules)
    if not blocks:
        # A plain MLP or CNN: every layer that has a weight.
        for name, module in modules.items():
            if is_projection(module):
                yield _tap(name, "output", modules)
        return
    outside = [
        name
        for name, module in modules.items()
        if _is_leaf(module) and not any(name.startswith(f"{block}.") for block in blocks)
    ]
    embeddings = [name for name in outside if isinstance(modules[name], nn.Embedding)]
    norms = [name for name in outside if NORM.search(type(modules[name]).__name__)]
    heads = [name for name in outside if is_projection(modules[name])]
    # The first of several that share a weight may only keep it for the others and never be called;
    # pixels and frames are embedded by a convolution or a matrix.
    tied = [n for n in embeddings if modules[n].weight is modules[embeddings[0]].weight]
    for name in (tied[1:] or tied or heads[:-1])[:1]:
        yield _tap(name, "output", modules)
    for block in blocks:
        yield from _inside(block, modules)
        yield from _output(block, modules)
    for name in norms[-1:]:
        yield _tap(name, "output", modules)
    for name in heads[-1:]:
        yield _tap(name, "output", modules, limit=LOGITS_LIMIT)


def _inside(block: str, modules: dict[str, nn.Module]) -> Iterator[ModuleTap]:
    inside = [name for name in modules if name.startswith(f"{block}.")]
    projections = [name for name in inside if is_projection(modules[name])]
    attentions = _attentions(block, inside, modules)
    if not attentions:
        # An attention written out in the block itself: its projections are all there is to see.
        yield from _both(projections, modules, block)
        return
    rest = projections
    for attention in attentions:
        yield _tap(attention, "input", modules, block)
        yield from _query_and_key(attention, block, modules)
        own = [name for name in projections if f"{name}.".startswith(f"{attention}.")]
        yield from _both(own[-1:], modules, block)
        rest = [name for name in rest if name not in own]
    # A mixture's last projection may be its router or one expert's.
    mixtures = filter(None, (_mixture(block, name, modules) for name in reversed(rest)))
    yield from _both(list(itertools.islice(mixtures, 1)) or rest[-1:], modules, block)


def _both(names: list[str], modules: dict[str, nn.Module], block: str) -> list[ModuleTap]:
    sides: tuple[Side, Side] = ("input", "output")
    return [_tap(name, side, modules, block) for name in names for side in sides]


def _attentions(block: str, inside: list[str], modules: dict[str, nn.Module]) -> list[str]:
    """The outermost attentions, by their own names in the block, else by their classes'."""
    # Norms beside the attention are called attention_norm in some models.
    parts = [n for n in inside if _is_called(modules[n]) and not _is_leaf(modules[n])]
    found = [name for name in parts if ATTENTION.search(name.removeprefix(block))] or [
        name for name in parts if ATTENTION.search(type(_unwrapped(modules[name])).__name__)
    ]
    outer = tuple(f"{name}." for name in found)
    return [name for name in found if not name.startswith(outer)]


def _query_and_key(attention: str, block: str, modules: dict[str, nn.Module]) -> list[ModuleTap]:
    """Outputs that the attention's logits are products of: after their norms, if they have any."""
    found: dict[bool, str] = {}
    for name, module in modules.items():
        made = query_or_key(name)
        if made is None or not name.startswith(f"{attention}.") or not _is_called(module):
            continue
        is_query = made == "query"
        if is_query not in found or NORM.search(type(module).__name__):
            found[is_query] = name
    if len(found) < 2:
        return []  # one alone bounds nothing
    return [
        dataclasses.replace(
            _tap(found[is_query], "output", modules, block),
            heads=_heads(attention, found[is_query], modules),
        )
        for is_query in (True, False)
    ]


def _heads(attention: str, name: str, modules: dict[str, nn.Module]) -> Heads | None:
    """How the output of the module `name` is cut into heads, by what its parent says of itself."""
    weight = getattr(_adapted(modules[name]), "weight", None)
    if not isinstance(weight, torch.Tensor) or isinstance(weight, nn.UninitializedParameter):
        return None
    return heads(attention, weight.shape[0], modules.get(name.rpartition(".")[0]))


def _mixture(block: str, name: str, modules: dict[str, nn.Module]) -> str | None:
    """The mixture that `name` is the experts or one expert's layer of."""
    part = name
    while len(part) > len(block):
        outer = part.rpartition(".")[0]
        listed = not _is_called(modules[part]) and _repeats(modules[part].children())
        if (listed or _is_fused_mixture(modules[part])) and _is_called(modules[outer]):
            # As a whole, with its router and shared experts, unless it is all in the block itself.
            return outer if listed or outer != block else part
        part = outer
    return None


def _repeats(modules: Iterable[nn.Module]) -> bool:
    """Whether two of them, leaves aside, are of one class."""
    classes = Counter(type(_unwrapped(module)) for module in modules if not _is_leaf(module))
    return max(classes.values(), default=0) >= 2
