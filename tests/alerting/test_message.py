"""What people read: complete, in their language, short enough, and harmless whatever labels say."""

from __future__ import annotations

import dataclasses
import functools
import re
from datetime import UTC
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from alerting.control import Answer, Request
from alerting.message import of_alerts, of_answer, of_test
from alerting.notifiers.dingtalk import _render as dingtalk_format
from alerting.notifiers.wecom import _render as wecom_format
from alerting.outbox import news_of_group
from alerting.payload import PayloadError, parse
from alerting.phrases import ALERTS_ZH, LANGUAGES, PHRASES, VERDICTS
from alerting.text import KEYWORD, Message, fit, neutral
from tests.alerting.deliveries import text
from tests.alerting.test_alertmanager import RECEIVERS, labels_of, seen_firing

REQUEST = Request(
    id="1-a", run="gpt", generation=0, action="recover", alert="ActRunaway", created_at=1.0
)
ANSWER = Answer(
    id="1-a",
    action="recover",
    result="done",
    detail="rolled back from step 1300 to step-1000",
    step=1300,
    onset=1290,
    checkpoint="step-1300-emergency",
    resumed_from="step-1000",
    resumed_step=1000,
    generation=1,
    answered_at=2.0,
)


@functools.cache
def fired(name: str) -> tuple[dict[str, str], dict[str, str]]:
    """Labels and annotations; reading promtool's cases takes a tenth of a second each time."""
    return labels_of(name), seen_firing(name)["exp_annotations"]


def shipped(name: str, status: str = "firing", **labels: str) -> dict[str, Any]:
    """An alert as promtool sees it come out of the shipped rules."""
    its_labels, annotations = fired(name)
    return {"status": status, "labels": its_labels | labels, "annotations": dict(annotations)}


def read(*alerts: dict[str, Any], language: Any = "en", **fields: Any) -> Message:
    fields = {"groupLabels": {"run": "gpt"}} | fields
    return of_alerts(parse(text(*alerts, **fields)), language, "http://grafana/d/act?var-run={run}")


def drill(status: str = "firing") -> dict[str, Any]:
    """As `act-alerting drill` gives it to Alertmanager."""
    labels = {"alertname": "ActDrill", "severity": "critical", "action": "recover", "run": "gpt"}
    return {"status": status, "labels": labels | {"drill": "1-a"}, "annotations": {"summary": "-"}}


