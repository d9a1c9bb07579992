"""A training node and the central store that its agent writes to, from the shipped files.

deploy/agent's configurations are read and changed in addresses, paths, and the seconds between two
scrapes, which are a fifth instead of fifteen. vmagent's times are its own, as shipped.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import requests
import yaml

from act_exporter.targets import TargetFile
from deploy.demo.servers import REPOSITORY, Server, binary, free_port, wait_for

AGENT = REPOSITORY / "deploy" / "agent"
NODE = "node17"
# A scrape may take as long, and on a busy machine it does: ACT_SCRAPE_SECONDS=1 there.
SCRAPE_SECONDS = float(os.environ.get("ACT_SCRAPE_SECONDS", "0.2"))
SERIES = 10
METRIC = "act_step"
RUN = "counted"

Sample = tuple[str, int]
"""A series, by its rank, and which scrape it was served at."""


def environment(name: str) -> dict[str, str]:
    """The variables of a shipped file, as systemd and a shell read it."""
    lines = (AGENT / name).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def flags(name: str, changed: dict[str, object]) -> str:
    """A shipped file of flags, for `prometheus @FILE`, with other values for some."""
    text = (AGENT / name).read_text()
    for flag, value in changed.items():
        text, found = re.subn(rf"^{flag}=.*$", f"{flag}={value}", text, flags=re.MULTILINE)
        assert found == 1, flag
    return text


def counted(number: int) -> str:
    """A page whose series all have that value."""
    labels = (f'run="{RUN}",rank="{rank}"' for rank in range(SERIES))
    return "".join(f"{METRIC}{{{each}}} {number}\n" for each in labels)


class Page:
    """An exporter that knows what it served: each scrape gets the next number, in each series.

    Args:
        render: the page of a scrape, by its number.
    """

    def __init__(self, render: Callable[[int], str] = counted) -> None:
        self.served: dict[int, float] = {}
        """When each number had gone out."""
        page, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                with lock:
                    number = len(page.served) + 1
                    text = render(number)
                    page.served[number] = time.time()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port: int = self._server.server_address[1]

    @contextlib.contextmanager
    def up(self) -> Iterator[Page]:
        thread = threading.Thread(target=self._server.serve_forever)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()

    @property
    def count(self) -> int:
        """How often it was scraped."""
        return len(self.served)

    def wait_for_more(self, scrapes: int) -> int:
        """Until it was scraped so often again; the last number."""
        goal = self.count + scrapes
        patience = 180 + 2 * scrapes * SCRAPE_SECONDS
        wait_for(lambda: self.count >= goal, f"{scrapes} scrapes", patience)
        return goal

    def samples(self, after: int, until: int) -> set[Sample]:
        """All that was served in scrapes after the one and until the other."""
        return {
            (str(rank), number) for rank in range(SERIES) for number in range(after + 1, until + 1)
        }


class Centre:
    """VictoriaMetrics with the shipped flags."""

    def __init__(self, folder: Path) -> None:
        listen = f"127.0.0.1:{free_port()}"
        self.url = f"http://{listen}"
        argv = [
            binary("victoria-metrics"),
            "-envflag.enable",
            f"-httpListenAddr={listen}",
            f"-storageDataPath={folder / 'centre-data'}",
            "-storage.minFreeDiskSpaceBytes=10MB",  # the machine of a test may have no more
        ]
        self.server = Server(
            "centre", argv, folder, env=os.environ | environment("victoria-metrics.env")
        )

    def start(self) -> None:
        self.server.start()
        self.server.wait_for(lambda: requests.get(f"{self.url}/health", timeout=2).ok, "an answer")

    def export(self, selector: str) -> list[dict[str, Any]]:
        """The raw samples of each series, as they were stored."""
        requests.get(f"{self.url}/internal/force_flush", timeout=10).raise_for_status()
        answer = requests.get(
            f"{self.url}/api/v1/export", params={"match[]": selector, "start": "0"}, timeout=10
        )
        answer.raise_for_status()
        return [json.loads(line) for line in answer.text.splitlines()]

    def samples(self) -> Counter[Sample]:
        """The counted page's, and how often each is there."""
        return Counter(
            (series["metric"]["rank"], int(value))
            for series in self.export(f'{METRIC}{{run="{RUN}"}}')
            for value in series["values"]
            if value is not None  # where a scrape failed, Prometheus marks the series as stale
        )

    def last(self) -> int:
        """The newest number that came in all series."""
        numbers: dict[str, int] = {}
        for rank, number in self.samples():
            numbers[rank] = max(number, numbers.get(rank, 0))
        return min(numbers.values()) if len(numbers) == SERIES else 0

    def wait_until(self, number: int) -> None:
        """Until it has what the page served at that scrape."""
        self.server.wait_for(lambda: self.last() >= number, f"scrape {number}", 200)


