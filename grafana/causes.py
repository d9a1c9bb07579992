"""The lower rows of the dashboard Layers, for those who look for the cause."""

from __future__ import annotations

from grafana_foundation_sdk.builders import timeseries

from grafana.panels import Row, lines, query
from grafana.selection import CHOSEN, NAME, RANKED, RATIO, RUN, of_ranks, worst


def rows() -> list[Row]:
    """Them; those of seldom faults are collapsed."""
    return [
        Row(title="Values at their ends", panels=_ends()),
        Row(title="Slow faults", panels=_slow(), collapsed=True),
        Row(title="Gradients, updates and ranks", panels=_others(), collapsed=True),
    ]


def _ends() -> list[timeseries.Panel]:
    exceeding = of_ranks("act_layer_exceed_ratio")
    headroom = f"layer:act_layer_headroom_ratio:max{{{CHOSEN}}}"
    consecutive = f'layer:act_layer_exceeded_consecutive:max{{{CHOSEN}, rule=~"hard|nonfinite"}}'
    return [
        lines(
            "Share of elements beyond the exceed threshold, worst ten",
            "Of each layer's elements, those with an absolute value above `exceed_threshold` "
            "(100). Steady is good, whatever its height; a share that climbs tells growth before "
            "the peak.",
            query(f"topk(10, {exceeding} > 0)", NAME),
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
                  rate(act_layer_nonfinite_total{{{RANKED}}}[$__rate_interval])
                ) > 0
                """,
                NAME + " {{kind}}",
            ),
            unit="short",
            alerts=["ActLayerNonFinite"],
        ),
        lines(
            "Share of the format's largest number, worst ten",
            "Peak over the largest number of the tensor's own dtype (65,504 for float16). At 1 it "
            "overflows to Inf. Good is far below; in bfloat16 and float32 it always is.",
            query(worst(10, headroom), NAME),
            unit="percentunit",
            alerts=["ActLayerHeadroomLow"],
            log=True,
        ),
        lines(
            "Bad sampled steps in a row",
            "How many sampled steps in a row were beyond the hard rule or not finite, held for two "
            "minutes. Good is 0; at the line the run is rolled back.",
            query(f"{consecutive} > 0", NAME + " {{rule}}"),
            unit="none",
            alerts=["ActRunaway"],
        ),
    ]


def _slow() -> list[timeseries.Panel]:
    kinds = {"dead": "ActLayerDead", "saturated": "ActLayerSaturated"}
    layer = f'{RUN}, layer=~"$layer"'
    return [
        lines(
            "Still growing: times the baseline",
            "Layers whose absmax still grows by more than half a percent a sampled step. No "
            "lines is good. One that climbs for hours ends above the hard rule: lower the "
            "learning rate or look at its norm before that.",
            query(f"layer:act_layer_absmax:growing_baseline_ratio{{{CHOSEN}}}", NAME),
            unit="short",
            alerts=["ActLayerDrift"],
        ),
        *(
            lines(
                f"Sampled steps in a row that a layer is {kind}",
                f"Layers that count as {kind}. No lines is good. One that lasts has stopped "
                "learning; the runbook says what makes layers so.",
                query(f"layer:act_layer_exceeded_consecutive:{kind}_max{{{CHOSEN}}} > 0", NAME),
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
            query(f"layer:act_layer_headroom_ratio:predicted1h{{{CHOSEN}}}", NAME),
            unit="percentunit",
            alerts=["ActLayerHeadroomEnding"],
        ),
    ]


def _others() -> list[timeseries.Panel]:
    layer = f'{RUN}, layer=~"$layer", rank=~"$rank"'
    spread = f"layer:act_layer_absmax_peak:rank_spread{{{CHOSEN}}}"
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
            query(worst(10, spread), NAME),
            unit="short",
            alerts=["ActRankSpread"],
        ),
        lines(
            "Which rank has the largest value",
            'With reduce="global": the rank that has each layer\'s absmax, or values that are not '
            "finite. Changing is good; the same rank for all layers is that rank's fault.",
            query(worst(10, RATIO, of_ranks("act_layer_absmax_rank")), NAME),
            unit="none",
        ),
    ]
