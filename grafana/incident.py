"""What somebody paged at night must see first: what began, where, how far, and what was done."""

from __future__ import annotations

from grafana_foundation_sdk.builders import stat, statetimeline, table
from grafana_foundation_sdk.models.common import BigValueTextMode

from grafana.boards import firing
from grafana.looks import COLORS
from grafana.panels import instant, number, query, row_query, timeline
from grafana.tables import Column, rows


def first(run: str) -> list[stat.Panel]:
    """One line: the layer that went first, when, how far, and of which kind the fault is.

    Args:
        run: the matcher of one run.
    """
    onset = f"run:act_onset_step:first{{{run}}}"
    ratio = f"layer:act_layer_absmax:baseline_ratio{{{run}}}"
    return [
        number(
            "First bad layer, and the step at which it began",
            "The layer and tensor that broke a rule first, with the rule, by the trainer's own "
            "word. Those that broke one later mostly follow from it: begin here. Green: none.",
            # What is there now; when it is over, the latest of the range.
            instant(
                f"{onset} or on (run) topk(1, last_over_time({onset}[$__range]))",
                "{{layer}} {{tensor}} ({{rule}})",
            ),
            unit="none",
            worse={0: "red"},
            named=True,
            width=8,
        ),
        number(
            "Began",
            "When the last anomaly of the range was first seen; the dashboard Layers has a table "
            "of all of them, with their times.",
            instant(f"1000 * max(min_over_time(timestamp({onset})[$__range:]))"),
            unit="dateTimeFromNow",
            worse={0: "red"},
            none="nothing",
            width=4,
        ),
        number(
            "Furthest above its baseline in this range, times",
            "The largest peak over baseline of any layer. Around 1 is good. Where it is another "
            "layer than the first bad one, the fault has grown on its way.",
            instant(
                f"topk(1, max_over_time({ratio}[$__range]))",
                "{{layer}} {{tensor}}",
            ),
            unit="short",
            alerts=["ActLayerAboveBaseline"],
            none="no baseline yet",
            named=True,
            width=8,
        ),
        number(
            "Verdict",
            "What kind of fault the trainer takes it for: activation, gradient, data, parameters, "
            "resume or loss. The runbook says what each needs. Green: none.",
            instant(
                f"max by (verdict) (max_over_time(act_diagnosis{{{run}}}[$__range])) > 0",
                "{{verdict}}",
            ),
            unit="none",
            alerts=["ActDiagnosis"],
            width=4,
        ).text_mode(BigValueTextMode.NAME),
    ]


def done(run: str) -> list[stat.Panel]:
    """One line: rollbacks, requests, and the checkpoints that there are to go back to."""
    return [
        number(
            "Rolled back",
            "Rollbacks in this range, by the trainer's process that is up; one that goes back by a "
            "restart shows it in its generation. One that helped needs no hurry; two mean that the "
            "same place is bad again: look at the data and the learning rate there.",
            instant(f"sum(increase(act_rollbacks_total{{{run}}}[$__range]))"),
            unit="none",
            color="blue",
            none="no guard",
            width=4,
        ).decimals(0),
        number(
            "Rollbacks left",
            "How many the guard makes before it halts the run and waits for people. At 0 the next "
            "request halts it. A run whose guard may make none by choice shows nothing.",
            instant(
                f"""
                run:act_rollback_budget_remaining:min{{{run}}}
                or on (run) min by (run) (act_rollback_budget_remaining{{{run}}} > 0)
                """
            ),
            unit="none",
            alerts=["ActRollbackBudgetSpent"],
            width=4,
        ),
        number(
            "What the trainers answered",
            "Requests that ended in this range, by action and result, of all runs of this "
            "receiver: its counts know no run. `done` is good; `refused` means that the trainer "
            "itself has seen no bad step; after `failed` or `lost` people must act.",
            instant(
                """
                sum by (action, result) (increase(act_recovery_answers_total[$__range])) > 0.5
                """,
                "{{action}}: {{result}}",
            ),
            unit="none",
            color="blue",
            none="nothing was asked",
            named=True,
            width=8,
        ).decimals(0),
        number(
            "Newest checkpoint, age",
            "What a crash or a rollback would lose at least. One is due every 15 minutes.",
            instant(f"run:act_checkpoint_last_success_timestamp_seconds:age{{{run}}}"),
            unit="s",
            alerts=["ActCheckpointStale"],
            width=4,
        ).decimals(0),
        number(
            "Checkpoints to go back to",
            "Those on disk that are confirmed by a clean stretch, or pending. At 0 a rollback "
            "has no place to go: pin one (`act-alerting checkpoints pin`).",
            instant(f'sum(act_checkpoints{{{run}, health=~"confirmed|pending"}})'),
            unit="none",
            color="blue",
            width=4,
        ),
    ]


def onsets(run: str) -> table.Panel:
    """A row an anomaly of the range."""
    onset = f"run:act_onset_step:first{{{run}}}"
    labels = "by (run, layer, tensor, rule)"
    ratio = f"layer:act_layer_absmax:baseline_ratio{{{run}}}"
    return rows(
        "Anomalies in this range: where each began",
        "A row for each first bad layer of the range, the latest on top: when it was first seen, "
        "at which step, by which rule, and how far it went. An empty table is good.",
        row_query(f"1000 * min {labels} (min_over_time(timestamp({onset})[$__range:]))"),
        row_query(f"max {labels} (last_over_time({onset}[$__range]))"),
        row_query(
            f"""
            max by (run, layer, tensor) (max_over_time({ratio}[$__range]))
            * on (run, layer, tensor) group_right ()
            count {labels} (last_over_time({onset}[$__range]))
            """
        ),
        columns=[
            Column(name="First seen", source="Value #A", unit="dateTimeAsLocalNoDateIfToday"),
            Column(name="Run", source="run"),
            Column(name="Layer", source="layer"),
            Column(name="Tensor", source="tensor"),
            Column(name="Rule", source="rule"),
            Column(name="Step", source="Value #B", unit="none"),
            Column(
                name="Times its baseline",
                source="Value #C",
                unit="short",
                decimals=1,
                alert="ActLayerAboveBaseline",
            ),
        ],
        sort_by="First seen",
        alerts=["ActLayerAboveBaseline"],
        none="no anomaly",
        width=12,
    )


def alerts(run: str, legend: str) -> statetimeline.Panel:
    """A row an alert that fired in the range."""
    levels = {3: "critical", 2: "warning", 1: "info"}
    return timeline(
        "Alerts, from when to when",
        "A bar while an alert fires: red is critical, orange a warning, blue for information only. "
        "Left ends tell in which order. ActRunaway and ActGradientRunaway are what asks for a "
        "rollback. Empty is good.",
        query(
            " or ".join(
                f"{level} * max by (alertname, run) ({firing(run, severity)})"
                for level, severity in levels.items()
            ),
            legend,
        ),
        meanings={level: (severity, COLORS[severity]) for level, severity in levels.items()},
    )
