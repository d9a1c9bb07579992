"""Any HTTP endpoint: the message as JSON, with a bearer token where one is configured.

    {"version": "1", "language": "en", "title": "...", "lines": ["..."], "left_out": 0,
     "links": [{"text": "Runbook", "url": "https://..."}], "text": "all of it, as plain text"}

Any 2xx is a yes. The text of labels comes as it is: the endpoint escapes what its page interprets.
"""

from __future__ import annotations

import dataclasses
import json

from alerting.notifiers.bucket import TokenBucket
from alerting.notifiers.http import judge_status, post
from alerting.text import Message, fit

MAX_BODY_BYTES = 65_536
"""Takes a hundred alerts, and passes through the usual proxies and queues."""


class Webhook:
    """An HTTP endpoint.

    Args:
        url: its address.
        secret: sent as `Authorization: Bearer`, unless None.
    """

    def __init__(self, url: str, secret: str | None = None) -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        # Nobody's limit: one a second keeps an endpoint that is back after an hour alive.
        self.bucket = TokenBucket(10, 60)

    def send(self, message: Message) -> str:
        """Send one message; see `Notifier`."""
        reply = post(self._url, fit(message, _render, MAX_BODY_BYTES), self._headers)
        judge_status(reply)
        return f"HTTP {reply.status}"


def _render(message: Message) -> str:
    content = {
        "version": "1",
        "language": message.language,
        "title": message.title,
        "lines": message.lines(),
        "left_out": message.left_out,
        "links": [dataclasses.asdict(link) for link in message.links],
        "text": message.plain(),
    }
    return json.dumps(content, ensure_ascii=False)
