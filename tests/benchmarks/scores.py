"""Figures of what rules and detectors said about recordings: recall, delays, false alarms."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from act_exporter.history import Thresholds
from tests.benchmarks.detectors import DETECTORS
from tests.benchmarks.recordings import SCRAPE_SECONDS, START, Recording
from tests.benchmarks.replay import Firing, Rule, Verdicts

Fired = Callable[[Recording], int | None]
"""The first step, in the run's own count, in which something fired because of the fault."""


_EVERYWHERE = {"__name__", "run", "rank", "job", "instance"}


def alarm(names: Iterable[str], verdicts: Verdicts) -> Fired:
    """The first time that one of these alerts began after the fault had."""
    names = list(names)

    def fired(recording: Recording) -> int | None:
        firings = [firing for name in names for firing in begun(verdicts, name, recording)]
        return min((recording.step_at(firing.since) for firing in firings), default=None)

    return fired


def begun(verdicts: Verdicts, name: str, recording: Recording) -> list[Firing]:
    """The alerts of this name that began after the fault, or at all in a healthy run."""
    after = START + (recording.healthy_steps * recording.pace if recording.fault else 0)
    firings = verdicts.firings[name].get(recording.name, [])
    # Strictly more than an evaluation after: that of the last healthy scrape is not the fault's.
    return [firing for firing in firings if firing.since > after + 1]


def score(fired: Fired, recordings: Sequence[Recording]) -> dict[str, Any]:
    """Recall by kind of fault, and delays."""
    hits: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    delays: dict[str, list[int]] = defaultdict(list)
    hard = Thresholds().hard
    for recording in recordings:
        fault = recording.fault
        if fault is None:
            continue
        step = fired(recording)
        destroyed, harmed = recording.destroyed(), recording.harmed()
        group = "destroyed" if destroyed else "harmed" if harmed else "harmless"
        hits[fault.kind][group].append(step is not None)
        if step is not None and destroyed:
            if recording.pace >= SCRAPE_SECONDS:
                delays["delay_steps"].append(looked(recording, recording.healthy_steps + 1, step))
                bad = recording.first_bad_step(hard)
                if bad is not None:
                    delays["delay_from_bad_value"].append(looked(recording, bad, step))
            else:
                delays["delay_at_scrapes"].append(
                    looked(recording, recording.healthy_steps + 1, step)
                )
    return {
        "recall": {kind: _share(groups["destroyed"]) for kind, groups in hits.items()},
        "recall_overall": _share([hit for groups in hits.values() for hit in groups["destroyed"]]),
        "recall_harmed": {
            kind: _share(groups["destroyed"] + groups["harmed"]) for kind, groups in hits.items()
        },
        "recall_harmed_overall": _share(
            [hit for groups in hits.values() for hit in groups["destroyed"] + groups["harmed"]]
        ),
        "fired_harmless": {
            kind: [sum(groups["harmless"]), len(groups["harmless"])]
            for kind, groups in hits.items()
            if groups["harmless"]
        },
        **{
            name: {"median": float(np.median(own)), "max": max(own)} if own else None
            for name in ("delay_steps", "delay_from_bad_value", "delay_at_scrapes")
            for own in [delays[name]]
        },
    }


def looked(recording: Recording, first: int, last: int) -> int:
    """Sampled steps from one to another, both counted; negative where the second came first."""
    low, high = min(first, last), max(first, last)
    count = sum(recording.sampled[low - 1 : high])
    return count if last >= first else -count


def layer_steps(recordings: Iterable[Recording]) -> int:
    return sum(sum(recording.sampled) * len(recording.taps) for recording in recordings)


def false_alarms(
    names: Iterable[str], verdicts: Verdicts, healthy: Sequence[Recording]
) -> dict[str, Any]:
    """Alerts that began in healthy runs."""
    names = list(names)
    counts = {
        recording.name: sum(len(begun(verdicts, name, recording)) for name in names)
        for recording in healthy
    }
    rates = {
        f"{pace:g} s a step": _per_million(
            sum(counts[recording.name] for recording in own), layer_steps(own)
        )
        for pace in sorted({recording.pace for recording in healthy})
        for own in [[recording for recording in healthy if recording.pace == pace]]
    }
    return {
        "false_alarms": sum(counts.values()),
        "false_alarms_per_million": _per_million(sum(counts.values()), layer_steps(healthy)),
        "false_alarms_per_million_by_pace": rates,
    }


