"""Two of each server: any of the six killed at any time, still one rollback, told once.

As the shipped files have it: both Prometheus tell both Alertmanagers, which know each other and
tell both receivers, which have the run folders and a folder of claims in common.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from deploy.demo.servers import REPOSITORY, Server, binary, free_port, running
from deploy.demo.stack import SPEEDUP, render_alertmanager
from tests.alerting.mailbox import MAIL_SECRET, Mailbox
from tests.alerting.test_store import rows
from tests.integration.scene import Scene
from tests.integration.trainer import RUN


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two of each, in the place of the stage's own servers.

    Attributes:
        scene: the stage, whose questions go to Prometheus that live.
        servers: all six, by name and number.
        urls: likewise.
        databases: the receivers', likewise.
        mailbox: people's.
    """

    scene: Scene
    servers: dict[str, Server]
    urls: dict[str, str]
    databases: dict[str, Path]
    mailbox: Mailbox

    def kill(self, name: str) -> Pair:
        """Kill one; the pair as it is without it."""
        self.servers[name].kill()
        left = {key: value for key, value in self.servers.items() if key != name}
        answers = next(key for key in left if key.startswith("prometheus"))
        urls = self.scene.stack.urls | {"prometheus": self.urls[answers]}
        return dataclasses.replace(
            self,
            scene=dataclasses.replace(
                self.scene, stack=dataclasses.replace(self.scene.stack, urls=urls)
            ),
            servers=left,
            databases={key: value for key, value in self.databases.items() if key != name},
        )

    @contextlib.contextmanager
    def receivers_standing_still(self) -> Iterator[None]:
        """They take connections and answer none; those that live go on afterwards."""
        receivers = [server for name, server in self.servers.items() if name in self.databases]
        for server in receivers:
            assert server.process is not None
            server.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for server in receivers:
                assert server.process is not None
                server.process.send_signal(signal.SIGCONT)

    def rows(self, statement: str) -> list[dict[str, Any]]:
        """Rows of the living receivers' databases."""
        return [row for path in self.databases.values() for row in rows(path, statement)]

    def wait_until_alerted(self) -> None:
        """Until an Alertmanager has the alert that asks for a rollback."""

        def alerted() -> bool:
            return any(
                alert["labels"]["alertname"] == "ActRunaway"
                for name in self.servers
                if name.startswith("alertmanager")
                for alert in requests.get(f"{self.urls[name]}/api/v2/alerts", timeout=30).json()
            )

        self.scene.wait(alerted, "the alert in Alertmanager")

    def wait_until_both_know_the_request(self) -> str:
        """Until one receiver has asked and the other found it open; who asked."""
        recover = "SELECT found FROM requests WHERE action = 'recover' AND claimed_at IS NOT NULL"
        self.scene.wait(
            lambda: sorted(row["found"] for row in self.rows(recover)) == [0, 1],
            "one request that both receivers know",
        )
        assert self.scene.open_recovery()
        return next(
            name for name, path in self.databases.items() if not rows(path, recover)[0]["found"]
        )


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    with Mailbox().serving() as mailbox:
        yield mailbox


