"""What people read: one message of an Alertmanager group, and one of a guard's answer.

Pure: no files, no clock. A `Message` is plain text in its reader's language; each bot's module
makes its own format of it. Labels and annotations are written by whoever can post, so line breaks
and invisible characters are taken out here, and what a format gives a meaning by `neutral`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from urllib.parse import quote

from alerting.control import Answer, Request
from alerting.payload import Alert, Payload
from alerting.phrases import PHRASES, SEVERITIES, TENSORS, VERDICTS, Language, summary_in

KEYWORD = "act-exporter"
"""Ends every message: a bot that asks for a keyword is given this one."""
MAX_LINE_BYTES = 600
"""One line of a message: a summary with two module names is under 300."""
MAX_NAME_BYTES = 120
"""A run's or alert's name in a title, of which phones show about this much."""
MAX_DIAGNOSES = 3
"""The trainer has one verdict at a time; of several ranks or within the hold there may be two."""
MAX_URL_BYTES = 500
"""A longer address is left out whole: one that was cut leads nowhere."""
_SHORTER_BYTES = (300, 150, 80, 40)
"""What lines are cut to, in turn, where a message without a single alert is still too large."""

_URL = re.compile(r"https?://[A-Za-z0-9\-._~:/?#@!$&*+,;=%]+")
"""No brackets, quotes or spaces: those would end a link in one of the formats."""
_ONSET = (
    re.compile(r"It began at step (?P<step>\d+) in (?P<layer>.{1,300}?) \((?P<tensor>\w+)\)\."),
    re.compile(r"First was (?P<layer>.{1,300}?) \((?P<tensor>\w+)\) at step (?P<step>\d+)\."),
)
"""How the shipped rules' descriptions end when the trainer knows the first bad layer. The bound on
its name keeps a hostile text from costing the square of its length."""
_TIMES = re.compile(r"(?:reached|it is|jumps to) ([0-9]+(?:\.[0-9]+)?) times")
_SEVERITIES = ("critical", "warning", "info")
_ACTIONS = ("recover", "checkpoint")
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
            lines.append(_say(self.language, key, count=self.left_out))
        return lines

    def plain(self) -> str:
        """All of it as plain text, the title included."""
        links = [f"{link.text}: {link.url}" for link in self.links]
        return "\n".join([self.title, *self.lines(), *links, KEYWORD])


def of_alerts(payload: Payload, language: Language, dashboard_url: str | None = None) -> Message:
    """The message of one Alertmanager group.

    Args:
        payload: the group; may hold firing and resolved alerts together.
        language: the reader's.
        dashboard_url: address of the dashboard; `{run}` in it becomes the run's name.
    """
    firing = sorted((a for a in payload.alerts if a.status == "firing"), key=_urgency)
    over = [alert for alert in payload.alerts if alert.status == "resolved"]
    run = payload.group_labels.get("run") or payload.common_labels.get("run", "")
    title = "mixed" if firing and over else "firing" if firing else "over"
    items = [_item(language, alert) for alert in firing]
    items += [_item_over(language, alert) for alert in over]
    links = _links(language, (firing or over)[:1], run, dashboard_url)
    return Message(
        language=language,
        title=_say(
            language, title, firing=len(firing), over=len(over), what=_what(language, payload, run)
        ),
        summary=tuple(_summary(language, firing)),
        items=tuple(items),
        left_out=payload.truncated_alerts,
        links=links,
    )


def of_answer(
    request: Request,
    answer: Answer | None,
    language: Language,
    *,
    detail: str = "",
    rollbacks_left: int | None = None,
    dashboard_url: str | None = None,
) -> Message:
    """The message of what became of a request to the guard.

    Args:
        request: what was asked.
        answer: the guard's, or None where the request was lost without one.
        language: the reader's.
        detail: what was seen of a request that was lost.
        rollbacks_left: the budget after it, None where it isn't known.
        dashboard_url: as for `of_alerts`.
    """
    result = answer.result if answer is not None else "lost"
    known = {
        "run": _clip(_clean(request.run), MAX_NAME_BYTES),
        "alert": _clip(_clean(request.alert), MAX_NAME_BYTES),
    }
    keys: list[str] = []
    if answer is None:
        known["detail"] = _clean(detail)
        keys += ["lost"] if request.action == "recover" else []
        keys += ["problem"] if detail else []
    else:
        known |= {
            "step": str(answer.step),
            "onset": str(answer.onset),
            "resumed_step": str(answer.resumed_step),
            "resumed_from": _clean(answer.resumed_from or ""),
            "checkpoint": _clean(answer.checkpoint or ""),
            "detail": _clean(answer.detail),
        }
        keys += ["resumed_from"] if answer.resumed_from else []
        keys += ["onset"] if answer.onset is not None else []
        keys += [f"made_{request.action}"] if answer.checkpoint else []
        keys += ["detail"] if result != "done" else []
    if rollbacks_left is not None and request.action == "recover":
        known["rollbacks_left"] = str(rollbacks_left)
        keys.append("rollbacks_left")
    keys.append("asked_by")
    return Message(
        language=language,
        title=_say(language, f"{result}_{request.action}", **known),
        summary=tuple(_line(_say(language, key, **known)) for key in keys),
        links=_links(language, [], request.run, dashboard_url),
    )


def of_test(language: Language) -> Message:
    """What `act-alerting send-test` sends."""
    return Message(
        language=language,
        title=_say(language, "test"),
        summary=(_say(language, "test_text"),),
    )


def of_unreadable(language: Language, reason: str) -> Message:
    """Said instead of a recorded message that this version cannot read any more."""
    return Message(
        language=language, title=_say(language, "unreadable"), summary=(_line(_clean(reason)),)
    )


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
                title=_clip(message.title, size),
                summary=tuple(_clip(line, size) for line in message.summary),
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


def _summary(language: Language, firing: list[Alert]) -> Iterable[str]:
    if not firing:
        yield _say(language, "resolved")
        return
    verdicts = dict.fromkeys(filter(None, (alert.labels.get("verdict") for alert in firing)))
    for verdict in list(verdicts)[:MAX_DIAGNOSES]:
        text = VERDICTS[language].get(verdict, _clean(verdict))
        yield _line(_say(language, "diagnosis", text=text))
    if onset := _onset(firing):
        tensor = TENSORS[language].get(onset["tensor"], onset["tensor"])
        yield _line(_say(language, "first_bad", **(onset | {"tensor": tensor})))
    # Of the most urgent alert that has it. Those of ActLayerAboveBaseline are multiples of the
    # baseline, those of ActRunaway how many steps it has lasted.
    for alert in sorted(firing, key=lambda a: a.labels.get("action") != "checkpoint"):
        if worst := alert.annotations.get("worst_layers"):
            if language == "zh":
                worst = worst.replace(" steps", " 步")
            yield _line(_say(language, "worst", worst=_clean(worst)))
            break
    asked = [action for action in _ACTIONS if any(a.labels.get("action") == action for a in firing)]
    yield _say(language, asked[0] if asked else "nothing")
    # The rules' descriptions are English; what one with an action says is said already.
    description = _clean(firing[0].annotations.get("description", ""))
    description = description.removesuffix("Nothing is done automatically.").rstrip()
    if language == "en" and not asked and description:
        yield _line(description)


def _onset(firing: list[Alert]) -> dict[str, str] | None:
    for alert in firing:
        description = alert.annotations.get("description", "")
        for pattern in _ONSET:
            if found := pattern.search(description):
                return {name: _clean(value) for name, value in found.groupdict().items()}
    return None


def _urgency(alert: Alert) -> tuple[int, int, float]:
    """Sorts by severity, then what asks for most, then by how many times its baseline it is."""
    severity, action = alert.labels.get("severity", ""), alert.labels.get("action", "")
    found = _TIMES.search(alert.annotations.get("summary", ""))
    return (
        _SEVERITIES.index(severity) if severity in _SEVERITIES else len(_SEVERITIES),
        _ACTIONS.index(action) if action in _ACTIONS else len(_ACTIONS),
        -float(found[1]) if found else 0.0,
    )


def _item(language: Language, alert: Alert) -> str:
    labels = alert.labels
    name, summary = labels.get("alertname", ""), _line(_clean(alert.annotations.get("summary", "")))
    said = summary_in(language, name, summary)
    if said is not None:
        tensor = labels.get("tensor", "")
        subject = f"{labels.get('layer', '')} {TENSORS[language].get(tensor, tensor)}".strip()
        # ActRankSpread and others say what they say of a layer, the rest of the run.
        text = f"{_clean(subject)} {said}".strip()
    else:
        text = summary or ", ".join(f"{k}={v}" for k, v in labels.items() if k != "alertname")
    severity = labels.get("severity", "")
    severity = SEVERITIES[language].get(severity, severity) or "-"
    name = _clip(_clean(name), MAX_NAME_BYTES)
    return _line(
        _say(language, "item", alertname=name, severity=_clean(severity), text=_clean(text))
    )


def _item_over(language: Language, alert: Alert) -> str:
    labels = alert.labels
    where = (labels.get(name, "") for name in ("layer", "tensor", "verdict", "instance"))
    name = _clip(_clean(labels.get("alertname", "")), MAX_NAME_BYTES)
    where_text = _clean(" ".join(part for part in where if part))
    return _line(_say(language, "item_over", alertname=name, where=where_text))


def _what(language: Language, payload: Payload, run: str) -> str:
    if run:
        return _say(language, "run", run=_clip(_clean(run), MAX_NAME_BYTES))
    name = payload.common_labels.get("alertname", "")
    return _clip(_clean(name), MAX_NAME_BYTES) or _say(language, "no_run")


def _links(
    language: Language, alerts: list[Alert], run: str, dashboard_url: str | None
) -> tuple[Link, ...]:
    urls = {}
    if alerts:
        urls["runbook"] = alerts[0].annotations.get("runbook_url", "")
    if dashboard_url is not None:
        urls["dashboard"] = dashboard_url.replace("{run}", quote(run, safe=""))
    return tuple(
        Link(text=_say(language, key), url=url) for key, url in urls.items() if is_link(url)
    )


def _say(language: Language, key: str, **values: object) -> str:
    return PHRASES[language][key].format(**values)


def _clean(text: str) -> str:
    """One line: without control characters, lone surrogates and what is invisible or turns text."""
    return " ".join(
        "".join(
            " " if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") else character
            for character in text
        ).split()
    )


def _line(text: str) -> str:
    # What is missing leaves no gap.
    return _clip(" ".join(text.split()), MAX_LINE_BYTES)


def _clip(text: str, size: int) -> str:
    """At most `size` bytes of UTF-8, an ellipsis included; never half a character."""
    encoded = text.encode()
    if len(encoded) <= size:
        return text
    return encoded[: size - len("…".encode())].decode(errors="ignore") + "…"
