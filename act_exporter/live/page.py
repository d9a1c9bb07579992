"""The page for one request: from the text of a query to bytes."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

from act_exporter.live.alerts import Shipped
from act_exporter.live.html import page_of
from act_exporter.live.query import Query
from act_exporter.live.view import Source, view_of


class LivePage:
    """Renders the page, in whichever thread asks for it.

    Args:
        source: where everything is read from.
        clock: Unix seconds.
    """

    def __init__(self, source: Source, clock: Callable[[], float] = time.time) -> None:
        self._source = source
        self._clock = clock

    def render(self, query: str) -> bytes:
        """The page for what stands behind the `?` of its address."""
        view = view_of(self._source, self._shipped, Query.of(query), self._clock())
        return page_of(view).encode()

    @functools.cached_property
    def _shipped(self) -> Shipped:
        # At the first request and not before: a trainer whose page nobody opens reads no rules.
        return Shipped(self._source.thresholds)