@pytest.fixture
def pair(scene: Scene, mailbox: Mailbox) -> Iterator[Pair]:
    """Two of each, running and healthy, from the shipped files."""
    stack, folder = scene.stack, scene.stack.database.parent
    names = ("prometheus", "alertmanager", "receiver")
    urls = {f"{name}-0": stack.urls[name] for name in names}
    urls |= {f"{name}-1": f"http://127.0.0.1:{free_port()}" for name in names}
    at = {name: url.removeprefix("http://") for name, url in urls.items()}
    mesh = [f"127.0.0.1:{free_port()}" for _ in range(2)]

    def read(name: str) -> Any:
        return yaml.safe_load((folder / f"{name}.yml").read_text())

    def write(name: str, content: dict[str, Any]) -> Path:
        path = folder / f"{name}.yml"
        path.write_text(yaml.safe_dump(content))
        return path

    for server in (stack.alertmanager, stack.receiver, stack.prometheus):
        server.stop()
    prometheus = read("prometheus")
    (managers,) = prometheus["alerting"]["alertmanagers"]
    managers["static_configs"][0]["targets"] = [at["alertmanager-0"], at["alertmanager-1"]]
    write("prometheus", prometheus)
    # Its chat's and token's files, as in the configuration that the stage has.
    (people,) = (told for told in read("alertmanager")["receivers"] if told["name"] == "people")
    token = Path(people["webhook_configs"][0]["http_config"]["authorization"]["credentials_file"])
    config = render_alertmanager(
        {"receiver": int(at["receiver-0"].rpartition(":")[2])},
        token,
        Path(people["slack_configs"][0]["api_url_file"]),
        bots=True,
        second_receiver=int(at["receiver-1"].rpartition(":")[2]),
    )
    write("pair", with_mail(config, mailbox, folder / "smtp-password"))
    databases = {f"receiver-{n}": folder / f"pair-{n}.sqlite" for n in range(2)}
    commands: dict[str, list[str | Path]] = {}
    for n in range(2):
        keys = read("receiver") | {
            "listen": at[f"receiver-{n}"],
            "database": str(databases[f"receiver-{n}"]),
            "shared": str(stack.runs / ".act-messages"),
        }
        commands[f"receiver-{n}"] = [
            *(sys.executable, "-m", "alerting.cli", "serve"),
            f"--config={write(f'receiver-{n}', keys)}",
        ]
        commands[f"alertmanager-{n}"] = [
            binary("alertmanager"),
            f"--config.file={folder / 'pair.yml'}",
            f"--storage.path={folder / f'alertmanager-{n}-data'}",
            f"--web.listen-address={at[f'alertmanager-{n}']}",
            f"--cluster.listen-address={mesh[n]}",
            f"--cluster.peer={mesh[1 - n]}",
            f"--cluster.peer-timeout={15 / SPEEDUP:g}s",
            # Ten times this is how often it looks whether the mesh is complete.
            f"--cluster.gossip-interval={200 / SPEEDUP:.0f}ms",
        ]
        commands[f"prometheus-{n}"] = [
            binary("prometheus"),
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / f'prometheus-{n}-data'}",
            f"--web.listen-address={at[f'prometheus-{n}']}",
            f"--rules.alert.resend-delay={60 / SPEEDUP:g}s",
        ]
    with contextlib.ExitStack() as opened:
        servers = {
            name: opened.enter_context(running(name, argv, folder, cwd=REPOSITORY))
            for name, argv in commands.items()
        }
        for name, server in servers.items():
            ready = f"{urls[name]}/{'readyz' if name in databases else '-/ready'}"
            server.wait_for(lambda url=ready: requests.get(url, timeout=2).ok, "an answer")  # type: ignore[misc]
        made = Pair(scene=scene, servers=servers, urls=urls, databases=databases, mailbox=mailbox)
        for n in range(2):
            scene.wait(lambda n=n: is_in_touch(made, n), "the servers to find each other")  # type: ignore[misc]
        yield made


def with_mail(config: dict[str, Any], mailbox: Mailbox, password: Path) -> dict[str, Any]:
    """People told by email too, as in the shipped file."""
    shipped = yaml.safe_load((REPOSITORY / "alerting" / "alertmanager-pair.yml").read_text())
    password.write_text(MAIL_SECRET)
    config["global"] = shipped["global"] | {
        "smtp_smarthost": f"127.0.0.1:{mailbox.port}",
        "smtp_auth_password_file": str(password),
        "smtp_require_tls": False,  # loopback, and the mailbox has no certificate
    }
    for told, own in zip(config["receivers"], shipped["receivers"], strict=True):
        assert told["name"] == own["name"]
        if "email_configs" in own:
            told["email_configs"] = own["email_configs"]
    return config


