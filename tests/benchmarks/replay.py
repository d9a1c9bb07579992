"""Recordings through a real Prometheus: what each shipped rule says at each evaluation.

Pages become OpenMetrics with the scrapes' times, promtool makes blocks of them, and Prometheus
evaluates the rules' own expressions over them every 15 s: first those that are recorded, whose
results are stored as they would be, then each alert's. `for` is applied as Prometheus does.

Two things differ from a server that scrapes. Imported text cannot say that a series has ended, so
the lookback is 14 s: an instant query sees the last scrape and nothing older, which is what a
series' end mark does. And an evaluation comes 1 s after each scrape; on a server it is a fixed time
between 0 and 15 s, which adds as much to a delay in seconds.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
import yaml

from deploy.demo.servers import REPOSITORY, binary, free_port, running
from tests.benchmarks.recordings import SCRAPE_SECONDS, START, Recording

RULES = REPOSITORY / "prometheus" / "rules"
JOB = "act-exporter"  # of prometheus.yml; rules may know the trainers by it
EVALUATED_AFTER = 1
"""Seconds from a scrape to an evaluation."""

_LINE = re.compile(r"(\w+)\{(.*)\} (\S+)")
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
# Whatever else stands in an expression is a function, a keyword or a label.
_EXPORTED = ("act_", "alertmanager_", "prometheus_")
_DURATION = re.compile(r"(\d+)(ms|[smhdwy])")
_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604_800, "y": 31_536_000}


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of a rule file."""

    name: str
    expression: str
    hold: float = 0.0
    labels: tuple[tuple[str, str], ...] = ()
    alert: bool = True

    @property
    def names(self) -> set[str]:
        """Everything in the expression that may be a metric."""
        return set(_NAME.findall(_QUOTED.sub("", self.expression)))

    def label(self, name: str) -> str | None:
        return dict(self.labels).get(name)


