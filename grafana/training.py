"""The dashboard Training and recovery: how one run learns, saves, and is brought back."""

from __future__ import annotations

from grafana_foundation_sdk.builders import statetimeline, timeseries

from act_exporter.rules import DEFAULTS
from grafana import incident, receiver
from grafana.boards import Board, rank
from grafana.looks import band
from grafana.panels import Row, lines, query, timeline
from grafana.rules import limit
from grafana.selection import RUN

_RANKED = f'{RUN}, rank=~"$rank"'
_SIGMA = limit("ActLossSpike")


def board() -> Board:
    """The dashboard."""
    return Board(
        name="training",
        description="How one run learns, what it saves, and how it was brought back.",
        variables=[rank()],
        rows=[
            Row(
                title="What went first, and what was done about it",
                panels=[*incident.first(RUN), *incident.done(RUN)],
            ),
            Row(title="Loss and gradient", panels=[*_loss(), *_gradient()]),
            Row(title="Learning rate and updates", panels=_updates()),
            Row(title="Steps, checkpoints and rollbacks", panels=_recovery()),
            Row(title="Requests and messages, of all runs", panels=receiver.panels()),
        ],
    )


def _of_ranks(metric: str) -> str:
    """The largest of the chosen ranks."""
    return f"max by (run) ({metric}{{{_RANKED}}})"


def _loss() -> list[timeseries.Panel]:
    mean, deviation = _of_ranks("act_loss_window_mean"), _of_ranks("act_loss_window_std")
    high = f"mean + {_SIGMA:g} sigma"
    panel = lines(
        "Loss",
        "The loss, and its peak of the last two minutes; the band goes from the mean of the last "
        f"{DEFAULTS.window} calm sampled steps to {_SIGMA:g} standard deviations above it. Good "
        "is a line that falls slowly inside the band; at a spike compare when the layers rose.",
        query(f"avg by (run) (act_loss{{{_RANKED}}})", "loss"),
        query(_of_ranks("act_loss_peak"), "peak"),
        query(f"{mean} + {_SIGMA:g} * {deviation}", high),
        query(mean, "mean of the window"),
        unit="short",
    )
    return [
        band(panel, "mean of the window", high, "blue"),
        lines(
            "Loss: standard deviations above its window",
            "Of the highest loss of the last two minutes that was also twice the mean. No line, or "
            "0, is good.",
            query(f"run:act_loss_peak_zscore:max{{{RUN}}}", "sigma"),
            unit="short",
            alerts=["ActLossSpike"],
        ),
    ]


def _gradient() -> list[timeseries.Panel]:
    explosion = limit("ActGradientExplosion")
    mean = _of_ranks("act_grad_norm_window_mean")
    shifted = "shifted_consecutive"
    return [
        lines(
            "Gradient norm before clipping",
            "Of all parameters, the loss scale taken out, with the mean of the last "
            f"{DEFAULTS.window} calm "
            f"sampled steps and {explosion:g} times it. Good is near the mean. One that explodes "
            "while all layers are calm is a wrong backward pass.",
            query(_of_ranks("act_grad_norm_peak"), "peak"),
            query(_of_ranks("act_grad_norm"), "norm"),
            query(mean, "mean of the window"),
            query(f"{explosion:g} * {mean}", f"{explosion:g} times the mean"),
            unit="short",
            log=True,
        ),
        lines(
            "Gradient norm over its mean",
            "The highest of the last two minutes that was high (5 sigma and five times the "
            "mean). No line, or 0, is good.",
            query(f"run:act_grad_norm_peak_ratio:max{{{RUN}}}", "times the mean"),
            unit="short",
            alerts=["ActGradientExplosion"],
        ),
        lines(
            "Gradient norm against its mean, least",
            "The smallest rank's. Around 1 is good; near 0 the gradient vanishes and nothing "
            "learns.",
            query(f"run:act_grad_norm_peak:window_ratio_min{{{RUN}}}", "times the mean"),
            unit="short",
            alerts=["ActGradientVanishing"],
            log=True,
        ),
        lines(
            "Sampled steps in a row with a moved median",
            "How long the median of the last 20 values has been far above its window. 0 is good; a "
            "gradient norm at the line is rolled back.",
            query(f"max by (run) (act_grad_norm_{shifted}{{{RUN}}})", "gradient norm"),
            query(f"run:act_loss_{shifted}:max{{{RUN}}}", "loss"),
            unit="none",
            alerts=["ActGradientRunaway", "ActLossShifted"],
        ),
        lines(
            "Steps with a loss or a gradient that is not finite, a minute",
            "No lines is good. Any at all: see which layer had NaN or Inf first.",
            *(
                query(
                    f"60 * max by (run) (rate(act_{signal}_nonfinite_total{{{_RANKED}}}"
                    "[$__rate_interval])) > 0",
                    name,
                )
                for signal, name in {"loss": "loss", "grad_norm": "gradient norm"}.items()
            ),
            unit="short",
            alerts=["ActLossNonFinite", "ActGradientNonFinite"],
        ),
        lines(
            "Verdicts",
            "The kind of fault that the trainer takes it for, while it does. No lines is good.",
            query(f"run:act_diagnosis:max{{{RUN}}} > 0", "{{verdict}}"),
            unit="none",
            alerts=["ActDiagnosis"],
        ),
    ]


