"""DingTalk: custom robots of a group, as markdown."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Callable
from urllib.parse import quote

from alerting.notifiers.bucket import TokenBucket
from alerting.notifiers.http import Fault, Reply, judge, post
from alerting.text import KEYWORD, Message, fit, neutral

MAX_BODY_BYTES = 20_000
"""The robot's limit for a body."""
BLOCKED_SECONDS = 660.0
"""It is blocked for 10 minutes after more than 20 messages in one; a minute more, since another
try too early begins them again."""

_REFUSED = 310000
"""One code for four causes, which its words tell apart."""
# In this order: its advice on a wrong signature speaks of the time too.
_CAUSES = (
    (
        ("keyword", "关键词"),
        f"the robot's keyword is not in the message; set it to {KEYWORD}, which every message "
        "has, in the robot's settings",
    ),
    (
        ("sign not match", "签名不匹配"),
        "the signature is not accepted; copy the robot's secret (it begins with SEC) into "
        "secret_file again",
    ),
    (
        ("timestamp", "时间戳", "过期"),
        "the time is not accepted; set this machine's clock, which may be wrong by an hour at most",
    ),
    (
        ("whitelist", "白名单"),
        "this machine's address is not on the robot's IP list; add it in the robot's settings",
    ),
)
_FAULTS = {
    _REFUSED: Fault(
        sentence=f"the robot's security settings refuse the message: keyword ({KEYWORD} is in "
        "every message), secret (secret_file), clock, or IP list"
    ),
    300001: Fault(sentence="there is no such robot; copy its webhook address into url_file again"),
    300005: Fault(sentence="there is no such robot; copy its webhook address into url_file again"),
    460101: Fault(sentence="the message is too large for the robot"),
    130101: Fault(
        sentence="too many messages; the robot is blocked for 10 minutes", after=BLOCKED_SECONDS
    ),
}


def sign(secret: str, milliseconds: int) -> str:
    """DingTalk's signature: HMAC-SHA256 of time (in milliseconds) and secret; before URL-coding."""
    text = f"{milliseconds}\n{secret}".encode()
    return base64.b64encode(hmac.new(secret.encode(), text, hashlib.sha256).digest()).decode()


class DingTalk:
    """A custom robot.

    Args:
        url: its webhook address, with the access token.
        secret: its signing secret; None for one that checks a keyword or an address instead.
        clock: Unix seconds.
    """

    def __init__(
        self, url: str, secret: str | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._url = url
        self._secret = secret
        self._clock = clock
        # It takes 20 a minute.
        self.bucket = TokenBucket(5, 15)

    def send(self, message: Message) -> str:
        """Send one message; see `Notifier`."""
        url = self._url
        if self._secret:
            milliseconds = int(self._clock() * 1000)
            signature = quote(sign(self._secret, milliseconds), safe="")
            url += f"{'&' if '?' in url else '?'}timestamp={milliseconds}&sign={signature}"
        reply = post(url, fit(message, _render, MAX_BODY_BYTES))
        secrets = (self._url, self._secret) if self._secret else (self._url,)
        return judge(reply, ("errcode",), _FAULTS | _cause(reply), secrets)


def _cause(reply: Reply) -> dict[int, Fault]:
    words = reply.body.decode("utf-8", "replace").lower()
    # A server may write Chinese as \u escapes.
    if "\\u" in words:
        words = words.encode("latin-1", "replace").decode("unicode_escape", "replace")
    for hints, sentence in _CAUSES:
        if any(hint in words for hint in hints):
            return {_REFUSED: Fault(sentence=sentence)}
    return {}


def _render(message: Message) -> str:
    links = [f"[{link.text}]({link.url})" for link in message.links]
    lines = [neutral(line) for line in message.lines()]
    # A line break alone is none in markdown.
    text = "\n\n".join([f"### {neutral(message.title)}", *lines, *links, KEYWORD])
    body = {
        "msgtype": "markdown",
        "markdown": {"title": neutral(message.title), "text": text},
        "at": {"isAtAll": False},
    }
    return json.dumps(body, ensure_ascii=False)
