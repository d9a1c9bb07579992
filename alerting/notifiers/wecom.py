"""WeCom (企业微信): group robots, as markdown; the key in the address is all that they check."""

from __future__ import annotations

import json

from alerting.notifiers.bucket import TokenBucket
from alerting.notifiers.http import RATE_SECONDS, Fault, judge, post
from alerting.text import KEYWORD, Message, fit, neutral

MAX_CONTENT_BYTES = 4096
"""The robot's limit for markdown; its plain text may have half of that."""

_FAULTS = {
    40058: Fault(sentence="the robot calls the message malformed or too large"),
    45009: Fault(sentence="too many messages in this minute", after=RATE_SECONDS),
    93000: Fault(sentence="there is no such robot; copy its webhook address into url_file again"),
}


class WeCom:
    """A group robot.

    Args:
        url: its webhook address, with the key.
        secret: must be None: there is no signature.
    """

    def __init__(self, url: str, secret: str | None = None) -> None:
        if secret is not None:
            raise ValueError("A WeCom robot has no secret; the key in its address is all.")
        self._url = url
        # It takes 20 a minute.
        self.bucket = TokenBucket(5, 15)

    def send(self, message: Message) -> str:
        """Send one message; see `Notifier`."""
        content = fit(message, _render, MAX_CONTENT_BYTES)
        body = json.dumps(
            {"msgtype": "markdown", "markdown": {"content": content}}, ensure_ascii=False
        )
        return judge(post(self._url, body), ("errcode",), _FAULTS, (self._url,))


def _render(message: Message) -> str:
    links = [f"[{link.text}]({link.url})" for link in message.links]
    lines = [neutral(line) for line in message.lines()]
    return "\n".join([f"**{neutral(message.title)}**", *lines, *links, KEYWORD])