def _updates() -> list[timeseries.Panel]:
    return [
        lines(
            "Learning rate",
            "The largest of the optimizer's groups, as the scheduler sets it. A spike of the loss "
            "while it still rises is often a rate that is too high.",
            query(_of_ranks("act_learning_rate"), "learning rate"),
            unit="sci",
            width=8,
        ),
        lines(
            "Loss scale",
            "Factor on the loss, taken out of the gradient norms. Halving now and then is good; "
            "halving on and on is overflow. No line without a scaler.",
            query(_of_ranks("act_loss_scale"), "loss scale"),
            unit="short",
            log=True,
            width=8,
        ),
        lines(
            "Last update over the weights",
            "Root mean square of what a step changed, over that of the weights. Around a "
            "thousandth is usual.",
            query(_of_ranks("act_update_ratio"), "update over weights"),
            unit="percentunit",
            log=True,
            width=8,
        ),
        lines(
            "Update at its learning rate, over its mean",
            "The highest of the last two minutes that was high. No line, or 0, is good; a spike at "
            "the first step after a resume is a lost optimizer state.",
            query(f"run:act_update_rms_peak_ratio:max{{{RUN}}}", "times the mean"),
            unit="short",
            alerts=["ActUpdateSpike"],
        ),
        lines(
            "Weights with a gradient that the update left unchanged",
            "Near 0 is good. Where many stay, updates are rounded away: keep the weights in "
            "float32.",
            query(_of_ranks("act_update_unchanged_ratio"), "left unchanged"),
            query(f"run:act_update_unchanged_ratio:min10m{{{RUN}}}", "least of 10 minutes"),
            unit="percentunit",
            alerts=["ActUpdatesLost"],
        ),
    ]


def _recovery() -> list[timeseries.Panel | statetimeline.Panel]:
    return [
        lines(
            "Step, and that of the newest checkpoint",
            "The distance is what a crash would cost. A fall of the step is a rollback; it should "
            "pass the old place again.",
            query(_of_ranks("act_step"), "step"),
            query(f"max by (run) (act_checkpoint_last_step{{{RUN}}})", "checkpoint"),
            unit="none",
        ),
        lines(
            "Age of the newest checkpoint",
            "Falling to 0 every 15 minutes at least is good.",
            query(f"run:act_checkpoint_last_success_timestamp_seconds:age{{{RUN}}}", "age"),
            unit="s",
            alerts=["ActCheckpointStale"],
        ),
        lines(
            "Time of a save",
            "From the step's boundary to complete files; training goes on meanwhile. Steady is "
            "good; one that grows is a slow disk.",
            query(f"max by (run) (act_checkpoint_save_seconds{{{RUN}}})", "save"),
            unit="s",
            width=8,
        ),
        lines(
            "Saves that failed, of the last half hour",
            "No line is good. A full disk fails the next one too: make room.",
            query(f"run:act_checkpoint_failures:increase30m{{{RUN}}}", "failed"),
            unit="short",
            alerts=["ActCheckpointFailing"],
            width=8,
        ),
        lines(
            "Checkpoints on disk by health",
            "Confirmed ones have a clean stretch behind them; pending ones wait for it; suspect "
            "and corrupt ones are never gone back to. One confirmed at least is good.",
            query(f"sum by (health) (act_checkpoints{{{RUN}}})", "{{health}}"),
            unit="none",
            width=8,
        ),
        timeline(
            "Generations: each rollback begins a new one",
            "One bar is good. Each further one begins with a rollback, in the process or by a "
            "restart; many short ones are an anomaly that comes back.",
            query(f"max by (generation) (act_run_info{{{RUN}}})", "generation {{generation}}"),
            meanings={1: ("trains", "blue")},
        ),
        lines(
            "Rollbacks left",
            "What the guard may still make. They come back when the place of the last anomaly is "
            "behind and calm; at 0 the next request halts the run.",
            query(f"min by (run) (act_rollback_budget_remaining{{{RUN}}})", "left"),
            unit="none",
            alerts=["ActRollbackBudgetSpent"],
        ),
    ]