class TestAlerts:
    def test_an_incident_says_where_how_much_since_when_and_what_is_done(self) -> None:
        message = read(
            shipped("ActLayerNonFinite"), shipped("ActLayerAboveBaseline"), shipped("ActRunaway")
        )
        assert message.plain().splitlines() == [
            "3 firing: run gpt",
            "First bad layer: h.3.mlp (output), at step 1200",
            "Worst layers: h.3.mlp output 450x, h.4.attn output 50x",
            "What is done: the trainer is asked to save an emergency checkpoint and to roll back "
            "to the newest healthy one.",
            "ActRunaway (critical): gpt is running away: 3 bad sampled steps in a row",
            "ActLayerAboveBaseline (critical): h.3.mlp output of gpt reached 450 times its "
            "baseline",
            "ActLayerNonFinite (critical): h.3.mlp output of gpt had NaN or Inf",
            "Runbook: https://github.com/act-exporter/act-exporter/blob/main/prometheus/"
            "runbook.md#actrunaway",
            "Dashboard: http://grafana/d/act?var-run=gpt",
            "act-exporter",
        ]

    @pytest.mark.parametrize(
        ("language", "title", "text"),
        [
            ("en", "drill, nothing is wrong: run gpt", "ActDrill is a drill: somebody tries"),
            ("zh", "演练，并无故障：训练任务 gpt", "ActDrill 为演练：有人在检查"),
        ],
    )
    def test_a_drill_says_that_it_is_one_and_promises_nothing(
        self, language: str, title: str, text: str
    ) -> None:
        message = read(drill(), language=language)
        assert message.title == title
        assert message.lines()[0].startswith(text)
        assert "roll" not in message.plain().replace("rolled", "")
        assert "回滚" not in message.plain()

    def test_the_end_of_a_drill_is_no_news(self) -> None:
        def key(*alerts: dict[str, Any]) -> str:
            return news_of_group(parse(text(*alerts)), "", 1.0).key

        assert key(drill()) == key(drill("resolved"))
        real = shipped("ActRunaway")
        assert key(real, drill()) != key(real, drill("resolved")) != key(real)

    def test_beside_a_drill_what_is_real_comes_first(self) -> None:
        message = read(drill(), shipped("ActRunaway"))
        assert message.title == "2 firing: run gpt"
        assert message.items[0].startswith("ActRunaway (critical)")
        assert any("asked to save an emergency checkpoint" in line for line in message.summary)
        assert any("ActDrill is a drill" in line for line in message.summary)

    def test_the_same_in_chinese(self) -> None:
        message = read(shipped("ActLayerAboveBaseline"), shipped("ActRunaway"), language="zh")
        assert message.title == "2 条告警：训练任务 gpt"
        assert message.lines() == [
            "最先异常的层：h.3.mlp（输出），第 1200 步",
            "偏离最大的层：h.3.mlp output 450x, h.4.attn output 50x",
            "处置：已请求训练进程保存紧急检查点，并回滚到最近的健康检查点。",
            "ActRunaway（严重）：正在失控：连续 3 个采样步异常",
            "ActLayerAboveBaseline（严重）：h.3.mlp 输出 达到基线的 450 倍",
        ]

    @pytest.mark.parametrize("name", RECEIVERS)
    def test_every_shipped_alert_has_its_chinese_sentence_with_its_value(self, name: str) -> None:
        (line,) = read(shipped(name), language="zh").items
        assert re.search("[一-鿿]", line.split("）：")[1]), line
        assert fired(name)[1]["summary"] not in line

    @pytest.mark.parametrize("verdict", VERDICTS["en"])
    def test_the_diagnosis(self, verdict: str) -> None:
        for language in LANGUAGES:
            message = read(shipped("ActDiagnosis", verdict=verdict), language=language)
            assert VERDICTS[language][verdict] in message.summary[0]
            assert "h.3.attn.o" in message.summary[1]  # "First was ...", from the same rule

    def test_a_backup_and_nothing_are_told_apart(self) -> None:
        assert "asked for a backup" in read(shipped("ActLayerNonFinite")).plain()
        assert "nothing automatically" in read(shipped("ActTrainerStalled")).plain()

    def test_firing_and_over_in_one_group(self) -> None:
        message = read(shipped("ActRunaway", "resolved"), shipped("ActLayerNonFinite"))
        assert message.title == "1 firing, 1 over: run gpt"
        assert message.items[1] == "over: ActRunaway"
        assert "roll back" not in message.plain()

    def test_the_end_says_that_it_is_not_a_recovery(self) -> None:
        message = read(shipped("ActLayerNonFinite", "resolved"))
        assert message.title == "over: run gpt"
        assert message.items == ("over: ActLayerNonFinite h.3.mlp output",)
        assert "Whether a rollback did that" in message.plain()

    def test_what_alertmanager_left_out_is_said(self) -> None:
        assert (
            "900 more alerts are left out."
            in read(shipped("ActRunaway"), truncatedAlerts=900).lines()
        )
        assert "1 more alert is left out." in read(shipped("ActRunaway"), truncatedAlerts=1).lines()

    def test_the_worst_layer_comes_first(self) -> None:
        alerts = [shipped("ActLayerAboveBaseline", layer=f"h.{n}") for n in range(3)]
        for number, one in enumerate(alerts):
            one["annotations"] = {"summary": f"h.{number} output of gpt reached {number}00 times"}
        assert [line.split()[2] for line in read(*alerts).items] == ["h.2", "h.1", "h.0"]

    def test_an_alert_of_somebody_else_is_shown_with_what_it_has(self) -> None:
        foreign = {"status": "firing", "labels": {"alertname": "DiskFull", "instance": "a:9100"}}
        message = read(foreign, groupLabels={}, commonLabels={"alertname": "DiskFull"})
        assert message.title == "1 firing: DiskFull"
        assert message.items == ("DiskFull (-): instance=a:9100",)

    def test_a_run_with_odd_characters_makes_a_whole_link(self) -> None:
        message = read(shipped("ActRunaway"), groupLabels={"run": "a b)/层"})
        assert message.links[-1].url == "http://grafana/d/act?var-run=a%20b%29%2F%E5%B1%82"


