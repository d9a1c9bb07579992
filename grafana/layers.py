"""The dashboard Layers: which layer went first, when, how far, and what was done about it."""

from __future__ import annotations

import math

from grafana_foundation_sdk.builders import heatmap, timeseries, xychart

from grafana import incident
from grafana.boards import Board, rank, several
from grafana.looks import band, dashed
from grafana.panels import Row, heat, lines, query, row_query
from grafana.rules import limit
from grafana.tables import Column, points

_RUN = 'run="$run"'
_CHOSEN = f'{_RUN}, layer=~"$layer", tensor=~"$tensor"'
# Recorded series are of all ranks together; those of single ranks are what the trainers expose.
_RANKED = f'{_CHOSEN}, rank=~"$rank"'
_RATIO = f"layer:act_layer_absmax:baseline_ratio{{{_CHOSEN}}}"
_NAME = "{{layer}} {{tensor}}"
_HARD = limit("ActLayerAboveBaseline")
_SIGMA = limit("ActLayerAboveWindow")


def board() -> Board:
    """The dashboard."""
    names = f"label_values(act_layer_absmax{{{_RUN}}}, "
    return Board(
        name="layers",
        description="Which layer went first, when, how far, and what the system did about it.",
        variables=[
            rank(),
            several("layer", "Layer", f"{names}layer)", "By the module's name."),
            several("tensor", "Tensor", f"{names}tensor)", "The module's input or its output."),
        ],
        rows=[
            Row(
                title="What went first, and what was done about it",
                panels=[
                    *incident.first(_RUN),
                    *incident.done(_RUN),
                    incident.onsets(_RUN),
                    incident.alerts(_RUN, "{{alertname}}"),
                ],
            ),
            Row(title="All layers over time", panels=[_heat(), _ratios(), _closely(), *_sigma()]),
            Row(title="Over depth", panels=[_profile(), *_over_depth()]),
            Row(title="Values at their ends", panels=_ends()),
            Row(title="Slow faults", panels=_slow(), collapsed=True),
            Row(title="Gradients, updates and ranks", panels=_others(), collapsed=True),
        ],
    )


def _worst(count: int, recorded: str, expr: str | None = None) -> str:
    """Of `recorded`, or of `expr`, the same few layers all along.

    They are those whose `recorded` was largest at any time of the range.
    """
    largest = f"topk({count}, max_over_time({recorded}[$__range] @ end()))"
    return f"{expr or recorded} and on (run, layer, tensor) {largest}"


def _of_ranks(metric: str) -> str:
    """The largest of the chosen ranks."""
    return f"max by (run, layer, tensor) ({metric}{{{_RANKED}}})"


def _heat() -> heatmap.Panel:
    # Grafana sorts a heatmap's rows by the numbers that their names begin with: here the depth.
    # `count_values by (...)` over a range is wrong in Prometheus 2.42, `without ()` is not.
    return heat(
        "Each layer's peak over its baseline, log10",
        "A row a layer and tensor in the order of execution, the first on top (the number is its "
        f"place). 0 is the baseline; at {math.log10(_HARD):g} it is darkest, and there the rule "
        "fires. Good is pale all over. The row that darkens first is where it began; darkness that "
        "spreads downwards followed from it. Empty: no baseline yet, or no data.",
        query(
            f"""
            log10({_RATIO}) * on (run, layer, tensor) group_left (depth)
            count_values without () (
              "depth", min by (run, layer, tensor) (act_layer_depth{{{_RANKED}}})
            )
            """,
            "{{depth}} " + _NAME,
        ),
        alert="ActLayerAboveBaseline",
        low=0,
        high=math.log10(_HARD),
    )


def _ratios() -> timeseries.Panel:
    return lines(
        "Times the baseline, worst ten",
        "Peak over baseline of the ten layers that were furthest above it in this range. Around "
        "1 is good. The line that rises first went first; what follows steps later was carried "
        "along.",
        query(_worst(10, _RATIO), _NAME),
        unit="short",
        alerts=["ActLayerAboveBaseline"],
        log=True,
        width=24,
        side=True,
    )


