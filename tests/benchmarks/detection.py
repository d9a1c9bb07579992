"""What the shipped rules find, miss and cry wolf at: small models, real text, real faults.

    python -m tests.benchmarks.detection            (about 20 minutes on two cores)
    python -m tests.benchmarks.detection --quick    (3 minutes: fewer runs, one fault a kind)

Trains small GPTs with the exporter on a simulated clock, once at 1 s a step (a scrape of 15 s meets
one step in 15) and once at 15 s (each step is scraped, as with a large model), in good health and
with a hundred faults. The pages go through promtool into a real Prometheus, which evaluates every
alert of prometheus/rules as it stands there. Writes build/bench/detection.json:

    rules       for each alert:
                recall                     kind of fault to the share of its destroyed runs that
                                           the alert fired in; null where none was destroyed
                recall_harmed              the same of runs whose loss was so high in any 5 steps,
                                           whether it came back by itself or not
                fired_harmless             kind to [fired, of] where the loss never was
                false_alarms_per_million   alerts that began in healthy runs, per million of
                                           layer-steps (sampled steps times watched tensors)
                delay_steps                sampled steps from the first faulty one to the verdict,
                                           both counted, in destroyed runs in which each step is
                                           scraped: 3 is the third; the trainer's own count
                delay_from_bad_value       the same from the first step with a value that was not
                                           finite or above 100 baselines
                delay_at_scrapes           as delay_steps, in runs where one step in 15 is
    combined    the same for all alerts of a severity, and those that ask for a recovery
    false_recover_requests   alerts with action=recover that began in any healthy run
    comparison  the same for detectors that people write by hand, at every step
    skipped     alerts that recordings cannot judge, and why
    faults      each run: what became of it, and when each alert fired, on what and at which value
    healthy     each run: its false alarms likewise

A run counts as destroyed by its recorded loss alone: not finite at its end, or the median of its
last 20 steps more than 0.3 nats above that of the same run, on the same batches, without the fault
(what these models learn between their 150th and 600th step). Nothing here rolls back. An alert
that only chance made fire after the fault counts as well: read recall beside false alarms.

The recordings (some 500 MB) stay in build/bench/recordings; after a change of rules, not of what
the trainer exports, `--recordings build/bench/recordings` judges them anew.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from deploy.demo.servers import REPOSITORY, binary, end_with_parent
from tests.benchmarks.faults import FAULTS, Fault
from tests.benchmarks.recordings import HEALTHY, load, record_faults, record_healthy
from tests.benchmarks.replay import Rule, Verdicts, merged, read_rules, replay
from tests.benchmarks.report import parser_of, setting, write
from tests.benchmarks.scores import evaluate

PACES = (1.0, 15.0)
STEPS = 2500
FAULTS_A_TASK = 20
GROUP_BYTES = 40_000_000
"""Of compressed recordings replayed in one Prometheus: some 4 million samples."""


def tasks(arguments: argparse.Namespace, folder: Path) -> list[tuple[Callable[..., None], tuple]]:
    """What to record: functions for worker processes, longest first."""
    faults = [fault for fault in FAULTS if not arguments.only or arguments.only in fault.kind]
    if not faults:
        kinds = ", ".join(sorted({fault.kind for fault in FAULTS}))
        raise SystemExit(f"--only {arguments.only}: no such kind; there are: {kinds}")
    paces: Sequence[float] = PACES
    healthy = [] if arguments.only else list(HEALTHY)
    if arguments.quick:
        paces, healthy = PACES[1:], [kind for kind in healthy if kind in ("seed 1", "warm-up")]
        faults = list({fault.kind: fault for fault in reversed(faults)}.values())
    work: list[tuple[Callable[..., None], tuple]] = [
        (record_healthy, (kind, pace, arguments.steps, folder))
        for pace in paces
        for kind in healthy
    ]
    alike: dict[str, list[Fault]] = defaultdict(list)
    for fault in faults:
        alike[fault.trainee].append(fault)
    for pace in paces:
        for trainee, own in alike.items():
            for start in range(0, len(own), FAULTS_A_TASK):
                part = own[start : start + FAULTS_A_TASK]
                work.append((record_faults, (trainee, pace, part, folder)))
    return work


def record(arguments: argparse.Namespace, folder: Path) -> None:
    """Fill the folder with recordings, in worker processes."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    work = tasks(arguments, folder)
    total = sum(len(given[2]) if run is record_faults else 1 for run, given in work)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    context = multiprocessing.get_context("spawn")
    with (
        Progress(*columns, TimeElapsedColumn()) as progress,
        ProcessPoolExecutor(
            arguments.workers, mp_context=context, initializer=end_with_parent
        ) as pool,
    ):
        bar = progress.add_task("recording runs", total=total)
        open_: set[Future[None]] = {pool.submit(run, *given) for run, given in work}
        try:
            while open_:
                time.sleep(0.5)
                progress.update(bar, completed=len(list(folder.glob("*.pickle.gz"))))
                for future in [future for future in open_ if future.done()]:
                    open_.remove(future)
                    future.result()
        except BaseException:
            # Ctrl-C, or a run that failed: the others need not be waited for.
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def replay_all(folder: Path, workers: int, rules: list[Rule]) -> Verdicts:
    """Judge all recordings there, in groups: a Prometheus each, as many at a time as workers."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="replay-") as scratch:
        groups: list[list[Path]] = [[]]
        size = 0
        for path in sorted(folder.glob("*.pickle.gz")):
            size += path.stat().st_size
            if size > GROUP_BYTES and groups[-1]:
                groups.append([])
                size = path.stat().st_size
            groups[-1].append(path)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, context, end_with_parent) as pool:
            futures = [
                pool.submit(replay_group, group, Path(scratch) / str(number), rules)
                for number, group in enumerate(groups)
            ]
            return merged([future.result() for future in futures], rules)


def replay_group(paths: list[Path], folder: Path, rules: list[Rule]) -> Verdicts:
    """Judge some recordings, and leave nothing behind in the folder."""
    folder.mkdir()
    try:
        return replay([load(path) for path in paths], folder, rules)
    finally:
        shutil.rmtree(folder)


def show(result: dict[str, Any], console: Console) -> None:
    """The tables that a person wants first."""
    heads = ("rule", "recall", "of harmed", "false/million", "delay", "from bad")
    table = Table(*heads, title="rules")
    for part in ("rules", "combined", "comparison"):
        for name, own in result[part].items():
            rate = own["false_alarms_per_million"]
            delays = [own[key] for key in ("delay_steps", "delay_from_bad_value")]
            table.add_row(
                name,
                _percent(own["recall_overall"]),
                _percent(own["recall_harmed_overall"]),
                "-" if rate is None else f"{rate:.1f}",
                *(f"{delay['median']:g}, max {delay['max']}" if delay else "-" for delay in delays),
            )
        table.add_section()
    console.print(table)
    kinds = Table("kind", "destroyed", *result["combined"], title="recall of destroyed runs")
    for kind in dict.fromkeys(fault["kind"] for fault in result["faults"]):
        runs = [fault for fault in result["faults"] if fault["kind"] == kind]
        lost = sum(fault["destroyed"] for fault in runs)
        shares = [_percent(own["recall"][kind]) for own in result["combined"].values()]
        kinds.add_row(kind, f"{lost} of {len(runs)}", *shares)
    console.print(kinds)
    for name, why in result["skipped"].items():
        console.print(f"not evaluated: {name}: {why}")
    console.print(f"false recover requests: {result['false_recover_requests']}")


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.0f} %"


def _finite(value: Any) -> Any:
    """The same for JSON, which knows neither NaN nor Inf: as text."""
    if isinstance(value, dict):
        return {key: _finite(own) for key, own in value.items()}
    if isinstance(value, list):
        return [_finite(own) for own in value]
    return str(value) if isinstance(value, float) and not np.isfinite(value) else value


def _prometheus_version() -> str:
    done = subprocess.run(
        [binary("promtool"), "--version"], capture_output=True, text=True, check=True
    )
    return done.stdout.split()[2]


def main() -> None:
    """Record, replay, write the file."""
    parser = parser_of(__doc__, "detection.json", "two healthy runs, one fault a kind")
    parser.add_argument("--only", metavar="KIND", help="only kinds with this in their name")
    parser.add_argument("--steps", type=int, default=STEPS, help="of healthy runs (%(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes (%(default)s)")
    parser.add_argument(
        "--recordings",
        type=Path,
        metavar="FOLDER",
        help="judge the runs that lie there and record none: changed rules in a minute",
    )
    arguments = parser.parse_args()
    started = time.monotonic()
    folder = (arguments.recordings or REPOSITORY / "build" / "bench" / "recordings").resolve()
    if arguments.recordings is None:
        record(arguments, folder)
    recordings = [load(path) for path in sorted(folder.glob("*.pickle.gz"))]
    if not recordings:
        raise SystemExit(f"--recordings {folder}: no recordings there")
    console = Console()
    rules = read_rules()
    with console.status(f"replaying {len(recordings)} runs through Prometheus"):
        verdicts = replay_all(folder, arguments.workers, rules)
    result = {
        **setting(
            ("act-exporter", "torch"),
            threads=arguments.workers,
            prometheus=_prometheus_version(),
            seconds=round(time.monotonic() - started),
        ),
        **evaluate(recordings, verdicts),
    }
    show(result, console)
    write(_finite(result), arguments.out)


if __name__ == "__main__":
    main()
