"""What the names in a model say, and what `watch=` selects by them; the same in every framework."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

from act_exporter.exceptions import SettingError
from act_exporter.taps import Heads

ATTENTION = re.compile(r"attn|attention|mixer", re.IGNORECASE)  # or what stands in its place
NORM = re.compile(r"norm|^ln", re.IGNORECASE)

# What makes an attention's query or key, or norms it: q_proj, wq, to_q, query, q_lin, q_norm, ...
_QUERY_OR_KEY = re.compile(
    r"(?:to_|linear_|norm_|w)?(?:(?P<query>q|query)|k|key)"
    r"(?:_?(?:proj|lin|linear|dense|norm|layernorm|ln))?"
)

# What attentions call the width of a head, their number, and the factor on the logits.
_HEAD_DIMS = (
    "head_dim",
    "attention_head_size",
    "key_value_proj_dim",
    "head_size",
    "d_head",
    "key_dim",
)
_HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
_SCALES = ("scaling", "scale", "softmax_scale")


def selector(watch: str | Sequence[str] | Callable[[str, Any], bool]) -> Callable[[str, Any], bool]:
    """Whether `watch` means a layer, by its name and itself: "all", globs or a function.

    Raises:
        SettingError: `watch` is none of these.
    """
    if callable(watch):
        return watch
    globs = ["*" if watch == "all" else watch] if isinstance(watch, str) else list(watch)
    if not globs or not all(isinstance(glob, str) for glob in globs):
        raise SettingError(
            f"watch={watch!r}: expected 'sublayers', 'blocks', 'all', globs or a function"
        )
    return lambda name, _layer: any(fnmatch.fnmatchcase(name, glob) for glob in globs)


def query_or_key(layer: str) -> Literal["query", "key"] | None:
    """What an attention's own part makes or norms, by the name that models give it."""
    match = _QUERY_OR_KEY.fullmatch(layer.rpartition(".")[2])
    if match is None:
        return None
    return "query" if match["query"] is not None else "key"


def heads(attention: str, width: int, parent: object) -> Heads:
    """How a query's or key's rows of `width` elements are cut, by what `parent` says of itself.

    Args:
        attention: the attention's name.
        width: elements in a row before it is cut.
        parent: the layer that holds the query.
    """
    dim = width  # a norm before the cut, or one head: a bound all the same
    for attribute in _HEAD_DIMS:
        value = getattr(parent, attribute, None)
        if isinstance(value, int) and value > 0 and width % value == 0:
            dim = value
            break
    else:
        for attribute in _HEAD_COUNTS:
            value = getattr(parent, attribute, None)
            if isinstance(value, int) and value > 0 and width % value == 0:
                dim = width // value
                break
    scales = (getattr(parent, attribute, None) for attribute in _SCALES)
    own = next((scale for scale in scales if isinstance(scale, float) and scale > 0), None)
    return Heads(attention, dim, own if own is not None else dim**-0.5)