def _closely() -> timeseries.Panel:
    mean = _of_ranks("act_layer_absmax_window_mean")
    deviation = _of_ranks("act_layer_absmax_window_std")
    baseline = _of_ranks("act_layer_absmax_baseline")
    panel = lines(
        "The worst of the chosen layers: absmax, baseline and limits",
        "One layer's largest absolute value, of the chosen ones the worst: choose another above. "
        f"Dashed red is {_HARD:g} times its baseline, dashed green the baseline; the band goes "
        f"from the mean of its last 500 calm sampled steps to {_SIGMA:g} standard deviations "
        "above it. Good is a line inside the band.",
        *(
            query(_worst(1, _RATIO, expr), name)
            for name, expr in {
                f"peak of {_NAME}": _of_ranks("act_layer_absmax_peak"),
                "absmax": _of_ranks("act_layer_absmax"),
                "baseline": baseline,
                f"{_HARD:g} times the baseline": f"{_HARD:g} * {baseline}",
                f"mean + {_SIGMA:g} sigma": f"{mean} + {_SIGMA:g} * {deviation}",
                "mean of the window": mean,
            }.items()
        ),
        unit="short",
        log=True,
        width=24,
    )
    dashed(panel, "baseline", "green")
    dashed(panel, f"{_HARD:g} times the baseline", "red")
    return band(panel, "mean of the window", f"mean + {_SIGMA:g} sigma", "blue")


def _sigma() -> list[timeseries.Panel]:
    zscore = f"layer:act_layer_absmax:window_zscore{{{_CHOSEN}}}"
    consecutive = f'layer:act_layer_exceeded_consecutive:max{{{_CHOSEN}, rule="sigma"}}'
    return [
        lines(
            "Standard deviations above the window, worst five",
            "How far the last sampled step is above the mean of the last 500 calm ones. Single "
            "steps above the line happen in health; several in a row do not.",
            query(_worst(5, zscore), _NAME),
            unit="short",
            alerts=["ActLayerAboveWindow"],
        ),
        lines(
            f"Sampled steps in a row above {_SIGMA:g} standard deviations",
            "Held for two minutes. Below the line is good; above it the layer's level has moved.",
            query(f"{consecutive} > 0", _NAME),
            unit="none",
            alerts=["ActLayerAboveWindowSustained"],
        ),
    ]


def _profile() -> xychart.Panel:
    at_worst = (
        f"max by (run, layer, tensor) (max_over_time(act_layer_absmax_peak{{{_RANKED}}}[$__range]))"
    )
    return points(
        "Absmax by depth: baseline, and the largest of this range",
        "A point a layer and tensor, from the model's input on the left to its output. Good is "
        "each peak near its own baseline. One peak far above is a spike: look at that layer. All "
        "from one depth on is a plateau: look at where it begins. Names are in the tooltip.",
        row_query(f"min by (run, layer, tensor) (act_layer_depth{{{_RANKED}}})"),
        row_query(_of_ranks("act_layer_absmax_baseline")),
        row_query(at_worst),
        x=Column(name="Depth", source="Value #A", unit="none"),
        ys=[
            Column(name="Baseline", source="Value #B", unit="short"),
            Column(name="Largest", source="Value #C", unit="short"),
        ],
    )


def _over_depth() -> list[timeseries.Panel]:
    jump = f"layer:act_layer_depth_jump_ratio:max{{{_CHOSEN}}}"
    return [
        lines(
            "Further above its baseline than the blocks before it, times, worst five",
            "A layer's peak over baseline against that of the same place in the blocks before. "
            "Around 1 is good. One that jumps is where something entered.",
            query(_worst(5, jump), _NAME),
            unit="short",
            alerts=["ActLayerDepthSpike"],
            log=True,
        ),
        lines(
            "Plateau: its first and last depth",
            "The longest row of like places that are above ten times their baselines, by its ends. "
            "No lines is good. A first that stays is the place where it begins.",
            query(f'max by (edge) (act_plateau_depth{{{_RUN}, rank=~"$rank"}})', "{{edge}}"),
            unit="none",
        ),
    ]


def _ends() -> list[timeseries.Panel]:
    exceeding = _of_ranks("act_layer_exceed_ratio")
    headroom = f"layer:act_layer_headroom_ratio:max{{{_CHOSEN}}}"
    consecutive = f'layer:act_layer_exceeded_consecutive:max{{{_CHOSEN}, rule=~"hard|nonfinite"}}'
    return [
        lines(
            "Share of elements beyond the exceed threshold, worst ten",
            "Of each layer's elements, those with an absolute value above `exceed_threshold` "
            "(100). Steady is good, whatever its height; a share that climbs tells growth before "
            "the peak.",
            query(f"topk(10, {exceeding} > 0)", _NAME),
            unit="percentunit",
        ),
        lines(
            "NaN and Inf, elements a second",
            "By layer and kind. Any at all is bad: the first layer to have them is where they "
            "are made, those after it were given them. `nan` without `posinf` before it points "
            "to 0/0 or Inf - Inf, `posinf` to overflow: see the headroom.",
            query(
                f"""
                sum by (layer, tensor, kind) (
                  rate(act_layer_nonfinite_total{{{_RANKED}}}[$__rate_interval])
                ) > 0
                """,
                _NAME + " {{kind}}",
            ),
            unit="short",
            alerts=["ActLayerNonFinite"],
        ),
        lines(
            "Share of the format's largest number, worst ten",
            "Peak over the largest number of the tensor's own dtype (65,504 for float16). At 1 it "
            "overflows to Inf. Good is far below; in bfloat16 and float32 it always is.",
            query(_worst(10, headroom), _NAME),
            unit="percentunit",
            alerts=["ActLayerHeadroomLow"],
            log=True,
        ),
        lines(
            "Bad sampled steps in a row",
            "How many sampled steps in a row were beyond the hard rule or not finite, held for two "
            "minutes. Good is 0; at the line the run is rolled back.",
            query(f"{consecutive} > 0", _NAME + " {{rule}}"),
            unit="none",
            alerts=["ActRunaway"],
        ),
    ]


