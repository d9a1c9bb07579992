"""Prometheus and Alertmanager as shipped, 15 s and all, in front of simulated exporters."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import requests
import yaml

from deploy.demo.servers import REPOSITORY, Server, binary, free_port, running, wait_for


class Mailbox(BaseHTTPRequestHandler):
    """Takes what Alertmanager sends to people and receiver, and says no more than that."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextlib.contextmanager
def mailbox() -> Iterator[str]:
    """Its address, while it is open."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Mailbox)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def shipped(path: str) -> dict[str, Any]:
    """A configuration as it is shipped."""
    content: dict[str, Any] = yaml.safe_load((REPOSITORY / path).read_text())
    return content


def prometheus_config(
    folder: Path, prometheus: int, alertmanager: int, interval: str | None
) -> dict[str, Any]:
    """The shipped one, with the simulated exporters and these ports."""
    config = shipped("prometheus/prometheus.yml")
    if interval is not None:
        config["global"] = dict.fromkeys(config["global"], interval)
    config["rule_files"] = [str(REPOSITORY / "prometheus" / path) for path in config["rule_files"]]
    targets = {"alertmanager": alertmanager, "prometheus": prometheus}
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    for name, port in targets.items():
        jobs[name]["static_configs"] = [{"targets": [f"127.0.0.1:{port}"]}]
    del jobs["act-exporter"]["static_configs"]
    jobs["act-exporter"]["file_sd_configs"] = [{"files": [str(folder / "targets.json")]}]
    config["scrape_configs"] = [jobs["act-exporter"], *(jobs[name] for name in targets)]
    (managers,) = config["alerting"]["alertmanagers"]
    managers["static_configs"] = [{"targets": [f"127.0.0.1:{alertmanager}"]}]
    return config


def alertmanager_config(mail: str) -> dict[str, Any]:
    """The shipped one, with all that it sends going to `mail`."""
    config = shipped("alerting/alertmanager.yml")
    del config["global"]
    for receiver in config["receivers"]:
        receiver.pop("email_configs", None)
        for people in receiver.get("slack_configs", []):
            del people["api_url_file"]
            people["api_url"] = mail
        for trainer in receiver.get("webhook_configs", []):
            trainer["url"] = mail
            del trainer["http_config"]["authorization"]
    return config


class Watching:
    """The servers under load.

    Args:
        folder: of configurations and data.
        url: Prometheus' address.
        cluster: the simulated exporters.
        prometheus: for waiting.
    """

    def __init__(self, folder: Path, url: str, cluster: Server, prometheus: Server) -> None:
        self.folder, self.url, self.cluster, self.prometheus = folder, url, cluster, prometheus

    def begin_storm(self) -> None:
        """Each layer of each rank breaks each rule, from the next scrape on."""
        assert self.cluster.process is not None
        self.cluster.process.send_signal(signal.SIGUSR1)

    def get(self, path: str, **parameters: Any) -> Any:
        """The data of an answer."""
        answer = requests.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=60).json()
        if answer["status"] != "success":
            raise ValueError(f"{path} {parameters}: {answer['error']}")
        return answer["data"]

    def by(self, label: str, expression: str) -> dict[str, float]:
        """A query's values by a label."""
        found = self.get("query", query=expression)["result"]
        return {series["metric"].get(label, ""): float(series["value"][1]) for series in found}

    def value(self, expression: str) -> float:
        """A query's sum, 0 where there is nothing."""
        return sum(self.by("", f"sum({expression})").values())


@contextlib.contextmanager
def watching(
    folder: Path, exporters: int, runs: int, interval: str | None = None
) -> Iterator[Watching]:
    """Start all of it, and end it on leaving; with `interval` in place of the shipped one."""
    prometheus, alertmanager = free_port(), free_port()
    with mailbox() as mail, contextlib.ExitStack() as opened:
        for name, config in (
            ("prometheus", prometheus_config(folder, prometheus, alertmanager, interval)),
            ("alertmanager", alertmanager_config(mail)),
        ):
            (folder / f"{name}.yml").write_text(yaml.safe_dump(config, sort_keys=False))
        simulated = [sys.executable, "-m", "tests.benchmarks.cluster", str(folder)]
        cluster = opened.enter_context(
            running(
                "cluster",
                [*simulated, f"--exporters={exporters}", f"--runs={runs}"],
                folder,
                cwd=REPOSITORY,
            )
        )
        cluster.wait_for((folder / "targets.json").exists, "the targets", timeout=120)
        manager = opened.enter_context(
            running(
                "alertmanager",
                [
                    binary("alertmanager"),
                    f"--config.file={folder / 'alertmanager.yml'}",
                    f"--storage.path={folder / 'alertmanager'}",
                    f"--web.listen-address=127.0.0.1:{alertmanager}",
                    "--cluster.listen-address=",
                ],
                folder,
            )
        )
        ready = f"http://127.0.0.1:{alertmanager}/-/ready"
        manager.wait_for(lambda: requests.get(ready, timeout=2).ok, "an answer")
        server = opened.enter_context(
            running(
                "prometheus",
                [
                    binary("prometheus"),
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{prometheus}",
                    "--web.enable-admin-api",  # for the snapshot at the end
                ],
                folder,
            )
        )
        url = f"http://127.0.0.1:{prometheus}"
        server.wait_for(lambda: requests.get(f"{url}/-/ready", timeout=2).ok, "an answer")
        started = Watching(folder, url, cluster, server)
        wait_for(
            lambda: started.value('sum(up{job="act-exporter"})') == exporters,
            "all exporters",
            timeout=120,
            interval=1,
        )
        yield started
