"""Methods of single objects that are replaced, and put back.

The class is left alone, and so is Keras' own keeping of attributes: what is put here is saved,
copied and exported by nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class _Patch:
    owner: Any
    name: str
    replacement: Callable[..., Any]
    before: Any  # what the object itself had there; None for its class's method


class Patches:
    """Replaced methods of any objects."""

    def __init__(self) -> None:
        self._patches: list[_Patch] = []

    def put(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        """Have `owner.name` call `replacement` from now on."""
        self._patches.append(_Patch(owner, name, replacement, vars(owner).get(name)))
        vars(owner)[name] = replacement

    def restore(self) -> None:
        """Put everything back, but what somebody else has replaced since."""
        for patch in reversed(self._patches):
            own = vars(patch.owner)
            if own.get(patch.name) is not patch.replacement:
                continue
            if patch.before is None:
                del own[patch.name]
            else:
                own[patch.name] = patch.before
        self._patches.clear()