def compare(recordings: Sequence[Recording]) -> dict[str, Any]:
    """The detectors that people write by hand, on the same runs."""
    # One pace: they see steps, not time, and training is the same at both.
    pace = max(recording.pace for recording in recordings)
    runs = [recording for recording in recordings if recording.pace == pace]
    healthy = [recording for recording in runs if recording.fault is None]
    results = {}
    for name, detector in DETECTORS.items():
        verdicts = {}
        for recording in runs:
            sampled = np.array(recording.sampled)
            verdict = np.zeros(recording.absmax.shape, dtype=bool)
            verdict[sampled] = detector(recording.absmax[sampled])
            verdicts[recording.name] = verdict

        def fired(recording: Recording, verdicts: dict[str, np.ndarray] = verdicts) -> int | None:
            own = verdicts[recording.name].copy()
            # What was over the limit when the fault began is not its finding.
            own[:, own[max(recording.healthy_steps - 1, 0)]] = False
            steps = np.flatnonzero(own[recording.healthy_steps :].any(axis=1))
            return recording.healthy_steps + int(steps[0]) + 1 if steps.size else None

        wrong = [verdicts[recording.name][np.array(recording.sampled)] for recording in healthy]
        began = sum(int((own[1:] & ~own[:-1]).sum()) for own in wrong)
        results[name] = {
            **score(fired, runs),
            "false_alarms_per_million": _per_million(began, layer_steps(healthy)),
            "false_verdicts_per_million": _per_million(
                sum(int(own.sum()) for own in wrong), layer_steps(healthy)
            ),
        }
    return results


def evaluate(recordings: Sequence[Recording], verdicts: Verdicts) -> dict[str, Any]:
    """All figures."""
    healthy = [recording for recording in recordings if recording.fault is None]

    def figures(names: list[str]) -> dict[str, Any]:
        return {
            **score(alarm(names, verdicts), recordings),
            **false_alarms(names, verdicts, healthy),
        }

    def named(test: Callable[[Rule], bool]) -> list[str]:
        return [rule.name for rule in verdicts.alerts if test(rule)]

    recover = named(lambda rule: rule.label("action") == "recover")
    groups = {
        "asks for a recovery": recover,
        "critical": named(lambda rule: rule.label("severity") == "critical"),
        "warning or critical": named(lambda rule: rule.label("severity") != "info"),
    }
    return {
        "false_recover_requests": false_alarms(recover, verdicts, healthy)["false_alarms"]
        if healthy
        else None,
        "healthy_layer_steps": layer_steps(healthy),
        "rules": {
            rule.name: {
                "severity": rule.label("severity"),
                "action": rule.label("action"),
                **figures([rule.name]),
            }
            for rule in verdicts.alerts
        },
        "combined": {name: figures(names) for name, names in groups.items()},
        "comparison": compare(recordings),
        "skipped": verdicts.skipped,
        "healthy": [describe(recording, verdicts) for recording in healthy],
        "faults": [describe(recording, verdicts) for recording in recordings if recording.fault],
    }


def describe(recording: Recording, verdicts: Verdicts) -> dict[str, Any]:
    """One run: what became of it and what was said."""
    fault = recording.fault
    losses, hard = recording.losses, Thresholds().hard
    values = recording.absmax[recording.healthy_steps if fault else 0 :]
    with np.errstate(invalid="ignore", divide="ignore"):
        times = np.where(np.isfinite(values), values, np.nan) / recording.baseline
    top = int(np.nanargmax(times)) if np.isfinite(times).any() else None
    said = {
        rule.name: [
            {
                "step": recording.step_at(firing.since),
                **{key: text for key, text in firing.labels.items() if key not in _EVERYWHERE},
                "value": firing.value,
                "largest": firing.largest,
            }
            for firing in begun(verdicts, rule.name, recording)[:5]
        ]
        for rule in verdicts.alerts
        if begun(verdicts, rule.name, recording)
    }
    return {
        "run": recording.name,
        **(
            {
                "kind": fault.kind,
                "place": fault.place,
                "size": fault.size,
                "model": fault.trainee,
                "destroyed": recording.destroyed(),
                "harmed": recording.harmed(),
                "first_faulty_step": recording.healthy_steps + 1,
                "first_bad_step": recording.first_bad_step(hard),
            }
            if fault
            else {}
        ),
        "pace_seconds": recording.pace,
        "steps": recording.steps,
        "loss": {
            "before": float(np.median(losses[: recording.healthy_steps][-20:] or [np.nan])),
            "worst": float(np.max(losses[recording.healthy_steps :] or losses)),
            "end": float(np.median(losses[-20:])),
            **({"excess": float(np.median(recording.excess()[-20:]))} if fault else {}),
        },
        "most_baselines": None
        if top is None
        else {
            "times": float(times.flat[top]),
            "tap": " ".join(recording.taps[top % times.shape[1]]),
            "step": top // times.shape[1] + 1 + (recording.healthy_steps if fault else 0),
        },
        "largest_over_median_of_first_100": over_first(recording),
        "alerts": said,
    }


def over_first(recording: Recording) -> float | None:
    """The largest value of any tap in units of that tap's median over the first 100 steps."""
    if recording.fault is not None or recording.steps <= 100:
        return None
    return float(np.nanmax(recording.absmax / np.median(recording.absmax[:100], axis=0)))


def _share(hits: Sequence[bool]) -> float | None:
    return round(sum(hits) / len(hits), 4) if hits else None


def _per_million(count: int, of: int) -> float | None:
    return round(count * 1e6 / of, 2) if of else None
