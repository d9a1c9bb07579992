"""The real receiver, as its own process on a loopback port, held to its contract."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

import alerting.receiver
import alerting.serve
from alerting.control import ControlDirectory
from alerting.receiver import create_app
from alerting.settings import Settings
from alerting.store import Store
from deploy.demo.servers import REPOSITORY, Server, free_port, running, wait_for
from tests.alerting.deliveries import RUN, alert, payload, register, status, text
from tests.alerting.test_control import answer_to
from tests.alerting.test_store import rows

TOKEN = "correct-horse-battery-staple"
TIMEOUT = 20
CHECKPOINT = alert("ActLayerAboveBaseline", action="checkpoint")


@dataclass
class Receiver:
    """One running `act-alerting serve` and what can be seen of it from outside."""

    server: Server
    address: str
    runs: Path
    database: Path

    def post(self, body: str | bytes, token: str | None = TOKEN) -> requests.Response:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return requests.post(f"{self.address}/alerts", data=body, headers=headers, timeout=TIMEOUT)

    def deliver(self, *alerts: dict[str, Any]) -> int:
        """Post a notification and return its delivery's id, as soon as it is acknowledged."""
        response = self.post(text(*alerts))
        assert response.status_code == 202, response.text
        identifier: int = response.json()["delivery"]
        return identifier

    def decisions(self, delivery: int) -> list[dict[str, Any]]:
        """Wait until the delivery is handled; what was decided."""
        wait_for(
            lambda: self.rows(
                f"SELECT 1 FROM deliveries WHERE id = {delivery} AND handled_at IS NOT NULL"
            ),
            f"delivery {delivery} to be handled",
        )
        return self.rows(f"SELECT * FROM decisions WHERE delivery_id = {delivery} ORDER BY id")

    def rows(self, statement: str) -> list[dict[str, Any]]:
        return rows(self.database, statement)

    def metric(self, name: str, **labels: str) -> float | None:
        page = requests.get(f"{self.address}/metrics", timeout=TIMEOUT).text
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return float(sample.value)
        return None


@contextlib.contextmanager
def receiving(
    folder: Path,
    runs: Path,
    name: str = "receiver",
    module: tuple[str, ...] = ("alerting.cli",),
) -> Iterator[Receiver]:
    """Start a receiver with its database in `folder`, and wait until it answers."""
    token = folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    runs.mkdir(exist_ok=True)
    database = folder / f"{name}.sqlite"
    port = free_port()
    argv: list[str | Path] = [
        sys.executable,
        "-m",
        *module,
        "serve",
        "--listen",
        f"127.0.0.1:{port}",
        "--runs",
        runs,
        "--database",
        database,
        "--token-file",
        token,
    ]
    with running(name, argv, folder, env={"PYTHONPATH": str(REPOSITORY)}) as server:
        address = f"http://127.0.0.1:{port}"
        server.wait_for(
            lambda: requests.get(f"{address}/healthz", timeout=TIMEOUT).ok, "the first answer"
        )
        yield Receiver(server, address, runs, database)


@pytest.fixture(scope="module")
def receiver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Receiver]:
    """One receiver for the tests that leave nothing behind which another would see."""
    folder = tmp_path_factory.mktemp("receiver")
    with receiving(folder, folder / "runs") as started:
        yield started


def open_ids(control: ControlDirectory) -> list[str]:
    return sorted(path.name for path in (control.path / "requests").iterdir())