def is_in_touch(pair: Pair, number: int) -> bool:
    """Whether an Alertmanager has its peer, and Prometheus both of them and every layer."""
    url = pair.urls[f"alertmanager-{number}"]
    mesh = requests.get(f"{url}/api/v2/status", timeout=30).json()["cluster"]
    url = pair.urls[f"prometheus-{number}"]
    found = requests.get(f"{url}/api/v1/alertmanagers", timeout=30).json()["data"]
    query = {"query": f'count(layer:act_layer_absmax:baseline_ratio{{run="{RUN}"}})'}
    seen = requests.get(f"{url}/api/v1/query", params=query, timeout=30).json()["data"]["result"]
    return (
        len(mesh["peers"]) == 2
        and mesh["status"] == "ready"
        and len(found["activeAlertmanagers"]) == 2
        and bool(seen)
    )


@pytest.mark.parametrize(
    ("killed", "when"),
    [
        ("prometheus-0", "before the fault"),
        ("alertmanager-0", "before the fault"),
        ("receiver-0", "before the fault"),
        ("prometheus-1", "between alert and request"),
        ("alertmanager-1", "between alert and request"),
        ("receiver-1", "between alert and request"),
        ("who asked", "between request and answer"),
    ],
)
def test_one_rollback_told_once(pair: Pair, killed: str, when: str) -> None:
    if when == "before the fault":
        pair = pair.kill(killed)
        fault = pair.scene.start_fault()
    else:
        with contextlib.ExitStack() as held:
            with pair.receivers_standing_still():
                fault = pair.scene.start_fault()
                pair.wait_until_alerted()
                assert not pair.scene.open_recovery()
                if killed == "who asked":
                    held.enter_context(pair.scene.step_held())
                else:
                    pair = pair.kill(killed)
            if killed == "who asked":
                pair = pair.kill(pair.wait_until_both_know_the_request())
                assert pair.scene.open_recovery()
    scene = pair.scene

    def recoveries(result: str | None = None) -> dict[str, dict[str, Any]]:
        """Requests to roll back that a living receiver made or found, by their id."""
        found = pair.rows("SELECT * FROM requests WHERE action = 'recover'")
        return {row["id"]: row for row in found if result in (None, row["result"])}

    def told(part: str) -> list[str]:
        return [seen for seen in scene.bot.texts() if re.search(part, seen)]

    rollback = next(iter(scene.wait(lambda: recoveries("done"), "a rollback", timeout=60).values()))
    scene.assert_went_back_before(fault, rollback)
    scene.wait(lambda: told(f"run {RUN} was rolled back"), "the outcome by the bot", timeout=60)
    scene.wait(lambda: told(rf"\d firing.*: run {RUN}"), "the alert by the bot", timeout=60)
    scene.wait(scene.messages, "people's message by Slack", timeout=60)
    scene.wait(lambda: pair.mailbox.mails, "people's email", timeout=60)
    scene.wait_until_healthy_again(rollback)
    # One that came too late was refused by the trainer, which saw no bad step any more.
    scene.wait(
        lambda: all(row["result"] in ("done", "refused") for row in recoveries().values()),
        "all answers",
    )
    open_sendings = "SELECT 1 FROM sendings WHERE ended_at IS NULL"
    scene.wait(lambda: not pair.rows(open_sendings), "all messages to end")

    assert len(recoveries("done")) == 1
    assert scene.value("max_over_time(act_rollbacks_total{RUN}[1h])") == 1
    assert (scene.status()["generation"], scene.status()["state"]) == (1, "running")
    assert len(told(f"run {RUN} was rolled back")) == 1
    sent = (
        "SELECT kind, content FROM messages JOIN sendings ON id = message_id WHERE result = 'sent'"
    )
    assert Counter(map(what_is_told, pair.rows(sent))).most_common(1)[0][1] == 1


def what_is_told(message: dict[str, Any]) -> str:
    """What a message says to people, without the times that two servers may see differently."""
    content = json.loads(message["content"])
    if message["kind"] == "alerts":
        alerts = [[one["status"], sorted(one["labels"].items())] for one in content["alerts"]]
        return str([content["groupKey"], sorted(alerts)])
    return str([message["kind"], content["request"]["id"], (content["answer"] or {}).get("detail")])
