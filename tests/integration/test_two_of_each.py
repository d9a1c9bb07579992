"""A pair of Alertmanagers and two receivers over one runs folder: still one rollback."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests
import yaml

from deploy.demo.servers import REPOSITORY, binary, free_port, running
from deploy.demo.stack import SPEEDUP, render_alertmanager
from tests.alerting.test_store import rows
from tests.integration.scene import Scene
from tests.integration.trainer import RUN


@contextlib.contextmanager
def pair(scene: Scene) -> Iterator[Path]:
    """Two Alertmanagers that know each other, with alertmanager-pair.yml, and a second receiver.

    The one Alertmanager of the stage makes room for them, at its address; the second receiver's
    database is what comes back.
    """
    folder = scene.stack.database.parent
    first = scene.stack.urls["alertmanager"].removeprefix("http://")
    second, receiver = (f"127.0.0.1:{free_port()}" for _ in range(2))
    mesh = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    database = folder / "second.sqlite"

    def read(name: str) -> Any:
        return yaml.safe_load((folder / f"{name}.yml").read_text())

    def changed(name: str, content: dict[str, Any]) -> Path:
        path = folder / f"{name}.yml"
        path.write_text(yaml.safe_dump(content))
        return path

    # Its chat's and token's files, as in the configuration that the stage has.
    (people,) = (told for told in read("alertmanager")["receivers"] if told["name"] == "people")
    (webhook,) = people["webhook_configs"]
    config = render_alertmanager(
        {"receiver": int(scene.stack.urls["receiver"].rpartition(":")[2])},
        Path(webhook["http_config"]["authorization"]["credentials_file"]),
        Path(people["slack_configs"][0]["api_url_file"]),
        bots=True,
        second_receiver=int(receiver.rpartition(":")[2]),
    )
    keys = read("receiver") | {"listen": receiver, "database": str(database)}
    commands: dict[str, list[str | Path]] = {
        "second-receiver": [
            *(sys.executable, "-m", "alerting.cli", "serve"),
            f"--config={changed('second-receiver', keys)}",
        ],
    }
    changed("pair", config)
    for number, listen in enumerate((first, second)):
        commands[f"alertmanager-{number}"] = [
            binary("alertmanager"),
            f"--config.file={folder / 'pair.yml'}",
            f"--storage.path={folder / f'pair-{number}-data'}",
            f"--web.listen-address={listen}",
            f"--cluster.listen-address={mesh[number]}",
            f"--cluster.peer={mesh[1 - number]}",
            f"--cluster.peer-timeout={15 / SPEEDUP:g}s",
        ]
    answers = (f"{receiver}/readyz", f"{first}/-/ready", f"{second}/-/ready")
    scene.stack.alertmanager.stop()
    with contextlib.ExitStack() as opened:
        servers = [
            opened.enter_context(running(name, argv, folder, cwd=REPOSITORY))
            for name, argv in commands.items()
        ]
        for server, at in zip(servers, answers, strict=True):
            server.wait_for(lambda at=at: requests.get(f"http://{at}", timeout=2).ok, "an answer")  # type: ignore[misc]
        scene.wait(
            lambda: len(status(first)["peers"]) == 2 and status(first)["status"] == "ready",
            "the two Alertmanagers to find each other",
        )
        prometheus = read("prometheus")
        (managers,) = prometheus["alerting"]["alertmanagers"]
        managers["static_configs"][0]["targets"].append(second)
        changed("prometheus", prometheus)
        assert scene.stack.prometheus.process is not None
        scene.stack.prometheus.process.send_signal(signal.SIGHUP)
        address = f"{scene.stack.urls['prometheus']}/api/v1/alertmanagers"
        scene.wait(
            lambda: (
                len(requests.get(address, timeout=5).json()["data"]["activeAlertmanagers"]) == 2
            ),
            "both Alertmanagers in Prometheus",
        )
        yield database


def status(alertmanager: str) -> dict[str, Any]:
    """What an Alertmanager says of its mesh."""
    found: dict[str, Any] = requests.get(f"http://{alertmanager}/api/v2/status", timeout=5).json()
    return found["cluster"]


def test_two_alertmanagers_and_two_receivers_roll_back_once(scene: Scene) -> None:
    with pair(scene) as second:
        databases = (scene.stack.database, second)

        def recoveries(result: str | None = None) -> list[dict[str, Any]]:
            """Requests to roll back that either of the receivers has made."""
            statement = "SELECT * FROM requests WHERE action = 'recover'"
            found = [row for path in databases for row in rows(path, statement)]
            return [row for row in found if result in (None, row["result"])]

        def told() -> list[str]:
            return [seen for seen in scene.bot.texts() if f"run {RUN} was rolled back" in seen]

        fault = scene.start_fault()
        rollback = scene.wait(lambda: recoveries("done"), "a rollback", timeout=60)[0]
        scene.assert_went_back_before(fault, rollback)
        handled = "SELECT 1 FROM deliveries WHERE handled_at IS NOT NULL"
        scene.wait(lambda: all(rows(path, handled) for path in databases), "a delivery to each")
        scene.wait_until_healthy_again(rollback)
        scene.wait(scene.messages, "people's message")
        scene.wait(told, "the outcome by the bot")

        # One that came too late was refused by the trainer, which saw no bad step any more.
        scene.wait(
            lambda: all(row["result"] in ("done", "refused") for row in recoveries()), "all answers"
        )
        assert len(recoveries("done")) == 1
        assert scene.value("max_over_time(act_rollbacks_total{RUN}[1h])") == 1
        assert (scene.status()["generation"], scene.status()["state"]) == (1, "running")
        assert len(told()) == 1
        # Whichever of the two Alertmanagers posted them, and as often as they did.
        alerts = "SELECT key FROM messages WHERE kind = 'alerts'"
        keys = [row["key"] for row in rows(databases[0], alerts)]
        assert keys
        assert len(keys) == len(set(keys))
        assert rows(second, alerts) == []
