"""The metric families: what is exposed, under which name, from which value.

Layer families are rendered here, since there are thousands of series: each one's name and labels
are put together once and cached. All other families go through client_python.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from act_exporter.diagnosis import VERDICTS, Verdict
from act_exporter.history import RULES, SERIOUS, Layers, Thresholds
from act_exporter.journal import Journal
from act_exporter.rows import NONFINITE_KINDS, Array
from act_exporter.sample import Update
from act_exporter.taps import Tap
from act_exporter.training import SIGNALS, Signal


@dataclass(frozen=True, slots=True)
class Family:
    """One layer family.

    Attributes:
        name: as in Prometheus.
        help: one sentence, with the unit.
        value: from a snapshot, (taps,), or (values of the label, taps).
        label: the label that the rows of `value` stand for, and its values.
    """

    name: str
    help: str
    value: Callable[[Layers], Array]
    label: tuple[str, Sequence[str]] | None = None

    @property
    def kind(self) -> str:
        return "counter" if self.name.endswith("_total") else "gauge"


FAMILIES = (
    Family(
        "act_layer_absmax",
        "Largest absolute value in the last sampled step that ran the layer.",
        lambda layers: layers.statistics.absmax,
    ),
    Family(
        "act_layer_absmax_rank",
        'With reduce="global", the rank that has the absmax, or elements that are not finite.',
        lambda layers: layers.holder,
    ),
    Family(
        "act_layer_absmax_peak",
        "Largest absmax of the last peak_seconds (120) and at least of the last sampled step.",
        lambda layers: layers.peak,
    ),
    Family(
        "act_layer_absmax_baseline",
        "Median absmax of baseline_steps (100) sampled steps, once training had settled.",
        lambda layers: layers.baseline,
    ),
    Family(
        "act_layer_absmax_window_mean",
        "Mean absmax of the last window (500) sampled steps that broke no rule.",
        lambda layers: layers.window_mean,
    ),
    Family(
        "act_layer_absmax_window_std",
        "Standard deviation of the same, at least 1 % of the mean.",
        lambda layers: layers.window_std,
    ),
    Family("act_layer_min", "Smallest value.", lambda layers: layers.statistics.min),
    Family("act_layer_max", "Largest value.", lambda layers: layers.statistics.max),
    Family("act_layer_mean", "Mean.", lambda layers: layers.statistics.mean),
    Family("act_layer_std", "Standard deviation.", lambda layers: layers.statistics.std),
    Family("act_layer_l2norm", "Euclidean norm.", lambda layers: layers.statistics.l2norm),
    Family("act_layer_rms", "Root mean square.", lambda layers: layers.statistics.rms),
    Family(
        "act_layer_exceed_ratio",
        "Share of elements beyond the exceed threshold, 0 to 1.",
        lambda layers: layers.statistics.exceed_ratio,
    ),
    Family(
        "act_layer_nonfinite_total",
        "Elements that were NaN or infinite.",
        lambda layers: layers.nonfinite,
        ("kind", tuple(NONFINITE_KINDS)),
    ),
    Family(
        "act_layer_exceeded_steps_total",
        "Sampled steps that broke the rule.",
        lambda layers: layers.exceeded_steps,
        ("rule", RULES),
    ),
    Family(
        "act_layer_exceeded_consecutive",
        "Sampled steps in a row that broke the rule, their maximum held for peak_seconds (120).",
        lambda layers: layers.consecutive,
        ("rule", RULES),
    ),
    Family(
        "act_layer_absmax_growth_ratio",
        "Relative growth of absmax a sampled step, over the last 100.",
        lambda layers: layers.growth,
    ),
    Family(
        "act_layer_depth", "Place in the order of execution, from 0.", lambda layers: layers.depth
    ),
    Family(
        "act_layer_depth_jump_ratio",
        "Peak over baseline, against the same place in the blocks before; 1 in health.",
        lambda layers: layers.jump_ratio(),
    ),
    Family(
        "act_layer_headroom_ratio",
        "Peak over the largest number that the tensor's dtype has; 1 is the end.",
        lambda layers: layers.headroom,
    ),
    Family(
        "act_layer_calls_total",
        "Times that the module ran in sampled training forwards.",
        lambda layers: layers.calls,
    ),
)


# Share of the series that is kept for tensors which have no place of their own, where there are
# any: those that look worst, ran least and ran most. A tenth of the usual limit is 70 of them.
_GUESTS = 0.1


class LayerPage:
    """Renders the layer families.

    Args:
        taps: the taps, in the order of the snapshots' columns.
        labels: labels of every sample.
        max_series: how many series there may be; of more taps the most nested ones have no place
            of their own, a mixture's experts before its blocks. Of those the worst, the least and
            the most used are shown, as of the scrape. None for no limit.
    """

    def __init__(
        self, taps: Sequence[Tap], labels: dict[str, str], max_series: int | None = None
    ) -> None:
        each = sum(len(_more_labels(family)) for family in FAMILIES)
        most = len(taps) if max_series is None else max_series // each
        self._guests = math.ceil(_GUESTS * most) if most < len(taps) else 0
        ranked = sorted(range(len(taps)), key=lambda index: (_nesting(taps[index]), index))
        own = most - self._guests
        self._kept = sorted(ranked[:own])
        self._rest = np.array(sorted(ranked[own:]), dtype=np.int64)
        self._taps = taps
        self._labels = labels
        self.dropped = [taps[index] for index in self._rest]
        """Taps that are judged in the trainer but have no place of their own on the page."""
        self.series = each * (len(self._kept) + self._guests)
        """How many series there are at most."""
        self.series_dropped = each * (len(self.dropped) - self._guests)
        self._prefixes = self._prefixes_of(self._kept)
        # Taps and their prefixes, replaced as one: several scrapes may render at a time.
        self._invited = list[int](), self._prefixes_of([])

    def _prefixes_of(self, taps: Sequence[int]) -> dict[str, list[list[str]]]:
        """By family, (values of its label, taps)."""
        return {
            family.name: [
                [
                    sample_prefix(
                        family.name,
                        {
                            **self._labels,
                            "layer": self._taps[tap].layer,
                            "tensor": self._taps[tap].tensor,
                        },
                        more,
                    )
                    for tap in taps
                ]
                for more in _more_labels(family)
            ]
            for family in FAMILIES
        }

    def render(self, layers: Layers, openmetrics: bool) -> str:
        """The exposition text, with no end mark; series without a value are left out."""
        lines = []
        invited, guest_prefixes = self._invited
        if (wanted := self._invite(layers)) != invited:
            invited, guest_prefixes = self._invited = wanted, self._prefixes_of(wanted)
        shown = [*self._kept, *invited]
        for family in FAMILIES:
            # OpenMetrics names a counter's family without the suffix that its samples have.
            name = family.name.removesuffix("_total") if openmetrics else family.name
            lines.append(f"# HELP {name} {family.help}\n# TYPE {name} {family.kind}\n")
            values = np.atleast_2d(family.value(layers))[:, shown]
            rows = zip(
                self._prefixes[family.name],
                guest_prefixes[family.name],
                values.tolist(),
                strict=True,
            )
            for own, guests, row in rows:
                lines += [
                    f"{prefix}{value!r}\n"
                    for prefix, value in zip([*own, *guests], row, strict=True)
                    if value == value
                ]
        return "".join(lines)

    def _invite(self, layers: Layers) -> list[int]:
        """The taps without a place of their own that are shown this time.

        Half of them the worst, so that a fault in any tensor is on the page where the rules see it;
        the rest by turns those that ran least and most (a mixture's dead and overworked experts).
        """
        if not self._guests:
            return []
        serious = [RULES.index(rule) for rule in SERIOUS]
        broken = np.fmax.reduce(layers.consecutive[serious])[self._rest]
        with np.errstate(divide="ignore", invalid="ignore"):
            # In whole powers of two: small ups and downs must not have the guests change at each
            # scrape. A settled tap wanders by less than 2.
            excess = np.floor(np.log2((layers.peak / layers.baseline)[self._rest]))
        worst = np.lexsort((-np.nan_to_num(excess, nan=0.0), -np.nan_to_num(broken)))
        used = np.argsort(layers.calls[self._rest], kind="stable")
        order = [*worst[: (self._guests + 1) // 2]]
        for least, most in zip(used, used[::-1], strict=True):
            order += [least, most]
        chosen = list(dict.fromkeys(order))[: self._guests]
        return sorted(self._rest[chosen].tolist())


def _nesting(tap: Tap) -> int:
    """How many lists the layer lies in: a block is in one, its expert in two."""
    return sum(part.isdecimal() for part in tap.layer.split("."))


def _more_labels(family: Family) -> list[dict[str, str]]:
    if family.label is None:
        return [{}]
    name, values = family.label
    return [{name: value} for value in values]


def sample_prefix(name: str, labels: dict[str, str], more: dict[str, str]) -> str:
    """A sample's name and labels, escaped: all of its line but the value."""
    pairs = ",".join(f'{key}="{_escaped(value)}"' for key, value in {**labels, **more}.items())
    return f"{name}{{{pairs}}} "


def _escaped(value: str) -> str:
    # Unescaped, one quote in a module's name takes the whole target down.
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """The run as of its last step: an immutable copy, for scrapes.

    Attributes:
        step: last finished step.
        steps: steps finished in this process; a rollback does not take any back.
        finished_at: when the last step ended, Unix seconds; before the first, when the exporter
            started, so that a run which hangs there is seen as well.
        generation: 0, and one more with each rollback.
        values: what is known of "loss", "grad_norm", "learning_rate" and "loss_scale".
        signals: history of "loss", "grad_norm" and "update_rms", once there is one.
        gradients: watched layer to the norm of its gradient.
        update: the last one that was looked at.
        layers: all taps as of the last sampled step.
        verdict: the diagnosis in force.
        probe_seconds: spent on statistics, on the host.
        overhead: share of training time that looking costs, or None while it is not known.
        sample_every: the interval in force, in steps.
    """

    step: int = 0
    steps: int = 0
    finished_at: float = 0.0
    generation: int = 0
    values: dict[str, float] = field(default_factory=dict)
    signals: dict[str, Signal] = field(default_factory=dict)
    gradients: dict[str, float] = field(default_factory=dict)
    update: Update | None = None
    layers: Layers | None = None
    verdict: Verdict | None = None
    probe_seconds: float = 0.0
    overhead: float | None = None
    sample_every: int = 1


Fact = tuple[str, str, str, dict[str, float]]
"""A family of constants: name, help, label, {label's value: number}."""

_VALUE_HELP = {
    "loss": "Loss as last recorded.",
    "grad_norm": "Norm of the gradient before clipping, at the last sampled step or as recorded.",
    "learning_rate": "Largest learning rate of the optimizer's groups at the last step.",
    "loss_scale": "Factor on the loss, taken out of the gradient norms again.",
}

_UPDATE_HELP = {
    "update_ratio": "RMS of the weights' last update that was looked at, over that of the weights.",
    "update_rms": "RMS of the weights' last update that was looked at, over the learning rate.",
    "update_unchanged_ratio": "Share of weights with a gradient that it left unchanged, 0 to 1.",
}


_SIGNAL_HELP = {
    "peak": "Largest value of the last peak_seconds (120)",
    "peak_zscore": "Deviations above the window of the highest of the last peak_seconds (120)",
    "peak_ratio": "The highest of the last peak_seconds (120) over the mean of the window",
    "window_mean": "Mean of the last window (500) calm values",
    "window_std": "Standard deviation of the same",
    "shifted_consecutive": "Sampled steps in a row with a moved median of the last 20 values",
}

_BOUND_HELP = {
    "act_attention_logit_bound": "No attention logit of the last sampled step was beyond this.",
    "act_attention_logit_bound_baseline": "Median of the bound, once training had settled.",
}


class TrainingCollector(Collector):
    """The families of the run and of the exporter itself, for client_python.

    Args:
        labels: labels of every sample.
        training: gives the newest `Training`.
        errors: stage to number of errors.
        facts: what does not change.
        series_dropped: layer series that had no place on the page.
        faults: layer to the factor of an injected fault.
        scrape_seconds: how long the last scrape took.
        journal: whose counts are told; None where there is none.
        memory: bytes in tensors and bytes that there are, by accelerator.
    """

    def __init__(
        self,
        labels: dict[str, str],
        training: Callable[[], Training],
        errors: dict[str, int],
        facts: Sequence[Fact],
        series_dropped: int,
        faults: Callable[[], dict[str, float]],
        scrape_seconds: Callable[[], float | None],
        journal: Journal | None,
        memory: Callable[[], dict[str, tuple[float, float]]],
    ) -> None:
        self._labels = labels
        self._memory_in_use = memory
        self._training = training
        self._errors = errors
        self._facts = facts
        self._series_dropped = series_dropped
        self._faults = faults
        self._scrape_seconds = scrape_seconds
        self._journal = journal

    def collect(self) -> Iterator[Metric]:
        """All families, with a value or without."""
        now = self._training()
        yield self._gauge("act_step", "Last finished step; a rollback takes it back.", now.step)
        yield self._counter("act_steps", "Steps finished in this process.", {"": now.steps})
        yield self._gauge(
            "act_last_step_timestamp_seconds",
            "When the last step ended; before the first, when the exporter started.",
            now.finished_at,
        )
        for name, text in _VALUE_HELP.items():
            yield self._gauge(f"act_{name}", text, now.values.get(name))
        for name in SIGNALS:
            yield from self._signal(name, now.signals.get(name))
        # Not with the layer families: one series a layer, and NaN is a value here, not an absence.
        yield self._gauges(
            "act_layer_grad_norm",
            "Norm of the gradient of the layer's parameters, at the last sampled step.",
            "layer",
            now.gradients,
        )
        yield from self._update(now.update)
        yield from self._judgements(now)
        yield from self._memory()
        yield self._gauge(
            "act_overhead_ratio", "Share of training time that looking costs.", now.overhead
        )
        yield self._gauge(
            "act_sample_interval_steps", "Each so-many-th step is sampled.", now.sample_every
        )
        run = {str(now.generation): 1.0}
        yield self._gauges("act_run_info", "The run's generation.", "generation", run)
        yield self._gauges(
            "act_injected_fault",
            "Factor that inject_fault has the layer's output multiplied by; 1 while it waits.",
            "layer",
            self._faults(),
        )
        for fact in self._facts:
            yield self._gauges(*fact)
        yield self._counter(
            "act_probe_seconds",
            "Time spent on statistics and history, on the host.",
            {"": now.probe_seconds},
        )
        yield self._counter(
            "act_series_dropped",
            "Series that had no place on this page.",
            {"layer": self._series_dropped},
            "family",
        )
        yield self._gauge(
            "act_scrape_duration_seconds",
            "Time that rendering this page took at the scrape before.",
            self._scrape_seconds(),
        )
        kept = self._journal
        yield self._counter(
            "act_journal_records",
            "Lines written to the journal.",
            {} if kept is None else {"": kept.records},
        )
        yield self._counter(
            "act_journal_bytes",
            "Their size before compression.",
            {} if kept is None else {"": kept.bytes},
        )
        yield self._counter(
            "act_journal_dropped",
            "Lines lost: the writer was too slow (queue), or the disk did not take them (write).",
            {} if kept is None else kept.dropped,
            "reason",
        )
        yield self._counter(
            "act_errors", "Errors inside the exporter, by stage.", self._errors, "stage"
        )

    def _signal(self, name: str, signal: Signal | None) -> Iterator[Metric]:
        for part, text in _SIGNAL_HELP.items():
            value = getattr(signal, part.removesuffix("_consecutive"), math.nan)
            known = None if math.isnan(value) else value
            yield self._gauge(f"act_{name}_{part}", f"{text} of act_{name}.", known)
        yield self._counter(
            f"act_{name}_nonfinite",
            f"Sampled steps in which act_{name} was NaN or infinite.",
            {"": signal.nonfinite if signal is not None else 0},
        )

    def _update(self, update: Update | None) -> Iterator[Metric]:
        values = {} if update is None else update.values
        for name, text in _UPDATE_HELP.items():
            yield self._gauge(f"act_{name}", text, values.get(name))
        yield self._gauges(
            "act_layer_update_ratio",
            "RMS of the last update of the layer's matrices over that of their weights.",
            "layer",
            {} if update is None else update.ratios,
        )
        yield self._gauges(
            "act_layer_update_unchanged_ratio",
            "Share of the layer's weights with a gradient that it left unchanged, 0 to 1.",
            "layer",
            {} if update is None else update.unchanged,
        )

    def _judgements(self, now: Training) -> Iterator[Metric]:
        onset = now.layers.onset if now.layers is not None else None
        family = GaugeMetricFamily(
            "act_onset_step",
            "Step at which the present anomaly began, and the layer that went first.",
            labels=[*self._labels, "layer", "tensor", "rule"],
        )
        if onset is not None:
            where = [onset.layer, onset.tensor, onset.rule]
            family.add_metric([*self._labels.values(), *where], onset.step)
        yield family
        yield self._gauges(
            "act_diagnosis",
            "1 for the kind of fault that is in force.",
            "verdict",
            {verdict: float(verdict == now.verdict) for verdict in VERDICTS},
        )
        plateau = now.layers.plateau() if now.layers is not None else None
        yield self._gauges(
            "act_plateau_depth",
            "Depth from which and to which like places stay above ten times their baselines.",
            "edge",
            {} if plateau is None else {"first": plateau[0], "last": plateau[1]},
        )
        yield self._gauges(
            "act_logit_log_partition",
            "Mean of log(sum(exp(logits))) over some rows of the last sampled step.",
            "layer",
            now.layers.log_partitions if now.layers is not None else {},
        )
        bounds = now.layers.logit_bounds if now.layers is not None else {}
        for place, (name, text) in enumerate(_BOUND_HELP.items()):
            known = {layer: pair[place] for layer, pair in bounds.items()}
            known = {layer: value for layer, value in known.items() if not math.isnan(value)}
            yield self._gauges(name, text, "layer", known)

    def _memory(self) -> Iterator[Metric]:
        found = self._memory_in_use()
        for name, text, values in (
            (
                "allocated",
                "Device memory in tensors.",
                {key: use for key, (use, _) in found.items()},
            ),
            ("limit", "Device memory there is.", {key: limit for key, (_, limit) in found.items()}),
        ):
            yield self._gauges(f"act_memory_{name}_bytes", text, "device", values)

    def _gauge(self, name: str, text: str, value: float | None) -> Metric:
        family = GaugeMetricFamily(name, text, labels=list(self._labels))
        if value is not None:
            family.add_metric(list(self._labels.values()), value)
        return family

    def _gauges(self, name: str, text: str, label: str, values: dict[str, float]) -> Metric:
        family = GaugeMetricFamily(name, text, labels=[*self._labels, label])
        for value, number in values.items():
            family.add_metric([*self._labels.values(), value], number)
        return family

    def _counter(
        self, name: str, text: str, values: dict[str, int] | dict[str, float], label: str = ""
    ) -> Metric:
        more = [label] if label else []
        family = CounterMetricFamily(name, text, labels=[*self._labels, *more])
        for value, number in values.items():
            family.add_metric([*self._labels.values(), *([value] if label else [])], number)
        return family


def constants(thresholds: Thresholds, series: int) -> list[Fact]:
    """What does not change in a run."""
    from act_exporter import __version__

    rules = {
        rule: float(getattr(thresholds, rule)) for rule in ("hard", "sigma", "exceed", "window")
    }
    return [
        ("act_rule_threshold", "The thresholds that the trainer judges by.", "rule", rules),
        ("act_build_info", "Version of the exporter.", "version", {__version__: 1.0}),
        ("act_series", "Layer series on this page, at most.", "family", {"layer": float(series)}),
    ]


def render_page(
    accept: str, registry: CollectorRegistry, page: LayerPage, layers: Layers | None
) -> tuple[bytes, str]:
    """The whole page and its content type, in the format that the Accept header asks for."""
    encode, content_type = choose_encoder(accept)
    openmetrics = content_type.startswith("application/openmetrics-text")
    text = encode(registry)
    rendered = page.render(layers, openmetrics).encode() if layers is not None else b""
    # The layer families come first: OpenMetrics ends with a mark that client_python has written.
    return rendered + text, content_type