def scrape_config(folder: Path, ports: dict[str, int]) -> dict[str, Any]:
    """scrape.yml for targets in `folder`, and for the jobs whose ports are given."""
    config = yaml.safe_load((AGENT / "scrape.yml").read_text().replace("NODE", NODE))
    for key in ("scrape_interval", "scrape_timeout"):
        config["global"][key] = f"{SCRAPE_SECONDS * 1000:.0f}ms"
    trainers, *machine = config["scrape_configs"]
    trainers["file_sd_configs"] = [{"files": [str(folder / "targets" / "act-*.json")]}]
    for job in machine:
        if (port := ports.get(job["job_name"])) is not None:
            job["static_configs"] = [{"targets": [f"localhost:{port}"]}]
    kept = [job for job in machine if job["job_name"] in ports]
    config["scrape_configs"] = [trainers, *kept]
    return config


def remote_write(url: str) -> dict[str, Any]:
    """remote-write.yml for this centre, its waits as much shorter as the scrapes are."""
    config = yaml.safe_load((AGENT / "remote-write.yml").read_text())
    (way,) = config["remote_write"]
    assert way["url"].startswith("http://centre:8428/")
    way["url"] = way["url"].replace("http://centre:8428", url)
    way["queue_config"] |= {"batch_send_deadline": "100ms", "max_backoff": "400ms"}
    return config


@contextlib.contextmanager
def listed(folder: Path, port: int) -> Iterator[None]:
    """As an exporter with ACT_TARGETS lists itself."""
    target = TargetFile(
        folder / "targets", run=RUN, rank="0", scheme="http", host="127.0.0.1", port=port
    )
    target.write()
    try:
        yield
    finally:
        target.remove()


def vmagent(folder: Path, centre: str, ports: dict[str, int]) -> Server:
    config = folder / "scrape.yml"
    config.write_text(yaml.safe_dump(scrape_config(folder, ports)))
    argv = [
        binary("vmagent"),
        "-envflag.enable",
        f"-remoteWrite.url={centre}/api/v1/write",
        f"-promscrape.config={config}",
        f"-remoteWrite.tmpDataPath={folder / 'vmagent-data'}",
        f"-httpListenAddr=127.0.0.1:{free_port()}",
    ]
    return Server("vmagent", argv, folder, env=os.environ | environment("vmagent.env"))


def agent_mode(folder: Path, centre: str, ports: dict[str, int]) -> Server:
    config = folder / "prometheus-agent.yml"
    config.write_text(yaml.safe_dump(scrape_config(folder, ports) | remote_write(centre)))
    changed = {
        "--config.file": config,
        "--storage.agent.path": folder / "agent-data",
        "--web.listen-address": f"127.0.0.1:{free_port()}",
    }
    own = folder / "prometheus-agent.flags"
    own.write_text(flags("prometheus-agent.flags", changed))
    return Server("agent", [binary("prometheus"), f"@{own}"], folder)
