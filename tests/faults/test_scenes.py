"""The faults that take seconds; `make test-faults` plays all."""

from __future__ import annotations

import pytest

from tests.faults.scene import Stage
from tests.faults.scenes import SCENES


@pytest.mark.parametrize("scene", [s for s in SCENES if s.quick], ids=lambda scene: scene.fault)
def test_nothing_is_lost(tmp_path, scene):
    stage = Stage(tmp_path / "scene", thorough=False)
    scene.play(stage)
    scene.require(stage.loss())
