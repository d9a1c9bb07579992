"""The dashboard Layers: which layer went first, when, how far, and what was done about it."""

from __future__ import annotations

import math

from grafana_foundation_sdk.builders import heatmap, timeseries, xychart

from act_exporter.rules import DEFAULTS
from grafana import causes, incident
from grafana.boards import Board, rank, several
from grafana.looks import band, dashed
from grafana.panels import Row, heat, lines, query, row_query
from grafana.rules import limit
from grafana.selection import CHOSEN, NAME, RANKED, RATIO, RUN, of_ranks, worst
from grafana.tables import Column, points

_HARD = limit("ActLayerAboveBaseline")
_SIGMA = limit("ActLayerAboveWindow")


def board() -> Board:
    """The dashboard."""
    names = f"label_values(act_layer_absmax{{{RUN}}}, "
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
                    *incident.first(RUN),
                    *incident.done(RUN),
                    incident.onsets(RUN),
                    incident.alerts(RUN, "{{alertname}}"),
                ],
            ),
            Row(title="All layers over time", panels=[_heat(), _ratios(), _closely(), *_sigma()]),
            Row(title="Over depth", panels=[_profile(), *_over_depth()]),
            *causes.rows(),
        ],
    )


def _heat() -> heatmap.Panel:
    # Grafana sorts a heatmap's rows by the numbers that their names begin with: here the depth.
    # `count_values by (...)` over a range is wrong in Prometheus 2.42, `without ()` is not.
    return heat(
        "Each layer's peak over its baseline, log10",
        "A row a layer and tensor in the order of execution, the first on top (the number is its "
        f"place). Blue is the baseline, yellow ten times it, and red from {math.log10(_HARD):g} "
        "on, where the rule fires. Good is blue all over. The row that turns first is where it "
        "began; what spreads downwards from it followed. Empty: no baseline yet, or no data.",
        query(
            f"""
            log10({RATIO}) * on (run, layer, tensor) group_left (depth)
            count_values without () (
              "depth", min by (run, layer, tensor) (act_layer_depth{{{RANKED}}})
            )
            """,
            "{{depth}} " + NAME,
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
        query(worst(10, RATIO), NAME),
        unit="short",
        alerts=["ActLayerAboveBaseline"],
        log=True,
        width=24,
        side=True,
    )


def _closely() -> timeseries.Panel:
    mean = of_ranks("act_layer_absmax_window_mean")
    deviation = of_ranks("act_layer_absmax_window_std")
    baseline = of_ranks("act_layer_absmax_baseline")
    panel = lines(
        "The worst of the chosen layers: absmax, baseline and limits",
        "One layer's largest absolute value, of the chosen ones the worst: choose another above. "
        f"Dashed red is {_HARD:g} times its baseline, dashed green the baseline; the band goes "
        f"from the mean of its last {DEFAULTS.window} calm sampled steps to {_SIGMA:g} standard "
        "deviations above it. Good is a line inside the band.",
        *(
            query(worst(1, RATIO, expr), name)
            for name, expr in {
                f"peak of {NAME}": of_ranks("act_layer_absmax_peak"),
                "absmax": of_ranks("act_layer_absmax"),
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
    zscore = f"layer:act_layer_absmax:window_zscore{{{CHOSEN}}}"
    consecutive = f'layer:act_layer_exceeded_consecutive:max{{{CHOSEN}, rule="sigma"}}'
    return [
        lines(
            "Standard deviations above the window, worst five",
            f"How far the last sampled step is above the mean of the last {DEFAULTS.window} calm "
            "ones. Single steps above the line happen in health; several in a row do not.",
            query(worst(5, zscore), NAME),
            unit="short",
            alerts=["ActLayerAboveWindow"],
        ),
        lines(
            f"Sampled steps in a row above {_SIGMA:g} standard deviations",
            "Held for two minutes. Below the line is good; above it the layer's level has moved.",
            query(f"{consecutive} > 0", NAME),
            unit="none",
            alerts=["ActLayerAboveWindowSustained"],
        ),
    ]


def _profile() -> xychart.Panel:
    at_worst = (
        f"max by (run, layer, tensor) (max_over_time(act_layer_absmax_peak{{{RANKED}}}[$__range]))"
    )
    return points(
        "Absmax by depth: baseline, and the largest of this range",
        "A point a layer and tensor, from the model's input on the left to its output. Good is "
        "each peak near its own baseline. One peak far above is a spike: look at that layer. All "
        "from one depth on is a plateau: look at where it begins. Names are in the tooltip.",
        row_query(f"min by (run, layer, tensor) (act_layer_depth{{{RANKED}}})"),
        row_query(of_ranks("act_layer_absmax_baseline")),
        row_query(at_worst),
        x=Column(name="Depth", source="Value #A", unit="none"),
        ys=[
            Column(name="Baseline", source="Value #B", unit="short"),
            Column(name="Largest", source="Value #C", unit="short"),
        ],
    )


def _over_depth() -> list[timeseries.Panel]:
    jump = f"layer:act_layer_depth_jump_ratio:max{{{CHOSEN}}}"
    return [
        lines(
            "Further above its baseline than the blocks before it, times, worst five",
            "A layer's peak over baseline against that of the same place in the blocks before. "
            "Around 1 is good. One that jumps is where something entered.",
            query(worst(5, jump), NAME),
            unit="short",
            alerts=["ActLayerDepthSpike"],
            log=True,
        ),
        lines(
            "Plateau: its first and last depth",
            "The longest row of like places that are above ten times their baselines, by its ends. "
            "No lines is good. A first that stays is the place where it begins.",
            query(f'max by (edge) (act_plateau_depth{{{RUN}, rank=~"$rank"}})', "{{edge}}"),
            unit="none",
        ),
    ]