class TestHostileText:
    def test_a_label_is_one_line_and_has_nothing_invisible(self) -> None:
        hostile = "h\n@all\r\x00\u202e\u200b\u2028x"
        message = read(shipped("ActLayerNonFinite", "resolved", layer=hostile))
        assert message.items == ("over: ActLayerNonFinite h @all x output",)

    @pytest.mark.parametrize(
        "attack",
        [
            '<at user_id="all">everyone</at>',
            "<at id=all></at>",
            "<@all>",
            "@everyone",
            "[click](http://evil.example)",
            "**bold** `code` # heading",
            "&lt;at id=all&gt;",
        ],
    )
    def test_what_a_bot_would_obey_is_disarmed(self, attack: str) -> None:
        assert not set(neutral(attack)) & set("<>[]*`#@&")

    @pytest.mark.parametrize(
        "url", ["javascript:alert(1)", "http://a b", "http://a)[x](http://b", "http://" + "a" * 999]
    )
    def test_a_runbook_that_is_no_plain_address_is_left_out(self, url: str) -> None:
        alert = shipped("ActRunaway")
        alert["annotations"] = {"summary": "x", "runbook_url": url}
        assert [link.text for link in read(alert).links] == ["Dashboard"]

    def test_braces_in_labels_are_text(self) -> None:
        line = read(shipped("ActLayerNonFinite", "resolved", layer="{run} {0} %s")).items[0]
        assert "{run} {0} %s" in line

    def test_a_megabyte_of_one_sentence_is_read_in_no_time(self) -> None:
        alert = shipped("ActRunaway")
        alert["annotations"] = {"summary": "x", "description": "It began at step 1 in a" * 2800}
        assert read(alert).title


class TestFit:
    def many(self, count: int, language: Any = "en") -> Message:
        alerts = [shipped("ActLayerAboveBaseline", layer=f"层.{n}") for n in range(count)]
        return read(*alerts, language=language)

    @pytest.mark.parametrize("language", LANGUAGES)
    @pytest.mark.parametrize("limit", [2048, 4096, 20_000])
    def test_hundreds_are_cut_and_counted(self, limit: int, language: Any) -> None:
        message = self.many(1000, language)
        shown = fit(message, Message.plain, limit)
        assert limit - 200 < len(shown.encode()) <= limit
        lines = shown.splitlines()
        kept = sum(line.startswith("ActLayerAboveBaseline") for line in lines)
        assert PHRASES[language]["left_out"].format(count=1000 - kept) in lines
        assert lines[-1] == KEYWORD
        assert any("runbook.md" in line for line in lines)

    def test_what_fits_is_whole(self) -> None:
        message = self.many(3)
        whole = message.plain()
        assert fit(message, Message.plain, len(whole.encode())) == whole

    def test_names_that_are_too_long_are_cut_between_characters(self) -> None:
        name = "层" * 1300
        alert = shipped("ActDiagnosis", verdict=name, run=name)
        message = read(alert, groupLabels={"run": name}, language="zh")
        for limit in range(1024, 1040):
            shown = fit(message, Message.plain, limit)
            assert len(shown.encode()) <= limit
            assert "�" not in shown
            assert "…" in shown


