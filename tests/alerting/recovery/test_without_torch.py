"""What is not torch's own knows no torch: other frameworks' guards are built on it."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

from alerting.exceptions import CheckpointError
from alerting.recovery.tree import copied, read_tree, write_tree
from deploy.demo.servers import REPOSITORY
from tests.alerting.recovery.trainer import Trainer

RUN = """
import sys
sys.modules["torch"] = None  # what imports it fails
from pathlib import Path
from alerting.recovery.detector import Unwatched
from alerting.recovery.position import Nowhere
from alerting.recovery.ranks import Alone
from alerting.recovery.remedies import Remedies
from alerting.recovery.run import GuardedRun
from alerting.recovery.settings import Settings
from alerting.recovery.treatment import Untreated


class Number:
    '''The whole state of a run: how many steps it has taken.'''

    data, value = None, 0

    def start(self): pass

    def capture(self, step, folder):
        value = self.value

        class Snapshot:
            def write(self, folder, ranks):
                (folder / "number").write_text(str(value))
                return [folder / "number"]

        return Snapshot()

    def restore(self, folder, world_size):
        self.value = int((folder / "number").read_text())


number = Number()
run = GuardedRun(
    Path(sys.argv[1]), "plain", state=number, detector=Unwatched("plain"), watched=False,
    ranks=Alone(), settings=Settings(save_every_steps=2), remedies=Remedies({}, has_loader=False),
    treatment=Untreated(),
)
with run.entered():
    step = run.begin()
    while step < int(sys.argv[2]):
        number.value += 1
        step = run.boundary(step + 1, last=step + 1 == int(sys.argv[2]))
    run.end(step)
print(number.value)
"""


def run(folder: Path, total: int) -> str:
    command = [sys.executable, "-c", RUN, str(folder), str(total)]
    ended = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True
    )
    return ended.stdout.strip()


class TestRun:
    def test_one_of_no_framework_is_saved_and_resumed(self, tmp_path):
        assert run(tmp_path, 3) == "3"
        assert run(tmp_path, 5) == "5"
        names = sorted(path.parent.name for path in tmp_path.glob("checkpoints/*/manifest.json"))
        assert "step-00000003-g0" in names
        assert names[-1] == "step-00000005-g0"

    def test_torch_refuses_what_another_framework_saved(self, tmp_path):
        run(tmp_path / "toy", 3)
        guard = tmp_path / "toy" / "guard.json"
        guard.write_text(guard.read_text().replace('"plain"', '"toy"'))
        with pytest.raises(CheckpointError, match="was not saved by torch"):
            Trainer(tmp_path / "toy").run()


class TestTree:
    @pytest.mark.parametrize(
        "value",
        [
            {"window": numpy.arange(6.0).reshape(2, 3), "counts": [1, (2, None)], 3: {"on": True}},
            {"name": "run", "share": 0.25, "far": math.inf, "none": {}},
        ],
    )
    def test_it_comes_back_with_its_types(self, tmp_path, value):
        write_tree(tmp_path / "tree.npz", value)
        assert repr(read_tree(tmp_path / "tree.npz")) == repr(value)
        assert repr(copied(value, "here")) == repr(value)

    def test_a_copy_shares_nothing(self):
        array = numpy.zeros(2)
        copy = copied({"array": array}, "here")
        array += 1
        assert copy["array"].tolist() == [0, 0]

    def test_anything_else_is_named_with_its_place(self):
        with pytest.raises(CheckpointError, match=r"state\['a'\]\[1\] is a builtins\.object"):
            copied({"a": [1, object()]}, "state")
