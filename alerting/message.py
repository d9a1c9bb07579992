"""What people read: one message of an Alertmanager group, and one of a guard's answer.

Pure: no files, no clock. What is said of an alert comes from the labels and annotations that the
shipped rules have; other alerts are shown with what they have.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import quote

from alerting.control import ASKED, DRILL_ALERT, Action, Answer, Request
from alerting.payload import Alert, Payload
from alerting.phrases import SEVERITIES, TENSORS, VERDICTS, Language, summary_in
from alerting.text import Link, Message, clean, clip, is_link, line_of, say

MAX_NAME_BYTES = 120
"""A run's or alert's name in a title, of which phones show about this much."""
MAX_DIAGNOSES = 3
"""The trainer has one verdict at a time; of several ranks or within the hold there may be two."""
_ONSET = (
    re.compile(r"It began at step (?P<step>\d+) in (?P<layer>.{1,300}?) \((?P<tensor>\w+)\)\."),
    re.compile(r"First was (?P<layer>.{1,300}?) \((?P<tensor>\w+)\) at step (?P<step>\d+)\."),
)
"""How the shipped rules' descriptions end when the trainer knows the first bad layer. The bound on
its name keeps a hostile text from costing the square of its length."""
_TIMES = re.compile(r"(?:reached|it is|jumps to) ([0-9]+(?:\.[0-9]+)?) times")
_SEVERITIES = ("critical", "warning", "info")


def of_alerts(
    payload: Payload, language: Language, dashboard_url: str | None = None, *, acts: bool = True
) -> Message:
    """The message of one Alertmanager group.

    Args:
        payload: the group; may hold firing and resolved alerts together.
        language: the reader's.
        dashboard_url: address of the dashboard; `{run}` in it becomes the run's name.
        acts: whether trainers are asked for what the alerts ask for.
    """
    firing = sorted((a for a in payload.alerts if a.status == "firing"), key=_urgency)
    over = [alert for alert in payload.alerts if alert.status == "resolved"]
    run = payload.group_labels.get("run") or payload.common_labels.get("run", "")
    title = "mixed" if firing and over else "firing" if firing else "over"
    if payload.alerts and all(map(_is_drill, payload.alerts)):
        title = "drill"
    items = [_item(language, alert) for alert in firing]
    items += [_item_over(language, alert) for alert in over]
    links = _links(language, (firing or over)[:1], run, dashboard_url)
    return Message(
        language=language,
        title=say(
            language, title, firing=len(firing), over=len(over), what=_what(language, payload, run)
        ),
        summary=tuple(_summary(language, firing, acts)),
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
        "run": clip(clean(request.run), MAX_NAME_BYTES),
        "alert": clip(clean(request.alert), MAX_NAME_BYTES),
    }
    keys: list[str] = []
    if answer is None:
        known["detail"] = clean(detail)
        keys += ["lost"] if request.action == "recover" else []
        keys += ["problem"] if detail else []
    else:
        known |= {
            "step": str(answer.step),
            "onset": str(answer.onset),
            "resumed_step": str(answer.resumed_step),
            "resumed_from": clean(answer.resumed_from or ""),
            "checkpoint": clean(answer.checkpoint or ""),
            "detail": clean(answer.detail),
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
        title=line_of(say(language, f"{result}_{request.action}", **known)),
        summary=tuple(line_of(say(language, key, **known)) for key in keys),
        links=_links(language, [], request.run, dashboard_url),
    )


def of_overdue(
    request: Request, seconds: float, language: Language, dashboard_url: str | None = None
) -> Message:
    """The message that a request is open for `seconds` and its trainer does not take it up."""
    known = {
        "run": clip(clean(request.run), MAX_NAME_BYTES),
        "alert": clip(clean(request.alert), MAX_NAME_BYTES),
        "minutes": f"{seconds / 60:.0f}",
    }
    keys = (f"overdue_{request.action}_text", "overdue_text", "asked_by")
    return Message(
        language=language,
        title=line_of(say(language, f"overdue_{request.action}", **known)),
        summary=tuple(line_of(say(language, key, **known)) for key in keys),
        links=_links(language, [], request.run, dashboard_url),
    )


def of_notify_only(
    run: str, action: Action, alert: str, language: Language, dashboard_url: str | None = None
) -> Message:
    """The message of what would have been asked of a run's guard."""
    known = {
        "run": clip(clean(run), MAX_NAME_BYTES),
        "alert": clip(clean(alert), MAX_NAME_BYTES),
    }
    return Message(
        language=language,
        title=line_of(say(language, f"notify_only_{action}", **known)),
        summary=tuple(line_of(say(language, k, **known)) for k in ("notify_only_text", "asked_by")),
        links=_links(language, [], run, dashboard_url),
    )


def of_watchdog(language: Language, seconds: float, *, back: bool) -> Message:
    """The message that the watchdog stays away, or is back after `seconds`."""
    key = "watchdog_back" if back else "watchdog_missed"
    return Message(
        language=language,
        title=say(language, key, seconds=f"{seconds:.0f}"),
        summary=(say(language, f"{key}_text"),),
    )


