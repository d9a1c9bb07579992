"""Each incident has servers and a trainer of its own: what one test breaks no other sees."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.scene import Scene, open_scene


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """The whole loop, running and healthy, every layer with its baseline."""
    with open_scene(tmp_path) as opened:
        opened.wait_until_settled()
        yield opened
