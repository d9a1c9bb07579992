"""Each way to people, against a server that checks and answers as its vendor documents it."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import ssl
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import alerting.notifiers.http
from alerting.exceptions import ConfigError, NotSentError
from alerting.message import of_alerts, of_test
from alerting.notifiers import KINDS, Notifier
from alerting.notifiers.apprise import Apprise
from alerting.notifiers.bucket import TokenBucket
from alerting.notifiers.dingtalk import DingTalk
from alerting.notifiers.dingtalk import sign as sign_dingtalk
from alerting.notifiers.feishu import Feishu
from alerting.notifiers.feishu import sign as sign_feishu
from alerting.notifiers.webhook import Webhook
from alerting.notifiers.wecom import WeCom
from alerting.payload import parse
from alerting.text import Message
from tests.alerting.bots import KEY, SECRET, Bot, DingTalkBot, Endpoint, FeishuBot, WeComBot
from tests.alerting.deliveries import alert, text

PAIRS: dict[str, tuple[type[Bot], str | None]] = {
    "feishu": (FeishuBot, SECRET),
    "dingtalk": (DingTalkBot, SECRET),
    "wecom": (WeComBot, None),
    "webhook": (Endpoint, "endpoint-token"),
}
BOTS = ("feishu", "dingtalk", "wecom")
"""Those that put their errors into an HTTP 200."""
TEST = of_test("en")


@contextlib.contextmanager
def talking(kind: str, **fields: Any) -> Iterator[tuple[Notifier, Bot]]:
    """A notifier and the bot that it talks to."""
    make, secret = PAIRS[kind]
    with make(**fields).serving() as bot:
        yield KINDS[kind](bot.url, secret), bot


def hundreds(language: Any, name: str = "层.") -> Message:
    alerts = [
        alert("ActLayerAboveBaseline", action="checkpoint", layer=f"{name}{n}", tensor="output")
        for n in range(700)
    ]
    for number, one in enumerate(alerts):
        one["annotations"] = {
            "summary": f"{name}{number} output of gpt reached {number} times its baseline",
            "runbook_url": "https://example.com/runbook.md#act",
        }
    return of_alerts(parse(text(*alerts)), language, "https://grafana.example.com/d/{run}")


class TestSignatures:
    """Known vectors, computed by others."""

    def test_feishu(self) -> None:
        assert sign_feishu(SECRET, 1700000000) == "XprR1de+0SSBnwWyU/4k6x2TL+Q2SJlM5NNEdAv7MWg="

    def test_dingtalk(self) -> None:
        expected = "jcUpW0QmtKduN03n4JqQ0PBosVjqnM8gU7fIIvsDmCM="
        assert sign_dingtalk(SECRET, 1700000000000) == expected


class TestEveryKind:
    @pytest.mark.parametrize("kind", PAIRS)
    def test_a_message_is_taken(self, kind: str) -> None:
        with talking(kind) as (notifier, bot):
            assert "HTTP 200" in notifier.send(TEST)
            assert TEST.title in bot.texts()[0]

    @pytest.mark.parametrize("kind", PAIRS)
    @pytest.mark.parametrize("language", ["en", "zh"])
    def test_hundreds_of_alerts_fit_and_what_is_missing_is_said(
        self, kind: str, language: Any
    ) -> None:
        with talking(kind) as (notifier, bot):
            notifier.send(hundreds(language))
            (seen,) = bot.texts()
            said = "more alerts are left out" if language == "en" else "条告警未列出"
            assert said in seen
            assert "https://example.com/runbook.md#act" in seen
            assert "https://grafana.example.com/d/gpt" in seen

    @pytest.mark.parametrize("kind", PAIRS)
    def test_hundreds_of_alerts_of_characters_that_are_escaped_fit_too(self, kind: str) -> None:
        with talking(kind) as (notifier, bot):
            notifier.send(hundreds("en", name='<"\\' * 90))
            assert len(bot.taken) == 1

    @pytest.mark.parametrize("kind", PAIRS)
    @pytest.mark.parametrize("character", ["<", '"', "\\", "层", "😀", "a"])
    def test_the_longest_labels_of_the_worst_characters_fit(
        self, kind: str, character: str
    ) -> None:
        long = character * 4096
        alerts = [
            alert(
                f"Act{long[:4000]}", run=long, layer=long, tensor=long, verdict=f"{n}{long[:4000]}"
            )
            for n in range(40)
        ]
        for one in alerts:
            one["annotations"] = {"summary": long, "worst_layers": long, "description": long}
        message = of_alerts(parse(text(*alerts, groupLabels={"run": long})), "en")
        with talking(kind) as (notifier, bot):
            notifier.send(message)
            (seen,) = bot.texts()
            # The webhook's 64 KiB have room for all of them.
            assert kind == "webhook" or "more alerts are left out" in seen

    @pytest.mark.parametrize("kind", BOTS)
    @pytest.mark.parametrize("attack", ['<at user_id="all">x</at>', "<@all>", "@all", "[a](b)"])
    def test_no_label_mentions_everybody(self, kind: str, attack: str) -> None:
        one = alert(layer=attack, run=attack)
        one["annotations"] = {"summary": attack, "worst_layers": attack, "description": attack}
        message = of_alerts(parse(text(one, groupLabels={"run": attack})), "en")
        with talking(kind) as (notifier, bot):
            notifier.send(message)
            (seen,) = bot.texts()
            assert attack not in json.loads(json.dumps(seen))
            for opening in ("<at", "<@", "@all", "](b)"):
                assert opening not in seen

    @pytest.mark.parametrize("kind", PAIRS)
    @pytest.mark.parametrize(
        ("status", "headers", "retry", "after"),
        [
            (500, {}, True, None),
            (502, {}, True, None),
            (503, {}, True, None),
            (408, {}, True, None),
            (429, {}, True, 60),
            (429, {"Retry-After": "7"}, True, 7),
            (302, {"Location": "http://127.0.0.1:9/"}, False, None),
            (401, {}, False, None),
            (404, {}, False, None),
            (413, {}, False, None),
        ],
    )
    def test_http_statuses(
        self, kind: str, status: int, headers: dict[str, str], retry: bool, after: float | None
    ) -> None:
        with talking(kind, answers=[(status, headers, b"<html>")]) as (notifier, bot):
            with pytest.raises(NotSentError, match=f"HTTP {status}") as caught:
                notifier.send(TEST)
            assert (caught.value.retry, caught.value.after) == (retry, after)
            assert len(bot.posts) == 1  # no redirect was followed, nothing was tried twice

    @pytest.mark.parametrize("kind", PAIRS)
    def test_silence_and_hanging_up_can_be_tried_again(
        self, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(alerting.notifiers.http, "READ_SECONDS", 0.2)
        answers: list[Any] = [(200, {}, "hang"), (200, {}, "cut")]
        with talking(kind, answers=answers) as (notifier, _bot):
            for sentence in ("no answer within 0.2 s", "hung up"):
                with pytest.raises(NotSentError, match=sentence) as caught:
                    notifier.send(TEST)
                assert caught.value.retry

    def test_an_answer_that_breaks_off_can_be_tried_again(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        short: list[Any] = [(200, {"Content-Length": "1000", "Connection": "close"}, b'{"code"')]
        monkeypatch.setattr(alerting.notifiers.http, "READ_SECONDS", 0.5)
        with talking("feishu", answers=short) as (notifier, _bot):
            with pytest.raises(NotSentError, match=r"broke off|no answer|without") as caught:
                notifier.send(TEST)
            assert caught.value.retry

    @pytest.mark.parametrize("kind", PAIRS)
    def test_a_certificate_that_the_system_does_not_know_is_refused_and_one_that_it_does_is_not(
        self, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"),
                *("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
                *("-keyout", key, "-out", certificate),
            ],
            check=True,
            capture_output=True,
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        with talking(kind, tls=context) as (notifier, bot):
            assert bot.url.startswith("https://")
            with pytest.raises(NotSentError, match="not one that this system trusts"):
                notifier.send(TEST)
            assert bot.posts == []
            # OpenSSL's own name for the system's file.
            monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
            notifier.send(TEST)
            assert len(bot.taken) == 1

    def test_netrc_does_not_replace_the_token(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "netrc").write_text("machine 127.0.0.1 login a password b")
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        with talking("webhook") as (notifier, bot):
            notifier.send(TEST)
            assert len(bot.taken) == 1

    @pytest.mark.parametrize("kind", PAIRS)
    def test_nobody_there(self, kind: str) -> None:
        make, secret = PAIRS[kind]
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))  # bound and not listening: refused
            bot = make(port=taken.getsockname()[1])
            with pytest.raises(NotSentError, match="nobody listens") as caught:
                KINDS[kind](bot.url, secret).send(TEST)
            assert caught.value.retry

    def test_a_body_that_never_ends_is_read_to_a_bound(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        endless = (200, {"Content-Length": "100000000"}, b"x" * 200_000)
        monkeypatch.setattr(alerting.notifiers.http, "READ_SECONDS", 0.5)
        with talking("feishu", answers=[endless]) as (notifier, _bot):
            begun = time.monotonic()
            with pytest.raises(NotSentError):
                notifier.send(TEST)
            assert time.monotonic() - begun < 20


class TestErrorsInsideOf200:
    @pytest.mark.parametrize("kind", BOTS)
    @pytest.mark.parametrize(
        "garbage", [b"", b"ok", b"[]", b"{}", b"null", b"\xff\xfe", b'{"code": "0"}', b"[" * 60_000]
    )
    def test_garbage_is_no_success(self, kind: str, garbage: bytes) -> None:
        with talking(kind, answers=[(200, {}, garbage)]) as (notifier, _bot):
            with pytest.raises(NotSentError, match="without the bot's code") as caught:
                notifier.send(TEST)
            assert caught.value.retry

    @pytest.mark.parametrize("kind", BOTS)
    def test_an_unknown_code_is_shown_in_the_bots_words_without_its_key(self, kind: str) -> None:
        said = {"code": 777, "errcode": 777, "msg": f"odd {KEY}\n{SECRET}"}
        said["errmsg"] = said["msg"]
        with talking(kind, answers=[(200, {}, json.dumps(said).encode())]) as (notifier, _bot):
            with pytest.raises(NotSentError, match="error 777, not known here: 'odd") as caught:
                notifier.send(TEST)
            assert caught.value.retry
            assert KEY not in str(caught.value)
            assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("kind", "said", "sentence", "after"),
        [
            ("feishu", {"code": 11232, "msg": "frequency limited"}, "too many messages", 60),
            ("feishu", {"code": 19022, "msg": "Ip Not Allowed"}, "IP list", None),
            ("feishu", {"code": 9499, "msg": "Bad Request"}, "malformed", None),
            ("dingtalk", {"errcode": 130101, "errmsg": "send too fast"}, "10 minutes", 660),
            ("dingtalk", {"errcode": 460101, "errmsg": "too long"}, "too large", None),
            ("dingtalk", {"errcode": 310000, "errmsg": "sign not match"}, "secret_file", None),
            ("dingtalk", {"errcode": 310000, "errmsg": "not in whitelist"}, "IP list", None),
            ("dingtalk", {"errcode": 310000, "errmsg": "description:?"}, "security settings", None),
            ("wecom", {"errcode": 45009, "errmsg": "api freq out of limit"}, "too many", 60),
            ("wecom", {"errcode": 40058, "errmsg": "exceed max length"}, "too large", None),
        ],
    )
    def test_codes(
        self, kind: str, said: dict[str, Any], sentence: str, after: float | None
    ) -> None:
        with talking(kind, answers=[(200, {}, json.dumps(said).encode())]) as (notifier, _bot):
            with pytest.raises(NotSentError, match=sentence) as caught:
                notifier.send(TEST)
            assert (caught.value.retry, caught.value.after) == (after is not None, after)

    @pytest.mark.parametrize("make", [Feishu, DingTalk])
    def test_a_wrong_secret_says_which_file_to_change(self, make: Any) -> None:
        bot_type = FeishuBot if make is Feishu else DingTalkBot
        with bot_type().serving() as bot:
            for secret in ("SECwrong", None):
                with pytest.raises(NotSentError, match=r"secret_file|clock") as caught:
                    make(bot.url, secret).send(TEST)
                assert not caught.value.retry
            assert bot.taken == []

    @pytest.mark.parametrize("make", [Feishu, DingTalk])
    def test_a_wrong_clock_says_so(self, make: Any) -> None:
        bot_type = FeishuBot if make is Feishu else DingTalkBot
        with (
            bot_type().serving() as bot,
            pytest.raises(NotSentError, match="set this machine's clock"),
        ):
            make(bot.url, SECRET, clock=lambda: time.time() - 7200).send(TEST)

    @pytest.mark.parametrize("make", [Feishu, DingTalk])
    def test_a_keyword_is_either_ours_or_named(self, make: Any) -> None:
        bot_type = FeishuBot if make is Feishu else DingTalkBot
        with bot_type(keyword="act-exporter", secret=None).serving() as bot:
            make(bot.url).send(TEST)
            make(bot.url).send(hundreds("zh"))
        with (
            bot_type(keyword="监控", secret=None).serving() as bot,
            pytest.raises(NotSentError, match=r"keyword .* set it to act-exporter") as caught,
        ):
            make(bot.url).send(TEST)
        assert not caught.value.retry

    @pytest.mark.parametrize("kind", BOTS)
    def test_a_bot_that_was_deleted(self, kind: str) -> None:
        with talking(kind) as (_notifier, bot):
            url = bot.url.replace(KEY, "another-key")
            with pytest.raises(NotSentError, match=r"there is no such .* url_file") as caught:
                KINDS[kind](url, PAIRS[kind][1]).send(TEST)
            assert not caught.value.retry


class TestSecrets:
    @pytest.mark.parametrize("kind", PAIRS)
    def test_they_are_in_no_log_repr_or_traceback(
        self, kind: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        answers: list[Any] = [(200, {}, "cut"), (500, {}, b""), (302, {"Location": "/"}, b"")]
        shown = []
        with talking(kind, answers=answers) as (notifier, bot):
            port = bot.port
            for _ in range(3):
                with pytest.raises(NotSentError) as caught:
                    notifier.send(TEST)
                shown += [repr(caught.value), _traceback(caught.value)]
                assert caught.value.__context__ is None
            notifier.send(TEST)
        make, secret = PAIRS[kind]
        with pytest.raises(NotSentError) as caught:
            KINDS[kind](make(port=port).url, secret).send(TEST)  # closed by now
        shown += [_traceback(caught.value), repr(notifier), caplog.text]
        for line in shown:
            assert KEY not in line
            assert secret is None or secret not in line

    def test_the_webhook_sends_its_token(self) -> None:
        with Endpoint().serving() as bot:
            Webhook(bot.url, "endpoint-token").send(TEST)
            with pytest.raises(NotSentError, match="HTTP 401: it wants another token"):
                Webhook(bot.url).send(TEST)
            assert "Authorization" not in bot.posts[1]["headers"]

    def test_where_there_is_no_secret_none_is_taken(self) -> None:
        for make in (WeCom, Apprise):
            with pytest.raises(ValueError, match="secret"):
                make("https://a.example", "secret")


def _traceback(error: Exception) -> str:
    return "".join(traceback.format_exception(error))


class TestBucket:
    @pytest.mark.parametrize(
        ("kind", "per_minute", "per_second"),
        [("feishu", 100, 5), ("dingtalk", 20, 20), ("wecom", 20, 20)],
    )
    def test_no_minute_and_no_second_has_more_than_the_vendor_allows(
        self, kind: str, per_minute: int, per_second: int
    ) -> None:
        now = 0.0
        bucket = KINDS[kind]("https://a.example/b", None).bucket
        bucket._clock = lambda: now
        bucket._counted_at = -3600.0  # an hour of silence: it is full
        sent = []
        while now < 300:
            wait = bucket.take()
            if wait:
                now += wait + 1e-9
            else:
                sent.append(now)
        for start in sent:
            assert sum(start <= at < start + 60 for at in sent) <= per_minute
            assert sum(start <= at < start + 1 for at in sent) <= per_second
        assert len(sent) > 5 * per_minute * 0.7

    def test_a_restart_does_not_fill_it(self) -> None:
        bucket = TokenBucket(5, 15, clock=lambda: 0.0)
        assert bucket.take() == 0
        assert bucket.take() == pytest.approx(4)


@pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")  # Apprise's own
class TestApprise:
    def test_a_message_goes_to_the_service_of_the_url(self) -> None:
        pytest.importorskip("apprise")
        with Bot().serving() as bot:
            taken = Apprise(f"json://127.0.0.1:{bot.port}/{KEY}").send(TEST)
            assert "taken" in taken
            (post,) = bot.posts
            assert post["body"]["title"] == TEST.title
            assert "Nothing is wrong" in post["body"]["message"]

    def test_what_it_does_not_take_can_be_tried_again(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        pytest.importorskip("apprise")
        caplog.set_level(logging.DEBUG)
        with Bot(answers=[(500, {}, b"")]).serving() as bot:
            with pytest.raises(NotSentError, match="not taken") as caught:
                Apprise(f"json://127.0.0.1:{bot.port}/{KEY}").send(TEST)
            assert caught.value.retry
        assert KEY not in caplog.text

    def test_a_url_that_it_does_not_know(self) -> None:
        pytest.importorskip("apprise")
        with pytest.raises(ConfigError, match="no URL that Apprise knows"):
            Apprise("pigeon://roof/key")

    def test_without_the_package_it_says_what_to_install(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "apprise", None)
        with pytest.raises(ConfigError, match=r"pip install 'act-exporter\[apprise\]'"):
            Apprise("json://127.0.0.1/")


def test_all_kinds_are_made_alike() -> None:
    makers: list[Callable[[str, str | None], Notifier]] = list(KINDS.values())
    assert set(KINDS) == {*PAIRS, "apprise"}
    for make in makers[:4]:
        assert make("https://a.example/b", None).bucket.take() == 0
