"""How a message gets to people: one module a chat tool, each of them a `Notifier`.

A notifier knows the tool's format, signature, size limit, rate and errors. It sends once: when to
try again is `alerting.messenger`'s matter, and `NotSentError` says whether that can help.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from alerting.notifiers.apprise import Apprise
from alerting.notifiers.bucket import TokenBucket
from alerting.notifiers.dingtalk import DingTalk
from alerting.notifiers.feishu import Feishu
from alerting.notifiers.webhook import Webhook
from alerting.notifiers.wecom import WeCom
from alerting.text import Message

__all__ = ["KINDS", "Notifier"]


class Notifier(Protocol):
    """A way to one group of people.

    Attributes:
        bucket: how often it may be used; whoever sends takes from it first.
    """

    bucket: TokenBucket

    def send(self, message: Message) -> str:
        """Send one message and return what came back, in a few words.

        Raises:
            NotSentError: it was not taken.
        """
        ...


KINDS: dict[str, Callable[[str, str | None], Notifier]] = {
    "feishu": Feishu,
    "dingtalk": DingTalk,
    "wecom": WeCom,
    "webhook": Webhook,
    "apprise": Apprise,
}
"""The word in receiver.yml to what is made of the address and the secret, if there is one."""
