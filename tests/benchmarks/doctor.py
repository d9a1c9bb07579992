"""What the doctor names first, on small models with one fault each, and on healthy ones.

    python -m tests.benchmarks.doctor            (2.5 minutes on two cores)
    python -m tests.benchmarks.doctor --half tuning --only weight

The models are `tests.act_exporter.doctor.corpus`. Half of them are drawn from seeds that nobody
looked at while the doctor's thresholds were tuned. Writes build/bench/doctor.json:

    named_first           share of the held-out sick ones whose fault stands first in the report
    placed_first          share of those, where a layer is to be named, that have the right one too
    critical_on_healthy   critical findings on the held-out healthy ones
    confusion             for each kind of fault: the first findings, and how often
    wrong                 each example that is named wrongly, and what was said first
    alarmed               each critical finding on a healthy one
    failed                checks that raised, and on what
    tuning                the same for the half that the thresholds were tuned on
"""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from rich.progress import track

from act_exporter.doctor import Finding, examine
from deploy.demo.servers import end_with_parent
from tests.act_exporter.doctor.corpus import HALVES, KINDS, Half, Patient, draw, healthy
from tests.benchmarks.report import parser_of, setting, write

EXAMPLES = 4
"""Of each kind and half."""

HEALTHY = 36
"""Of each half: three of each architecture."""


Example = tuple[Half, str, int]
"""Half, the kind's function by its name or "healthy", number."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the doctor said of one example.

    Attributes:
        kind, name, faults, layers, shown: the patient's.
        findings: the report's.
        failed: checks that raised, and why.
        seconds: that it took.
    """

    kind: str
    name: str
    faults: frozenset[str]
    layers: frozenset[str | None]
    shown: Mapping[str, float]
    findings: tuple[Finding, ...]
    failed: tuple[str, ...]
    seconds: float

    @property
    def first(self) -> str:
        return self.findings[0].fault if self.findings else "nothing"

    @property
    def named(self) -> bool:
        return self.first in self.faults

    @property
    def placed(self) -> bool:
        return self.named and self.findings[0].layer in self.layers


def examined(patient: Patient) -> Verdict:
    """The doctor's verdict."""
    started = time.monotonic()
    report = examine(patient.body.model, patient.body.batch, **patient.given)
    return Verdict(
        kind=patient.kind,
        name=patient.name,
        faults=patient.faults,
        layers=patient.layers,
        shown=patient.shown,
        findings=report.findings,
        failed=tuple(
            f"{name} {why}" for name, why in report.not_run.items() if why.startswith("failed")
        ),
        seconds=time.monotonic() - started,
    )


def drawn_and_examined(example: Example) -> Verdict:
    """In a process of its own: models hold functions that cannot be sent to one."""
    half, name, number = example
    torch.set_num_threads(1)  # small models: a second thread waits more than it works
    if name == "healthy":
        return examined(healthy(half, number))
    return examined(draw(next(kind for kind in KINDS if kind.__name__ == name), half, number))


def judged(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """The figures of one half."""
    sick = [verdict for verdict in verdicts if verdict.faults]
    well = [verdict for verdict in verdicts if not verdict.faults]
    located = [verdict for verdict in sick if verdict.layers]
    alarms = [
        (verdict, finding)
        for verdict in well
        for finding in verdict.findings
        if finding.severity == "critical"
    ]
    confusion: dict[str, Counter[str]] = defaultdict(Counter)
    for verdict in sick:
        confusion[verdict.kind][verdict.first] += 1
    return {
        "sick": len(sick),
        "healthy": len(well),
        "named_first": _share([verdict.named for verdict in sick]),
        "placed_first": _share([verdict.placed for verdict in located]),
        "critical_on_healthy": len(alarms),
        "warnings_on_healthy": dict(
            Counter(f.fault for v in well for f in v.findings if f.severity == "warning")
        ),
        "seconds_each": round(sum(v.seconds for v in verdicts) / max(len(verdicts), 1), 2),
        "confusion": confusion,
        "wrong": [
            {
                "example": verdict.name,
                "right": sorted(verdict.faults),
                "said": _said(verdict.findings[:3]),
                "shown": verdict.shown,
            }
            for verdict in sick
            if not verdict.named
        ],
        "misplaced": [
            {
                "example": verdict.name,
                "right": sorted(map(str, verdict.layers)),
                "said": _said(verdict.findings[:1]),
            }
            for verdict in located
            if verdict.named and not verdict.placed
        ],
        "alarmed": [
            {"example": verdict.name, "said": _said([finding]), "what": finding.what}
            for verdict, finding in alarms
        ],
        "failed": [f"{v.name}: {failed}" for v in verdicts for failed in v.failed],
    }


def _share(right: Sequence[bool]) -> float | None:
    return round(sum(right) / len(right), 4) if right else None


def _said(findings: Sequence[Finding]) -> list[str]:
    return [f"{f.severity} {f.fault} at {f.layer}, {f.strength:.3g}" for f in findings]


def main() -> None:
    """Examine, count, write the file."""
    parser = parser_of(__doc__, "doctor.json", "one example a kind, one healthy one a model")
    parser.add_argument("--only", metavar="KIND", help="only kinds with this in their name")
    parser.add_argument("--half", choices=HALVES, help="only this one")
    parser.add_argument("--workers", type=int, default=2, help="processes (%(default)s)")
    arguments = parser.parse_args()
    counts = {kind.__name__: 1 if arguments.quick else EXAMPLES for kind in KINDS}
    counts["healthy"] = 12 if arguments.quick else HEALTHY
    counts = {name: counts[name] for name in counts if (arguments.only or "") in name}
    if not counts:
        raise SystemExit(f"--only {arguments.only}: no such kind")
    started = time.monotonic()
    results = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.workers, context, end_with_parent) as pool:
        for half in HALVES if arguments.half is None else (arguments.half,):
            examples = [(half, name, number) for name in counts for number in range(counts[name])]
            verdicts = pool.map(drawn_and_examined, examples)
            results[half] = judged(list(track(verdicts, half, total=len(examples))))
            _tell(half, results[half])
    result = setting(
        ("act-exporter", "torch", "transformers"),
        threads=arguments.workers,
        seconds=round(time.monotonic() - started),
    )
    result |= results.get("held-out", {})
    if "tuning" in results:
        result["tuning"] = results["tuning"]
    write(result, arguments.out)


def _tell(half: str, result: dict[str, Any]) -> None:
    for kind, first in result["confusion"].items():
        print(f"{kind}: {dict(first)}")
    for name in ("wrong", "misplaced", "alarmed", "failed"):
        for one in result[name]:
            print(f"{name}: {one}")
    print(
        f"{half}: named first {result['named_first']}, in the right place {result['placed_first']},"
        f" critical on healthy ones {result['critical_on_healthy']}"
    )


if __name__ == "__main__":
    main()
