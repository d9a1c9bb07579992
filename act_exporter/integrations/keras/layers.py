"""Which layers of a Keras model are watched.

As in torch's models: inside the blocks, whose outputs are blind to a fault that a residual stream
or a norm hides.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import keras

from act_exporter.exceptions import NothingToWatchError, SettingError
from act_exporter.integrations.keras.parts import Part, base_name, walk
from act_exporter.names import ATTENTION, NORM, heads, query_or_key, selector
from act_exporter.taps import LOGITS_LIMIT, Side, Tap

Watch = str | Sequence[str] | Callable[[str, keras.Layer], bool]

_ATTENTIONS = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTap(Tap):
    """A tap on a layer of Keras.

    Attributes:
        watched: the layer.
    """

    watched: keras.Layer


def find_taps(model: keras.Model, watch: Watch = "sublayers") -> list[LayerTap]:
    """The taps of `model`, in the order in which its layers stand in it.

    Args:
        model: a built model.
        watch: "sublayers" (each block's output, its attentions' inputs, queries, keys and values,
            the ins and outs of the attentions' and the feed-forward's last projections; embedding,
            final norm, logits), "blocks" (block outputs), "all" (each layer's output), one or more
            globs over names, or a function `(name, layer) -> bool`.

    Raises:
        NothingToWatchError: nothing in the model is selected.
        SettingError: `watch` is none of the above, or the model is not built.
    """
    # `Model.build` calls itself done where a subclass has layers that it knows nothing of.
    if not (model.built and model.weights):
        raise SettingError(
            f"{type(model).__name__} is not built, and has no weights yet: call it once on a batch"
            " before the exporter starts"
        )
    parts = dict(walk(model))
    if watch == "sublayers":
        taps = list(_sublayers(parts))
    elif watch == "blocks":
        taps = [_tap(block, "output", parts, block) for block in _blocks(parts)]
    else:
        selects = selector(watch)
        taps = [_tap(name, "output", parts) for name in parts if selects(name, parts[name].layer)]
    unique = list({(tap.layer, tap.tensor): tap for tap in taps}.values())
    if not unique:
        raise NothingToWatchError(
            f"{type(model).__name__} has no layer to watch with watch={watch!r};"
            f" its layers are: {', '.join(list(parts)[:20]) or 'none'}"
        )
    return unique


def _tap(
    name: str,
    side: Side,
    parts: dict[str, Part],
    block: str | None = None,
    limit: int | None = None,
) -> LayerTap:
    place = name.removeprefix(block) if block is not None else name
    return LayerTap(
        layer=name, tensor=side, watched=parts[name].layer, kind=f"{place} {side}", limit=limit
    )


def _blocks(parts: dict[str, Part]) -> list[str]:
    """Names of the layers whose class repeats among their siblings, outermost first; or none.

    Attentions that stand one after the other in a functional model are no blocks, but in them; nor
    are two towers, which have blocks in them.
    """
    names: list[str] = []
    families: dict[str, list[str]] = {}
    for name in parts:
        families.setdefault(_family(name, parts), []).append(name)
    towers = {parent for parent, inside in families.items() if _repeating(inside, parts, least=2)}
    for parent, inside in families.items():
        if not any(f"{parent}.".startswith(f"{block}.") for block in names):
            names += [name for name in _repeating(inside, parts) if name not in towers]
    return names


def _repeating(names: Iterable[str], parts: dict[str, Part], *, least: int = 1) -> list[str]:
    """Those that are of one class with another and have at least so many projections inside."""
    composite = [
        name
        for name in names
        if not parts[name].is_leaf
        and not isinstance(parts[name].layer, _ATTENTIONS)
        and sum(parts[own].is_projection for own in parts if own.startswith(f"{name}.")) >= least
    ]
    classes = Counter(type(parts[name].layer) for name in composite)
    return [name for name in composite if classes[type(parts[name].layer)] >= 2]


def _family(name: str, parts: dict[str, Part]) -> str:
    """The layer that it is a part of; "" for the model's own."""
    parent = name.rpartition(".")[0]
    while parent and parent not in parts:  # blocks.3: the list has no name of its own
        parent = parent.rpartition(".")[0]
    return parent


def _sublayers(parts: dict[str, Part]) -> Iterator[LayerTap]:
    blocks = _blocks(parts)
    if not blocks:
        yield from _flat(parts)
        return
    outside = [
        name
        for name, part in parts.items()
        if part.is_leaf and not any(name.startswith(f"{block}.") for block in blocks)
    ]
    embeddings = [name for name in outside if parts[name].is_embedding]
    norms = [name for name in outside if NORM.search(type(parts[name].layer).__name__)]
    projections = [name for name in outside if parts[name].is_projection]
    # Pixels and frames are embedded by a convolution or a matrix.
    for name in (embeddings or projections[:-1])[:1]:
        yield _tap(name, "output", parts)
    for block in blocks:
        yield from _inside(block, parts)
        yield _tap(block, "output", parts, block)
    for name in norms[-1:]:
        yield _tap(name, "output", parts)
    for name in projections[-1:]:
        yield _tap(name, "output", parts, limit=LOGITS_LIMIT)


def _flat(parts: dict[str, Part]) -> Iterator[LayerTap]:
    """A model that is written out layer by layer: all that multiply, attentions taken apart.

    What follows an attention up to the next one is like what follows any other.
    """
    attentions = [name for name in parts if isinstance(parts[name].layer, _ATTENTIONS)]
    if not attentions:
        for name, part in parts.items():
            if part.is_projection:
                yield _tap(name, "output", parts)
        return
    inside = tuple(f"{name}." for name in attentions)
    outside = [name for name in parts if name not in attentions and not name.startswith(inside)]
    head = [name for name in outside if parts[name].is_projection][-1:]
    norm = [name for name in outside if NORM.search(type(parts[name].layer).__name__)][-1:]
    counts: Counter[str] = Counter()
    for name, part in parts.items():
        if name in attentions:
            counts.clear()
            for tap in _attention(name, parts, name):
                yield dataclasses.replace(tap, kind=f"attention{tap.kind}")
        elif name in head:
            yield _tap(name, "output", parts, limit=LOGITS_LIMIT)
        elif name in norm:
            yield _tap(name, "output", parts)
        elif name in outside and part.has_matrix:
            base = base_name(part.layer)
            counts[base] += 1
            kind = f"{base} {counts[base]} output"
            yield dataclasses.replace(_tap(name, "output", parts), kind=kind)


def _inside(block: str, parts: dict[str, Part]) -> Iterator[LayerTap]:
    inside = [name for name in parts if name.startswith(f"{block}.")]
    projections = [name for name in inside if parts[name].is_projection]
    attentions = _attentions(block, inside, parts)
    if not attentions:
        # An attention written out in the block itself: its projections are all there is to see.
        yield from _both(projections, parts, block)
        return
    for attention in attentions:
        yield from _attention(attention, parts, block)
    own = tuple(f"{attention}." for attention in attentions)
    yield from _both([name for name in projections if not name.startswith(own)][-1:], parts, block)


def _attention(attention: str, parts: dict[str, Part], block: str) -> Iterator[LayerTap]:
    inside = [name for name in parts if name.startswith(f"{attention}.")]
    projections = [name for name in inside if parts[name].is_projection]
    yield _tap(attention, "input", parts, block)
    yield from _query_and_key(attention, inside, parts, block)
    if isinstance(parts[attention].layer, _ATTENTIONS):
        for name in inside:
            if name == f"{attention}.value":
                yield _tap(name, "output", parts, block)
    # Its own output is that of its last projection.
    yield from _both(projections[-1:], parts, block)
    if not projections:
        yield _tap(attention, "output", parts, block)


def _both(names: list[str], parts: dict[str, Part], block: str) -> list[LayerTap]:
    sides: tuple[Side, Side] = ("input", "output")
    return [_tap(name, side, parts, block) for name in names for side in sides]


def _attentions(block: str, inside: list[str], parts: dict[str, Part]) -> list[str]:
    """The outermost attentions, by their own names in the block, else by their classes'."""
    composite = [name for name in inside if not parts[name].is_leaf]
    found = [name for name in composite if ATTENTION.search(name.removeprefix(block))] or [
        name for name in composite if ATTENTION.search(type(parts[name].layer).__name__)
    ]
    outer = tuple(f"{name}." for name in found)
    return [name for name in found if not name.startswith(outer)]


def _query_and_key(
    attention: str, inside: list[str], parts: dict[str, Part], block: str
) -> list[LayerTap]:
    """Outputs that the attention's logits are products of: after their norms, if they have any."""
    found: dict[str, str] = {}
    for name in inside:
        made = query_or_key(name)
        is_norm = NORM.search(type(parts[name].layer).__name__)
        if made is not None and (made not in found or is_norm):
            found[made] = name
    if len(found) < 2:
        return []  # one alone bounds nothing
    taps = []
    for part in ("query", "key"):
        tap = _tap(found[part], "output", parts, block)
        weights = tap.watched.weights
        if weights:  # the last dimension of what it puts out
            width = int(weights[0].shape[-1])
            tap = dataclasses.replace(tap, heads=heads(attention, width, parts[attention].layer))
        taps.append(tap)
    return taps
