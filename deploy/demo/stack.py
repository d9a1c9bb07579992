"""Prometheus, Alertmanager and the receiver on free loopback ports, from the shipped files.

The shipped configurations are read and changed in three things: addresses, paths, and every time
divided by one number, so that a fault is through in seconds. The rules are used as they are.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
import yaml

from deploy.demo.servers import REPOSITORY, Server, binary, free_port

SPEEDUP = 15.0
"""The shipped 15 s between two scrapes become 1 s; 30 s for people to be told become 2 s."""

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_TIMES = {
    "scrape_interval",
    "scrape_timeout",
    "evaluation_interval",
    "group_wait",
    "group_interval",
    "repeat_interval",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """The running servers; each can be ended and started again.

    Attributes:
        prometheus: Prometheus.
        alertmanager: Alertmanager.
        receiver: the webhook receiver.
        urls: server name to its address.
        runs: the folder that holds the run folders.
        database: the receiver's SQLite file.
    """

    prometheus: Server
    alertmanager: Server
    receiver: Server
    urls: dict[str, str]
    runs: Path
    database: Path

    def query(self, expression: str, time: float | None = None) -> list[dict[str, Any]]:
        """Prometheus' answer to an instant query, now or at `time`.

        A range (`metric[1h]`) gives the samples as they were stored, with their own times.
        """
        parameters: dict[str, str | float] = {"query": expression}
        if time is not None:
            parameters["time"] = time
        answer = requests.get(
            f"{self.urls['prometheus']}/api/v1/query", params=parameters, timeout=30
        ).json()
        if answer["status"] != "success":
            raise ValueError(f"{expression}: {answer['error']}")
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def value(self, expression: str) -> float | None:
        """The first value of an instant query, or None where there is no sample."""
        result = self.query(expression)
        return float(result[0]["value"][1]) if result else None

    def alerts(self) -> list[dict[str, Any]]:
        """Alertmanager's active alerts, with the receivers that each one goes to."""
        found: list[dict[str, Any]] = requests.get(
            f"{self.urls['alertmanager']}/api/v2/alerts", timeout=30
        ).json()
        return found

    def wait_until_ready(self) -> None:
        """Wait until all three answer."""
        for name, path in (
            ("prometheus", "/-/ready"),
            ("alertmanager", "/-/ready"),
            ("receiver", "/readyz"),
        ):
            server: Server = getattr(self, name)
            url = self.urls[name] + path
            server.wait_for(lambda url=url: requests.get(url, timeout=2).ok, "an answer")  # type: ignore[misc]


@contextlib.contextmanager
def stack(
    folder: Path,
    *,
    exporter_port: int,
    chat_url: str,
    notify: Sequence[dict[str, str]] = (),
) -> Iterator[Stack]:
    """Start the three servers in `folder`, and end them on leaving.

    Args:
        folder: for configurations, data, logs and the run folders; created.
        exporter_port: where the trainer serves its metrics.
        chat_url: a Slack-style incoming webhook for people's messages.
        notify: whom the receiver tells besides, as in receiver.yml.
    """
    folder.mkdir(parents=True, exist_ok=True)
    runs = folder / "runs"
    runs.mkdir()
    ports = {name: free_port() for name in ("prometheus", "alertmanager", "receiver")}
    token = _write_secret(folder / "token", secrets.token_hex(16))
    chat = _write_secret(folder / "chat-url", chat_url)
    files = {
        "prometheus": render_prometheus(exporter_port, ports),
        "alertmanager": render_alertmanager(ports, token, chat, bots=bool(notify)),
        "receiver": render_receiver(ports, token, runs, folder / "receiver.sqlite", notify),
    }
    for name, content in files.items():
        (folder / f"{name}.yml").write_text(yaml.safe_dump(content, sort_keys=False))
    listen = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
    commands: dict[str, list[str | Path]] = {
        "prometheus": [
            binary("prometheus"),
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'prometheus-data'}",
            f"--web.listen-address={listen['prometheus']}",
            # How soon it tells Alertmanager again, which forgets all when it restarts: 1 m / 15.
            f"--rules.alert.resend-delay={60 / SPEEDUP:g}s",
        ],
        "alertmanager": [
            binary("alertmanager"),
            f"--config.file={folder / 'alertmanager.yml'}",
            f"--storage.path={folder / 'alertmanager-data'}",
            f"--web.listen-address={listen['alertmanager']}",
            "--cluster.listen-address=",  # one Alertmanager needs no mesh
        ],
        "receiver": [
            *(sys.executable, "-m", "alerting.cli", "serve"),
            f"--config={folder / 'receiver.yml'}",
        ],
    }
    servers = {name: Server(name, argv, folder) for name, argv in commands.items()}
    running = Stack(
        **servers,
        urls={name: f"http://{address}" for name, address in listen.items()},
        runs=runs,
        database=folder / "receiver.sqlite",
    )
    try:
        for server in servers.values():
            server.start()
        running.wait_until_ready()
        yield running
    finally:
        for server in servers.values():
            server.stop()


