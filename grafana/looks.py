"""How panels look: the colours of thresholds, bands, legends, words in place of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from grafana_foundation_sdk.builders import common, dashboard, timeseries
from grafana_foundation_sdk.models import common as values
from grafana_foundation_sdk.models import dashboard as models

from grafana.rules import Rule, rule

COLORS = {"critical": "red", "warning": "orange", "info": "blue"}
"""By severity; what no rule speaks of is green where the colour fills a cell, else clear."""
CALM = "green"
CLEAR = "transparent"

# A step's colour holds from its value on, and a rule `> 0` leaves 0 calm. Far below one of
# anything that is counted.
_ABOVE_ZERO = 0.001


def steps(
    alerts: Sequence[str], calm: str, worse: Mapping[float, str] | None = None
) -> dashboard.ThresholdsConfig:
    """The colours of values: calm, each of `worse` from its value on, and each alert's.

    What is judged here is never below 0; without data Grafana takes the lowest colour.
    """
    colors: dict[float | None, str] = {None: calm}
    for value, color in (worse or {}).items():
        colors[value] = color
    for each in map(rule, alerts):
        if each.limit is None:
            continue
        limit = each.limit or _ABOVE_ZERO * (each.sign in (">", "<=", "=="))
        if each.sign.startswith(">"):
            colors[limit] = COLORS[each.severity]
        else:
            colors |= {0: COLORS[each.severity], limit: calm}
    ordered = sorted(colors.items(), key=lambda step: (step[0] is not None, step[0] or 0.0))
    return (
        dashboard.ThresholdsConfig()
        .mode(models.ThresholdsMode.ABSOLUTE)
        .steps([models.Threshold(value=value, color=color) for value, color in ordered])
    )


def legend(*, side: bool) -> common.VizLegendOptions:
    """Below the panel, or beside it with each line's last and largest value."""
    options = common.VizLegendOptions().show_legend(True)
    if not side:
        return (
            options.display_mode(values.LegendDisplayMode.LIST)
            .placement(values.LegendPlacement.BOTTOM)
            .calcs([])
        )
    options.display_mode(values.LegendDisplayMode.TABLE).placement(values.LegendPlacement.RIGHT)
    return options.calcs(["lastNotNull", "max"]).sort_by("Max").sort_desc(True)


def words(meanings: Mapping[int, tuple[str, str]]) -> models.ValueMap:
    """A word and a colour in place of each number."""
    return models.ValueMap(
        options={
            str(value): models.ValueMappingResult(text=text, color=color, index=place)
            for place, (value, (text, color)) in enumerate(meanings.items())
        }
    )


def dashed(panel: timeseries.Panel, name: str, color: str) -> None:
    """Draw the line of that name dashed, in that colour."""
    style = {"fill": "dash", "dash": [8, 8]}
    panel.override_by_name(
        name,
        [
            models.DynamicConfigValue(id_val="custom.lineStyle", value=style),
            models.DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": color}),
        ],
    )


def band(panel: timeseries.Panel, low: str, high: str, color: str) -> timeseries.Panel:
    """Fill between the lines of these two names."""
    for name in (low, high):
        panel.override_by_name(
            name,
            [
                models.DynamicConfigValue(id_val="custom.lineWidth", value=0),
                models.DynamicConfigValue(
                    id_val="color", value={"mode": "fixed", "fixedColor": color}
                ),
            ],
        )
    return panel.override_by_name(
        high,
        [
            models.DynamicConfigValue(id_val="custom.fillBelowTo", value=low),
            models.DynamicConfigValue(id_val="custom.fillOpacity", value=20),
        ],
    )


def link(title: str, url: str) -> dashboard.DashboardLink:
    """A link that keeps the range and the variables."""
    kind = models.DashboardLinkType.LINK
    return dashboard.DashboardLink(title).type(kind).url(url).keep_time(True).include_vars(True)


def runbook(each: Rule) -> dashboard.DashboardLink:
    """A link to what the alert means and what to do."""
    plain = dashboard.DashboardLink(f"Runbook: {each.name}").type(models.DashboardLinkType.LINK)
    return plain.url(each.runbook).target_blank(True)
