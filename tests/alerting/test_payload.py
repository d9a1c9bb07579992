"""Alertmanager's payload in the shapes it really has, and what is refused."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from alerting.payload import (
    MAX_ALERTS,
    MAX_ANNOTATION,
    MAX_LABEL_VALUE,
    MAX_LABELS,
    PayloadError,
    parse,
)
from tests.alerting.deliveries import alert, payload, text


class TestAccepted:
    def test_a_firing_alert_ends_in_the_year_1(self) -> None:
        (member,) = parse(text(alert())).alerts
        assert member.ends_at is not None
        assert member.ends_at.year == 1
        assert member.starts_at is not None
        assert member.starts_at.microsecond == 123456  # Go sends nanoseconds

    def test_firing_and_resolved_together(self) -> None:
        group = parse(text(alert(), alert(status="resolved", layer="blocks.3")))
        assert [member.status for member in group.alerts] == ["firing", "resolved"]
        assert group.alerts[1].labels["layer"] == "blocks.3"

    def test_fields_that_do_not_exist_yet(self) -> None:
        member = alert() | {"labelsHash": 5}
        group = parse(text(member, notificationReason="new", nested={"a": [1]}))
        assert len(group.alerts) == 1

    def test_a_truncated_group_says_how_many_are_missing(self) -> None:
        assert parse(text(alert(), truncatedAlerts=299)).truncated_alerts == 299

    def test_what_only_messages_need_may_be_missing(self) -> None:
        minimal = {
            "version": "4",
            "status": "firing",
            "alerts": [{"status": "firing", "labels": {"alertname": "A"}}],
        }
        assert parse(json.dumps(minimal)).alerts[0].fingerprint == ""

    def test_no_alerts_at_all(self) -> None:
        assert parse(text()).alerts == ()

    def test_labels_with_quotes_backslashes_newlines_and_other_scripts(self) -> None:
        nasty = 'a"b\\c\nd\x00 层'
        assert parse(text(alert(layer=nasty))).alerts[0].labels["layer"] == nasty

    def test_a_thousand_alerts(self) -> None:
        body = text(*(alert(layer=f"blocks.{number}") for number in range(1000)))
        assert len(parse(body).alerts) == 1000


def without(source: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in source.items() if name != key}


class TestRefused:
    @pytest.mark.parametrize(
        "body",
        [
            "",
            "{",
            "nonsense",
            b"\xff\xfe",
            text(alert(), new="?").encode().replace(b"?", b"\xff"),
            text(alert(), new="?").encode() + b"\xff",
            b"\xef\xbb\xbf" + text(alert()).encode(),
            "[" * 100_000,
            '{"version": "\\ud800"}',
            "\x1f\x8b",
        ],
        ids=[
            "empty",
            "open",
            "word",
            "no UTF-8",
            "no UTF-8 in an unknown field",
            "no UTF-8 at the end",
            "byte order mark",
            "deep",
            "lone surrogate",
            "gzip",
        ],
    )
    def test_not_json(self, body: str | bytes) -> None:
        with pytest.raises(PayloadError, match="not valid JSON") as caught:
            parse(body)
        assert not caught.value.is_json

    @pytest.mark.parametrize(
        ("content", "place"),
        [
            ([], "the body"),
            (None, "the body"),
            ({}, "version"),
            (payload(alert()) | {"version": "3"}, "version"),
            (payload(alert()) | {"version": 4}, "version"),
            (without(payload(alert()), "alerts"), "alerts"),
            (payload(alert()) | {"alerts": {}}, "alerts"),
            (payload(alert()) | {"status": "pending"}, "status"),
            (payload(alert()) | {"truncatedAlerts": -1}, "truncatedAlerts"),
            (payload(without(alert(), "status")), "alerts.0.status"),
            (payload(without(alert(), "labels")), "alerts.0.labels"),
            (payload(alert(), alert() | {"status": "firing "}), "alerts.1.status"),
            (payload(alert() | {"labels": {"run": 5}}), "alerts.0.labels.run"),
            (payload(alert() | {"labels": {"run": ["a"]}}), "alerts.0.labels.run"),
            (payload(alert() | {"annotations": {"a": None}}), "alerts.0.annotations.*"),
            (payload(alert() | {"labels": {"": "a"}}), "alerts.0.labels.*.[key]"),
            (payload(alert() | {"endsAt": "soon"}), "alerts.0.endsAt"),
        ],
    )
    def test_the_sentence_names_the_place(self, content: Any, place: str) -> None:
        with pytest.raises(PayloadError, match="not an Alertmanager webhook payload") as caught:
            parse(json.dumps(content))
        assert f"({place}: " in str(caught.value)
        assert caught.value.is_json

    @pytest.mark.parametrize(
        "content",
        [
            payload(*([alert()] * (MAX_ALERTS + 1))),
            payload(*([{"status": "firing", "labels": {}}] * 10 * MAX_ALERTS)),
            payload(alert(layer="x" * (MAX_LABEL_VALUE + 1))),
            payload(alert(**{f"label{number}": "" for number in range(MAX_LABELS + 1)})),
            payload(alert() | {"annotations": {"summary": "x" * (MAX_ANNOTATION + 1)}}),
        ],
        ids=["alerts", "ten times the alerts", "label value", "labels", "annotation"],
    )
    def test_what_is_over_a_bound(self, content: Any) -> None:
        with pytest.raises(PayloadError, match="at most"):
            parse(json.dumps(content))

    @pytest.mark.parametrize(
        "labels",
        [
            {"k" * 10_000: {"password": "hunter2"}},
            {"hunter2": 5},
            {"run": {"hunter2": 5}},
            {"x\nERROR forged": 5},
        ],
    )
    def test_the_sentence_is_short_and_repeats_no_input(self, labels: Any) -> None:
        with pytest.raises(PayloadError) as caught:
            parse(json.dumps(payload(alert() | {"labels": labels})))
        assert "hunter2" not in str(caught.value)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 200

    def test_a_mebibyte_of_wrong_alerts_costs_no_more_than_right_ones(self) -> None:
        """Each of the errors would be kept until the last is found."""
        body = b'{"version": "4", "status": "firing", "alerts": [' + b"{}," * 340_000 + b"{}]}"
        tracemalloc.start()
        try:
            with pytest.raises(PayloadError, match=r"alerts\.0\.status"):
                parse(body)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()