@dataclass(frozen=True, slots=True)
class Firing:
    """One alert from its beginning to its end.

    Attributes:
        since: Unix seconds of the evaluation that made it fire.
        labels: of the series, without those of the rule.
        value: of the expression then.
        largest: the expression's largest value while it fired.
    """

    since: float
    labels: dict[str, str]
    value: float
    largest: float


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What the rules said.

    Attributes:
        alerts: those that were evaluated.
        skipped: name of the others, and why.
        firings: by name of the alert and of the run.
    """

    alerts: list[Rule]
    skipped: dict[str, str]
    firings: dict[str, dict[str, list[Firing]]]


def read_rules(folder: Path = RULES) -> list[Rule]:
    """All rules of the files in `folder`, in their order."""
    rules = []
    for path in sorted(folder.glob("*.yml")):
        for group in yaml.safe_load(path.read_text())["groups"]:
            for rule in group["rules"]:
                rules.append(
                    Rule(
                        rule.get("alert") or rule["record"],
                        str(rule["expr"]),
                        _seconds(str(rule.get("for", "0s"))),
                        tuple(rule.get("labels", {}).items()),
                        "alert" in rule,
                    )
                )
    return rules


def replay(recordings: Sequence[Recording], folder: Path, rules: Sequence[Rule]) -> Verdicts:
    """Judge the recordings by the rules.

    Args:
        recordings: with a name each of its own.
        folder: for Prometheus' data; must be empty.
        rules: as `read_rules` gives them.
    """
    records = {rule.name: rule for rule in rules if not rule.alert}
    known = {"up"} | {name for recording in recordings for name in _families(recording)}
    skipped = {
        rule.name: why for rule in rules if rule.alert and (why := _why_not(rule, records, known))
    }
    alerts = [rule for rule in rules if rule.alert and rule.name not in skipped]
    levels = _levels(alerts, records)
    wanted = set().union(
        *(rule.names for rule in [*alerts, *(r for level in levels for r in level)])
    )
    data = folder / "data"
    data.mkdir(parents=True)
    (folder / "prometheus.yml").write_text("{}\n")
    text = folder / "samples.txt"
    with text.open("w") as stream:
        for recording in recordings:
            stream.writelines(_samples(recording, wanted))
        stream.write("# EOF\n")
    _import(text, data)
    end = max(recording.end for recording in recordings)
    for level in levels:
        with _prometheus(folder) as server, text.open("w") as stream:
            for rule in level:
                for series in server.over(rule.expression, end):
                    stream.writelines(_lines(rule, series))
            stream.write("# EOF\n")
        _import(text, data)
    with _prometheus(folder) as server:
        firings = {rule.name: _firings(rule, server, end, recordings) for rule in alerts}
    return Verdicts(alerts, skipped, firings)


def merged(parts: Sequence[Verdicts], rules: Sequence[Rule]) -> Verdicts:
    """Verdicts on several groups of recordings as one.

    An alert counts as skipped where every group skipped it: in a group whose pages lack what it
    reads it could not have fired.
    """
    names = {rule.name for part in parts for rule in part.alerts}
    firings: dict[str, dict[str, list[Firing]]] = {name: {} for name in names}
    for part in parts:
        for name, runs in part.firings.items():
            firings[name].update(runs)
    skipped = {
        name: why for part in parts for name, why in part.skipped.items() if name not in names
    }
    return Verdicts([rule for rule in rules if rule.name in names], skipped, firings)


class _Server:
    def __init__(self, url: str) -> None:
        self._url = url

    def over(self, expression: str, end: float) -> list[dict[str, Any]]:
        """The series of a range query over all evaluations."""
        answer = requests.post(
            f"{self._url}/api/v1/query_range",
            data={
                "query": expression,
                "start": START + SCRAPE_SECONDS + EVALUATED_AFTER,
                "end": end + EVALUATED_AFTER,
                "step": SCRAPE_SECONDS,
                "timeout": "10m",
            },
            timeout=600,
        ).json()
        if answer["status"] != "success":
            raise ValueError(f"{expression}: {answer['error']}")
        return answer["data"]["result"]


@contextlib.contextmanager
def _prometheus(folder: Path) -> Iterator[_Server]:
    port = free_port()
    argv = [
        binary("prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        "--storage.tsdb.retention.time=100y",  # the samples' times are not today's
        f"--web.listen-address=127.0.0.1:{port}",
        f"--query.lookback-delta={SCRAPE_SECONDS - EVALUATED_AFTER}s",
        "--query.timeout=10m",
        "--query.max-samples=500000000",
    ]
    url = f"http://127.0.0.1:{port}"
    with running("replay", argv, folder) as server:
        server.wait_for(lambda: requests.get(f"{url}/-/ready", timeout=2).ok, "an answer", 120)
        yield _Server(url)


def _import(text: Path, data: Path) -> None:
    subprocess.run(
        [
            *(binary("promtool"), "tsdb", "create-blocks-from", "openmetrics"),
            "--max-block-duration=54h",  # of 2 h each block would read the whole text
            *(text, data),
        ],
        check=True,
        capture_output=True,
    )


def _families(recording: Recording) -> set[str]:
    """What its pages show: the first, when a fault has not begun, and the last, when all is known.

    After a NaN in all of a model's weights hardly any family has values.
    """
    pages = (recording.pages[0][1], recording.pages[-1][1])
    lines = [line for page in pages for line in _page(page)]
    return {match[1] for line in lines if (match := _LINE.match(line))}


def _page(compressed: bytes) -> list[str]:
    return [line for line in zlib.decompress(compressed).decode().splitlines() if line[0] != "#"]


def _samples(recording: Recording, wanted: set[str]) -> Iterator[str]:
    """The pages' samples that any rule reads, labelled as Prometheus would, and `up`."""
    target = f'job="{JOB}",instance="{recording.name}"'
    own, new = f'run="{recording.label}"', f'run="{recording.name}"'
    heads: dict[str, str | None] = {}
    for when, compressed in recording.pages:
        yield f"up{{{target}}} 1 {when:.0f}\n"
        for line in _page(compressed):
            series, _, value = line.rpartition(" ")
            if series not in heads:
                match = _LINE.match(line)
                known = match is not None and match[1] in wanted
                labels = match[2].replace(own, new) if match else ""
                heads[series] = f"{match[1]}{{{labels},{target}}}" if known else None
            if (head := heads[series]) is not None:
                yield f"{head} {value} {when:.0f}\n"


