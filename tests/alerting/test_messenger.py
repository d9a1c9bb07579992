"""From the outbox to people: everything recorded is sent, once where nothing breaks."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

import alerting.messenger
from alerting.control import Answer, Request
from alerting.exceptions import ConfigError
from alerting.messenger import Messenger
from alerting.metrics import Metrics
from alerting.notifiers import KINDS
from alerting.notifiers.bucket import TokenBucket
from alerting.outbox import News, news_of_answer, news_of_group
from alerting.payload import parse
from alerting.settings import Settings
from alerting.store import SCHEMAS, Store
from alerting.targets import Target
from deploy.demo.servers import wait_for
from tests.alerting.bots import Bot, Endpoint, FeishuBot
from tests.alerting.deliveries import alert, text
from tests.alerting.test_message import ANSWER, REQUEST
from tests.alerting.test_store import rows
from tests.alerting.test_worker import Clock


@dataclass
class Office:
    """An outbox with its messenger, and bots on loopback."""

    folder: Path
    bots: dict[str, Bot]
    clock: Clock = field(default_factory=Clock)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    @property
    def database(self) -> Path:
        return self.folder / "receiver.sqlite"

    @contextlib.contextmanager
    def working(self, messenger: bool = True) -> Iterator[Store]:
        targets = []
        for name, bot in self.bots.items():
            kind, secret = ("feishu", "SECabc") if isinstance(bot, FeishuBot) else ("webhook", None)
            notifier = KINDS[kind](bot.url, secret)
            notifier.bucket = TokenBucket(1000, 1e6)
            targets.append(Target(name=name, kind=kind, language="en", notifier=notifier))
        settings = Settings(
            host="127.0.0.1",
            port=0,
            runs=self.folder,
            database=self.database,
            token="t",
            alerts=frozenset({"ActRunaway"}),
            backup_interval_seconds=900,
            notify=tuple(targets),
        )
        store = Store(self.database, tuple(self.bots), 3600)
        metrics = Metrics(self.registry, self.bots)
        works = Messenger(settings, store.outbox, metrics, self.clock)
        if messenger:
            works.start()
        try:
            yield store
        finally:
            if messenger:
                works.stop()
            store.close()

    def sendings(self) -> list[dict[str, Any]]:
        return rows(self.database, "SELECT * FROM sendings ORDER BY message_id, target")

    def wait_until(self, result: str, count: int = 1) -> None:
        wait_for(
            lambda: sum(row["result"] == result for row in self.sendings()) == count,
            f"{count} sendings that are {result}",
        )

    def counted(self, target: str, result: str) -> float | None:
        labels = {"target": target, "result": result}
        return self.registry.get_sample_value("act_notifications_total", labels)


def group(*alerts: dict[str, Any], at: float, **fields: Any) -> News:
    content = text(*(alerts or (alert(),)), **fields)
    return news_of_group(parse(content), content, at)


def endpoint(**fields: Any) -> Endpoint:
    made = Endpoint(**fields)
    made.judge = lambda *_: {}  # type: ignore[method-assign]
    return made


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits between attempts that a test can wait for, on a clock that goes."""
    monkeypatch.setattr(alerting.messenger, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(alerting.messenger, "LONGEST_WAIT_SECONDS", 0.02)
    monkeypatch.setattr(alerting.messenger, "POLL_SECONDS", 0.02)


class TestOnce:
    """Which notifications are one message."""

    @pytest.fixture
    def office(self, tmp_path: Path) -> Office:
        return Office(tmp_path, {"oncall": endpoint(), "other": endpoint()})

    def ids(self, office: Office, *news: News) -> list[int]:
        with office.working(messenger=False) as store:
            return [store.outbox.add(one).result(10) for one in news]

    def test_the_copy_of_a_second_alertmanager(self, office: Office) -> None:
        first = alert(layer="h.1"), alert(layer="h.2")
        copy = group(*reversed(first), at=130.0, externalURL="http://another:9093")
        assert self.ids(office, group(*first, at=100.0), copy) == [1, 1]
        assert [row["target"] for row in office.sendings()] == ["oncall", "other"]

    def test_a_copy_that_was_written_first(self, office: Office) -> None:
        assert self.ids(office, group(at=100.2), group(at=100.0)) == [1, 1]

    def test_the_reminder_after_an_hour_is_another(self, office: Office) -> None:
        assert self.ids(office, group(at=0.0), group(at=3000.0), group(at=3600.0)) == [1, 1, 2]

    def test_a_clock_that_was_set_back_holds_nothing_back(self, office: Office) -> None:
        assert self.ids(office, group(at=9000.0), group(at=5000.0)) == [1, 2]

    @pytest.mark.parametrize(
        "other",
        [
            group(alert(status="resolved"), at=1.0),
            group(alert(), alert(layer="h.2"), at=1.0),
            group(alert() | {"startsAt": "2026-01-05T10:09:00Z"}, at=1.0),
            group(at=1.0, groupKey="{}:{another}"),
        ],
    )
    def test_what_is_something_else(self, office: Office, other: News) -> None:
        assert self.ids(office, group(at=0.0), other) == [1, 2]

    def test_many_at_once_are_one(self, office: Office) -> None:
        with office.working(messenger=False) as store:
            futures = [store.outbox.add(group(at=100.0)) for _ in range(200)]
            assert {future.result(10) for future in futures} == {1}

    def test_equal_refusals_are_one_and_each_rollback_is_told(self, office: Office) -> None:
        def refused(identifier: str) -> News:
            request = _replace(REQUEST, id=identifier)
            answer = _replace(ANSWER, id=identifier, result="refused", detail="all is well")
            return news_of_answer(request, answer, 100.0)

        done = [news_of_answer(_replace(REQUEST, id=i), ANSWER, 100.0) for i in ("1-c", "1-d")]
        assert self.ids(office, refused("1-a"), refused("1-b"), *done) == [1, 1, 2, 3]

    def test_backups_of_one_incident_are_one(self, office: Office) -> None:
        def made(identifier: str, generation: int = 0) -> News:
            request = _replace(REQUEST, id=identifier, action="checkpoint", generation=generation)
            return news_of_answer(request, _replace(ANSWER, action="checkpoint"), 100.0)

        assert self.ids(office, made("1-a"), made("1-b"), made("1-c", 1)) == [1, 1, 2]


class TestSending:
    def test_alerts_and_outcomes_reach_every_target_once(self, tmp_path: Path) -> None:
        with FeishuBot().serving() as feishu, endpoint().serving() as other:
            office = Office(tmp_path, {"feishu": feishu, "other": other})
            with office.working() as store:
                store.outbox.add(group(at=office.clock())).result(10)
                store.outbox.add(
                    news_of_answer(REQUEST, ANSWER, office.clock(), rollbacks_left=2)
                ).result(10)
                office.wait_until("sent", 4)
            assert len(feishu.taken) == len(other.taken) == 2
            assert other.taken[0]["title"] == "1 firing: run gpt"
            assert "rolled back from step 1300 to step 1000" in other.taken[1]["title"]
            assert "Rollbacks left: 2" in other.taken[1]["lines"]
            assert office.counted("feishu", "sent") == 2
            assert office.counted("feishu", "failed") == 0

    @pytest.mark.usefixtures("quick")
    def test_what_fails_for_a_while_is_sent_in_the_end(self, tmp_path: Path) -> None:
        answers: list[Any] = [(503, {}, b""), (200, {}, "cut"), (500, {}, b"")]
        with endpoint(answers=answers).serving() as bot:
            office = Office(tmp_path, {"oncall": bot}, clock=time.time)  # type: ignore[arg-type]
            with office.working() as store:
                store.outbox.add(group(at=time.time())).result(10)
                office.wait_until("sent")
            assert (len(bot.posts), len(bot.taken)) == (4, 1)
            assert office.counted("oncall", "retried") == 3
            (row,) = office.sendings()
            assert (row["attempts"], row["detail"]) == (4, "HTTP 200")

    @pytest.mark.usefixtures("quick")
    def test_what_fails_for_ever_is_given_up_and_counted(self, tmp_path: Path) -> None:
        with endpoint(answers=[(503, {}, b"")] * 50).serving() as bot:
            office = Office(tmp_path, {"oncall": bot}, clock=time.time)  # type: ignore[arg-type]
            with office.working() as store:
                store.outbox.add(group(at=time.time())).result(10)
                office.wait_until("failed")
            assert len(bot.posts) == alerting.messenger.MAX_ATTEMPTS
            assert office.counted("oncall", "failed") == 1
            assert "HTTP 503" in office.sendings()[0]["detail"]

    def test_what_cannot_succeed_is_given_up_at_once(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with FeishuBot(secret="SECother").serving() as bot:
            office = Office(tmp_path, {"oncall": bot})
            with office.working() as store:
                store.outbox.add(group(at=office.clock())).result(10)
                office.wait_until("failed")
            assert len(bot.posts) == 1
        assert "secret_file" in caplog.text
        assert any(record.levelno == logging.ERROR for record in caplog.records)

    def test_a_rate_limit_holds_every_message_back_for_as_long_as_it_says(
        self, tmp_path: Path
    ) -> None:
        limited = json.dumps({"code": 11232, "msg": "frequency limited"}).encode()
        with FeishuBot(answers=[(200, {}, limited)]).serving() as bot:
            office = Office(tmp_path, {"oncall": bot})
            with office.working() as store:
                store.outbox.add(group(at=office.clock())).result(10)
                wait_for(lambda: office.sendings()[0]["detail"], "the refusal to be recorded")
                assert office.sendings()[0]["next_at"] == office.clock() + 60
                store.outbox.add(group(at=office.clock(), groupKey="another")).result(10)
            assert len(bot.posts) == 1

    def test_a_target_that_hangs_delays_no_other(self, tmp_path: Path) -> None:
        with (
            endpoint(answers=[(200, {}, "hang")]).serving() as slow,
            endpoint().serving() as quick,
        ):
            office = Office(tmp_path, {"slow": slow, "quick": quick})
            with office.working() as store:
                for number in range(3):
                    store.outbox.add(group(at=office.clock(), groupKey=str(number))).result(10)
                office.wait_until("sent", 3)
                assert len(quick.taken) == 3
                assert slow.taken == []
                slow.closed.set()

    def test_taken_while_the_database_is_locked_it_is_not_sent_again(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with endpoint(answers=[(200, {}, "late")]).serving() as bot:
            office = Office(tmp_path, {"oncall": bot})
            with office.working() as store:
                store._database._writer.execute("PRAGMA busy_timeout = 50")
                store.outbox.add(group(at=office.clock())).result(10)
                wait_for(lambda: bot.posts, "the message")
                lock = sqlite3.connect(office.database, isolation_level=None)
                try:
                    lock.execute("BEGIN IMMEDIATE")
                    bot.closed.set()  # now it says yes
                    wait_for(lambda: caplog.text.count("tried again") >= 2, "two refused writes")
                    lock.execute("ROLLBACK")
                finally:
                    lock.close()
                office.wait_until("sent")
            assert len(bot.posts) == 1

    def test_what_a_newer_version_recorded_is_said_and_holds_nothing_up(
        self, tmp_path: Path
    ) -> None:
        with endpoint().serving() as bot:
            office = Office(tmp_path, {"oncall": bot})
            with office.working() as store:
                for kind in ("alerts", "outcome"):
                    odd = News(kind=kind, key=kind, content="{}", at=office.clock())  # type: ignore[arg-type]
                    store.outbox.add(odd).result(10)
                office.wait_until("sent", 2)
            assert bot.taken[0]["title"] == "An alert came that cannot be shown"

    def test_a_target_that_was_taken_out_is_given_up(self, tmp_path: Path) -> None:
        with endpoint().serving() as bot:
            with Office(tmp_path, {"old": endpoint()}).working(messenger=False) as store:
                store.outbox.add(group(at=1.0)).result(10)
            office = Office(tmp_path, {"new": bot})
            with office.working():
                office.wait_until("failed")
            assert "not configured any more" in office.sendings()[0]["detail"]

    def test_a_clock_that_was_set_back_delays_nothing_by_more_than_an_hour(
        self, tmp_path: Path
    ) -> None:
        with endpoint().serving() as bot:
            office = Office(tmp_path, {"oncall": bot})
            with office.working() as store:
                store.outbox.add(group(at=office.clock() + 86_400)).result(10)
                office.wait_until("sent")


class TestOlderFiles:
    def version_1(self, path: Path) -> None:
        """A database as the version before wrote it, with a delivery that is not handled."""
        connection = sqlite3.connect(path)
        connection.executescript(
            f"{SCHEMAS[0]} PRAGMA application_id = 0x61637477; PRAGMA user_version = 1;"
            "PRAGMA journal_mode = WAL;"
            "INSERT INTO deliveries (received_at, payload) VALUES (1.0, 'kept');"
        )
        connection.close()

    def test_version_1_is_opened_keeps_what_it_has_and_takes_messages(self, tmp_path: Path) -> None:
        path = tmp_path / "receiver.sqlite"
        self.version_1(path)
        for _ in range(2):  # the second time there is nothing to do
            store = Store(path, ("oncall",), 3600)
            delivery = store.next_unhandled()
            assert delivery is not None
            assert delivery.payload == "kept"
            assert store.outbox.add(group(at=1.0)).result(10) == 1
            store.close()
        assert rows(path, "PRAGMA user_version") == [{"user_version": len(SCHEMAS)}]

    def test_a_migration_that_fails_leaves_the_file_as_it_was(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "receiver.sqlite"
        self.version_1(path)
        broken = (SCHEMAS[0], SCHEMAS[1] + "CREATE TABLE deliveries (x);")
        monkeypatch.setattr("alerting.store.SCHEMAS", broken)
        with pytest.raises(ConfigError, match="cannot be used"):
            Store(path)
        assert rows(path, "PRAGMA user_version") == [{"user_version": 1}]
        assert rows(path, "SELECT name FROM sqlite_master WHERE name = 'messages'") == []


def _replace(record: Request | Answer, **fields: Any) -> Any:
    return dataclasses.replace(record, **fields)
