"""Messages to people through the real receiver, killed and locked, and from two Alertmanagers."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from alerting.control import ControlDirectory
from deploy.demo.servers import REPOSITORY, binary, free_port, running, wait_for
from tests.alerting.bots import KEY, SECRET, Bot, DingTalkBot, FeishuBot, WeComBot
from tests.alerting.deliveries import alert, payload, register, status, text
from tests.alerting.test_alertmanager import CONFIG, amtool, shipped_routes, uncommented
from tests.alerting.test_alertmanager import alert as shipped
from tests.alerting.test_control import answer_to
from tests.alerting.test_receiver import TIMEOUT, TOKEN, Receiver


@contextlib.contextmanager
def receiving(
    folder: Path,
    level: str = "INFO",
    keys: dict[str, Any] | None = None,
    *,
    module: tuple[str, ...] = ("alerting.cli",),
    port: int | None = None,
    runs: Path | None = None,
    **bots: Bot,
) -> Iterator[Receiver]:
    """A receiver that tells these bots, its database in `folder`.

    `keys` are more settings; `module` is started in place of the command, and may put a fault in.
    """

    def secret(name: str, content: str) -> str:
        (folder / name).touch(mode=0o600)
        (folder / name).write_text(content)
        return name

    entries: list[dict[str, str]] = []
    for kind, bot in bots.items():
        entries.append({"kind": kind, "url_file": secret(f"{kind}-url", bot.url)})
        if kind != "wecom":
            entries[-1]["secret_file"] = secret(f"{kind}-secret", SECRET)
    runs = runs or folder / "runs"
    runs.mkdir(exist_ok=True)
    port = port or free_port()
    config = {
        "listen": f"127.0.0.1:{port}",
        "runs": str(runs),
        "database": "receiver.sqlite",
        "token_file": secret("token", TOKEN),
        "notify": entries,
        **(keys or {}),
    }
    (folder / "receiver.yml").write_text(yaml.safe_dump(config))
    argv = [sys.executable, "-m", *module, "serve", "--config", folder / "receiver.yml"]
    environment = {"PYTHONPATH": str(REPOSITORY), "ACT_LOG_LEVEL": level}
    with running("receiver", argv, folder, env=environment) as server:
        address = f"http://127.0.0.1:{port}"
        server.wait_for(lambda: requests.get(f"{address}/readyz", timeout=TIMEOUT).ok, "readiness")
        yield Receiver(server, address, runs, folder / "receiver.sqlite")


def post(receiver: Receiver, body: str | bytes, token: str = TOKEN) -> requests.Response:
    headers = {"Authorization": f"Bearer {token}"}
    return requests.post(
        f"{receiver.address}/messages", data=body, headers=headers, timeout=TIMEOUT
    )


def tell(receiver: Receiver, run: str = "gpt") -> int:
    """Post a group about a run; the message's id, as soon as it is acknowledged."""
    response = post(receiver, text(alert(run=run), groupKey=run, groupLabels={"run": run}))
    assert response.status_code == 202, response.text
    identifier: int = response.json()["message"]
    return identifier


def wait_for_messages(bot: Bot, count: int) -> None:
    wait_for(lambda: len(bot.taken) >= count, f"{count} messages")


class TestWhatIsTaken:
    def test_each_target_gets_its_signed_message_and_it_is_counted(self, tmp_path: Path) -> None:
        with (
            FeishuBot().serving() as feishu,
            DingTalkBot().serving() as dingtalk,
            WeComBot().serving() as wecom,
            receiving(tmp_path, "DEBUG", feishu=feishu, dingtalk=dingtalk, wecom=wecom) as receiver,
        ):
            labels = {"target": "dingtalk", "result": "sent"}
            assert receiver.metric("act_notifications_total", **labels) == 0
            tell(receiver)
            for bot in (feishu, dingtalk, wecom):
                wait_for_messages(bot, 1)
                assert "1 firing: run gpt" in bot.texts()[0]
            wait_for(lambda: receiver.metric("act_notifications_total", **labels) == 1, "the count")
            # A word is not a secret, but the bots' keys are; DEBUG is the most that it can log.
            log = receiver.server.log.read_text()
            assert "sent: HTTP 200, code 0" in log
            for secret in (KEY, SECRET, TOKEN):
                assert secret not in log

    @pytest.mark.parametrize(
        ("body", "token", "code"),
        [
            (text(alert()), f"{TOKEN}x", 401),
            (b"x" * 2_000_000, TOKEN, 413),
            (b"{", TOKEN, 400),
            (b"{}", TOKEN, 422),
        ],
    )
    def test_the_same_bounds_as_for_alerts(
        self, tmp_path: Path, body: bytes, token: str, code: int
    ) -> None:
        with (
            FeishuBot().serving() as bot,
            receiving(tmp_path, feishu=bot) as receiver,
        ):
            assert post(receiver, body, token).status_code == code
            assert receiver.rows("SELECT * FROM messages") == []

    def test_where_nobody_is_told_alertmanager_hears_so(self, tmp_path: Path) -> None:
        with receiving(tmp_path) as receiver:
            response = post(receiver, text(alert()))
            assert response.status_code == 422
            assert "Nobody is listed" in response.json()["detail"]

    def test_copies_at_the_same_time_are_one_message(self, tmp_path: Path) -> None:
        with FeishuBot().serving() as bot, receiving(tmp_path, feishu=bot) as receiver:
            with ThreadPoolExecutor(10) as pool:
                assert set(pool.map(lambda _: tell(receiver), range(50))) == {1}
            tell(receiver, "the-next")
            wait_for_messages(bot, 2)
            assert [("run gpt" in seen) for seen in bot.texts()] == [True, False]

    def test_what_cannot_be_recorded_is_answered_503_and_taken_later(self, tmp_path: Path) -> None:
        with FeishuBot().serving() as bot, receiving(tmp_path, feishu=bot) as receiver:
            lock = sqlite3.connect(receiver.database, isolation_level=None)
            try:
                lock.execute("BEGIN IMMEDIATE")
                assert post(receiver, text(alert())).status_code == 503
                lock.execute("ROLLBACK")
            finally:
                lock.close()
            assert bot.posts == []
            tell(receiver)
            wait_for_messages(bot, 1)

    def test_a_thousand_alerts_are_one_message(self, tmp_path: Path) -> None:
        storm = payload(*(alert(layer=f"层.{n}") for n in range(1000)))
        with WeComBot().serving() as bot, receiving(tmp_path, wecom=bot) as receiver:
            assert post(receiver, json.dumps(storm, ensure_ascii=False).encode()).ok
            wait_for_messages(bot, 1)
            assert "more alerts are left out" in bot.texts()[0]


