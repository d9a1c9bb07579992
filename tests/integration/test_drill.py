"""`act-alerting drill` on a real Alertmanager, a real receiver and a guard between its steps.

Alertmanager's times are the shipped ones divided by 15, as everywhere here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from deploy.demo.servers import binary, free_port, running, wait_for
from deploy.demo.stack import render_alertmanager
from tests.alerting.bots import Bot, FeishuBot, WeComBot
from tests.alerting.deliveries import register
from tests.alerting.recovery.trainer import Trainer
from tests.alerting.test_messages import Receiver, receiving
from tests.alerting.test_store import rows

RUN = "toy"
COMMAND = Path(sys.executable).with_name("act-alerting")
SHORT = "--wait=7"
"""For what never comes: people's messages leave after 2 s here."""


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """What an operator has running."""

    folder: Path
    receiver: Receiver
    chat: Bot
    feishu: FeishuBot
    wecom: WeComBot
    alertmanager: str

    @property
    def config(self) -> Path:
        return self.folder / "receiver.yml"

    def changed(self, **keys: Any) -> Path:
        """The receiver's config with other keys, for the command alone."""
        path = self.folder / f"changed-{time.monotonic_ns()}.yml"
        content = yaml.safe_load(self.config.read_text()) | keys
        path.write_text(yaml.safe_dump(content))
        return path

    def drill(self, *arguments: str, **more: str | Path) -> subprocess.CompletedProcess[str]:
        options = {"run": RUN, "config": self.config, "alertmanager": self.alertmanager, **more}
        return subprocess.run(
            [COMMAND, "drill", *(f"--{n}={v}" for n, v in options.items()), *arguments],
            env={"PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def told(self) -> list[str]:
        """What all groups of people have seen."""
        return [text for bot in (self.chat, self.feishu, self.wecom) for text in bot.texts()]


def state_of(hop: str, done: subprocess.CompletedProcess[str]) -> str:
    """State and sentence of the last line about a hop."""
    found = [line for line in done.stdout.splitlines() if line[9:].startswith(f"{hop}: ")]
    assert found, done.stdout + done.stderr
    return found[-1].replace(f"{hop}: ", "")


@contextlib.contextmanager
def alertmanager(
    folder: Path, name: str, change: Callable[[dict[str, Any]], None], port: int, chat: Bot
) -> Iterator[str]:
    """An Alertmanager with the shipped file after a change; its address."""
    url_file = folder / "chat-url"
    url_file.write_text(chat.url)
    config = render_alertmanager({"receiver": port}, folder / "token", url_file, bots=True)
    change(config)
    (folder / f"{name}.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    argv: list[str | Path] = [
        binary("alertmanager"),
        f"--config.file={folder / f'{name}.yml'}",
        f"--storage.path={folder / f'{name}-data'}",
        f"--web.listen-address={address}",
        "--cluster.listen-address=",
    ]
    with running(name, argv, folder) as server:
        ready = f"http://{address}/-/ready"
        server.wait_for(lambda: requests.get(ready, timeout=2).ok, "readiness")
        yield f"http://{address}"


@contextlib.contextmanager
def training(folder: Path) -> Iterator[Trainer]:
    """A guarded run that goes on until the test is over."""
    trainer = Trainer(folder)
    ended = threading.Event()
    failed: list[BaseException] = []

    def train() -> None:
        try:
            for step, batch in trainer.guard.steps(10**9):
                trainer.train_step(step, batch)
                if ended.wait(0.02):
                    break
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        wait_for(lambda: trainer.detector.steps[-1:] > [20], "the first steps")
        yield trainer
    finally:
        ended.set()
        thread.join(30)
        assert not failed, failed


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("drill")
    with contextlib.ExitStack() as opened:
        chat = opened.enter_context(Bot().serving())
        feishu = opened.enter_context(FeishuBot().serving())
        wecom = opened.enter_context(WeComBot().serving())
        port = free_port()
        (folder / "runs").mkdir()
        opened.enter_context(training(folder / "runs" / RUN))
        receiver = opened.enter_context(receiving(folder, port=port, feishu=feishu, wecom=wecom))
        url = opened.enter_context(
            alertmanager(folder, "alertmanager", lambda config: None, port, chat)
        )
        yield Deployment(
            folder=folder,
            receiver=receiver,
            chat=chat,
            feishu=feishu,
            wecom=wecom,
            alertmanager=url,
        )


class TestFine:
    def test_each_hop_is_told_and_people_hear_once_that_it_is_a_drill(
        self, deployment: Deployment
    ) -> None:
        done = deployment.drill()
        assert done.returncode == 0, done.stdout + done.stderr
        assert [line.split()[0] for line in done.stdout.splitlines()] == ["ok"] * 9, done.stdout
        assert "for trainer, people" in state_of("alertmanager", done)
        guard = state_of("guard", done)
        assert "a recovery would roll back from step " in guard
        assert "rollbacks left: 2" in guard
        assert "it would be refused, since no bad step was seen" in guard
        for hop in ("people by slack", "people by feishu", "people by wecom"):
            assert state_of(hop, done).startswith("ok")

        for bot in (deployment.chat, deployment.feishu, deployment.wecom):
            (text,) = bot.texts()
            assert "DRILL, nothing is wrong with run toy" in text
            assert "演练" in text

    def test_nothing_was_done(self, deployment: Deployment) -> None:
        status = yaml.safe_load(
            (deployment.folder / "runs" / RUN / "control" / "status.json").read_text()
        )
        assert (status["generation"], status["rollbacks_left"]) == (0, 2)
        assert status["last_backup_at"] is None
        found = rows(deployment.receiver.database, "SELECT action, result FROM requests")
        assert found == [{"action": "drill", "result": "done"}]
        active = requests.get(
            f"{deployment.alertmanager}/api/v2/alerts", params={"active": "true"}, timeout=30
        ).json()
        assert active == []

    def test_people_can_be_left_out(self, deployment: Deployment) -> None:
        before = len(deployment.told())
        done = deployment.drill("--no-people")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "for trainer, dashboard" in state_of("alertmanager", done)
        assert state_of("people", done).startswith("skipped")
        assert state_of("guard", done).startswith("ok")
        assert len(deployment.told()) == before

    def test_routes_that_ask_for_another_label(self, deployment: Deployment) -> None:
        """As prometheus-operator makes them, with its matcher on `namespace` above all of ours."""

        def operators(config: dict[str, Any]) -> None:
            ours = {**config["route"], "matchers": ['namespace="training"']}
            config["receivers"].append({"name": "nobody"})
            config["route"] = {"receiver": "nobody", "routes": [ours]}

        port = int(deployment.receiver.address.rpartition(":")[2])
        with alertmanager(deployment.folder, "operator", operators, port, deployment.chat) as url:
            without = deployment.drill(SHORT, "--no-people", alertmanager=url)
            with_it = deployment.drill("--no-people", alertmanager=url, label="namespace=training")
        assert without.returncode == 1
        assert state_of("delivery", without).startswith("failed")
        assert with_it.returncode == 0, with_it.stdout + with_it.stderr
        assert state_of("guard", with_it).startswith("ok")


class TestBroken:
    def test_alertmanager_is_down(self, deployment: Deployment) -> None:
        done = deployment.drill(alertmanager=f"http://user:secret@127.0.0.1:{free_port()}")
        assert done.returncode == 1
        assert "failed" in state_of("alertmanager", done)
        assert "does not answer at http://127.0.0.1:" in state_of("alertmanager", done)
        assert "secret" not in done.stdout + done.stderr

    def test_another_server_than_alertmanager(self, deployment: Deployment) -> None:
        done = deployment.drill(alertmanager=deployment.receiver.address)
        assert done.returncode == 1
        assert "answers POST /api/v2/alerts with 404" in state_of("alertmanager", done)

    def test_the_run_is_silenced(self, deployment: Deployment) -> None:
        api = f"{deployment.alertmanager}/api/v2"
        silence = {
            "matchers": [{"name": "run", "value": RUN, "isRegex": False, "isEqual": True}],
            "startsAt": datetime.now(UTC).isoformat(),
            "endsAt": (datetime.now(UTC) + timedelta(minutes=5)).isoformat(),
            "createdBy": "test",
            "comment": "forgotten",
        }
        identifier = requests.post(f"{api}/silences", json=silence, timeout=30).json()["silenceID"]
        try:
            done = deployment.drill()
        finally:
            requests.delete(f"{api}/silence/{identifier}", timeout=30).raise_for_status()
        assert done.returncode == 1
        assert "a silence or an inhibit rule keeps the alert" in state_of("alertmanager", done)

    def test_no_route_to_the_trainer(self, deployment: Deployment) -> None:
        def only_people(config: dict[str, Any]) -> None:
            config["route"] = {"receiver": "people", "group_wait": "1s"}

        port = int(deployment.receiver.address.rpartition(":")[2])
        with alertmanager(deployment.folder, "rootonly", only_people, port, deployment.chat) as url:
            done = deployment.drill(SHORT, alertmanager=url)
        assert done.returncode == 1
        assert state_of("delivery", done).startswith("failed")
        assert "it needs the route" in state_of("delivery", done)
        assert state_of("guard", done).startswith("skipped")
        assert state_of("people by feishu", done).startswith("ok")

    def test_alertmanager_has_another_token(self, deployment: Deployment) -> None:
        def wrong(config: dict[str, Any]) -> None:
            (deployment.folder / "wrong").write_text("guessed")
            for receiver in config["receivers"]:
                for webhook in receiver.get("webhook_configs", []):
                    file = str(deployment.folder / "wrong")
                    webhook["http_config"]["authorization"]["credentials_file"] = file

        port = int(deployment.receiver.address.rpartition(":")[2])
        with alertmanager(deployment.folder, "untrusted", wrong, port, deployment.chat) as url:
            done = deployment.drill(SHORT, "--no-people", alertmanager=url)
        assert done.returncode == 1
        assert "posts of Alertmanager's failed" in state_of("delivery", done)
        assert "token" in state_of("delivery", done)

    def test_the_receiver_is_down(self, deployment: Deployment) -> None:
        config = deployment.changed(listen=f"127.0.0.1:{free_port()}")
        done = deployment.drill(config=config)
        assert done.returncode == 1
        assert "start it with `act-alerting serve`" in state_of("receiver", done)
        assert state_of("alertmanager", done).startswith("ok")
        assert state_of("delivery and guard", done).startswith("skipped")
        assert state_of("people by slack", done).startswith("ok")

    def test_the_receiver_has_read_another_token(self, deployment: Deployment) -> None:
        token = deployment.folder / "newer"
        token.touch(mode=0o600)
        token.write_text("newer-than-the-receiver")
        done = deployment.drill("--no-people", config=deployment.changed(token_file=str(token)))
        assert done.returncode == 1
        assert "it refuses the token" in state_of("receiver", done)
        assert "newer-than" not in done.stdout + done.stderr

    def test_an_unknown_run_is_told_to_nobody(self, deployment: Deployment) -> None:
        before = len(deployment.told())
        done = deployment.drill(run="tyo")
        assert done.returncode == 1
        assert "there are: toy" in state_of("run", done)
        assert state_of("alertmanager", done).startswith("skipped")
        found = requests.get(
            f"{deployment.alertmanager}/api/v2/alerts", params={"filter": 'run="tyo"'}, timeout=30
        ).json()
        assert found == []
        assert len(deployment.told()) == before

    def test_a_run_that_has_finished(self, deployment: Deployment) -> None:
        register(deployment.folder / "runs", "over", run="over", state="finished")
        done = deployment.drill(run="over")
        assert done.returncode == 1
        assert "finished at step 1200" in state_of("run", done)

    def test_a_guard_that_was_killed_does_not_answer(self, deployment: Deployment) -> None:
        """So does one of a version before drills, which never looks for such a request."""
        control = register(deployment.folder / "runs", "dead", run="dead")
        try:
            done = deployment.drill(SHORT, "--no-people", run="dead")
        finally:
            control.publish(
                dataclasses.replace(control.status(), state="finished")  # type: ignore[type-var]
            )
        assert done.returncode == 1
        assert state_of("delivery", done).startswith("ok")
        assert "it did not answer" in state_of("guard", done)
        assert control.open_request("recover") is None
        assert control.open_request("checkpoint") is None

    def test_a_bot_that_refuses(self, deployment: Deployment) -> None:
        deployment.feishu.keyword = "another-keyword"
        try:
            done = deployment.drill()
        finally:
            deployment.feishu.keyword = ""
        assert done.returncode == 1
        assert state_of("people by feishu", done).startswith("failed")
        assert "keyword" in state_of("people by feishu", done)
        assert state_of("people by wecom", done).startswith("ok")

    def test_wrong_settings_are_2(self, deployment: Deployment) -> None:
        assert deployment.drill(alertmanager="localhost:9093").returncode == 2
        assert deployment.drill(config=deployment.folder / "none.yml").returncode == 2
        for label in ("namespace", "name space=x", "run=other"):
            refused = deployment.drill(label=label)
            assert refused.returncode == 2
            assert f"--label {label}" in refused.stderr


def test_people_heard_of_no_end(deployment: Deployment) -> None:
    """By now Alertmanager has posted the first drill's end to the receiver, as it is configured."""

    def ended() -> list[str]:
        return [text for text in deployment.chat.texts() if "over: ActDrill" in text]

    wait_for(ended, "the end of a drill in the chat, as Alertmanager sends it itself", timeout=40)
    assert not [text for text in deployment.feishu.texts() if "over" in text]
    told = rows(deployment.receiver.database, "SELECT kind FROM messages")
    assert {row["kind"] for row in told} == {"alerts"}, "no outcome of a drill is told"
