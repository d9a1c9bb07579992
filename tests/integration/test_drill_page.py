"""docs/drill.md, followed on real servers: its trainer, its commands, and what it says they print.

Times are the shipped ones divided by 15, and so is the wait for people's message.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests

from deploy.demo.servers import REPOSITORY, Server, free_port, running, wait_for
from deploy.demo.stack import Stack, stack
from tests.alerting.bots import Bot

PAGE = (REPOSITORY / "docs" / "drill.md").read_text()
(TRAINER,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SHELL = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)


def block(part: str) -> str:
    """The one block of commands that has `part` in it."""
    (found,) = [commands for commands in SHELL if part in commands]
    return found


@dataclass(frozen=True, kw_only=True)
class Desk:
    """Where an engineer sits who follows the page.

    Attributes:
        folder: has toy.py, receiver.yml and the folder runs.
        stack: the servers that the page starts.
        port: of the trainer's page.
        chat: what people see.
    """

    folder: Path
    stack: Stack
    port: int
    chat: Bot

    @property
    def environment(self) -> dict[str, str]:
        folders = [Path(sys.executable).parent, REPOSITORY / ".servers" / "bin"]
        path = os.pathsep.join([*map(str, folders), "/usr/bin", "/bin"])
        return {"PATH": path, "ACT_PORT": str(self.port)}

    @contextlib.contextmanager
    def trainer(self, run: str, *arguments: str) -> Iterator[Server]:
        """`python toy.py RUN`, which logs to RUN.log as on the page."""
        argv = [sys.executable, "toy.py", run, *arguments]
        with running(run, argv, self.folder, env=self.environment) as trainer:
            assert trainer.process is not None
            (self.folder / f"{run}.pid").write_text(str(trainer.process.pid))
            yield trainer

    def step(self) -> int:
        """The last step that the trainer's own page has."""
        page = requests.get(f"http://localhost:{self.port}/metrics", timeout=30).text
        found = re.search(r"^act_step{.*} (\d+)", page, re.MULTILINE)
        return int(found[1]) if found else 0

    def generation(self, run: str) -> int:
        """That of its row of `act-alerting status`."""
        rows = self.run("act-alerting status --config receiver.yml").splitlines()
        (row,) = [row.split("\t") for row in rows if row.startswith(f"{run}\t")]
        return int(row[rows[0].split("\t").index("generation")])

    def run(self, commands: str) -> str:
        """What they print; the page's addresses are replaced by those of these servers."""
        for ours, theirs in (
            (f"localhost:{self.port}", "localhost:9460"),
            (self.stack.urls["prometheus"], "http://localhost:9090"),
            (f"drill --alertmanager {self.stack.urls['alertmanager']} --run", "drill --run"),
        ):
            commands = commands.replace(theirs, ours)
        done = subprocess.run(
            ["bash", "-ec", commands],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    port = free_port()
    with Bot().serving() as chat, stack(tmp_path, exporter_port=port, chat_url=chat.url) as servers:
        (tmp_path / "toy.py").write_text(TRAINER)
        yield Desk(folder=tmp_path, stack=servers, port=port, chat=chat)


def printed(commands: str) -> str:
    """What the page says that a block of commands prints."""
    return PAGE.split(commands)[1].split("```\n")[2]


def test_followed_to_the_end(desk: Desk) -> None:
    look, routes, copied, after = map(block, ("page", "drill", "cp -r", "ALERTS"))
    with desk.trainer("toy") as trainer:
        trainer.wait_for(lambda: desk.step() >= 100, "a hundred steps")
        seen, said = desk.run(look), printed(look)
        assert names(seen) == names(said)
        assert "no errors\n18 tensors, 0 baselines\n" in said
        assert "no errors\n18 tensors, 0 baselines\n" in seen
        trainer.wait_for(lambda: "18 tensors, 18 baselines" in desk.run(look), "the baselines")

        desk.run("act-exporter assets monitoring")
        compared = 'count(layer:act_layer_absmax:baseline_ratio{run="toy"})'
        wait_for(lambda: desk.stack.value(compared) == 18, "the rules' own series")
        seen = desk.run(routes)
        for part in ("is valid prometheus config file", '{run="toy"} => 18 ', "asks the trainer"):
            assert part in seen
            assert part in printed(routes)
        assert hops(seen) == hops(printed(routes))
        assert "ActDrill" in desk.chat.texts()[0]

        seen = desk.run(copied)
        rows = [line.split("\t") for line in seen.splitlines()]
        assert rows[0] == printed(copied).splitlines()[0].split("\t")
        assert rows[1][3] == "yes, next start"
    # No multiple of 50 after it: one step in 50 is not sampled, to know what looking costs.
    fault = int(rows[1][1]) + 70
    with desk.trainer("toy-copy", str(fault)) as trainer:
        back = "to recover: done: rolled back from step"
        trainer.wait_for(lambda: back in trainer.log.read_text(), "a rollback", timeout=60)
        log = trainer.log.read_text()
        told = wait_for(lambda: [text for text in desk.chat.texts() if "toy-copy" in text], "chat")
        for part in (
            "injected fault: the output of encoder.layers.1.linear2 times 1000 from step 700 on",
            "step 700: output of encoder.layers.1.linear2 went bad first (rule hard)",
        ):
            assert part in PAGE
            assert part.replace("700", str(fault)) in log
        assert "encoder.layers.1.linear2 output" in told[0]
        seen = desk.run(after)
        assert 'alertname="ActLayerAboveBaseline"' in seen
        # That one is over soon after the rollback, perhaps before this look.
        asked = 'max_over_time(ALERTS{run="toy-copy",alertname="ActRunaway"}[5m])'
        assert desk.stack.value(asked) == 1
        assert desk.generation("toy-copy") == 1
        assert "emergency\tsuspect" in seen
        assert trainer.returncode() is None


def names(lines: str) -> set[str]:
    """The series among them, without their values."""
    return {line.rpartition(" ")[0] for line in lines.splitlines() if line.startswith("act_")}


def hops(lines: str) -> list[str]:
    """The hops of a drill that are fine, in order."""
    return re.findall(r"^ok +([^:]+):", lines, re.MULTILINE)