class TestOutcomes:
    def ask(self, receiver: Receiver) -> tuple[ControlDirectory, Any]:
        control = register(receiver.runs)
        receiver.decisions(receiver.deliver(alert()))
        asked = control.open_request("recover")
        assert asked is not None
        return control, asked

    def test_a_rollback_is_told_with_what_is_left(self, tmp_path: Path) -> None:
        with FeishuBot().serving() as bot, receiving(tmp_path, feishu=bot) as receiver:
            control, asked = self.ask(receiver)
            control.publish(status(generation=1, rollbacks_left=2))
            control.answer(answer_to(asked))
            wait_for_messages(bot, 1)
            for part in (
                "run gpt was rolled back from step 1300 to step 1000",
                "checkpoint step-1000",
                "Emergency checkpoint: step-1300-emergency",
                "Rollbacks left: 2",
            ):
                assert part in bot.texts()[0]

    def test_the_budget_of_another_generation_is_not_told(self, tmp_path: Path) -> None:
        with FeishuBot().serving() as bot, receiving(tmp_path, feishu=bot) as receiver:
            control, asked = self.ask(receiver)
            control.publish(status(generation=2, rollbacks_left=1))
            control.answer(answer_to(asked))
            wait_for_messages(bot, 1)
            assert "Rollbacks left" not in bot.texts()[0]

    def test_an_answer_while_the_receiver_was_dead_is_told_once(self, tmp_path: Path) -> None:
        with FeishuBot().serving() as bot:
            with receiving(tmp_path, feishu=bot) as first:
                control, asked = self.ask(first)
                first.server.kill()
            control.answer(answer_to(asked, result="failed", detail="No checkpoint is healthy."))
            for _ in range(2):
                with receiving(tmp_path, feishu=bot) as receiver:
                    wait_for(
                        lambda: receiver.rows("SELECT * FROM sendings WHERE result = 'sent'"),
                        "the sending",
                    )
            assert len(bot.posts) == 1
            assert "the rollback of run gpt failed" in bot.texts()[0]
            assert "No checkpoint is healthy." in bot.texts()[0]


