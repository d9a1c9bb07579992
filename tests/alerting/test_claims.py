"""Two receivers with a folder in common: each message and escalation once, wherever one dies."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import alerting.claims
from alerting.claims import Claim, Claims
from alerting.files import write_atomically
from alerting.settings import DEFAULT_REQUEST_DEADLINE_SECONDS, DEFAULT_WATCHDOG_SECONDS
from deploy.demo.servers import REPOSITORY, wait_for
from tests.alerting.bots import Bot, FeishuBot
from tests.alerting.deliveries import alert, register, status, text
from tests.alerting.faulty import CLAIM_DEATHS, RETRIED_SECONDS
from tests.alerting.test_control import answer_to
from tests.alerting.test_escalation import writes_down
from tests.alerting.test_faults import FAULTY, is_about, wait_for_death, wait_for_request
from tests.alerting.test_messages import receiving, tell
from tests.alerting.test_receiver import Receiver
from tests.alerting.test_watchdog import AWAY, BACK, WATCHDOG
from tests.alerting.test_watchdog import post as post_watchdog

AT = 1_700_000_000.0
ONCE = 3240.0
"""The part of the repeat interval within which copies are one message."""

SENDER = """
import sys, time
from pathlib import Path
import alerting.claims
from alerting.claims import Claims

shared, go, out = map(Path, sys.argv[1:4])
now = 0.0
claims = Claims(shared, lambda: now)
left = {f"message {number}" for number in range(20)}
if shared.exists():
    # What a dead one was sending was seen long ago; of the living none is ever waited for too long.
    for key in left:
        assert not claims.take(key, 1_700_000_000.0, 0.0).mine
    now = alerting.claims.PATIENCE_SECONDS
print("ready", flush=True)
while not go.exists():
    time.sleep(0.001)
while left:
    for key in sorted(left):
        claim = claims.take(key, 1_700_000_000.0, 0.0)
        if claim.mine:
            with out.open("a") as file:
                file.write(f"{key}\\n")
            claims.finish(claim, sent=True)
        if claim.mine or claim.sent:
            left.remove(key)
"""


@dataclass
class Clock:
    """Seconds that pass when a test says so."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    return tmp_path / "shared"


def mine(claims: Claims, key: str = "key", at: float = AT) -> Claim:
    claim = claims.take(key, at, at - ONCE)
    assert claim is not None
    assert claim.mine
    return claim


def others(claims: Claims, key: str = "key", at: float = AT) -> Claim:
    claim = claims.take(key, at, at - ONCE)
    assert claim is not None
    assert not claim.mine
    return claim