def render_prometheus(exporter_port: int, ports: dict[str, int]) -> dict[str, Any]:
    """The shipped prometheus.yml for these ports."""
    config = _shipped("prometheus/prometheus.yml")
    config["rule_files"] = [
        str(REPOSITORY / "prometheus" / pattern) for pattern in config["rule_files"]
    ]
    targets = {"act-exporter": exporter_port, "act-receiver": ports["receiver"], **ports}
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": [f"localhost:{targets[job['job_name']]}"]}]
    (managers,) = config["alerting"]["alertmanagers"]
    managers["static_configs"] = [{"targets": [f"localhost:{ports['alertmanager']}"]}]
    return config


def render_alertmanager(
    ports: dict[str, int],
    token: Path,
    chat: Path,
    *,
    bots: bool = False,
    second_receiver: int | None = None,
) -> dict[str, Any]:
    """The shipped alertmanager.yml for these ports and secrets, with chat but without email.

    With `bots` people are told by the receiver too, as where that part is uncommented; with the
    port of a second receiver it is alertmanager-pair.yml.
    """
    pair = second_receiver is not None
    config = _shipped("alerting/alertmanager-pair.yml" if pair else "alerting/alertmanager.yml")
    for receiver in config["receivers"]:
        receiver.pop("email_configs", None)  # there is no mail server here
        for people in receiver.get("slack_configs", []):
            people["api_url_file"] = str(chat)
        for trainer in receiver.get("webhook_configs", []):
            url = urlsplit(trainer["url"])
            port = second_receiver if "receiver-b" in url.netloc else ports["receiver"]
            trainer["url"] = f"http://localhost:{port}{url.path}"
            trainer["http_config"]["authorization"]["credentials_file"] = str(token)
    if bots:
        told = {receiver["name"]: receiver for receiver in config["receivers"]}
        told["people"]["webhook_configs"] = [
            {
                **trainer,
                "url": trainer["url"].replace("/alerts", "/messages"),
                "send_resolved": True,
            }
            for trainer in told["trainer"]["webhook_configs"]
        ]
    config["global"] = {
        key: value for key, value in config["global"].items() if not key.startswith("smtp_")
    }
    return config


def render_receiver(
    ports: dict[str, int],
    token: Path,
    runs: Path,
    database: Path,
    notify: Sequence[dict[str, str]] = (),
) -> dict[str, Any]:
    """The shipped receiver.yml for these ports, paths and people."""
    config = {
        **_shipped("alerting/receiver.yml"),
        "listen": f"127.0.0.1:{ports['receiver']}",
        "token_file": str(token),
        "runs": str(runs),
        "database": str(database),
    }
    if notify:
        config["notify"] = list(notify)
        config["repeat_interval_seconds"] /= SPEEDUP
    return config


def _shipped(path: str) -> dict[str, Any]:
    config: dict[str, Any] = _faster(yaml.safe_load((REPOSITORY / path).read_text()))
    return config


def _faster(node: Any, key: str = "") -> Any:
    """The same configuration with its times divided by `SPEEDUP`."""
    if isinstance(node, dict):
        return {name: _faster(value, name) for name, value in node.items()}
    if isinstance(node, list):
        return [_faster(value) for value in node]
    if key in _TIMES:
        match = re.fullmatch(r"(\d+)(ms|s|m|h)", str(node))
        if match is None:
            raise ValueError(f"{key}: {node!r} is no duration")
        return f"{int(match[1]) * _SECONDS[match[2]] / SPEEDUP * 1000:.0f}ms"
    return node


def _write_secret(path: Path, secret: str) -> Path:
    path.touch(mode=0o600)
    path.write_text(secret)
    return path
