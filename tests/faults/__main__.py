"""Plays all scenes and writes down what each fault cost.

    python -m tests.faults                          (make test-faults)
    python -m tests.faults --only 'disk|hung'       those whose words match
    python -m tests.faults --write docs/faults.md   puts the table there

Writes build/faults.json. The exit code is 1 where a scene went wrong.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.progress import track

from deploy.demo.servers import REPOSITORY
from tests.faults.report import Row, markdown, table
from tests.faults.scene import Scene, Stage
from tests.faults.scenes import SCENES


def play(scene: Scene, folder: Path) -> Row:
    """Play it, all of it."""
    stage = Stage(folder, thorough=True)
    began = time.monotonic()
    try:
        happened, loss = scene.play(stage), stage.loss()
        scene.require(loss)
    except (AssertionError, OSError) as error:
        words = " ".join(f"{type(error).__name__}: {error}".split())
        return Row(scene.fault, words, None, time.monotonic() - began)
    return Row(scene.fault, happened, loss, time.monotonic() - began)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    parser.add_argument("--only", default="", help="scenes whose words match this expression")
    parser.add_argument("--write", type=Path, help="the Markdown file that gets the table")
    arguments = parser.parse_args()
    chosen = [scene for scene in SCENES if re.search(arguments.only, scene.fault)]
    console = Console()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number, scene in enumerate(track(chosen, "Scenes", console=console)):
            rows.append(play(scene, Path(folder) / str(number)))
            if rows[-1].loss is None:
                console.print(f"{scene.fault}: {rows[-1].happened}", style="red", markup=False)
    console.print(table(rows))
    build = REPOSITORY / "build"
    build.mkdir(exist_ok=True)
    content = [row.to_dict() for row in rows]
    (build / "faults.json").write_text(json.dumps(content, indent=1) + "\n")
    if arguments.write:
        arguments.write.write_text(markdown(rows))
    return int(any(row.loss is None for row in rows))


if __name__ == "__main__":
    sys.exit(main())
