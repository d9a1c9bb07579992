"""Any service that Apprise knows, by one of its URLs; the package is imported when it is used.

Not for Feishu, DingTalk and WeCom: it signs no Feishu message, and takes an error inside of an HTTP
200 for a success.
"""

from __future__ import annotations

import logging

from alerting.exceptions import ConfigError, NotSentError
from alerting.notifiers.bucket import TokenBucket
from alerting.text import Message, fit, neutral

MAX_TEXT_BYTES = 2_000
"""Discord's limit is 2,000 characters; Apprise would cut a longer text without saying so."""


class Apprise:
    """One Apprise URL.

    Args:
        url: as Apprise's documentation of the service has it.
        secret: must be None: the URL holds it.

    Raises:
        ConfigError: Apprise is not installed, or knows no such service.
    """

    def __init__(self, url: str, secret: str | None = None) -> None:
        if secret is not None:
            raise ValueError("An Apprise URL holds its secret itself.")
        try:
            import apprise
        except ModuleNotFoundError:
            raise ConfigError(
                "Apprise is not installed; run: pip install 'act-exporter[apprise]'"
            ) from None
        # Its messages may show the URL.
        logging.getLogger("apprise").setLevel(logging.CRITICAL)
        # Escapes such as \n in a label stay what they are.
        asset = apprise.AppriseAsset(interpret_escapes=False, async_mode=False)
        self._apprise = apprise.Apprise(asset=asset)
        self._format = apprise.NotifyFormat.TEXT
        if not self._apprise.add(url):
            raise ConfigError("the file holds no URL that Apprise knows")
        # Nobody's limit in particular.
        self.bucket = TokenBucket(5, 15)

    def send(self, message: Message) -> str:
        """Send one message; see `Notifier`."""
        text = fit(message, _render, MAX_TEXT_BYTES)
        try:
            taken = self._apprise.notify(
                title=neutral(message.title), body=text, body_format=self._format
            )
        except Exception as error:  # its plugins raise what they like, with the URL in it
            problem = f"Apprise failed ({type(error).__name__})"
        else:
            if taken:
                return "Apprise says that it was taken"
            problem = "Apprise says that it was not taken, and no more"
        raise NotSentError(problem, retry=True)


def _render(message: Message) -> str:
    links = [f"{link.text}: {link.url}" for link in message.links]
    return "\n".join([*(neutral(line) for line in message.lines()), *links])
