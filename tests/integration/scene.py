"""One incident's stage: the shipped servers, a chat stand-in and a trainer, each a process.

Everything that a test asks is asked from outside: HTTP APIs, files, the receiver's database.
"""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import requests

from deploy.demo.servers import REPOSITORY, Server, free_port, running
from deploy.demo.stack import Stack, stack
from tests.alerting.bots import SECRET, FeishuBot
from tests.integration.trainer import RUN

SETTLED_STEP = 250
"""Baselines are settled after 200 steps, so a checkpoint of this step holds them."""

_FAULT = re.compile(r"train WARNING fault: .* before step (\d+)$", re.MULTILINE)

T = TypeVar("T")
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """The running processes of one test.

    Attributes:
        stack: Prometheus, Alertmanager and the receiver.
        trainer: the training process.
        exporter_url: the trainer's metrics page.
        chat: the file in which the chat stand-in keeps people's messages.
        bot: a Feishu bot that the receiver tells.
        knobs: the folder that only the trainer looks at.
    """

    stack: Stack
    trainer: Server
    exporter_url: str
    chat: Path
    bot: FeishuBot
    knobs: Path

    def wait(self, probe: Callable[[], T | None], what: str, timeout: float = 60.0) -> T:
        """Until `probe` is true, and its answer; fails at once when the trainer has died."""
        answer = self.trainer.wait_for(probe, what, timeout)
        assert answer is not None
        return answer

    # The trainer's knobs

    def start_fault(self) -> int:
        """Let a layer go bad and stay bad; the first step that has it."""
        (self.knobs / "fault").touch()
        return int(self.wait(lambda: _FAULT.search(self.trainer.log.read_text()), "a fault")[1])

    @contextlib.contextmanager
    def step_held(self) -> Iterator[None]:
        """The training loop stands in the middle of a step; its metrics page does not."""
        hold = self.knobs / "hold"
        hold.touch()
        try:
            yield
        finally:
            hold.unlink()

    # What Prometheus says

    def query(self, expression: str) -> list[Row]:
        """An instant query, in which RUN stands for the run's selector."""
        return self.stack.query(expression.replace("RUN", f'run="{RUN}"'))

    def value(self, expression: str) -> float | None:
        """The first value of such a query, None where there is no sample."""
        return self.stack.value(expression.replace("RUN", f'run="{RUN}"'))

    def firing(self) -> set[str]:
        """Names of the run's alerts that fire in Prometheus now."""
        found = self.query('ALERTS{RUN,alertstate="firing"}')
        return {series["metric"]["alertname"] for series in found}

    def worst_ratio(self) -> float | None:
        """Largest activation of all layers in multiples of the baseline, now."""
        return self.value("max(layer:act_layer_absmax:baseline_ratio{RUN})")

    def wait_until_settled(self) -> None:
        """Until every layer has its baseline and a checkpoint that knows it is there."""
        self.wait(
            lambda: (self.value("act_checkpoint_last_step{RUN}") or 0) >= SETTLED_STEP,
            f"a checkpoint of step {SETTLED_STEP}",
        )
        taps = self.value("count(act_layer_absmax{RUN})")
        assert taps
        self.wait(
            lambda: self.value("count(layer:act_layer_absmax:baseline_ratio{RUN})") == taps,
            "a baseline of every layer",
        )

    # What the receiver says

    def rows(self, statement: str, *parameters: Any) -> list[Row]:
        """Rows of the receiver's database, opened read-only."""
        uri = f"file:{self.stack.database}?mode=ro"
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=30)) as database:
            database.row_factory = sqlite3.Row
            return [dict(row) for row in database.execute(statement, parameters)]

    def recoveries(self, result: str | None = None) -> list[Row]:
        """Requests to roll back, oldest first; all, or those that ended in `result`."""
        rows = self.rows("SELECT * FROM requests WHERE action = 'recover' ORDER BY created_at")
        return [row for row in rows if result in (None, row["result"])]

    def messages(self) -> list[Row]:
        """People's messages about the run: `at`, `title`, `text`."""
        found = []
        for line in self.chat.read_text().splitlines():
            message = json.loads(line)
            attachment = message["body"]["attachments"][0]
            found.append({"at": message["at"], **attachment})
        return [message for message in found if f"run {RUN}" in message["title"]]

    # What lies in the run folder

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.stack.runs / RUN

    def open_recovery(self) -> bool:
        """Whether a request to roll back lies open."""
        return (self.folder / "control" / "requests" / "recover.json").exists()

    def status(self) -> Row:
        """What the guard says of its run."""
        content: Row = json.loads((self.folder / "control" / "status.json").read_text())
        return content

    def checkpoints(self) -> dict[str, Row]:
        """Checkpoint name to its manifest, with its `health`."""
        found = {}
        for path in (self.folder / "checkpoints").glob("step-*/manifest.json"):
            # One that is deleted meanwhile is not there any more.
            with contextlib.suppress(FileNotFoundError):
                health = json.loads((path.parent / "health.json").read_text())["health"]
                found[path.parent.name] = {**json.loads(path.read_text()), "health": health}
        return found

    # What several tests hold

    def wait_for_rollback(self, timeout: float = 60.0) -> Row:
        """Until the receiver knows of a rollback that was done; the request's row."""
        return self.wait(lambda: self.recoveries("done"), "a rollback", timeout)[0]

    def assert_went_back_before(self, fault: int, rollback: Row) -> None:
        """The checkpoint that was gone back to is from before the fault, and trusted."""
        assert rollback["onset"] >= fault
        assert rollback["resumed_step"] < fault
        checkpoint = self.checkpoints()[rollback["resumed_from"]]
        assert checkpoint["step"] == rollback["resumed_step"]
        assert checkpoint["health"] in ("pending", "confirmed")
        assert checkpoint["generation"] == 0

    def wait_until_healthy_again(self, rollback: Row) -> None:
        """Until 100 steps and a checkpoint came after the rollback, with every layer calm."""
        goal = rollback["resumed_step"] + 100
        self.wait(
            lambda: (
                self.value('act_run_info{RUN,generation="1"}')
                and (self.value("act_step{RUN}") or 0) >= goal
                and (self.worst_ratio() or 1e9) < 100
                and "ActRunaway" not in self.firing()
                and any(manifest["generation"] == 1 for manifest in self.checkpoints().values())
            ),
            f"healthy training up to step {goal}",
        )

    def assert_one_rollback(self) -> None:
        """All who count say one."""
        assert len(self.recoveries("done")) == 1
        assert self.value("max_over_time(act_rollbacks_total{RUN}[1h])") == 1
        assert self.status()["generation"] == 1
        assert self.status()["state"] == "running"
        assert max(manifest["generation"] for manifest in self.checkpoints().values()) == 1

    def assert_nothing_happened(self) -> None:
        """No alert that asks for something, no request, no message, no rollback."""
        assert self.query('ALERTS{RUN,action!=""}') == []
        told = {alert["labels"]["alertname"] for alert in self.stack.alerts()}
        assert told <= {"ActWatchdog"}, told  # which always fires
        assert self.rows("SELECT * FROM deliveries") == []
        assert self.rows("SELECT * FROM requests") == []
        assert self.rows("SELECT * FROM messages") == []
        assert self.chat.read_text() == ""
        assert self.value("act_rollbacks_total{RUN}") == 0


