"""docs/deployment.md: its commands run, in its order, but those that say why they are not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

from deploy.demo.servers import REPOSITORY

GUIDE = (REPOSITORY / "docs" / "deployment.md").read_text()
BLOCKS = [dedent(text) for text in re.findall(r"^ *```sh\n(.*?)^ *```$", GUIDE, re.DOTALL | re.M)]


def test_its_commands_run(tmp_path: Path) -> None:
    script = "set -e\n" + "".join(each for each in BLOCKS if not each.startswith("# Not run: "))
    folders = [Path(sys.executable).parent, REPOSITORY / ".servers" / "bin"]
    path = os.pathsep.join([*map(str, folders), os.environ["PATH"]])
    done = subprocess.run(
        ["sh", "-x"],
        input=script,
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rendered = tmp_path / "monitoring" / "deploy" / "kubernetes" / "manifests"
    assert "registry.example.com/act-receiver" in (rendered / "receiver.yaml").read_text()


def test_what_is_not_run_is_right_shell() -> None:
    for block in BLOCKS:
        subprocess.run(["sh", "-n"], input=block, text=True, check=True)


def test_the_files_that_it_names_are_there() -> None:
    for path in re.findall(r"`((?:deploy|alerting|prometheus|tests)/[\w./*-]+)`", GUIDE):
        if path != "deploy/agent":
            assert list(REPOSITORY.glob(path)), path
    for anchor in re.findall(r"\]\(#([\w-]+)\)", GUIDE):
        headings = re.findall(r"^## (.+)$", GUIDE, re.MULTILINE)
        assert anchor in {
            re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings
        }
