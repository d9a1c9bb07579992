"""The page's sentences: what is wrong, how far it went, and what was done about it."""

from __future__ import annotations

import math

from act_exporter.diagnosis import meaning
from act_exporter.history import Rule
from act_exporter.live.conditions import Holding
from act_exporter.live.incident import Incident
from act_exporter.live.trail import Event
from act_exporter.live.view import View

RULES: dict[Rule, str] = {
    "nonfinite": "NaN or Inf",
    "hard": "hard",
    "sigma": "sigma",
    "dead": "dead",
    "saturated": "saturated",
}

_ACTIONS = {"recover": "a rollback", "checkpoint": "a backup checkpoint"}

# What an alert compares, with its value.
_CONDITIONS = {
    "ActRunaway": "{value} bad sampled steps in a row",
    "ActGradientRunaway": "gradient norm far above its mean for {value} sampled steps in a row",
    "ActLayerNonFinite": "NaN or Inf in {value} sampled steps in a row",
    "ActLayerAboveBaseline": "{value} times its baseline",
    "ActLayerAboveWindowSustained": "above its window in {value} sampled steps in a row",
    "ActLayerHeadroomLow": "{value} of the largest number of its format",
    "ActLayerDrift": "{value} times its baseline, and growing",
    "ActLayerDepthSpike": "{value} times further up than the blocks before it",
    "ActLayerDead": "dead for {value} sampled steps in a row",
    "ActLayerSaturated": "saturated for {value} sampled steps in a row",
    "ActAttentionLogitsGrowing": "attention logits {value} times their baseline",
    "ActLogitsDrifting": "log-partition {value} from 0",
    "ActLossNonFinite": "the loss is NaN or Inf",
    "ActLossSpike": "loss {value} deviations above its window",
    "ActLossShifted": "loss above its window for {value} sampled steps in a row",
    "ActGradientNonFinite": "the gradient norm is NaN or Inf",
    "ActGradientExplosion": "gradient norm {value} times its mean",
    "ActGradientVanishing": "gradient norm {value} of its mean",
    "ActUpdateSpike": "an update {value} times as large as usual",
    "ActTrainerStalled": "no step for {value} s",
    "ActHooksSilent": "watched layers do not run",
    "ActOverheadHigh": "looking costs too much, though it is done only once in {value} steps",
    "ActCheckpointStale": "the newest checkpoint is {value} s old",
    "ActRollbackBudgetSpent": "no rollback is left",
}


def number(value: float) -> str:
    """Three digits, or a word."""
    if math.isnan(value):
        return "-"
    if math.isinf(value):
        return "Inf" if value > 0 else "-Inf"
    size = abs(value)
    if size >= 1e6 or 0 < size < 1e-3:
        return f"{value:.2e}"
    return f"{value:,.0f}" if size >= 100 else f"{value:.3g}"


def ago(seconds: float) -> str:
    """An age, in the two largest units that it has."""
    left = max(0, int(seconds))
    parts = []
    for name, size in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        if left >= size:
            parts.append(f"{left // size} {name}")
        left %= size
    return " ".join(parts[:2]) or "0 s"


