"""Who gets messages: the entries of `notify:`, checked and made into notifiers."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from alerting.exceptions import ConfigError
from alerting.given import Given, check_keys, is_loopback, read_secret
from alerting.notifiers import KINDS, Notifier
from alerting.phrases import LANGUAGES, Language

TARGET_KEYS = ("kind", "name", "url_file", "secret_file", "language")
_TARGET_NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")
"""It is a metric's label value and a word on the command line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A group of people who are told.

    Attributes:
        name: unique among the targets.
        kind: one of `notifiers.KINDS`.
        language: of its messages.
        notifier: sends them; alone holds the address and the secret.
    """

    name: str
    kind: str
    language: Language
    notifier: Notifier = field(repr=False)


def read_targets(given: Given) -> tuple[Target, ...]:
    """The targets of a `notify:` list.

    Raises:
        ConfigError: an entry is wrong; names it by its number, and the key.
    """
    if not isinstance(given.value, list):
        raise given.error("must be a list, each entry with kind and url_file.")
    targets: list[Target] = []
    for number, entry in enumerate(given.value, start=1):
        target = _target(Given(entry, f"{given.where}: entry {number}", given.base))
        if any(target.name == other.name for other in targets):
            raise given.error(f"two entries have the name {target.name}; give one another `name`.")
        targets.append(target)
    return tuple(targets)


def _target(given: Given) -> Target:
    entry = given.value
    if not isinstance(entry, dict):
        raise given.error("must have keys and values, such as `kind: feishu`.")
    check_keys(entry, TARGET_KEYS, given.where)

    def part(key: str, default: Any = None) -> Given:
        value = entry.get(key)
        return Given(default if value is None else value, f"{given.where}: {key}", given.base)

    kind = part("kind")
    if kind.value not in list(KINDS):  # not the dict itself: a YAML list has no hash
        raise kind.error(f"must be one of {', '.join(KINDS)}, not {kind.value!r}.")
    name = part("name", kind.value)
    if not isinstance(name.value, str) or not _TARGET_NAME.fullmatch(name.value):
        raise name.error(
            f"must be a word of up to 40 letters, digits, - and _, not {name.value!r}."
        )
    language = part("language", "en")
    if language.value not in LANGUAGES:
        raise language.error(f"must be one of {', '.join(LANGUAGES)}, not {language.value!r}.")
    url_file, secret_file = part("url_file"), part("secret_file")
    if url_file.value is None:
        raise given.error("url_file is missing: the file that holds the bot's address.")
    url = read_secret(url_file)
    if kind.value != "apprise":
        _check_url(url, url_file)
    secret = None if secret_file.value is None else read_secret(secret_file)
    try:
        notifier = KINDS[kind.value](url, secret)
    except ConfigError as error:
        raise url_file.error(str(error)) from None
    except ValueError as error:
        raise secret_file.error(str(error)) from None
    return Target(name=name.value, kind=kind.value, language=language.value, notifier=notifier)


def _check_url(url: str, given: Given) -> None:
    # Nothing of the file may be shown: the address is the key to the group.
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        parts.port  # noqa: B018  (raises where it is no number)
    except ValueError:
        raise given.error("the file holds no address such as https://HOST/PATH.") from None
    if parts.scheme not in ("http", "https") or not host:
        raise given.error("the file holds no address such as https://HOST/PATH.")
    if parts.scheme == "http" and not is_loopback(host):
        raise given.error("the address in the file must be https: it is a secret itself.")
