"""Two Alertmanagers, each with a receiver of its own, over one runs folder: still one rollback."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
import yaml

from deploy.demo.servers import REPOSITORY, binary, free_port, running
from tests.alerting.test_store import rows
from tests.integration.scene import Scene
from tests.integration.trainer import RUN


@contextlib.contextmanager
def second_pair(scene: Scene) -> Iterator[Path]:
    """Another Alertmanager and receiver, which Prometheus tells too; the receiver's database."""
    folder = scene.stack.database.parent
    own = {name: free_port() for name in ("alertmanager", "receiver")}
    database = folder / "second.sqlite"

    def changed(name: str, content: dict[str, Any]) -> Path:
        path = folder / f"second-{name}.yml"
        path.write_text(yaml.safe_dump(content))
        return path

    def read(name: str) -> Any:
        return yaml.safe_load((folder / f"{name}.yml").read_text())

    listen = {name: f"127.0.0.1:{port}" for name, port in own.items()}
    receiver = read("receiver") | {"listen": listen["receiver"], "database": str(database)}
    routing = read("alertmanager")
    for told in routing["receivers"]:
        for webhook in told.get("webhook_configs", []):
            webhook["url"] = f"http://{listen['receiver']}{urlsplit(webhook['url']).path}"
    commands: dict[str, list[str | Path]] = {
        "second-receiver": [
            *(sys.executable, "-m", "alerting.cli", "serve"),
            f"--config={changed('receiver', receiver)}",
        ],
        "second-alertmanager": [
            binary("alertmanager"),
            f"--config.file={changed('alertmanager', routing)}",
            f"--storage.path={folder / 'second-alertmanager-data'}",
            f"--web.listen-address={listen['alertmanager']}",
            "--cluster.listen-address=",
        ],
    }
    with contextlib.ExitStack() as opened:
        for name, argv in commands.items():
            server = opened.enter_context(running(name, argv, folder, cwd=REPOSITORY))
            url = f"http://{listen[name.removeprefix('second-')]}"
            path = "/readyz" if "receiver" in name else "/-/ready"
            server.wait_for(lambda at=url + path: requests.get(at, timeout=2).ok, "an answer")  # type: ignore[misc]
        prometheus = read("prometheus")
        (managers,) = prometheus["alerting"]["alertmanagers"]
        managers["static_configs"][0]["targets"].append(listen["alertmanager"])
        (folder / "prometheus.yml").write_text(yaml.safe_dump(prometheus))
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


def test_two_alertmanagers_and_two_receivers_roll_back_once(scene: Scene) -> None:
    with second_pair(scene) as second:
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
