"""The receiver's benchmark counts what it says it counts; its figures are its own matter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.alerting.deliveries import alert, register
from tests.alerting.test_receiver import receiving
from tests.benchmarks.receiver import (
    RATE,
    measure_accepted,
    measure_acknowledgement,
    measure_request,
    require,
)


def test_each_incident_is_timed_once(tmp_path: Path) -> None:
    with receiving(tmp_path, tmp_path / "runs") as receiver:
        took = measure_request(receiver, 3)
        results = [row["result"] for row in receiver.rows("SELECT result FROM requests")]
    assert len(took) == 3
    assert results == ["done"] * 3


def test_each_notification_is_timed_from_when_it_is_due(tmp_path: Path) -> None:
    with receiving(tmp_path, tmp_path / "runs") as receiver:
        register(receiver.runs)
        took = measure_acknowledgement(receiver, 0.4)
        (row,) = receiver.rows("SELECT count(*) AS n FROM deliveries")
    assert len(took) == row["n"] == RATE * 0.4
    assert min(took) > 0


def test_what_was_acknowledged_is_in_the_database(tmp_path: Path) -> None:
    with receiving(tmp_path, tmp_path / "runs") as receiver:
        (rate,) = measure_accepted(receiver, 1, 0.3)
        assert rate > 0
        (row,) = receiver.rows("SELECT count(*) AS n FROM deliveries")
        receiver.deliver(alert())
        with pytest.raises(SystemExit, match=f"the database has {row['n'] + 1}"):
            require(row["n"], receiver, "SELECT count(*) FROM deliveries", "lost")
