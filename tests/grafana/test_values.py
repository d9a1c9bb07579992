"""Values in Grafana's units, as the pictures write them."""

from __future__ import annotations

import pytest

from tests.grafana.dashboards import load
from tests.grafana.values import look, with_unit

NOW = 1_000_000.0


@pytest.mark.parametrize(
    ("value", "unit", "decimals", "text"),
    [
        (0.0123, "percentunit", None, "1.23%"),
        (1.0, "percentunit", None, "100%"),
        (97.0, "percent", None, "97%"),
        (1310.4, "short", None, "1.31 K"),
        (2_500_000.0, "short", 1, "2.5 Mil"),
        (125_000.0, "Bps", None, "125 kB/s"),
        (0.25, "s", None, "250 ms"),
        (5400.0, "s", None, "1.5 hours"),
        ((NOW - 90) * 1000, "dateTimeFromNow", None, "2 mins ago"),
        (0.001, "sci", None, "1.00e-03"),
        (1310.4, "none", None, "1310"),
        (641.3, "watt", None, "641 W"),
        (float("nan"), "short", None, "NaN"),
        (float("inf"), "s", None, "Inf"),
    ],
)
def test_a_value_in_its_unit(value: float, unit: str, decimals: int | None, text: str) -> None:
    assert with_unit(value, unit, decimals, NOW) == text


def test_a_unit_that_is_not_known_is_named() -> None:
    with pytest.raises(ValueError, match="parsec"):
        with_unit(1.0, "parsec", None, NOW)


def test_the_units_of_all_dashboards_are_known() -> None:
    for dashboard in load():
        for panel in dashboard.panels:
            names = [override["matcher"]["options"] for override in panel.overrides]
            for name in ("", *names):
                assert look(panel, name).text(1e12, NOW)
