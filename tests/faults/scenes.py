"""All scenes, in the order of the table."""

from __future__ import annotations

from tests.faults import group, kills, requests, storage
from tests.faults.scene import SCENES

__all__ = ["SCENES", "group", "kills", "requests", "storage"]
