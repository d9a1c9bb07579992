"""The watchdog that stays away: told once by the receiver itself, and once when it is back."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml
from prometheus_client import CollectorRegistry

from alerting.message import of_watchdog
from alerting.metrics import Metrics
from alerting.store import Store
from alerting.watchdog import DeadMansSwitch
from deploy.demo.servers import binary, free_port, running, wait_for
from tests.alerting.bots import FeishuBot
from tests.alerting.deliveries import alert, text
from tests.alerting.test_alertmanager import CONFIG, shipped_routes
from tests.alerting.test_alertmanager import alert as shipped
from tests.alerting.test_messages import receiving, wait_for_messages
from tests.alerting.test_receiver import TIMEOUT, TOKEN, Receiver
from tests.alerting.test_store import rows
from tests.alerting.test_worker import Clock

WATCHDOG = alert("ActWatchdog", run=None, action=None, severity="info")
AWAY = "alerts do not get through: no watchdog for"
BACK = "alerts get through again"


@dataclass
class Desk:
    """The switch over a database of its own, at times that the test says."""

    folder: Path
    targets: tuple[str, ...] = ("oncall",)
    clock: Clock = field(default_factory=Clock)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    @contextlib.contextmanager
    def open(self) -> Iterator[tuple[Store, DeadMansSwitch]]:
        store = Store(self.folder / "receiver.sqlite", self.targets, 3600)
        metrics = Metrics(CollectorRegistry())
        self.registry = metrics.registry
        try:
            yield store, DeadMansSwitch(store.beats, 300, metrics, self.clock)
        finally:
            store.close()

    def told(self) -> list[bool]:
        """Of each message, whether it said that the watchdog is back."""
        found = rows(self.folder / "receiver.sqlite", "SELECT content FROM messages ORDER BY id")
        return [json.loads(row["content"])["back"] for row in found]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


class TestCounting:
    def test_before_the_first_nothing_is_missed(self, desk: Desk) -> None:
        with desk.open() as (_, switch):
            for _ in range(3):
                switch.look()
                desk.clock.now += 1e6
        assert desk.told() == []

    def test_away_and_back_are_one_message_each(self, desk: Desk) -> None:
        with desk.open() as (store, switch):
            for _ in range(2):
                store.beats.add(desk.clock()).result(10)
                switch.look()
                desk.clock.now += 299
                switch.look()
            assert desk.told() == []
            desk.clock.now += 1
            for _ in range(5):
                switch.look()
                desk.clock.now += 5000
            assert desk.told() == [False]
            for _ in range(2):
                store.beats.add(desk.clock()).result(10)
                switch.look()
            assert desk.told() == [False, True]
            desk.clock.now += 301
            switch.look()
            assert desk.told() == [False, True, False]

    def test_after_a_start_it_has_as_long_again(self, desk: Desk) -> None:
        """A receiver that was down has heard nothing, which says nothing of Alertmanager."""
        with desk.open() as (store, switch):
            store.beats.add(desk.clock()).result(10)
            switch.look()
        desk.clock.now += 5000
        with desk.open() as (_, switch):
            switch.look()
            desk.clock.now += 299
            switch.look()
            assert desk.told() == []
            desk.clock.now += 1
            switch.look()
            assert desk.told() == [False]

    def test_what_was_told_is_not_told_again_after_a_start(self, desk: Desk) -> None:
        for _ in range(2):
            with desk.open() as (store, switch):
                if not store.beats.last():
                    store.beats.add(desk.clock()).result(10)
                for _ in range(3):
                    switch.look()
                    desk.clock.now += 301
        assert desk.told() == [False]
        with desk.open() as (store, _):
            store.beats.add(desk.clock()).result(10)
        assert desk.told() == [False, True]

    def test_a_clock_that_was_set_back_raises_no_alarm_and_hides_none_for_long(
        self, desk: Desk
    ) -> None:
        with desk.open() as (store, switch):
            store.beats.add(desk.clock()).result(10)
            switch.look()
            desk.clock.now -= 86_400
            switch.look()
            desk.clock.now += 299
            switch.look()
            assert desk.told() == []
            desk.clock.now += 1
            switch.look()
            assert desk.told() == [False]

    def test_where_nobody_is_told_it_is_recorded_all_the_same(self, tmp_path: Path) -> None:
        desk = Desk(tmp_path, targets=())
        with desk.open() as (store, switch):
            store.beats.add(desk.clock()).result(10)
            switch.look()
            desk.clock.now += 300
            switch.look()
            beat = store.beats.last()
        assert desk.told() == []
        assert beat is not None
        assert beat.missed_at == desk.clock.now

    def test_its_age_is_a_metric(self, desk: Desk) -> None:
        with desk.open() as (store, switch):
            assert str(desk.registry.get_sample_value("act_watchdog_age_seconds")) == "nan"
            store.beats.add(desk.clock()).result(10)
            desk.clock.now += 42
            switch.look()
            assert desk.registry.get_sample_value("act_watchdog_age_seconds") == 42


class TestWords:
    def test_in_both_languages(self) -> None:
        assert of_watchdog("en", 301.4, back=False).title == f"{AWAY} 301 s"
        assert "301 秒" in of_watchdog("zh", 301.4, back=False).title
        assert of_watchdog("en", 301.4, back=True).title.startswith(BACK)
        assert "恢复" in of_watchdog("zh", 301.4, back=True).title


def post(receiver: Receiver, body: str | bytes, token: str = TOKEN) -> requests.Response:
    headers = {"Authorization": f"Bearer {token}"}
    return requests.post(
        f"{receiver.address}/watchdog", data=body, headers=headers, timeout=TIMEOUT
    )


class TestPost:
    def test_the_same_token_and_bounds_as_for_alerts(self, tmp_path: Path) -> None:
        with receiving(tmp_path) as receiver:
            for body, token, code in (
                (text(WATCHDOG), f"{TOKEN}x", 401),
                (b"x" * 2_000_000, TOKEN, 413),
                (b"{", TOKEN, 400),
                (b"{}", TOKEN, 422),
                # Another alert, or one that is over, does not prove that the watchdog comes.
                (text(alert()), TOKEN, 422),
                (text(alert("ActWatchdog", status="resolved")), TOKEN, 422),
            ):
                assert post(receiver, body, token).status_code == code
            assert receiver.rows("SELECT * FROM watchdog") == []
            assert post(receiver, text(WATCHDOG)).json() == {"watchdog": 1}
            assert post(receiver, text(WATCHDOG)).json() == {"watchdog": 2}
            assert receiver.rows("SELECT * FROM deliveries") == []

    def test_what_cannot_be_recorded_is_answered_503(self, tmp_path: Path) -> None:
        with receiving(tmp_path) as receiver:
            lock = sqlite3.connect(receiver.database, isolation_level=None)
            try:
                lock.execute("BEGIN IMMEDIATE")
                assert post(receiver, text(WATCHDOG)).status_code == 503
                lock.execute("ROLLBACK")
            finally:
                lock.close()


class TestAlertmanager:
    def test_ended_and_started_again(self, tmp_path: Path) -> None:
        """The shipped route, a hundred times as fast, through a real Alertmanager."""
        seconds = 6
        with (
            FeishuBot().serving() as bot,
            receiving(tmp_path, keys={"watchdog_seconds": seconds}, feishu=bot) as receiver,
        ):
            server, fire = self.alertmanager(tmp_path, receiver)
            with server() as alertmanager:
                alertmanager.wait_for(fire, "the alert to be taken")
                wait_for(
                    lambda: [
                        r for r in receiver.rows("SELECT came FROM watchdog") if r["came"] > 2
                    ],
                    "the watchdog again and again",
                )
                assert bot.posts == []
                age = receiver.metric("act_watchdog_age_seconds")
                assert age is not None
                assert age < seconds
            wait_for_messages(bot, 1)
            assert AWAY in bot.texts()[0]
            with server() as alertmanager:
                alertmanager.wait_for(fire, "the alert to be taken")
                wait_for_messages(bot, 2)
            assert BACK in bot.texts()[1]
            assert "ERROR" in receiver.server.log.read_text()

    def alertmanager(self, folder: Path, receiver: Receiver) -> Any:
        config = yaml.safe_load(CONFIG.read_text())
        parent, _ = shipped_routes(config)
        (route,) = (r for r in parent["routes"] if r["receiver"] == "watchdog")
        route["group_interval"], route["repeat_interval"] = "300ms", "450ms"
        config["global"] = {}
        receivers = {entry["name"]: entry for entry in config["receivers"]}
        (webhook,) = receivers["watchdog"]["webhook_configs"]
        webhook["url"] = f"{receiver.address}/watchdog"
        webhook["http_config"]["authorization"]["credentials_file"] = str(folder / "token")
        config["receivers"] = [
            receivers["watchdog"],
            *({"name": name} for name in receivers if name != "watchdog"),
        ]
        (folder / "alertmanager.yml").write_text(yaml.safe_dump(config))
        port = free_port()
        argv: list[str | Path] = [
            binary("alertmanager"),
            f"--config.file={folder / 'alertmanager.yml'}",
            f"--storage.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--cluster.listen-address=",
        ]

        def fire() -> bool:
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/api/v2/alerts",
                data=json.dumps([shipped("ActWatchdog")]).encode(),
                headers={"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=10) as answer:
                return bool(answer.status == 200)

        return lambda: running("alertmanager", argv, folder), fire
