"""What Grafana does with a dashboard's queries: variables and macros put in, Prometheus asked.

Written to the sources of Grafana's Prometheus plugin: how values are escaped and joined, what the
macros become, how a series is named.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import requests

from tests.grafana.dashboards import Annotation, Dashboard, Target, Variable

ALL = "$__all"
"""The choice "All" of a variable, as Grafana keeps it."""

SCRAPE_SECONDS = 1.0
"""The data source's interval: what deploy.demo.stack makes of the 15 s that are provisioned."""

_POINTS = 1_000
"""Asked for at most: about a panel's width in pixels."""

_WORD = re.compile(r"\$(\w+)|\[\[(\w+)(?::(\w+))?\]\]|\$\{(\w+)(?::(\w+))?\}")
_LABEL_VALUES = re.compile(r"label_values\((?:(.+),\s*)?(\w+)\)")
_QUERY_RESULT = re.compile(r"query_result\((.+)\)")
_LEGEND = re.compile(r"\{\{\s*(\w+)\s*\}\}")


class QueryError(Exception):
    """Prometheus did not take a query."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One series of an answer; `name` is its legend, times are Unix seconds."""

    name: str
    labels: Mapping[str, str]
    times: Sequence[float]
    values: Sequence[float]


class View:
    """A dashboard opened over a range of time, with a choice for each of its variables.

    Args:
        url: of Prometheus.
        start, end: of the range, Unix seconds.
        dashboard: whose queries are asked.
        chosen: variable name to values; the others have "All" where there is one, else their first.

    Attributes:
        options: variable name to the values that it offers.
    """

    def __init__(
        self,
        url: str,
        start: float,
        end: float,
        dashboard: Dashboard,
        chosen: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.start, self.end = start, end
        self.dashboard = dashboard
        self.options: dict[str, list[str]] = {}
        self._url = url
        self._variables = {variable.name: variable for variable in dashboard.variables}
        self._chosen: dict[str, Sequence[str]] = {}
        # In their order: a variable's query may have those before it.
        for variable in dashboard.variables:
            if variable.type != "query":
                continue
            found = self.options[variable.name] = self._offered(variable)
            first = [ALL] if variable.include_all else found[:1]
            self._chosen[variable.name] = (chosen or {}).get(variable.name, first)

    @property
    def interval(self) -> float:
        """Seconds between two points: `$__interval`."""
        return max((self.end - self.start) / _POINTS, SCRAPE_SECONDS)

    def choices(self) -> str:
        """What is chosen, as it stands above the panels."""
        return "    ".join(
            f"{self._variables[name].raw.get('label', name)}: "
            + ", ".join("All" if value == ALL else value for value in values)
            for name, values in self._chosen.items()
        )

    def ask(self, target: Target) -> list[Series]:
        """The answer to a panel's query; one point a series where it is asked for a moment.

        Raises:
            QueryError: with what Prometheus says about it.
        """
        return self._asked(target.expr, target.legendFormat, target.instant)

    def marks(self, annotation: Annotation) -> list[tuple[float, float, str]]:
        """Where an annotation stands: from, to, and its title.

        Points in a row make one region, as in Grafana.
        """
        title = annotation.raw.get("titleFormat", "")
        found = []
        for series in self._asked(annotation.expr, title, instant=False):
            begun = last = None
            for at, value in zip(series.times, series.values, strict=True):
                if not value:
                    continue
                if last is None or at - last > self.interval * 1.5:
                    if begun is not None and last is not None:
                        found.append((begun, last, series.name))
                    begun = at
                last = at
            if begun is not None and last is not None:
                found.append((begun, last, series.name))
        return sorted(found)

    def interpolate(self, text: str) -> str:
        """`text` with variables and macros put in.

        Raises:
            KeyError: one is not known.
        """

        def word(match: re.Match[str]) -> str:
            name = match[1] or match[2] or match[4]
            if name.startswith("__"):
                return self._macros()[name]
            return self._value(self._variables[name], match[3] or match[5] or "")

        return _WORD.sub(word, text)

    def _macros(self) -> dict[str, str]:
        seconds = round(self.end - self.start)
        rate = max(self.interval + SCRAPE_SECONDS, 4 * SCRAPE_SECONDS)
        return {
            "__interval": f"{self.interval * 1000:.0f}ms",
            "__interval_ms": f"{self.interval * 1000:.0f}",
            "__rate_interval": f"{rate * 1000:.0f}ms",
            "__range": f"{seconds}s",
            "__range_s": f"{seconds}",
            "__range_ms": f"{seconds * 1000}",
        }

    def _value(self, variable: Variable, form: str) -> str:
        values = self._chosen[variable.name]
        if list(values) == [ALL]:
            if variable.all_value is not None:
                return variable.all_value  # as it stands
            values = self.options[variable.name]
        if form == "regex":
            values = [re.sub(r"[\\^$.*+?()[\]{}|/]", r"\\\g<0>", value) for value in values]
        elif form:
            raise KeyError(f"${{{variable.name}:{form}}}")
        elif variable.multi or variable.include_all:
            # Twice: once for the regular expression, once for the quotes that it stands in.
            values = [
                re.sub(r"[$^*{}\[\]'+?.()|]", r"\\\\\g<0>", value.replace("\\", "\\" * 4))
                for value in values
            ]
        else:
            return values[0].replace("\\", "\\\\").replace("'", "\\\\'")
        return values[0] if len(values) == 1 else f"({'|'.join(values)})"

    def _offered(self, variable: Variable) -> list[str]:
        query = self.interpolate(variable.query)
        if match := _LABEL_VALUES.fullmatch(query):
            selector, label = match.groups()
            times: dict[str, Any] = {"start": self.start, "end": self.end}
            path = f"label/{label}/values"
            return list(self._get(path, times | ({"match[]": selector} if selector else {})))
        match = _QUERY_RESULT.fullmatch(query)
        if match is None:
            raise QueryError(f"{variable.name}: {query} is no query of a variable")
        return [
            f"{_full_name(series.labels)} {series.values[0]:g} {series.times[0] * 1000:.0f}"
            for series in self._asked(match[1], "", instant=True)
        ]

    def _asked(self, expr: str, legend: str, instant: bool) -> list[Series]:
        query = self.interpolate(expr)
        if instant:
            data = self._get("query", {"query": query, "time": self.end})
        else:
            # Grafana asks at multiples of the step.
            times = (each // self.interval * self.interval for each in (self.start, self.end))
            start, end = times
            parameters = {"query": query, "start": start, "end": end, "step": self.interval}
            data = self._get("query_range", parameters)
        found = []
        for each in data["result"]:
            labels = each["metric"]
            points = each["values"] if "values" in each else [each["value"]]
            found.append(
                Series(
                    name=_LEGEND.sub(lambda match, own=labels: own.get(match[1], ""), legend)
                    if legend
                    else _full_name(labels) or query,
                    labels=labels,
                    times=[float(at) for at, _ in points],
                    values=[float(value) for _, value in points],
                )
            )
        return found

    def _get(self, path: str, parameters: Mapping[str, Any]) -> Any:
        answer = requests.get(f"{self._url}/api/v1/{path}", params=parameters, timeout=30).json()
        if answer["status"] != "success":
            raise QueryError(f"{parameters}: {answer['error']}")
        return answer["data"]


def _full_name(labels: Mapping[str, str]) -> str:
    inner = ", ".join(f'{key}="{value}"' for key, value in labels.items() if key != "__name__")
    return labels.get("__name__", "") + (f"{{{inner}}}" if inner else "")