@contextlib.contextmanager
def open_scene(folder: Path) -> Iterator[Scene]:
    """Start everything in `folder`, and end it on leaving."""
    exporter_port, chat_port = free_port(), free_port()
    chat, knobs = folder / "chat.jsonl", folder / "knobs"
    chat.touch()
    knobs.mkdir()
    python = [sys.executable, "-m"]
    with contextlib.ExitStack() as opened:
        bot = opened.enter_context(FeishuBot().serving())
        entry = {"kind": "feishu"}
        for key, content in (("url_file", bot.url), ("secret_file", SECRET)):
            path = folder / f"feishu-{key}"
            path.touch(mode=0o600)
            path.write_text(content)
            entry[key] = str(path)
        servers = opened.enter_context(
            stack(
                folder / "stack",
                exporter_port=exporter_port,
                chat_url=f"http://127.0.0.1:{chat_port}/",
                notify=[entry],
            )
        )
        for name, arguments in (
            ("chat", ["deploy.demo.chat", str(chat_port), chat]),
            (
                "trainer",
                [
                    "tests.integration.trainer",
                    f"--log-dir={servers.runs}",
                    f"--port={exporter_port}",
                    f"--knobs={knobs}",
                ],
            ),
        ):
            server = opened.enter_context(
                running(name, [*python, *arguments], folder, cwd=REPOSITORY)
            )
        scene = Scene(
            stack=servers,
            trainer=server,
            exporter_url=f"http://127.0.0.1:{exporter_port}/metrics",
            chat=chat,
            bot=bot,
            knobs=knobs,
        )
        scene.wait(lambda: requests.get(scene.exporter_url, timeout=2).ok, "a metrics page")
        yield scene
