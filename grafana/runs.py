"""The dashboard Runs: all of them at a glance, the worst on top."""

from __future__ import annotations

from grafana_foundation_sdk.builders import stat, table, timeseries

from grafana import incident
from grafana.boards import Board, firing
from grafana.looks import words
from grafana.panels import Row, instant, lines, number, query, row_query
from grafana.rules import limit
from grafana.tables import Column, rows

_RUN = 'run=~"$run"'
_RATIO = f"layer:act_layer_absmax:baseline_ratio{{{_RUN}}}"
_STALLED = limit("ActTrainerStalled")
_STATES = words(
    {
        3: ("critical", "red"),
        2: ("warning", "orange"),
        1: ("healthy", "green"),
        0: ("ended or away", "text"),
    }
)


def board() -> Board:
    """The dashboard."""
    return Board(
        name="runs",
        description="All training runs: which need somebody, and what was done about them.",
        many_runs=True,
        rows=[
            Row(title="Who needs somebody", panels=[*_counts(), _table()]),
            Row(
                title="What began, and what was said about it",
                panels=[
                    incident.onsets(_RUN),
                    incident.alerts('run=~"$run|"', "{{run}}: {{alertname}}"),
                ],
            ),
            Row(title="How they go", panels=_over_time()),
        ],
    )


def _counts() -> list[stat.Panel]:
    by_run = "count(count by (run)"
    return [
        number(
            "Runs that train",
            "Runs whose trainer answers, and has ended a step lately enough to count as alive.",
            instant(f"count(run:act_last_step_timestamp_seconds:age{{{_RUN}}} <= {_STALLED:g})"),
            unit="none",
            color="blue",
            width=4,
        ),
        number(
            "Runs with a critical alert",
            "0 is good. The table below tells which, and where it began.",
            instant(f"{by_run} ({firing(_RUN, 'critical')})) or vector(0)"),
            unit="none",
            worse={1: "red"},
            width=4,
        ),
        number(
            "Runs with a warning",
            "0 is good; a warning can wait for the day.",
            instant(f"{by_run} ({firing(_RUN, 'warning')})) or vector(0)"),
            unit="none",
            worse={1: "orange"},
            width=4,
        ),
        number(
            "Trainers that do not answer",
            "Targets of the job act-exporter that Prometheus cannot read, of whatever run: a "
            "target that is gone does not tell its run. 0 is good; take those of runs that have "
            "ended out of prometheus.yml.",
            instant('count(up{job="act-exporter"} == 0) or vector(0)'),
            unit="none",
            worse={1: "red"},
            width=4,
        ),
        number(
            "Rollbacks in this range",
            "Of all chosen runs. One that helped needs no hurry: read what began below.",
            instant(f"sum(increase(act_rollbacks_total{{{_RUN}}}[$__range]))"),
            unit="none",
            color="blue",
            none="no guard",
            width=4,
        ).decimals(0),
        number(
            "Receivers that answer",
            "Without one nobody makes checkpoints or rolls back at an alert.",
            instant('sum(up{job="act-receiver"})'),
            unit="none",
            alerts=["ActReceiverDown"],
            color="blue",
            width=4,
        ),
    ]