def of_test(language: Language) -> Message:
    """What `act-alerting send-test` sends."""
    return Message(
        language=language,
        title=say(language, "test"),
        summary=(say(language, "test_text"),),
    )


def of_unreadable(language: Language, reason: str) -> Message:
    """Said instead of a recorded message that this version cannot read any more."""
    return Message(
        language=language, title=say(language, "unreadable"), summary=(line_of(clean(reason)),)
    )


def _summary(language: Language, firing: list[Alert], acts: bool) -> Iterable[str]:
    if not firing:
        yield say(language, "resolved")
        return
    verdicts = dict.fromkeys(filter(None, (alert.labels.get("verdict") for alert in firing)))
    for verdict in list(verdicts)[:MAX_DIAGNOSES]:
        text = VERDICTS[language].get(verdict, clean(verdict))
        yield line_of(say(language, "diagnosis", text=text))
    if onset := _onset(firing):
        tensor = TENSORS[language].get(onset["tensor"], onset["tensor"])
        yield line_of(say(language, "first_bad", **(onset | {"tensor": tensor})))
    # Of the most urgent alert that has it. Those of ActLayerAboveBaseline are multiples of the
    # baseline, those of ActRunaway how many steps it has lasted.
    for alert in sorted(firing, key=lambda a: a.labels.get("action") != "checkpoint"):
        if worst := alert.annotations.get("worst_layers"):
            if language == "zh":
                worst = worst.replace(" steps", " 步")
            yield line_of(say(language, "worst", worst=clean(worst)))
            break
    real = [alert for alert in firing if not _is_drill(alert)]
    if len(real) < len(firing):
        yield say(language, "drill_text")
    if not real:
        return
    asked = [action for action in ASKED if any(a.labels.get("action") == action for a in real)]
    done = asked[0] if asked and acts else "notify_only" if asked else "nothing"
    yield say(language, done)
    # The rules' descriptions are English; what one with an action says is said already.
    description = clean(firing[0].annotations.get("description", ""))
    description = description.removesuffix("Nothing is done automatically.").rstrip()
    if language == "en" and not asked and description:
        yield line_of(description)


def _onset(firing: list[Alert]) -> dict[str, str] | None:
    for alert in firing:
        description = alert.annotations.get("description", "")
        for pattern in _ONSET:
            if found := pattern.search(description):
                return {name: clean(value) for name, value in found.groupdict().items()}
    return None


def _is_drill(alert: Alert) -> bool:
    return alert.labels.get("alertname") == DRILL_ALERT


def _urgency(alert: Alert) -> tuple[int, int, float]:
    """Sorts by severity, then what asks for most, then by how many times its baseline it is."""
    if _is_drill(alert):
        # Nothing real may stand below it, whatever its labels say.
        return len(_SEVERITIES), len(ASKED), 0.0
    severity, action = alert.labels.get("severity", ""), alert.labels.get("action", "")
    found = _TIMES.search(alert.annotations.get("summary", ""))
    return (
        _SEVERITIES.index(severity) if severity in _SEVERITIES else len(_SEVERITIES),
        ASKED.index(action) if action in ASKED else len(ASKED),
        -float(found[1]) if found else 0.0,
    )


def _item(language: Language, alert: Alert) -> str:
    labels = alert.labels
    name, summary = (
        labels.get("alertname", ""),
        line_of(clean(alert.annotations.get("summary", ""))),
    )
    said = summary_in(language, name, summary)
    if said is not None:
        tensor = labels.get("tensor", "")
        subject = f"{labels.get('layer', '')} {TENSORS[language].get(tensor, tensor)}".strip()
        # ActRankSpread and others say what they say of a layer, the rest of the run.
        text = f"{clean(subject)} {said}".strip()
    else:
        text = summary or ", ".join(f"{k}={v}" for k, v in labels.items() if k != "alertname")
    severity = labels.get("severity", "")
    severity = SEVERITIES[language].get(severity, severity) or "-"
    name = clip(clean(name), MAX_NAME_BYTES)
    return line_of(
        say(language, "item", alertname=name, severity=clean(severity), text=clean(text))
    )


def _item_over(language: Language, alert: Alert) -> str:
    labels = alert.labels
    where = (labels.get(name, "") for name in ("layer", "tensor", "verdict", "instance"))
    name = clip(clean(labels.get("alertname", "")), MAX_NAME_BYTES)
    where_text = clean(" ".join(part for part in where if part))
    return line_of(say(language, "item_over", alertname=name, where=where_text))


def _what(language: Language, payload: Payload, run: str) -> str:
    if known := clip(clean(run), MAX_NAME_BYTES):
        return say(language, "run", run=known)
    name = payload.common_labels.get("alertname", "")
    return clip(clean(name), MAX_NAME_BYTES) or say(language, "no_run")


def _links(
    language: Language, alerts: list[Alert], run: str, dashboard_url: str | None
) -> tuple[Link, ...]:
    urls = {}
    if alerts:
        urls["runbook"] = alerts[0].annotations.get("runbook_url", "")
    if dashboard_url is not None:
        urls["dashboard"] = dashboard_url.replace("{run}", quote(run, safe=""))
    return tuple(
        Link(text=say(language, key), url=url) for key, url in urls.items() if is_link(url)
    )
