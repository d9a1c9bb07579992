"""Feishu and Lark: custom bots of a group, as rich text ("post"), in which text is only text."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Callable

from alerting.notifiers.bucket import TokenBucket
from alerting.notifiers.http import RATE_SECONDS, Fault, judge, post
from alerting.text import KEYWORD, Message, fit, neutral

MAX_BODY_BYTES = 20_000
"""The bot takes bodies of 20 KB; of the two readings of that word the smaller."""

_FAULTS = {
    19001: Fault(sentence="there is no such bot; copy its webhook address into url_file again"),
    19021: Fault(
        sentence="the signature is not accepted; copy the bot's signing secret into secret_file "
        "again, and set this machine's clock, which may be wrong by an hour at most"
    ),
    19022: Fault(
        sentence="this machine's address is not on the bot's IP list; add it in the bot's settings"
    ),
    19024: Fault(
        sentence=f"the bot's keyword is not in the message; set it to {KEYWORD}, which every "
        "message has, in the bot's settings"
    ),
    9499: Fault(sentence="the bot calls the message malformed; is url_file a bot's of Feishu?"),
    11232: Fault(sentence="too many messages in this minute", after=RATE_SECONDS),
}


def sign(secret: str, timestamp: int) -> str:
    """Feishu's signature: HMAC-SHA256 of nothing, with time (in seconds) and secret as the key."""
    key = f"{timestamp}\n{secret}".encode()
    return base64.b64encode(hmac.new(key, b"", hashlib.sha256).digest()).decode()


class Feishu:
    """A custom bot.

    Args:
        url: its webhook address.
        secret: its signing secret; None for one that checks a keyword or an address instead.
        clock: Unix seconds.
    """

    def __init__(
        self, url: str, secret: str | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._url = url
        self._secret = secret
        self._clock = clock
        # It takes 5 a second and 100 a minute: 3 at once and 90 a minute keep to both.
        self.bucket = TokenBucket(3, 90)

    def send(self, message: Message) -> str:
        """Send one message; see `Notifier`."""
        reply = post(self._url, fit(message, self._render, MAX_BODY_BYTES))
        secrets = (self._url, self._secret) if self._secret else (self._url,)
        # Older answers have StatusCode.
        return judge(reply, ("code", "StatusCode"), _FAULTS, secrets)

    def _render(self, message: Message) -> str:
        content: list[list[dict[str, str]]] = [
            *([{"tag": "text", "text": neutral(line)}] for line in message.lines()),
            *([{"tag": "a", "text": link.text, "href": link.url}] for link in message.links),
            [{"tag": "text", "text": KEYWORD}],
        ]
        post = {"title": neutral(message.title), "content": content}
        body: dict[str, object] = {
            "msg_type": "post",
            "content": {"post": {"zh_cn" if message.language == "zh" else "en_us": post}},
        }
        if self._secret:
            timestamp = int(self._clock())
            body |= {"timestamp": str(timestamp), "sign": sign(self._secret, timestamp)}
        return json.dumps(body, ensure_ascii=False)
