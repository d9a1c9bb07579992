"""The receiver's database: durable, batched, readable from outside, and never somebody else's."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from alerting.control import Answer, Request
from alerting.exceptions import ConfigError
from alerting.policy import Decision
from alerting.store import Intent, Store, StoreError

REQUESTED = Decision(
    run="gpt",
    action="recover",
    alertname="ActRunaway",
    outcome="requested",
    reason="asked",
    generation=1,
    request_id="1-a",
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "receiver.sqlite"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    opened = Store(path)
    yield opened
    opened.close()


def rows(path: Path, statement: str) -> list[dict[str, Any]]:
    """What somebody sees who opens the file read-only, as the documentation says."""
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    connection.row_factory = sqlite3.Row
    try:
        return [dict(row) for row in connection.execute(statement)]
    finally:
        connection.close()


def intent(delivery_id: int, identifier: str = "1-a") -> Intent:
    return Intent(
        request=Request(
            id=identifier,
            run="gpt",
            generation=1,
            action="recover",
            alert="ActRunaway",
            created_at=100.5,
        ),
        delivery_id=delivery_id,
        control=Path("/runs/gpt/control"),
    )


class TestRecords:
    def test_a_delivery_is_seen_from_outside_once_its_future_has_ended(
        self, store: Store, path: Path
    ) -> None:
        identifier = store.add_delivery('{"a": "层"}', 1000.25).result(10)
        assert rows(path, "SELECT * FROM deliveries") == [
            {"id": identifier, "received_at": 1000.25, "handled_at": None, "payload": '{"a": "层"}'}
        ]

    def test_a_delivery_is_unhandled_until_it_is_finished(self, store: Store) -> None:
        first = store.add_delivery("{}", 1.0).result()
        second = store.add_delivery("{}", 2.0).result()
        waiting = store.next_unhandled()
        assert waiting is not None
        assert waiting.id == first
        store.finish_delivery(first, [], 3.0)
        waiting = store.next_unhandled()
        assert waiting is not None
        assert waiting.id == second
        assert store.next_unhandled(after=second) is None

    def test_a_request_from_intended_to_answered(self, store: Store, path: Path) -> None:
        delivery = store.add_delivery("{}", 1.0).result()
        store.intend(intent(delivery))
        assert store.intended(delivery, "gpt", "recover") == intent(delivery)
        assert store.unanswered() == []

        store.decide(delivery, REQUESTED, 2.0, intent(delivery))
        assert store.intended(delivery, "gpt", "recover") is None
        assert store.unanswered() == [intent(delivery)]
        assert store.decided(delivery) == {("gpt", "recover")}

        store.record_answer(
            Answer(
                id="1-a",
                action="recover",
                result="done",
                detail="Rolled back.",
                step=1300,
                onset=1290,
                checkpoint="emergency",
                resumed_from="step-1000",
                resumed_step=1000,
                generation=2,
                answered_at=3.0,
            )
        )
        assert store.unanswered() == []
        assert rows(path, "SELECT * FROM requests") == [
            {
                "id": "1-a",
                "run": "gpt",
                "generation": 1,
                "action": "recover",
                "alert": "ActRunaway",
                "delivery_id": delivery,
                "control": "/runs/gpt/control",
                "created_at": 100.5,
                "claimed_at": 2.0,
                "result": "done",
                "detail": "Rolled back.",
                "step": 1300,
                "onset": 1290,
                "checkpoint": "emergency",
                "resumed_from": "step-1000",
                "resumed_step": 1000,
                "new_generation": 2,
                "answered_at": 3.0,
                "overdue_at": None,
                "escalated_at": None,
                "escalation": None,
                "found": 0,
            }
        ]
        assert rows(path, "SELECT outcome, reason, request_id, generation, at FROM decisions") == [
            {
                "outcome": "requested",
                "reason": "asked",
                "request_id": "1-a",
                "generation": 1,
                "at": 2.0,
            }
        ]

    def test_an_intended_request_that_was_not_made_leaves_no_row(
        self, store: Store, path: Path
    ) -> None:
        delivery = store.add_delivery("{}", 1.0).result()
        store.intend(intent(delivery))
        is_open = Decision(
            run="gpt", action="recover", alertname="A", outcome="open", reason="another is open"
        )
        store.decide(delivery, is_open, 2.0, intent(delivery))
        assert rows(path, "SELECT * FROM requests") == []
        assert rows(path, "SELECT outcome FROM decisions") == [{"outcome": "open"}]

    def test_everything_is_there_after_reopening(self, path: Path) -> None:
        first = Store(path)
        delivery = first.add_delivery("{}", 1.0).result()
        first.intend(intent(delivery))
        first.close()
        second = Store(path)
        try:
            assert second.intended(delivery, "gpt", "recover") == intent(delivery)
        finally:
            second.close()

    def test_the_documented_columns_are_all_there_are(self, store: Store, path: Path) -> None:
        import alerting.store

        documentation = alerting.store.__doc__ or ""
        for table in ("deliveries", "decisions", "requests", "messages", "sendings"):
            for column in rows(path, f"PRAGMA table_info({table})"):
                assert column["name"] in documentation


class TestWriting:
    def test_two_hundred_writers_at_once_lose_nothing_and_share_commits(
        self, store: Store, path: Path
    ) -> None:
        start = threading.Barrier(200)
        identifiers: list[int] = []

        def write() -> None:
            start.wait()
            identifiers.append(store.add_delivery("{}", 1.0).result(30))

        threads = [threading.Thread(target=write) for _ in range(200)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(identifiers)) == 200
        assert rows(path, "SELECT count(*) AS n FROM deliveries") == [{"n": 200}]

    def test_one_bad_write_costs_the_others_nothing(self, store: Store, path: Path) -> None:
        good, bad, last = [store.add_delivery(text, 1.0) for text in ("a", "\ud800", "b")]
        with pytest.raises(UnicodeEncodeError):  # a lone surrogate has no UTF-8
            bad.result(10)
        assert good.result(10) != last.result(10)
        assert [row["payload"] for row in rows(path, "SELECT payload FROM deliveries")] == [
            "a",
            "b",
        ]

    def test_a_cancelled_write_does_not_stop_the_writer(self, store: Store) -> None:
        for _ in range(50):
            store.add_delivery("{}", 1.0).cancel()
        assert store.add_delivery("{}", 1.0).result(10) > 0

    def test_a_locked_database_is_an_error_and_later_works_again(
        self, store: Store, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store._database._writer.execute("PRAGMA busy_timeout = 100")
        other = sqlite3.connect(path, isolation_level=None)
        try:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreError, match="locked"):
                store.add_delivery("{}", 1.0).result(10)
            with pytest.raises(StoreError, match="locked"):
                store.check_writable().result(10)
            other.execute("ROLLBACK")
        finally:
            other.close()
        store.add_delivery("{}", 1.0).result(10)
        store.check_writable().result(10)

    def test_a_full_disk_is_an_error_and_leaves_nothing_half_written(
        self, store: Store, path: Path
    ) -> None:
        store.add_delivery("{}", 1.0).result()
        # SQLite's own limit gives the very error that a full disk gives.
        store._database._writer.execute("PRAGMA max_page_count = 1")
        with pytest.raises(StoreError, match="full"):
            store.add_delivery("x" * 100_000, 1.0).result(10)
        store._database._writer.execute("PRAGMA max_page_count = 1000000")
        store.add_delivery("{}", 1.0).result(10)
        assert rows(path, "SELECT count(*) AS n FROM deliveries") == [{"n": 2}]

    def test_after_closing_a_write_is_an_error_at_once(self, path: Path) -> None:
        store = Store(path)
        store.close()
        with pytest.raises(StoreError, match="closed"):
            store.add_delivery("{}", 1.0).result(0)
        store.close()

    def test_closing_commits_what_waits(self, path: Path) -> None:
        store = Store(path)
        futures = [store.add_delivery("{}", 1.0) for _ in range(100)]
        store.close()
        assert all(future.result(0) for future in futures)
        assert rows(path, "SELECT count(*) AS n FROM deliveries") == [{"n": 100}]

    def test_one_write_waits_for_one_commit(self, store: Store) -> None:
        """The design asks for an acknowledgement within 100 ms, and a commit is most of it."""
        said: list[str] = []
        store._database._writer.set_trace_callback(said.append)
        for number in range(1, 31):
            store.add_delivery("{}", 1.0).result()
            assert said.count("COMMIT") == number


class TestOpening:
    def test_something_else_is_named_and_left_alone(self, path: Path) -> None:
        path.write_bytes(b"# a text file that is long enough to be no empty database\n" * 20)
        content = path.read_bytes()
        with pytest.raises(ConfigError, match=r"receiver\.sqlite cannot be used.*not a database"):
            Store(path)
        assert path.read_bytes() == content

    def test_another_programs_database_is_left_alone(self, path: Path) -> None:
        other = sqlite3.connect(path)
        other.execute("CREATE TABLE deliveries (pizza TEXT)")
        other.commit()
        other.close()
        content = path.read_bytes()
        with pytest.raises(ConfigError, match="another program's database"):
            Store(path)
        assert path.read_bytes() == content

    def test_another_version_is_named(self, path: Path) -> None:
        Store(path).close()
        other = sqlite3.connect(path)
        other.execute("PRAGMA user_version = 99")
        other.close()
        with pytest.raises(ConfigError, match=r"schema version 99; .* uses 7"):
            Store(path)

    def test_a_damaged_file_is_named(self, path: Path) -> None:
        store = Store(path)
        for _ in range(200):
            store.add_delivery("x" * 1000, 1.0)
        store.close()
        with path.open("r+b") as file:
            file.seek(8192)
            file.write(b"\xff" * 40_000)
        with pytest.raises(ConfigError, match=r"receiver\.sqlite (is damaged|cannot be used)"):
            Store(path)

    def test_a_missing_folder_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"folder .*none does not exist"):
            Store(tmp_path / "none" / "receiver.sqlite")

    def test_a_folder_in_its_place_is_named(self, path: Path) -> None:
        path.mkdir()
        with pytest.raises(ConfigError, match=r"receiver\.sqlite"):
            Store(path)

    def test_a_second_receiver_on_the_same_file_is_refused(self, store: Store, path: Path) -> None:
        with pytest.raises(ConfigError, match="Another receiver uses"):
            Store(path)

    def test_a_failed_opening_holds_no_lock(self, path: Path) -> None:
        path.write_bytes(b"nonsense" * 200)
        with pytest.raises(ConfigError):
            Store(path)
        path.unlink()
        Store(path).close()