def named(text: str, length: int = 80) -> str:
    """A name as it can be shown: nothing that is not printable, and its middle left out."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    half = length // 2
    return shown if len(shown) <= length else f"{shown[:half]}…{shown[1 - half :]}"


def place(view: View, tap: int) -> str:
    """Layer and tensor."""
    return f"{named(view.source.taps[tap].layer)} {view.source.taps[tap].tensor}"


def headline(view: View) -> str:
    """One sentence: what is wrong, or that nothing is."""
    training = view.training
    if view.onset is not None:
        layer, tensor, step = named(view.onset.layer), view.onset.tensor, view.onset.step
        when = "" if view.incident is None else f", {ago(view.at - view.incident.at)} ago"
        return f"{layer} {tensor} went bad first, at step {step:,}{when}"
    if training.verdict is not None:
        return meaning(training.verdict).partition(":")[0]
    if view.holding:
        worst = view.holding[0]
        more = f", and {len(view.holding) - 1} more" if len(view.holding) > 1 else ""
        return f"{worst.alert.name}: {condition(view, worst)}{more}"
    if training.layers is None:
        return "Nothing to judge yet: no step has been sampled"
    return f"All is well at step {training.step:,}"


def lines(view: View) -> list[str]:
    """What there is to say below the headline."""
    said = []
    if view.onset is not None and view.incident is not None:
        said.append(_how_far(view, view.incident))
        said.append(_done(view, view.incident))
    if view.training.verdict is not None:
        said.append(meaning(view.training.verdict))
    if view.state in ("well", "warning"):
        said.append(_baselines(view))
    if view.onset is None and view.incident is not None:
        said.append(_before(view, view.incident))
    for layer, factor in view.source.faults().items():
        waits = "waits" if factor == 1 else f"multiplies its output by {number(factor)}"
        said.append(f"A fault was injected on purpose into {named(layer)}: it {waits}.")
    return said


def condition(view: View, one: Holding) -> str:
    """What holds, of what, and the limit."""
    if one.alert.name == "ActDiagnosis":
        return f"verdict: {view.training.verdict}"
    what = _CONDITIONS[one.alert.name].format(value=number(one.value))
    # Where a value is no more than true there is no limit to tell.
    limit = f" (limit {number(one.alert.limit)})" if one.alert.limit > 0 else ""
    if one.taps:
        more = f", and {len(one.taps) - 1:,} more tensors" if len(one.taps) > 1 else ""
        return f"{place(view, one.taps[0])} {what}{limit}{more}"
    return f"{named(one.where)} {what}{limit}".strip()


def consequence(one: Holding) -> str:
    """Severity, and what is asked of the trainer."""
    said: list[str] = [one.alert.severity]
    if one.alert.action:
        said.append(f"asks for {_ACTIONS[one.alert.action]}")
    if one.alert.wait:
        said.append(f"fires after {one.alert.wait} of it")
    return ", ".join(said)


def happened(event: Event) -> str:
    """An event in words; "" for one that is nothing to people."""
    fields = {name: named(str(value), 160) for name, value in event.fields.items()}

    def get(name: str) -> str:
        return fields.get(name, "?")

    match event.kind:
        case "onset":
            rule = RULES.get(event.fields.get("rule", ""), get("rule"))
            return f"{get('layer')} {get('tensor')} went bad first (rule: {rule})"
        case "verdict" if event.fields.get("verdict") is None:
            return "nothing was wrong for long enough: the verdict is withdrawn"
        case "verdict":
            return f"verdict: {get('verdict')}"
        case "clean":
            return "no layer was bad for long enough: the anomaly is over"
        case "request":
            action = _ACTIONS.get(get("action"), get("action"))
            return f"{get('alert')} asked for {action}"
        case "checkpoint":
            return f"{get('kind')} checkpoint {get('name')} saved"
        case "rollback" if "resumed_from" in fields:
            remedies = event.fields.get("remedies")
            treated = f"; remedies: {get('remedies')}" if remedies else ""
            return f"rolled back from step {get('from_step')} to {get('resumed_from')}{treated}"
        case "rollback" if event.fields.get("to"):
            return f"the run goes on in generation {get('to')}"
        case "refused":
            return f"refused to {get('action')}: {get('why')}"
        case "halted":
            return f"halted: {get('why')}"
    return ""


def _how_far(view: View, incident: Incident) -> str:
    baseline = view.baseline_of(incident.onset.layer, incident.onset.tensor)
    if math.isinf(incident.first) or incident.onset.rule == "nonfinite":
        return "It had NaN or Inf in that step."
    said = f"It was {_times(incident.first, baseline)} in that step"
    if incident.worst > incident.first:
        worst = "NaN or Inf" if math.isinf(incident.worst) else _times(incident.worst, baseline)
        said += f", and {worst} at the worst since"
    hard = number(view.source.thresholds.hard)
    return f"{said}; the limit is {hard} times, the baseline {number(baseline)}."


def _done(view: View, incident: Incident) -> str:
    """What the system did about it."""
    done = [text for event in incident.after if (text := happened(event))]
    if done:
        return f"Since then: {'; '.join(done[-3:])}."
    if view.guard is None:
        return "No guard in this process: nothing is saved or rolled back."
    return "Nothing was done about it yet."


def _times(absmax: float, baseline: float) -> str:
    if math.isnan(absmax) or not baseline > 0:
        return f"at {number(absmax)}" if absmax == absmax else "out of line"
    return f"{number(absmax / baseline)} times its baseline"


def _baselines(view: View) -> str:
    watched = len(view.source.taps)
    if not view.baselines:
        return (
            f"{watched:,} tensors are watched. None has a baseline yet, which takes until training"
            " has settled: growth is not judged before, NaN and Inf are."
        )
    missing = watched - view.baselines
    some = f"; {missing:,} have no baseline yet" if missing else ""
    return (
        f"{watched:,} tensors are watched; the largest is {number(view.worst)} times its"
        f" baseline{some}."
    )


def _before(view: View, incident: Incident) -> str:
    onset = incident.onset
    how = ""
    baseline = view.baseline_of(onset.layer, onset.tensor)
    if math.isinf(incident.worst) or onset.rule == "nonfinite":
        how = ", with NaN or Inf"
    elif incident.worst == incident.worst and baseline > 0:
        how = f", up to {_times(incident.worst, baseline)}"
    ended = ""
    for event in incident.after:
        if event.kind == "clean":
            ended = " It passed by itself."
        elif event.kind == "rollback" and "resumed_step" in event.fields:
            ended = f" The run was rolled back to step {event.fields['resumed_step']}."
        elif event.kind == "rollback" and not ended:
            ended = f" It ended with generation {event.fields.get('to', '?')}."
        elif event.kind == "halted":
            ended = " The run was halted."
    return (
        f"The last anomaly began at step {onset.step:,}, {ago(view.at - incident.at)} ago, in"
        f" {named(onset.layer)} {onset.tensor}{how}.{ended}"
    )