class TestWhoGetsIn:
    @pytest.mark.parametrize(
        "header",
        [
            None,
            "",
            "Bearer",
            "Bearer ",
            "Bearer wrong",
            f"Bearer {TOKEN}x",
            f"Bearer {TOKEN[:-1]}",
            f"Basic {TOKEN}",
            TOKEN,
            "Bearer café".encode("latin-1"),
        ],
    )
    def test_without_the_token_nobody(self, receiver: Receiver, header: str | None) -> None:
        before = receiver.rows("SELECT count(*) AS n FROM deliveries")
        headers = {} if header is None else {"Authorization": header}
        response = requests.post(
            f"{receiver.address}/alerts", data=text(alert()), headers=headers, timeout=TIMEOUT
        )
        assert response.status_code == 401
        assert response.headers["WWW-Authenticate"] == "Bearer"
        assert "token is needed" in response.json()["detail"]
        assert receiver.rows("SELECT count(*) AS n FROM deliveries") == before

    def test_the_answer_comes_before_the_body_is_read(self, receiver: Receiver) -> None:
        host, port = receiver.address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=TIMEOUT) as connection:
            connection.sendall(
                b"POST /alerts HTTP/1.1\r\nHost: a\r\nContent-Length: 500000\r\n\r\n{"
            )
            assert connection.recv(4096).startswith(b"HTTP/1.1 401 ")

    def test_the_token_is_in_no_answer_and_no_log(self, receiver: Receiver) -> None:
        answers = [
            receiver.post(TOKEN).text,
            receiver.post(json.dumps({"version": TOKEN, TOKEN: TOKEN})).text,
            receiver.post(text(alert()), token=f"{TOKEN}x").text,
            requests.get(f"{receiver.address}/openapi.json", timeout=TIMEOUT).text,
            requests.get(f"{receiver.address}/metrics", timeout=TIMEOUT).text,
        ]
        assert not any(TOKEN in answer for answer in answers)
        assert TOKEN not in receiver.server.log.read_text()


