"""All scenes, in the order of the table."""

from __future__ import annotations

from tests.faults import kills, storage
from tests.faults.scene import SCENES

__all__ = ["SCENES", "kills", "storage"]