def _slow() -> list[timeseries.Panel]:
    kinds = {"dead": "ActLayerDead", "saturated": "ActLayerSaturated"}
    layer = 'run="$run", layer=~"$layer"'
    return [
        lines(
            "Still growing: times the baseline",
            "Layers whose absmax still grows by more than half a percent a sampled step. No "
            "lines is good. One that climbs for hours ends above the hard rule: lower the "
            "learning rate or look at its norm before that.",
            query(f"layer:act_layer_absmax:growing_baseline_ratio{{{_CHOSEN}}}", _NAME),
            unit="short",
            alerts=["ActLayerDrift"],
        ),
        *(
            lines(
                f"Sampled steps in a row that a layer is {kind}",
                f"Layers that count as {kind}. No lines is good. One that lasts has stopped "
                "learning; the runbook says what makes layers so.",
                query(f"layer:act_layer_exceeded_consecutive:{kind}_max{{{_CHOSEN}}} > 0", _NAME),
                unit="none",
                alerts=[alert],
            )
            for kind, alert in kinds.items()
        ),
        lines(
            "Attention logits: their bound over its baseline, where it is above 30",
            "No attention logit of the layer was beyond the bound. No lines is good. One that "
            "grows makes the softmax pick single tokens; see the runbook for query-key norms.",
            query(f"layer:act_attention_logit_bound:baseline_ratio{{{layer}}}", "{{layer}}"),
            unit="short",
            alerts=["ActAttentionLogitsGrowing"],
        ),
        lines(
            "Distance of the logits' log-partition from 0",
            "Where it drifts the logits drift as a whole, which the loss does not show. Steady is "
            "good.",
            query(f"layer:act_logit_log_partition:abs{{{layer}}}", "{{layer}}"),
            unit="short",
            alerts=["ActLogitsDrifting"],
        ),
        lines(
            "An hour ahead: share of the format's largest number",
            "Of layers whose headroom, as it has shrunk for an hour, ends within the next. No "
            "lines is good.",
            query(f"layer:act_layer_headroom_ratio:predicted1h{{{_CHOSEN}}}", _NAME),
            unit="percentunit",
            alerts=["ActLayerHeadroomEnding"],
        ),
    ]


def _others() -> list[timeseries.Panel]:
    layer = 'run="$run", layer=~"$layer", rank=~"$rank"'
    spread = f"layer:act_layer_absmax_peak:rank_spread{{{_CHOSEN}}}"
    return [
        lines(
            "Gradient norm of the layer's parameters, largest ten",
            "Before clipping, the loss scale taken out. Steady is good; one that grows alone has "
            "the fault in it or just behind it.",
            query(f"topk(10, max by (layer) (act_layer_grad_norm{{{layer}}}))", "{{layer}}"),
            unit="short",
            log=True,
        ),
        lines(
            "Last update over the weights, largest ten",
            "Root mean square of what an optimizer's step changed, over that of the weights. "
            "Around a thousandth is usual; far more is a learning rate too high for this layer.",
            query(f"topk(10, max by (layer) (act_layer_update_ratio{{{layer}}}))", "{{layer}}"),
            unit="percentunit",
            log=True,
        ),
        lines(
            "Largest rank over the others, worst ten",
            "How far one rank's peak is above the other ranks'. Around 1 is good; one rank that "
            "stays apart has other data or bad hardware. Of one rank, or of joined ones, there "
            "is none.",
            query(_worst(10, spread), _NAME),
            unit="short",
            alerts=["ActRankSpread"],
        ),
        lines(
            "Which rank has the largest value",
            'With reduce="global": the rank that has each layer\'s absmax, or values that are not '
            "finite. Changing is good; the same rank for all layers is that rank's fault.",
            query(_worst(10, _RATIO, _of_ranks("act_layer_absmax_rank")), _NAME),
            unit="none",
        ),
    ]
