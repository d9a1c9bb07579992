"""Runs that come and go: exporters list themselves, and a real Prometheus finds them."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import requests
import trustme
import yaml

from deploy.demo.servers import REPOSITORY, Server, binary, free_port, running

# A trainer as far as Prometheus can tell: it serves its page until somebody ends it.
TRAINER = """
import signal, sys, torch
from act_exporter import start_exporter
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
with start_exporter(torch.nn.Linear(2, 2), 0, watch="all", run="gpt/7b", targets=sys.argv[1]):
    signal.sigwait([signal.SIGTERM])
"""


def shipped_job() -> dict:
    """The scrape job as its comment in prometheus.yml says to write it."""
    text = (REPOSITORY / "prometheus" / "prometheus.yml").read_text()
    text = re.sub(r"# (file_sd_configs:|  - files: \[targets/)", r"\1", text)
    config = yaml.safe_load(text)
    return next(job for job in config["scrape_configs"] if job["job_name"] == "act-exporter")


class Prometheus:
    """One that scrapes each second and looks into the folder `targets`."""

    def __init__(self, server: Server, url: str) -> None:
        self._server, self._url = server, url

    def up(self) -> dict[str, str]:
        """By rank: what `up` is of the run now."""
        answer = requests.get(
            f"{self._url}/api/v1/query", params={"query": 'up{run="gpt/7b"}'}, timeout=30
        ).json()
        return {it["metric"]["rank"]: it["value"][1] for it in answer["data"]["result"]}

    def wait_for(self, expected: dict[str, str]) -> None:
        self._server.wait_for(lambda: self.up() == expected, f"up of {expected}", 60)


@contextmanager
def started(tmp_path: Path, **more: object) -> Iterator[Prometheus]:
    """With the shipped job, and `more` in it."""
    port = free_port()
    job = {**shipped_job(), **more}
    assert job["file_sd_configs"] == [{"files": ["targets/act-*.json"]}]
    job["scrape_interval"] = job["scrape_timeout"] = "1s"
    job["static_configs"] = []
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump({"scrape_configs": [job]}))
    (tmp_path / "targets").mkdir()
    argv = [
        binary("prometheus"),
        f"--config.file={tmp_path / 'prometheus.yml'}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    url = f"http://127.0.0.1:{port}"
    with running("prometheus", argv, tmp_path) as server:
        server.wait_for(lambda: requests.get(f"{url}/-/ready", timeout=2).ok, "an answer", 60)
        yield Prometheus(server, url)


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Prometheus]:
    with started(tmp_path) as server:
        yield server


@contextmanager
def trainer(folder: Path, rank: int, **variables: str) -> Iterator[subprocess.Popen]:
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINER, folder / "targets"],
        env={"PATH": "/usr/bin:/bin", "RANK": str(rank), **variables},
        cwd=REPOSITORY,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_run_is_found_when_it_starts_and_gone_when_it_ends(prometheus, tmp_path):
    with ExitStack() as opened:
        ranks = [opened.enter_context(trainer(tmp_path, rank)) for rank in range(2)]
        prometheus.wait_for({"0": "1", "1": "1"})
        for process in ranks:
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        # No alarm about a run that ended in order: its targets are gone, not down.
        prometheus.wait_for({})


def test_one_that_is_killed_is_down_until_it_is_back(prometheus, tmp_path):
    with trainer(tmp_path, 0) as process:
        prometheus.wait_for({"0": "1"})
        process.kill()
        prometheus.wait_for({"0": "0"})
    with trainer(tmp_path, 0):
        prometheus.wait_for({"0": "1"})


def test_over_tls_with_a_certificate_and_a_token(tmp_path):
    """As the README has it: what the target's file says, Prometheus takes up by itself."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.crt")
    for name in ("127.0.0.1", "prometheus"):
        issued = authority.issue_cert(name)
        issued.private_key_pem.write_to_path(tmp_path / f"{name}.key")
        issued.cert_chain_pems[0].write_to_path(tmp_path / f"{name}.crt")
    (tmp_path / "token").write_text("secret")
    web = {
        "tls_server_config": {
            "cert_file": "127.0.0.1.crt",
            "key_file": "127.0.0.1.key",
            "client_ca_file": "ca.crt",
        },
        "bearer_token_file": "token",
    }
    (tmp_path / "web.yml").write_text(yaml.safe_dump(web))
    client = {
        "tls_config": {
            "ca_file": "ca.crt",
            "cert_file": "prometheus.crt",
            "key_file": "prometheus.key",
        },
        "authorization": {"credentials_file": "token"},
    }
    with (
        started(tmp_path, **client) as prometheus,
        trainer(tmp_path, 0, ACT_WEB_CONFIG=str(tmp_path / "web.yml")),
    ):
        prometheus.wait_for({"0": "1"})
