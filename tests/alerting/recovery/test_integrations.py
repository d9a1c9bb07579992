"""The examples of docs/integrations.md, each run as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from alerting.control import ControlDirectory
from deploy.demo.servers import REPOSITORY, free_port

DOCUMENT = (REPOSITORY / "docs" / "integrations.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)


RUNS = ("gpt", "accelerated", "lit")


@pytest.mark.parametrize(("example", "run"), list(zip(EXAMPLES, RUNS, strict=True)))
def test_an_example_trains_to_its_end(tmp_path: Path, example: str, run: str) -> None:
    """On a free port: the one in the example may be in use here."""
    script = tmp_path / "train.py"
    script.write_text(example.replace("9460", str(free_port())))
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    status = ControlDirectory(tmp_path / "runs" / run / "control").status()
    assert (status.state, status.step, status.run) == ("finished", 20, run)
