"""What a reader asks for: which part of the table, in which order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, Self, get_args
from urllib.parse import parse_qsl, urlencode

Sort = Literal["worst", "depth"]
SORTS: tuple[Sort, ...] = get_args(Sort)

# Longer than any module's name that somebody types.
_FIND_LENGTH = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """The query of a page's address; what makes no sense in it is as if it were not there.

    Attributes:
        find: what the names of layer and tensor must contain, in any case.
        sort: the worst first, or in the order of execution.
        page: of the table, from 1.
        hold: whether the page stays as it is, without refreshing.
    """

    find: str = ""
    sort: Sort = "worst"
    page: int = 1
    hold: bool = False

    @classmethod
    def of(cls, text: str) -> Self:
        """From what stands behind the `?`; never raises."""
        try:
            given = dict(parse_qsl(text, max_num_fields=20))
        except ValueError:
            return cls()
        sort, page = given.get("sort"), given.get("page", "")
        return cls(
            find=given.get("find", "").strip()[:_FIND_LENGTH],
            sort="depth" if sort == "depth" else "worst",
            # More digits than a page can have are no page, and int() refuses thousands of them.
            page=int(page) if page.isascii() and page.isdecimal() and 0 < len(page) < 7 else 1,
            hold=given.get("hold") == "1",
        )

    def link(self, **changes: Any) -> str:
        """The address with some of it changed; what is as usual is left out."""
        asked, usual = replace(self, **changes), Query()
        names = ("find", "sort", "page", "hold")
        pairs = {name: getattr(asked, name) for name in names}
        return "/?" + urlencode(
            {
                name: int(v) if v is True else v
                for name, v in pairs.items()
                if v != getattr(usual, name)
            }
        )