def _lines(rule: Rule, series: dict[str, Any]) -> Iterator[str]:
    labels = {**series["metric"], **dict(rule.labels)}
    labels.pop("__name__", None)
    pairs = ",".join(f'{name}="{value}"' for name, value in labels.items())
    for when, value in series["values"]:
        yield f"{rule.name}{{{pairs}}} {value} {when:.0f}\n"


def _levels(alerts: Sequence[Rule], records: dict[str, Rule]) -> list[list[Rule]]:
    """The recorded expressions that alerts read, those that others read first."""
    depths: dict[str, int] = {}

    def visit(rule: Rule) -> int:
        inner = [records[name] for name in rule.names & records.keys() if name != rule.name]
        for other in inner:
            depths[other.name] = visit(other)
        return 1 + max((depths[other.name] for other in inner), default=-1)

    for alert in alerts:
        visit(alert)
    return [
        [records[name] for name, own in depths.items() if own == depth]
        for depth in range(max(depths.values(), default=-1) + 1)
    ]


def _why_not(rule: Rule, records: dict[str, Rule], known: set[str]) -> str | None:
    """Why the alert cannot be judged on recordings, if so."""
    names, open_ = set(rule.names), [rule]
    while open_:
        for name in open_.pop().names & records.keys():
            if not records[name].names <= names:
                names |= records[name].names
                open_.append(records[name])
    missing = sorted(name for name in names - known if name.startswith(_EXPORTED))
    if names & {"absent", "absent_over_time"}:
        return "asks for what is absent; the recordings share one server, where nothing is"
    if missing:
        return f"reads {', '.join(missing)}, which is on no recorded page"
    if names & known <= {"up"}:
        return "reads no page, only whether targets answer or nothing at all"
    return None


def _firings(
    rule: Rule, server: _Server, end: float, recordings: Sequence[Recording]
) -> dict[str, list[Firing]]:
    ends = {recording.name: recording.end + EVALUATED_AFTER for recording in recordings}
    found: dict[str, list[Firing]] = {}
    for series in server.over(rule.expression, end):
        labels = series["metric"]
        run = labels.get("run") or labels.get("instance")
        if run not in ends:
            raise ValueError(f"{rule.name}: {labels} names no run")
        # After its last scrape a run is over, not stalled or gone.
        values = [(when, float(value)) for when, value in series["values"] if when <= ends[run]]
        found.setdefault(run, []).extend(_episodes(rule.hold, labels, values))
    return {run: sorted(firings, key=lambda firing: firing.since) for run, firings in found.items()}


def _episodes(
    hold: float, labels: dict[str, str], values: list[tuple[float, float]]
) -> Iterator[Firing]:
    """Evaluations in a row are one alert, which fires once they have lasted for `hold`."""
    begin = 0
    for index in range(len(values)):
        last = index + 1 == len(values) or values[index + 1][0] > values[index][0] + SCRAPE_SECONDS
        if last:
            firing = [
                value for value in values[begin : index + 1] if value[0] - values[begin][0] >= hold
            ]
            if firing:
                yield Firing(firing[0][0], labels, firing[0][1], max(value for _, value in firing))
            begin = index + 1


def _seconds(duration: str) -> float:
    return sum(int(number) * _UNITS[unit] for number, unit in _DURATION.findall(duration))