def _table() -> table.Panel:
    level = " or on (run) ".join(
        f"({level} * max by (run) ({firing(_RUN, severity)}))"
        for level, severity in ((3, "critical"), (2, "warning"))
    )
    onset = f"run:act_onset_step:first{{{_RUN}}}"
    layers = "/d/act-layers?${__url_time_range}&var-datasource=${datasource}&var-run="
    return rows(
        "Runs, the worst on top",
        "A row a run of this range. State is its worst alert, else whether it answers. A click on "
        "its name leads to its layers. Good is green, around 1 times the baseline, and seconds "
        "since the last step.",
        row_query(
            f"""
            {level}
            or on (run) (1 + 0 * max by (run) (act_step{{{_RUN}}}))
            or on (run) (0 * max by (run) (last_over_time(act_step{{{_RUN}}}[$__range])))
            """
        ),
        row_query(
            f"max by (run, layer) ({onset} or on (run) topk by (run) (1, "
            f"last_over_time({onset}[$__range])))"
        ),
        row_query(f"max by (run) (max_over_time({_RATIO}[$__range]))"),
        row_query(f"max by (run) (last_over_time(act_step{{{_RUN}}}[$__range]))"),
        row_query(f"max by (run) (rate(act_steps_total{{{_RUN}}}[$__rate_interval]))"),
        row_query(f"max by (run) (last_over_time(act_loss{{{_RUN}}}[$__range]))"),
        row_query(f"run:act_last_step_timestamp_seconds:age{{{_RUN}}}"),
        row_query(f"sum by (run) (increase(act_rollbacks_total{{{_RUN}}}[$__range]))"),
        row_query(f"min by (run) (act_rollback_budget_remaining{{{_RUN}}})"),
        row_query(
            f"max by (run) (run:act_checkpoint_last_success_timestamp_seconds:age{{{_RUN}}})"
        ),
        columns=[
            Column(name="State", source="Value #A", mappings=[_STATES]),
            Column(name="Run", source="run", link=("Its layers", layers + "${__value.raw}")),
            Column(name="First bad layer", source="layer"),
            Column(name="since step", source="Value #B", unit="none"),
            Column(
                name="Times the baseline",
                source="Value #C",
                unit="short",
                decimals=1,
                alert="ActLayerAboveBaseline",
            ),
            Column(name="Step", source="Value #D", unit="none"),
            Column(name="Steps a second", source="Value #E", unit="short", decimals=2),
            Column(name="Loss", source="Value #F", unit="short", decimals=3),
            Column(
                name="Since last step",
                source="Value #G",
                unit="s",
                decimals=0,
                alert="ActTrainerStalled",
            ),
            Column(name="Rollbacks", source="Value #H", unit="none", decimals=0),
            Column(name="left", source="Value #I", unit="none"),
            Column(
                name="Checkpoint age",
                source="Value #J",
                unit="s",
                decimals=0,
                alert="ActCheckpointStale",
            ),
        ],
        sort_by="State",
        alerts=["ActLayerAboveBaseline", "ActTrainerStalled", "ActCheckpointStale"],
        none="no run in this range",
    )


def _over_time() -> list[timeseries.Panel]:
    name = "{{run}}"
    return [
        lines(
            "Worst layer of each run, times its baseline",
            "Around 1 is good. A run that rises has an anomaly: open its layers.",
            query(f"max by (run) ({_RATIO})", name),
            unit="short",
            alerts=["ActLayerAboveBaseline"],
            log=True,
        ),
        lines(
            "Loss",
            "As recorded, the mean over the ranks. Falling is good; a jump that stays is not.",
            query(f"avg by (run) (act_loss{{{_RUN}}})", name),
            unit="short",
        ),
        lines(
            "Steps a second",
            "Of each run's fastest rank. Steady is good; 0 is a trainer that hangs, no line one "
            "that is away.",
            query(f"max by (run) (rate(act_steps_total{{{_RUN}}}[$__rate_interval]))", name),
            unit="short",
        ),
        lines(
            "Step",
            "Rising evenly is good. A fall is a rollback or a restart, as deep as what it cost.",
            query(f"max by (run) (act_step{{{_RUN}}})", name),
            unit="none",
        ),
        lines(
            "Since the last step",
            "Time since each run's last step ended. Good is the time of one step; a rising line is "
            "a trainer that hangs.",
            query(f"run:act_last_step_timestamp_seconds:age{{{_RUN}}}", name),
            unit="s",
            alerts=["ActTrainerStalled"],
        ),
        lines(
            "Rollbacks left",
            "Of each run's budget. At 0 the next request halts the run.",
            query(f"min by (run) (act_rollback_budget_remaining{{{_RUN}}})", name),
            unit="none",
            alerts=["ActRollbackBudgetSpent"],
        ),
    ]