class TestClaims:
    def test_the_first_has_it_and_the_other_hears_that_it_was_sent(self, shared: Path) -> None:
        left, right = Claims(shared), Claims(shared)
        claim = mine(left)
        assert others(right).sent is None
        left.finish(claim, sent=True)
        assert others(right).sent
        assert others(right).owner == claim.owner
        # Its own copy, after a crash before it had recorded the sending.
        assert others(left).sent
        mine(right, "another key")

    def test_what_was_not_taken_is_anybodys(self, shared: Path) -> None:
        left, right = Claims(shared), Claims(shared)
        for first, second in ((left, right), (right, left)):
            claim = mine(first)
            assert others(second).sent is None
            first.finish(claim, sent=False)
        right.finish(mine(right), sent=True)
        assert others(left).sent

    def test_a_dead_ones_is_taken_over_after_a_while_and_not_before(self, shared: Path) -> None:
        clock = Clock()
        mine(Claims(shared))
        left, right = Claims(shared, clock), Claims(shared, clock)
        assert others(left).sent is None
        clock.now = alerting.claims.PATIENCE_SECONDS - 1
        assert others(left).sent is None
        assert others(right).sent is None  # which has only begun to wait
        clock.now += 1
        claim = mine(left)
        # A new claim, which is waited for anew.
        clock.now += alerting.claims.PATIENCE_SECONDS - 1
        assert others(right).sent is None
        left.finish(claim, sent=True)
        assert others(right).sent

    def test_the_reminder_is_another_message(self, shared: Path) -> None:
        left, right = Claims(shared), Claims(shared)
        left.finish(mine(left), sent=True)
        assert others(right, at=AT + 5).sent
        # The other clock may be behind.
        assert others(right, at=AT - 50).sent
        right.finish(mine(right, at=AT + 3600), sent=True)
        assert others(left, at=AT + 3601).sent
        # Who was away at the first one does not send it now.
        assert others(right, at=AT + 1).sent

    def test_of_processes_at_once_exactly_one_sends_each(
        self, tmp_path: Path, shared: Path
    ) -> None:
        assert self.race(tmp_path, shared) == [1] * 20

    def test_of_processes_that_want_a_dead_ones_place_exactly_one_gets_it(
        self, tmp_path: Path, shared: Path
    ) -> None:
        dead = Claims(shared)
        for number in range(20):
            mine(dead, f"message {number}")
        assert self.race(tmp_path, shared) == [1] * 20

    def race(self, folder: Path, shared: Path) -> list[int]:
        """How often each message was sent."""
        go, out = folder / "go", folder / "sent"
        argv = [sys.executable, "-c", SENDER, shared, go, out]
        processes = [
            subprocess.Popen(argv, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
            for _ in range(4)
        ]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        go.touch()
        for process in processes:
            assert process.wait(60) == 0
            assert process.stdout is not None
            process.stdout.close()
        sent = out.read_text().splitlines()
        return [sent.count(f"message {number}") for number in range(20)]

    def test_a_mangled_claim_is_waited_for_and_taken_over(self, shared: Path) -> None:
        clock = Clock()
        claims = Claims(shared, clock)
        path = mine(Claims(shared)).path
        path.write_text("{")
        assert others(claims).sent is None
        clock.now += alerting.claims.PATIENCE_SECONDS
        assert mine(claims).path.name == "2"

    def test_old_claims_are_removed_and_new_ones_stay(self, shared: Path) -> None:
        claims = Claims(shared)
        old, new = (mine(claims, key) for key in ("old", "new"))
        for claim in (old, new):
            claims.finish(claim, sent=True)
        os.utime(old.path.parent, (0, 0))
        claims.sweep(alerting.claims.KEEP_SECONDS)
        assert [path.name for path in shared.iterdir()] == [new.path.parent.name]
        assert others(claims, "new").sent
        mine(claims, "old")


class TestAway:
    def test_there_is_no_claim_and_it_is_said_once(
        self, shared: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        claims = Claims(shared)
        shared.touch()
        for _ in range(3):
            assert claims.take("key", AT, AT - ONCE) is None
        assert caplog.text.count("cannot be used") == 1
        shared.unlink()
        claims.finish(mine(claims), sent=True)
        assert caplog.text.count("can be used again") == 1

    def test_below_an_empty_mount_point_nothing_is_made(self, tmp_path: Path) -> None:
        assert Claims(tmp_path / "runs" / "shared").take("key", AT, AT - ONCE) is None
        assert list(tmp_path.iterdir()) == []

    def test_a_folder_that_hangs_is_away_until_it_answers(
        self, shared: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Who opens a pipe that nobody writes to hangs as over a dead mount."""
        claims = Claims(shared)
        path = mine(Claims(shared)).path
        path.unlink()
        os.mkfifo(path)
        monkeypatch.setattr(alerting.claims, "LIMIT_SECONDS", 0.2)
        begun = time.monotonic()
        assert claims.take("key", AT, AT - ONCE) is None
        monkeypatch.setattr(alerting.claims, "LIMIT_SECONDS", 30.0)
        # The next message does not wait at all, though its own claim would be free.
        assert claims.take("another key", AT, AT - ONCE) is None
        assert time.monotonic() - begun < 30
        path.open("w").close()
        claim = wait_for(lambda: claims.take("another key", AT, AT - ONCE), "the folder again")
        assert claim is not None
        assert claim.mine


@contextlib.contextmanager
def two(
    folder: Path, keys: dict[str, Any] | None = None, *, left: Bot, right: Bot, fault: str = ""
) -> Iterator[tuple[Receiver, Receiver]]:
    """Two receivers over one runs folder, which share; the left one may have a fault.

    Both go by a clock that `later` sets. Where the left one dies, it is soon not waited for.
    """
    runs = folder / "runs"
    runs.mkdir(exist_ok=True)
    keys = {"shared": str(runs / ".act-messages")} | (keys or {})
    offset = folder / "offset"
    if not offset.exists():
        offset.write_text("0")
    sound = (FAULTY, f"{'impatient' if fault else 'attentive'}+clock={offset}")
    with contextlib.ExitStack() as opened:
        pair = []
        for name, bot in (("left", left), ("right", right)):
            (folder / name).mkdir(exist_ok=True)
            module = (FAULTY, fault) if name == "left" and fault else sound
            one = receiving(folder / name, keys=keys, module=module, runs=runs, feishu=bot)
            pair.append(opened.enter_context(one))
        yield pair[0], pair[1]


def later(folder: Path, seconds: float) -> None:
    """So much time has passed for the receivers in `folder`."""
    offset = folder / "offset"
    # Whole at any moment, since they read it all the time.
    write_atomically(offset, str(float(offset.read_text()) + seconds), durable=False)


def results(receiver: Receiver) -> list[str | None]:
    return [r["result"] for r in receiver.rows("SELECT result FROM sendings ORDER BY message_id")]


def wait_until_ended(receiver: Receiver, count: int) -> list[str | None]:
    """Until it has nothing left to send, of so many messages; what became of them."""
    wait_for(
        lambda: len(results(receiver)) == count and None not in results(receiver),
        f"{count} messages to end",
    )
    return results(receiver)


class TestTwo:
    def test_what_both_hear_is_read_once(self, tmp_path: Path) -> None:
        with FeishuBot().serving() as bot, two(tmp_path, left=bot, right=bot) as pair:
            for run in ("run-a.", "run-b."):
                for receiver in pair:
                    tell(receiver, run)
            left, right = (wait_until_ended(receiver, 2) for receiver in pair)
            assert sorted(zip(left, right, strict=True)) in (
                [("other", "sent"), ("other", "sent")],
                [("other", "sent"), ("sent", "other")],
                [("sent", "other"), ("sent", "other")],
            )
            counted = [
                receiver.metric("act_notifications_total", target="feishu", result=result)
                for receiver in pair
                for result in ("sent", "other")
            ]
            assert sum(value or 0 for value in counted) == 4
        assert sorted(bot.texts().count(seen) for seen in bot.texts()) == [1, 1]

    def test_one_whose_bot_does_not_answer_leaves_it_to_the_other(self, tmp_path: Path) -> None:
        refusing: list[Any] = [(503, {}, b"")] * 20
        with (
            FeishuBot(answers=refusing).serving() as cut,
            FeishuBot().serving() as bot,
            two(tmp_path, left=cut, right=bot) as (left, right),
        ):
            tell(left)
            wait_for(lambda: cut.posts, "an attempt in vain")
            tell(right)
            assert wait_until_ended(right, 1) == ["sent"]
            later(tmp_path, RETRIED_SECONDS)
            assert wait_until_ended(left, 1) == ["other"]
            assert len(cut.posts) == 1

    def test_the_folder_away_both_send(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        keys = {"shared": str(tmp_path / "file")}
        with FeishuBot().serving() as bot, two(tmp_path, keys, left=bot, right=bot) as pair:
            for receiver in pair:
                tell(receiver)
                assert wait_until_ended(receiver, 1) == ["sent"]
        assert len(bot.taken) == 2

    @pytest.mark.parametrize("step", CLAIM_DEATHS)
    def test_wherever_one_dies_the_other_tells(self, tmp_path: Path, step: str) -> None:
        with FeishuBot().serving() as bot:
            with two(tmp_path, left=bot, right=bot, fault=step) as (left, right):
                tell(left)
                wait_for_death(left)
                tell(right)
                told = wait_until_ended(right, 1)
            # Back again it finds that it was to send, and in the folder who did.
            with two(tmp_path, left=bot, right=bot) as (left, _):
                assert wait_until_ended(left, 1) == ["other"]
        # At least once: only what was sent and could not be said any more is sent again.
        assert told == ["other" if step == "after-the-claims-end" else "sent"]
        assert len(bot.taken) == (2 if step == "before-the-claims-end" else 1)


class TestRequests:
    @pytest.mark.parametrize("dies", [False, True])
    def test_the_outcome_is_told_once_also_where_who_asked_has_died(
        self, tmp_path: Path, dies: bool
    ) -> None:
        control = register(tmp_path / "runs")
        with FeishuBot().serving() as bot, two(tmp_path, left=bot, right=bot) as (left, right):
            for receiver in (left, right):
                receiver.decisions(receiver.deliver(alert()))
            asked = wait_for_request(control)
            (row,) = right.rows("SELECT id, found FROM requests")
            assert (row["id"], row["found"]) == (asked.id, 1)
            # Alertmanager's repeat finds it again.
            right.decisions(right.deliver(alert()))
            if dies:
                left.server.kill()
            control.publish(status(generation=1, rollbacks_left=2))
            control.answer(answer_to(asked))
            assert wait_until_ended(right, 1) in (["sent"], ["other"])
            if not dies:
                wait_until_ended(left, 1)
            labels = {"action": "recover", "result": "done"}
            assert right.metric("act_recovery_answers_total", **labels) == 0
            (row,) = right.rows("SELECT result, new_generation FROM requests")
            assert (row["result"], row["new_generation"]) == ("done", answer_to(asked).generation)
            if dies:
                # Repaired two hours later, it hears what became of its request, and who told it.
                (tmp_path / "repaired").write_text("7200")
                module = (FAULTY, f"clock={tmp_path / 'repaired'}")
                keys = {"shared": str(tmp_path / "runs" / ".act-messages")}
                folder = tmp_path / "left"
                repaired = receiving(folder, keys=keys, module=module, runs=left.runs, feishu=bot)
                with repaired as again:
                    assert wait_until_ended(again, 1) == ["other"]
        assert is_about(bot, "run gpt was rolled back") == len(bot.taken) == 1
        assert "Rollbacks left: 2" in bot.texts()[0]

    @pytest.mark.parametrize("dies", [False, True])
    def test_one_nobody_takes_up_is_told_and_escalated_once(
        self, tmp_path: Path, dies: bool
    ) -> None:
        escalated = tmp_path / "escalated"
        keys = {"escalate": writes_down(escalated)}
        control = register(tmp_path / "runs")
        with FeishuBot().serving() as bot, two(tmp_path, keys, left=bot, right=bot) as pair:
            for receiver in pair:
                receiver.decisions(receiver.deliver(alert()))
            asked = wait_for_request(control)
            if dies:
                pair[0].server.kill()
            later(tmp_path, DEFAULT_REQUEST_DEADLINE_SECONDS)
            for receiver in pair[dies:]:
                wait_until_ended(receiver, 1)
                wait_for(
                    lambda r=receiver: r.rows("SELECT 1 FROM requests WHERE escalation != ''"),
                    "the end of the escalation",
                )
            (path,) = escalated.iterdir()
            assert json.loads(path.read_text())[1]["ACT_REQUEST"] == asked.id
        assert len(bot.taken) == 1

    def test_with_the_folder_away_who_asked_escalates(self, tmp_path: Path) -> None:
        escalated = tmp_path / "escalated"
        (tmp_path / "file").touch()
        keys = {
            "shared": str(tmp_path / "file"),
            "escalate": writes_down(escalated),
        }
        register(tmp_path / "runs")
        with FeishuBot().serving() as bot, two(tmp_path, keys, left=bot, right=bot) as pair:
            for receiver in pair:
                receiver.decisions(receiver.deliver(alert()))
            later(tmp_path, DEFAULT_REQUEST_DEADLINE_SECONDS)
            for receiver in pair:
                wait_until_ended(receiver, 1)
            wait_for(
                lambda: pair[0].rows("SELECT 1 FROM requests WHERE escalation != ''"),
                "the end of the escalation",
            )
            assert pair[1].rows("SELECT escalated_at FROM requests") == [{"escalated_at": None}]
            assert len(list(escalated.iterdir())) == 1

    def test_what_is_only_said_is_said_once(self, tmp_path: Path) -> None:
        control = register(tmp_path / "runs")
        keys = {"mode": "notify-only"}
        with FeishuBot().serving() as bot, two(tmp_path, keys, left=bot, right=bot) as pair:
            for receiver in pair:
                (decision,) = receiver.decisions(receiver.deliver(alert()))
                assert decision["outcome"] == "notify-only"
            for receiver in pair:
                wait_until_ended(receiver, 1)
        assert len(bot.taken) == 1
        assert control.open_request("recover") is None


class TestWatchdog:
    def miss(self, folder: Path, *receivers: Receiver) -> None:
        """No watchdog for so long, once the last one was seen to come."""
        for receiver in receivers:
            wait_for(
                lambda r=receiver: (
                    (age := r.metric("act_watchdog_age_seconds")) is not None
                    and age < DEFAULT_WATCHDOG_SECONDS
                ),
                "the watchdog's age",
            )
        later(folder, DEFAULT_WATCHDOG_SECONDS)

    def test_each_absence_and_each_return_is_told_once(self, tmp_path: Path) -> None:
        with FeishuBot().serving() as bot, two(tmp_path, left=bot, right=bot) as pair:
            for receiver in pair:
                assert post_watchdog(receiver, text(WATCHDOG)).ok
            for absence in (1, 2):
                self.miss(tmp_path, *pair)
                for receiver in pair:
                    wait_until_ended(receiver, 2 * absence - 1)
                assert (is_about(bot, AWAY), is_about(bot, BACK)) == (absence, absence - 1)
                for receiver in pair:
                    assert post_watchdog(receiver, text(WATCHDOG)).ok
                for receiver in pair:
                    wait_until_ended(receiver, 2 * absence)
                assert (is_about(bot, AWAY), is_about(bot, BACK)) == (absence, absence)

    def test_what_only_one_misses_is_told(self, tmp_path: Path) -> None:
        """Who was told by one that has died since is told of the next absence all the same."""
        with FeishuBot().serving() as bot, two(tmp_path, left=bot, right=bot) as (left, right):
            assert post_watchdog(left, text(WATCHDOG)).ok
            self.miss(tmp_path, left)
            assert wait_until_ended(left, 1) == ["sent"]
            left.server.kill()
            assert post_watchdog(right, text(WATCHDOG)).ok
            self.miss(tmp_path, right)
            assert wait_until_ended(right, 1) == ["sent"]
        assert is_about(bot, AWAY) == 2
