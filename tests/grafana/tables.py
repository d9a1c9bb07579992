"""The rows of a panel that asks for tables: joined, chosen and renamed as in Grafana."""

from __future__ import annotations

from collections.abc import Sequence

from tests.grafana.dashboards import Panel
from tests.grafana.queries import Series

Row = dict[str, float | str]


def rows(panel: Panel, answers: Sequence[Sequence[Series]]) -> list[Row]:
    """What is left after the panel's transformations, in the order of its columns.

    Args:
        panel: with "merge" and "organize", one after the other.
        answers: of each of its queries.
    """
    # Grafana numbers the values where more than one query has any.
    several = sum(bool(answer) for answer in answers) > 1
    tables = [
        [_row(series, f"Value #{target.refId}" if several else "Value") for series in answer]
        for target, answer in zip(panel.targets, answers, strict=True)
    ]
    merge, organize = panel.raw["transformations"]
    assert (merge["id"], organize["id"]) == ("merge", "organize"), panel
    return _organized(_merged(tables), organize["options"])


def _row(series: Series, value: str) -> Row:
    labels = {name: text for name, text in series.labels.items() if name != "__name__"}
    return {**labels, value: series.values[-1]}


def _merged(tables: Sequence[Sequence[Row]]) -> list[Row]:
    """Rows of several tables are one where all that the tables share is equal."""
    filled = [table for table in tables if table]
    if not filled:
        return []
    shared = set.intersection(*(set().union(*table) for table in filled))
    found: dict[tuple[object, ...], Row] = {}
    for table in filled:
        for row in table:
            found.setdefault(tuple(row.get(name) for name in sorted(shared)), {}).update(row)
    return list(found.values())


def _organized(table: Sequence[Row], options: dict[str, dict[str, object]]) -> list[Row]:
    excluded = {name for name, out in options["excludeByName"].items() if out}
    place = options.get("indexByName", {})
    names = options.get("renameByName", {})
    fields = sorted(
        dict.fromkeys(name for row in table for name in row if name not in excluded),
        key=lambda name: place.get(name, len(place)),
    )
    return [{names.get(name) or name: row[name] for name in fields if name in row} for row in table]
