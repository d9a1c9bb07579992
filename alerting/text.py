"""One message in plain text: how it is cut to a size, and made harmless for a bot's format.

A bot's module makes its own format of a `Message`. Labels and annotations are written by whoever
can post, so `clean` takes line breaks and invisible characters out of them when a message is made,
and `neutral` what a format gives a meaning.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, replace

from alerting.phrases import PHRASES, Language

KEYWORD = "act-exporter"
"""Ends every message: a bot that asks for a keyword is given this one."""
MAX_LINE_BYTES = 600
"""One line of a message: a summary with two module names is under 300."""
MAX_URL_BYTES = 500
"""A longer address is left out whole: one that was cut leads nowhere."""
_SHORTER_BYTES = (300, 150, 80, 40)
"""What lines are cut to, in turn, where a message without a single alert is still too large."""

_URL = re.compile(r"https?://[A-Za-z0-9\-._~:/?#@!$&*+,;=%]+")
"""No brackets, quotes or spaces: those would end a link in one of the formats."""
_MEANINGFUL = str.maketrans("<>[]*`#@&~|\\", "＜＞［］＊｀＃＠＆～｜＼")  # noqa: RUF001


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A named address of http or https without characters that end a link."""

    text: str
    url: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One message, in plain text.

    Attributes:
        language: of all texts but names and values.
        title: one line.
        summary: lines about all of it; kept when items are left out.
        items: a line an alert, the most urgent first.
        left_out: how many alerts have no line.
        links: runbook and dashboard.
    """

    language: Language
    title: str
    summary: tuple[str, ...] = ()
    items: tuple[str, ...] = ()
    left_out: int = 0
    links: tuple[Link, ...] = ()

    def lines(self) -> list[str]:
        """Everything below the title and above the links."""
        lines = [*self.summary, *self.items]
        if self.left_out:
            key = "left_out_one" if self.left_out == 1 else "left_out"
            lines.append(say(self.language, key, count=self.left_out))
        return lines

    def plain(self) -> str:
        """All of it as plain text, the title included."""
        links = [f"{link.text}: {link.url}" for link in self.links]
        return "\n".join([self.title, *self.lines(), *links, KEYWORD])


def fit(message: Message, render: Callable[[Message], str], limit: int) -> str:
    """Render as much of a message as `limit` bytes of UTF-8 hold, and say what is left out.

    Items go first, from the end; then what remains is shortened, never within a character.

    Args:
        message: the whole of it.
        render: into a bot's format.
        limit: bytes; a kilobyte or more.
    """

    def kept(count: int) -> str:
        left = message.left_out + len(message.items) - count
        return render(replace(message, items=message.items[:count], left_out=left))

    def fits(text: str) -> bool:
        return len(text.encode()) <= limit

    if fits(whole := kept(len(message.items))):
        return whole
    best, low, high = kept(0), 0, len(message.items)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(text := kept(middle)):
            best, low = text, middle
        else:
            high = middle
    for size in _SHORTER_BYTES:
        if fits(best):
            break
        best = render(
            replace(
                message,
                title=clip(message.title, size),
                summary=tuple(clip(line, size) for line in message.summary),
                items=(),
                left_out=message.left_out + len(message.items),
                links=() if size == _SHORTER_BYTES[-1] else message.links,
            )
        )
    return best


def neutral(text: str) -> str:
    """The same to a reader, and nothing to a bot.

    Each character that opens a mention, a tag, a link or emphasis in Feishu's, DingTalk's or
    WeCom's format becomes its full-width twin: none of the three documents an escape.
    """
    return text.translate(_MEANINGFUL)


def is_link(url: str) -> bool:
    """Whether an address can be linked in every format: http or https, and no odd characters."""
    return len(url) <= MAX_URL_BYTES and _URL.fullmatch(url) is not None


def say(language: Language, key: str, **values: object) -> str:
    """A phrase with its values."""
    return PHRASES[language][key].format(**values)


def clean(text: str) -> str:
    """One line: without control characters, lone surrogates and what is invisible or turns text."""
    return " ".join(
        "".join(
            " " if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") else character
            for character in text
        ).split()
    )


def line_of(text: str) -> str:
    """One line of a message, at most `MAX_LINE_BYTES` long."""
    # What is missing leaves no gap.
    return clip(" ".join(text.split()), MAX_LINE_BYTES)


def clip(text: str, size: int) -> str:
    """At most `size` bytes of UTF-8, an ellipsis included; never half a character."""
    encoded = text.encode()
    if len(encoded) <= size:
        return text
    return encoded[: size - len("…".encode())].decode(errors="ignore") + "…"