class TestAnswers:
    def test_a_rollback(self) -> None:
        message = of_answer(REQUEST, ANSWER, "en", rollbacks_left=2)
        assert message.plain().splitlines() == [
            "run gpt was rolled back from step 1300 to step 1000",
            "It goes on from checkpoint step-1000.",
            "First bad step: 1290",
            "Emergency checkpoint: step-1300-emergency",
            "Rollbacks left: 2",
            "Asked for by ActRunaway.",
            "act-exporter",
        ]

    def test_a_rollback_in_chinese(self) -> None:
        message = of_answer(REQUEST, ANSWER, "zh", rollbacks_left=0)
        assert message.title == "训练任务 gpt 已从第 1300 步回滚到第 1000 步"
        assert "从检查点 step-1000 继续训练。" in message.summary
        assert "剩余回滚次数：0" in message.summary

    def test_what_is_not_known_is_not_said(self) -> None:
        answer = {"checkpoint": None, "onset": None}
        message = of_answer(REQUEST, _answer(**answer), "en")
        assert "None" not in message.plain()
        assert "left" not in message.plain()

    @pytest.mark.parametrize("language", LANGUAGES)
    @pytest.mark.parametrize("action", ["recover", "checkpoint"])
    @pytest.mark.parametrize("result", ["done", "refused", "failed", "lost"])
    def test_every_end_has_its_words(self, result: str, action: str, language: Any) -> None:
        request = Request(
            id="1-a", run="gpt", generation=0, action=action, alert="A", created_at=1.0
        )
        if result == "lost":
            message = of_answer(request, None, language, detail="why")
        else:
            answer = _answer(result=result, action=action, detail="why")
            message = of_answer(request, answer, language)
        assert "gpt" in message.title
        assert ("why" in message.plain()) == (result != "done")

    def test_a_test_message_has_the_keyword(self) -> None:
        for language in LANGUAGES:
            assert of_test(language).plain().endswith(KEYWORD)


def test_both_languages_say_the_same_things() -> None:
    def fields(text: str) -> set[str]:
        return set(re.findall(r"{\w+}", text))

    assert PHRASES["en"].keys() == PHRASES["zh"].keys()
    for key, phrase in PHRASES["en"].items():
        assert fields(phrase) == fields(PHRASES["zh"][key]), key
    assert VERDICTS["en"].keys() == VERDICTS["zh"].keys()


def _answer(**fields: Any) -> Answer:
    return dataclasses.replace(ANSWER, **fields)


TEXTS = st.text(max_size=60) | st.sampled_from(
    [
        "It began at step 5 in a (b).",
        "First was a (b) at step 5.",
        "reached 1.5 times",
        "<@all>",
        "{x}",
    ]
)
ALERTS = st.fixed_dictionaries(
    {
        "status": st.sampled_from(["firing", "resolved"]),
        "labels": st.dictionaries(
            st.sampled_from(
                ["alertname", "run", "layer", "tensor", "verdict", "severity", "action", "x"]
            ),
            TEXTS | st.sampled_from(sorted(ALERTS_ZH)),
        ),
    },
    optional={
        "annotations": st.dictionaries(
            st.sampled_from(["summary", "description", "worst_layers", "runbook_url"]), TEXTS
        ),
        "startsAt": st.datetimes(timezones=st.just(UTC)).map(lambda at: at.isoformat()),
    },
)


# The same every time; a search that may end differently is for a workbench, not for CI.
@settings(
    deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
@example(alerts=[], labels={"run": " "}, truncated=0, language="en")
@given(
    alerts=st.lists(ALERTS, max_size=8),
    labels=st.dictionaries(st.sampled_from(["run", "alertname"]), TEXTS),
    truncated=st.integers(0, 10**9),
    language=st.sampled_from(LANGUAGES),
)
def test_whatever_is_accepted_has_a_message_of_clean_lines_in_every_format(
    alerts: list[Any], labels: dict[str, str], truncated: int, language: Any
) -> None:
    body = text(*alerts, groupLabels=labels, commonLabels=labels, truncatedAlerts=truncated)
    try:
        payload = parse(body)
    except PayloadError:
        return
    news_of_group(payload, body, 1.0)
    message = of_alerts(payload, language, "https://a.example/{run}")
    for line in (message.title, *message.lines()):
        assert " ".join(line.split()) == line
    for render in (Message.plain, wecom_format, dingtalk_format):
        for limit in (1024, 4096):
            shown = fit(message, render, limit)
            assert len(shown.encode()) <= limit
            assert not any(opening in shown for opening in ("<at", "<@")) or render is Message.plain