class TestBadInput:
    def test_ten_megabytes(self, receiver: Receiver) -> None:
        response = receiver.post(b"x" * 10_000_000)
        assert response.status_code == 413
        assert response.json()["detail"] == "The body is larger than 1048576 bytes."

    def test_ten_megabytes_without_saying_so(self, receiver: Receiver) -> None:
        response = requests.post(
            f"{receiver.address}/alerts",
            data=(b"x" * 100_000 for _ in range(100)),  # a generator is sent in chunks
            headers={"Authorization": f"Bearer {TOKEN}"},
            timeout=TIMEOUT,
        )
        assert response.status_code == 413

    @pytest.mark.parametrize(
        ("body", "code", "sentence"),
        [
            (b"", 400, "not valid JSON"),
            (b"alert=ActRunaway", 400, "not valid JSON"),
            (b"\xff\xfe\x00", 400, "not valid JSON"),
            (b"[" * 500_000, 400, "not valid JSON"),
            (b"[]", 422, "not an Alertmanager webhook payload"),
            (b"{}", 422, "(version: "),
            (json.dumps(payload(alert() | {"labels": {"a": 1}})).encode(), 422, "labels.*"),
        ],
    )
    def test_one_clear_sentence(
        self, receiver: Receiver, body: bytes, code: int, sentence: str
    ) -> None:
        response = receiver.post(body)
        assert response.status_code == code
        assert list(response.json()) == ["detail"]
        assert sentence in response.json()["detail"]

    def test_a_sender_that_hangs_up_in_the_middle_harms_nobody(self, receiver: Receiver) -> None:
        host, port = receiver.address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=TIMEOUT) as connection:
            connection.sendall(
                b"POST /alerts HTTP/1.1\r\nHost: a\r\nContent-Length: 500000\r\n"
                b"Authorization: Bearer " + TOKEN.encode() + b"\r\n\r\n{"
            )
        wait_for(
            lambda: "went away in the middle" in receiver.server.log.read_text(),
            "the log to say so",
        )
        assert receiver.post(text(alert(run="unknown"))).status_code == 202
        assert "Traceback" not in receiver.server.log.read_text()

    def test_a_sender_that_stalls_is_told_so(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Called without a server, so that the wait can be short."""
        monkeypatch.setattr(alerting.receiver, "BODY_SECONDS", 0.05)
        settings = Settings(
            host="127.0.0.1",
            port=0,
            runs=tmp_path,
            database=tmp_path / "receiver.sqlite",
            token=TOKEN,
            alerts=frozenset({"ActRunaway"}),
            backup_interval_seconds=900,
        )
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": "/alerts",
            "query_string": b"",
            "headers": [(b"authorization", f"Bearer {TOKEN}".encode())],
        }
        sent: list[Any] = []
        parts = iter([{"type": "http.request", "body": b"{", "more_body": True}])

        async def receive() -> Any:
            for part in parts:
                return part
            return await asyncio.Future()  # nothing more ever comes

        async def send(message: Any) -> None:
            sent.append(message)

        store = Store(settings.database)
        try:
            app = create_app(settings, store, registry=CollectorRegistry())
            asyncio.run(app(scope, receive, send))
        finally:
            store.close()
        assert sent[0]["status"] == 408
        assert b"took longer" in sent[1]["body"]


class TestDeliveries:
    def test_is_recorded_when_it_is_acknowledged(self, receiver: Receiver) -> None:
        body = text(alert(run="recorded", note='quote" and \\ and 层'))
        identifier = receiver.post(body).json()["delivery"]
        (row,) = receiver.rows(f"SELECT * FROM deliveries WHERE id = {identifier}")
        assert row["payload"] == body
        assert abs(row["received_at"] - time.time()) < 60

    def test_becomes_a_request_at_once(self, tmp_path: Path) -> None:
        """Not when the worker looks by itself, which this one does after ten minutes."""
        runs = tmp_path / "runs"
        with receiving(tmp_path, runs, module=("tests.alerting.faulty", "woken")) as woken:
            control = register(runs)
            for wanted in (alert(), CHECKPOINT):
                (decision,) = woken.decisions(woken.deliver(wanted))
                assert decision["outcome"] == "requested"
        assert open_ids(control) == ["checkpoint.json", "recover.json"]

    def test_the_acknowledgement_is_not_held_back(self) -> None:
        """Without TCP_NODELAY on its sockets each answer waits 40 ms for a delayed ACK."""

        async def accepted(listener: socket.socket) -> int:
            taken: asyncio.Future[int] = asyncio.get_running_loop().create_future()

            def take(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                connection = writer.get_extra_info("socket")
                taken.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
                writer.close()

            async with await asyncio.start_server(take, sock=listener):
                _, sender = await asyncio.open_connection(*listener.getsockname())
                sender.close()
                return await taken

        assert asyncio.run(accepted(alerting.serve._listen("127.0.0.1", 0))) == 1

    def test_an_unknown_run_is_refused_aloud(self, receiver: Receiver) -> None:
        before = sorted(receiver.runs.rglob("*"))
        (decision,) = receiver.decisions(receiver.deliver(alert(run="../../etc/passwd")))
        assert decision["outcome"] == "refused"
        assert "no run '../../etc/passwd' is registered" in decision["reason"]
        assert "no run '../../etc/passwd'" in receiver.server.log.read_text()
        assert sorted(receiver.runs.rglob("*")) == before

    def test_resolved_alone_asks_for_nothing(self, receiver: Receiver) -> None:
        control = register(receiver.runs, folder="well", run="well")
        (decision,) = receiver.decisions(receiver.deliver(alert(run="well", status="resolved")))
        assert decision["outcome"] == "refused"
        assert "resolved" in decision["reason"]
        assert open_ids(control) == []

    def test_an_alert_that_is_not_on_the_list_asks_for_nothing(self, receiver: Receiver) -> None:
        control = register(receiver.runs, folder="listed", run="listed")
        (decision,) = receiver.decisions(receiver.deliver(alert("MyOwnAlert", run="listed")))
        assert decision["outcome"] == "refused"
        assert "allow-list" in decision["reason"]
        assert open_ids(control) == []

    def test_a_thousand_alerts_in_one_group(self, receiver: Receiver) -> None:
        control = register(receiver.runs, folder="storm", run="storm")
        storm = [
            alert("ActLayerAboveBaseline", run="storm", action="checkpoint", layer=f"blocks.{n}")
            for n in range(1000)
        ]
        (decision,) = receiver.decisions(receiver.deliver(*storm))
        assert decision["outcome"] == "requested"
        assert open_ids(control) == ["checkpoint.json"]

    def test_the_guards_answer_is_recorded(self, receiver: Receiver) -> None:
        control = register(receiver.runs, folder="answered", run="answered")
        (decision,) = receiver.decisions(receiver.deliver(alert(run="answered")))
        asked = control.open_request("recover")
        assert asked is not None
        control.answer(answer_to(asked))
        (row,) = wait_for(
            lambda: receiver.rows(
                f"SELECT * FROM requests WHERE id = '{decision['request_id']}'"
                " AND answered_at IS NOT NULL"
            ),
            "the answer in the database",
        )
        assert (row["result"], row["resumed_from"]) == ("done", "step-1000")

    def test_a_hundred_at_once_make_one_request(self, receiver: Receiver) -> None:
        control = register(receiver.runs, folder="crowd", run="crowd")
        with ThreadPoolExecutor(20) as pool:
            identifiers = list(pool.map(lambda _: receiver.deliver(alert(run="crowd")), range(100)))
        outcomes = [receiver.decisions(identifier)[0]["outcome"] for identifier in identifiers]
        assert sorted(outcomes) == ["open"] * 99 + ["requested"]
        assert open_ids(control) == ["recover.json"]


class TestItsOwnState:
    def test_metrics_exist_from_the_start_and_count(self, tmp_path: Path) -> None:
        with receiving(tmp_path, tmp_path / "runs") as fresh:
            page = requests.get(f"{fresh.address}/metrics", timeout=TIMEOUT)
            assert page.headers["Content-Type"].startswith("text/plain")
            assert "_created" not in page.text
            assert fresh.metric("act_webhook_deliveries_total", code="202") == 0
            outcome = {"action": "recover", "outcome": "refused"}
            assert fresh.metric("act_recovery_requests_total", **outcome) == 0

            fresh.post(text(alert()), token=None)
            fresh.decisions(fresh.deliver(alert(), alert(status="resolved")))

            assert fresh.metric("act_webhook_deliveries_total", code="202") == 1
            assert fresh.metric("act_webhook_deliveries_total", code="401") == 1
            assert fresh.metric("act_webhook_alerts_total", status="firing") == 1
            assert fresh.metric("act_webhook_alerts_total", status="resolved") == 1
            wait_for(
                lambda: fresh.metric("act_recovery_requests_total", **outcome) == 2,
                "both refusals to be counted",
            )

    def test_ready_says_what_is_missing(self, tmp_path: Path) -> None:
        runs = tmp_path / "runs"
        with receiving(tmp_path, runs) as fresh:
            assert requests.get(f"{fresh.address}/readyz", timeout=TIMEOUT).status_code == 200
            runs.rmdir()
            response = requests.get(f"{fresh.address}/readyz", timeout=TIMEOUT)
            assert response.status_code == 503
            assert "runs folder" in response.json()["detail"]
            assert requests.get(f"{fresh.address}/healthz", timeout=TIMEOUT).status_code == 200

    def test_ready_says_which_run_cannot_be_asked(self, tmp_path: Path) -> None:
        runs = tmp_path / "runs"
        register(runs, folder="mine", run="mine")
        # Nobody can write into a file; of another user's folder os.access says the same.
        closed = register(runs, folder="theirs", run="theirs")
        (closed.path / "requests").rmdir()
        (closed.path / "requests").touch()
        with receiving(tmp_path, runs) as fresh:
            response = requests.get(f"{fresh.address}/readyz", timeout=TIMEOUT)
            assert response.status_code == 503
            assert response.json()["detail"] == (
                "Run 'theirs' cannot be asked: this process may not write requests into "
                f"{closed.path}."
            )
            # What has ended would not be asked, so its folder may be closed.
            closed.publish(status(run="theirs", state="finished"))
            assert requests.get(f"{fresh.address}/readyz", timeout=TIMEOUT).status_code == 200

    def test_what_cannot_be_recorded_is_answered_503_and_taken_later(self, tmp_path: Path) -> None:
        control = register(tmp_path / "runs")
        with receiving(tmp_path, tmp_path / "runs") as fresh:
            lock = sqlite3.connect(fresh.database, isolation_level=None)
            try:
                lock.execute("BEGIN IMMEDIATE")
                with ThreadPoolExecutor(2) as pool:  # each waits 5 s for the lock
                    posted = pool.submit(fresh.post, text(alert()))
                    asked = pool.submit(requests.get, f"{fresh.address}/readyz", timeout=TIMEOUT)
                    response, ready = posted.result(), asked.result()
                lock.execute("ROLLBACK")
            finally:
                lock.close()
            assert response.status_code == 503
            assert "could not be recorded" in response.json()["detail"]
            assert ready.status_code == 503
            assert open_ids(control) == []
            # Alertmanager sends it again.
            (decision,) = fresh.decisions(fresh.deliver(alert()))
            assert decision["outcome"] == "requested"

    def test_no_pages_for_browsers_and_a_schema_of_the_payload(self, receiver: Receiver) -> None:
        for path in ("/docs", "/redoc"):
            assert requests.get(receiver.address + path, timeout=TIMEOUT).status_code == 404
        schema = requests.get(f"{receiver.address}/openapi.json", timeout=TIMEOUT).json()
        body = schema["paths"]["/alerts"]["post"]["requestBody"]["content"]["application/json"]
        assert "groupKey" in body["schema"]["properties"]
        assert "labels" in body["schema"]["properties"]["alerts"]["items"]["properties"]


class TestCrashes:
    def test_killed_directly_after_its_answer_it_still_asks_exactly_once(
        self, tmp_path: Path
    ) -> None:
        control = register(tmp_path / "runs")
        with receiving(tmp_path, tmp_path / "runs") as first:
            identifier = first.deliver(alert())
            first.server.kill()
        with receiving(tmp_path, tmp_path / "runs") as second:
            (decision,) = second.decisions(identifier)
            assert decision["outcome"] == "requested"
            (row,) = second.rows("SELECT * FROM requests")
            asked = control.open_request("recover")
            assert asked is not None
            assert row["id"] == asked.id == decision["request_id"]
            # The next repeat finds it open.
            (repeat,) = second.decisions(second.deliver(alert()))
            assert repeat["outcome"] == "open"
        assert open_ids(control) == ["recover.json"]

    def test_killed_under_load_nothing_acknowledged_is_lost_or_doubled(
        self, tmp_path: Path
    ) -> None:
        controls = [
            register(tmp_path / "runs", folder=str(number), run=f"run-{number}")
            for number in range(12)
        ]
        acknowledged: dict[str, int] = {}
        enough = threading.Event()

        def send(fresh: Receiver, number: int) -> None:
            # Whatever has no answer was not acknowledged, and Alertmanager would send it again.
            with contextlib.suppress(requests.RequestException):
                acknowledged[f"run-{number}"] = fresh.deliver(alert(run=f"run-{number}"))
                if len(acknowledged) >= 4:
                    enough.set()

        with receiving(tmp_path, tmp_path / "runs") as first, ThreadPoolExecutor(4) as pool:
            for number in range(12):
                pool.submit(send, first, number)
            assert enough.wait(TIMEOUT)
            first.server.kill()
        with receiving(tmp_path, tmp_path / "runs") as second:
            for run, identifier in acknowledged.items():
                (decision,) = second.decisions(identifier)
                assert (decision["run"], decision["outcome"]) == (run, "requested")
            wait_for(
                lambda: not second.rows("SELECT 1 FROM deliveries WHERE handled_at IS NULL"),
                "what was recorded but not acknowledged",
            )
            claimed = {row["id"] for row in second.rows("SELECT id FROM requests")}
        open_now = {asked.id for control in controls if (asked := control.open_request("recover"))}
        assert claimed == open_now
        assert len(open_now) >= len(acknowledged)

    def test_the_backup_interval_holds_over_a_restart(self, tmp_path: Path) -> None:
        control = register(tmp_path / "runs")
        with receiving(tmp_path, tmp_path / "runs") as first:
            (decision,) = first.decisions(first.deliver(CHECKPOINT))
            assert decision["outcome"] == "requested"
            asked = control.open_request("checkpoint")
            assert asked is not None
            control.publish(status(last_backup_at=time.time()))
            control.answer(answer_to(asked))
        with receiving(tmp_path, tmp_path / "runs") as second:
            (decision,) = second.decisions(second.deliver(CHECKPOINT))
            assert decision["outcome"] == "limited"
            # The answer that came while nobody listened is in the same database.
            wait_for(
                lambda: second.rows("SELECT 1 FROM requests WHERE result = 'done'"), "the answer"
            )
        assert open_ids(control) == []

    def test_two_receivers_over_one_runs_folder_make_one_request(self, tmp_path: Path) -> None:
        runs = tmp_path / "runs"
        control = register(runs)
        with (
            receiving(tmp_path, runs, name="left") as left,
            receiving(tmp_path, runs, name="right") as right,
        ):
            pair = (left, right)
            with ThreadPoolExecutor(2) as pool:
                identifiers = list(pool.map(lambda one: one.deliver(alert()), pair))
            outcomes = [
                one.decisions(identifier)[0]["outcome"]
                for one, identifier in zip(pair, identifiers, strict=True)
            ]
        assert sorted(outcomes) == ["open", "requested"]
        assert open_ids(control) == ["recover.json"]
        asked = control.open_request("recover")
        assert asked is not None
        assert asked.run == RUN