class TestKilled:
    def test_directly_after_the_acknowledgement(self, tmp_path: Path) -> None:
        with FeishuBot().serving() as bot:
            with receiving(tmp_path, feishu=bot) as first:
                tell(first)
                first.server.kill()
            with receiving(tmp_path, feishu=bot) as second:
                wait_for_messages(bot, 1)
                # The copy of a second Alertmanager, sent while nobody listened.
                assert tell(second) == 1

    def test_while_it_was_being_sent_it_is_sent_again(self, tmp_path: Path) -> None:
        with FeishuBot(answers=[(200, {}, "hang")]).serving() as bot:
            with receiving(tmp_path, feishu=bot) as first:
                tell(first)
                wait_for(lambda: bot.posts, "the message to be under way")
                first.server.kill()
            with receiving(tmp_path, feishu=bot) as second:
                wait_for_messages(bot, 1)
                wait_for(
                    lambda: second.rows("SELECT 1 FROM sendings WHERE result = 'sent'"), "its end"
                )
            assert (len(bot.posts), len(bot.taken)) == (2, 1)

    def test_ended_in_order_while_a_bot_hangs(self, tmp_path: Path) -> None:
        with FeishuBot(answers=[(200, {}, "hang")]).serving() as bot:
            with receiving(tmp_path, feishu=bot) as first:
                tell(first)
                wait_for(lambda: bot.posts, "the message to be under way")
                assert first.server.process is not None
                first.server.process.terminate()
                assert first.server.process.wait(30) == 0
                log = first.server.log.read_text()
                assert log.rstrip().endswith("Ended.")
                assert "Traceback" not in log
            with receiving(tmp_path, feishu=bot):
                wait_for_messages(bot, 1)

    def test_between_two_attempts(self, tmp_path: Path) -> None:
        with FeishuBot(answers=[(503, {}, b"")]).serving() as bot:
            with receiving(tmp_path, feishu=bot) as first:
                tell(first)
                wait_for(lambda: first.rows("SELECT 1 FROM sendings WHERE detail != ''"), "a try")
                first.server.kill()
            with receiving(tmp_path, feishu=bot):
                wait_for_messages(bot, 1)

    def test_under_load_nothing_acknowledged_is_lost(self, tmp_path: Path) -> None:
        acknowledged: list[str] = []

        def send(receiver: Receiver, run: str) -> None:
            # Whatever has no answer was not acknowledged, and Alertmanager would send it again.
            with contextlib.suppress(requests.RequestException):
                tell(receiver, run)
                acknowledged.append(run)

        with FeishuBot().serving() as feishu:
            with receiving(tmp_path, feishu=feishu) as first, ThreadPoolExecutor(4) as pool:
                for number in range(20):
                    pool.submit(send, first, f"run-{number}.")
                wait_for(lambda: len(acknowledged) >= 5, "five acknowledgements")
                first.server.kill()
            with receiving(tmp_path, feishu=feishu):
                for run in acknowledged:
                    wait_for(
                        lambda run=run: any(f"run {run}" in seen for seen in feishu.texts()),
                        f"the message about {run}",
                        timeout=60,
                    )


class TestAlertmanager:
    """The part of alertmanager.yml that is a comment, uncommented, in two that are no cluster."""

    @pytest.fixture
    def uncommented(self, tmp_path: Path) -> Path:
        path = tmp_path / "alertmanager.yml"
        path.write_text(uncommented(CONFIG))
        return path

    def test_it_loads_and_goes_to_the_receiver_with_its_token(self, uncommented: Path) -> None:
        assert "SUCCESS" in amtool("check-config", uncommented)
        (people, trainer, *_) = yaml.safe_load(uncommented.read_text())["receivers"]
        (ours,) = people["webhook_configs"]
        assert ours["url"].endswith(":9464/messages")
        assert ours["http_config"] == trainer["webhook_configs"][0]["http_config"]

    def test_two_alertmanagers_give_one_message(self, tmp_path: Path, uncommented: Path) -> None:
        starts = datetime.now(UTC).isoformat()
        with (
            FeishuBot().serving() as bot,
            receiving(tmp_path, feishu=bot) as receiver,
            contextlib.ExitStack() as opened,
        ):
            config = yaml.safe_load(uncommented.read_text())
            config["global"] = {}
            config["receivers"][0] = {
                "name": "people",
                "webhook_configs": config["receivers"][0]["webhook_configs"],
            }
            (webhook,) = config["receivers"][0]["webhook_configs"]
            webhook["url"] = f"{receiver.address}/messages"
            authorization = webhook["http_config"]["authorization"]
            authorization["credentials_file"] = str(tmp_path / "token")
            parent, _ = shipped_routes(config)
            parent["group_wait"], parent["group_interval"] = "500ms", "1s"
            uncommented.write_text(yaml.safe_dump(config))

            def fire(url: str, **fields: Any) -> None:
                content = shipped("ActTrainerStalled", run="pair") | {"startsAt": starts} | fields
                request = urllib.request.Request(
                    f"{url}/api/v2/alerts",
                    data=json.dumps([content]).encode(),
                    headers={"Content-Type": "application/json"},
                )
                urllib.request.urlopen(request, timeout=10).close()

            urls = []
            for name in ("left", "right"):
                port = free_port()
                argv: list[str | Path] = [
                    binary("alertmanager"),
                    f"--config.file={uncommented}",
                    f"--storage.path={tmp_path / name}",
                    f"--web.listen-address=127.0.0.1:{port}",
                    "--cluster.listen-address=",
                ]
                server = opened.enter_context(running(name, argv, tmp_path))
                urls.append(f"http://127.0.0.1:{port}")
                server.wait_for(lambda: requests.get(f"{urls[-1]}/-/ready", timeout=30).ok, "ready")

            def delivered(count: int) -> bool:
                labels = {"code": "202"}
                return receiver.metric("act_webhook_deliveries_total", **labels) == count

            for url in urls:
                fire(url)
            wait_for(lambda: delivered(2), "both deliveries")
            wait_for_messages(bot, 1)
            for url in urls:
                fire(url, endsAt=datetime.now(UTC).isoformat())
            wait_for(lambda: delivered(4), "both ends")
            wait_for_messages(bot, 2)
            assert [row["kind"] for row in receiver.rows("SELECT kind FROM messages")] == [
                "alerts",
                "alerts",
            ]
        assert "1 firing: run pair" in bot.texts()[0]
        assert "over: run pair" in bot.texts()[1]
        assert len(bot.posts) == 2
