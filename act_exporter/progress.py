"""A bar on the terminal, where there is one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(what: str, parts: int | None = None) -> Iterator[Callable[[], None]]:
    """A bar that the yielded function moves on by a part.

    Args:
        what: stands beside it.
        parts: how many there are.
    """
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=parts)
        yield lambda: bar.advance(task)
