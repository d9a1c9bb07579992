"""The main job, end to end, on real servers:  make demo, make demo-keras.

A small GPT trains on the text of Python's own standard library. At a step that nothing but the
trainer knows, one inner layer's weights are multiplied by 100. Prometheus must see it, Alertmanager
must deliver it, the receiver must ask, and the trainer must be back on a healthy checkpoint.

Exit status: 0 if each of these was observed from outside and the loss is back; 1 if not.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from deploy.demo.observe import LOSS_SECONDS, Observer
from deploy.demo.servers import REPOSITORY, Server, free_port, running
from deploy.demo.stack import Stack, stack

RUN = "gpt-demo"
FOLDER = REPOSITORY / "build" / "demo"
MARK = "chat.jsonl"
"""The first file of a demo: a folder that has it may be emptied by the next one."""

SAVE_EVERY = 100
FAULT_STEPS = range(420, 520)
"""After step 300, by which all baselines have settled."""
STEPS = 5_000
"""More than are needed: the demo ends when everything was seen."""

MILD_FACTOR = 8
"""With the softmax no rule is broken by it; an exponential feature map takes it to its power."""

TRAINERS = {"torch": "deploy.demo.train", "keras": "deploy.demo.train_keras"}

BATCH_BYTES = 1 << 20
"""A batch has 12 kB."""

PATIENCE_SECONDS = 160
"""The demo's own limit; on two cores it takes about a minute."""


def main() -> int:
    """Run the demo; the exit status."""
    parser = argparse.ArgumentParser(
        prog="make demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--keep", action="store_true", help="leave the servers up until Ctrl-C and print where"
    )
    parser.add_argument("--seed", type=int, help="of training and of the fault's step")
    parser.add_argument(
        "--folder", type=Path, default=FOLDER, help="for all files; emptied (default: build/demo)"
    )
    parser.add_argument(
        "--framework", choices=TRAINERS, default="torch", help="of the trainer (default: torch)"
    )
    parser.add_argument(
        "--attention",
        choices=("exp",),
        help=f"linear, with an unbounded feature map: a fault of {MILD_FACTOR} times is enough,"
        " and the batch of the first bad step is saved; see docs/doctor.md",
    )
    arguments = parser.parse_args()
    if arguments.attention and arguments.framework != "torch":
        parser.error("--attention is of the trainer that uses torch")
    folder = arguments.folder.resolve()
    if folder.exists() and any(folder.iterdir()) and not (folder / MARK).exists():
        parser.error(f"--folder {folder} holds files that are not the demo's")
    # Ended in any way, everything that was started is ended too.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    # Where nobody's terminal says how wide it is, the table's rows fit on a line.
    console = Console(width=None if sys.stdout.isatty() else 130)
    try:
        with alone(folder):
            return demo(console, folder, arguments)
    except KeyboardInterrupt:
        console.print("interrupted; all processes were ended")
        return 130


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the folder: a second demo would empty it under the first one's feet."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            sys.exit(f"Another demo uses {folder}: end it, or give this one a --folder.")
        yield


def demo(console: Console, folder: Path, arguments: argparse.Namespace) -> int:
    """Start everything, watch it, report."""
    choice = random.Random(arguments.seed)
    fault_step = choice.choice(FAULT_STEPS)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    exporter_port, chat_port = free_port(), free_port()
    chat = folder / MARK
    chat.touch()
    python = [sys.executable, "-m"]
    options = {
        "run": RUN,
        "log-dir": folder / "runs",
        "port": exporter_port,
        "steps": STEPS,
        "save-every": SAVE_EVERY,
        "fault-step": fault_step,
        "seed": choice.randrange(10_000),
    }
    if arguments.attention:
        options |= {
            "attention": arguments.attention,
            "fault-factor": MILD_FACTOR,
            "save-batch-bytes": BATCH_BYTES,
        }
    trainer_options = [f"--{name}={it}" for name, it in options.items()]
    train = [*python, TRAINERS[arguments.framework], *trainer_options]
    with contextlib.ExitStack() as opened:
        console.print(f"Starting Prometheus, Alertmanager and the receiver in {folder}")
        servers = opened.enter_context(
            stack(folder, exporter_port=exporter_port, chat_url=f"http://127.0.0.1:{chat_port}/")
        )
        opened.enter_context(
            running(
                "chat", [*python, "deploy.demo.chat", str(chat_port), chat], folder, cwd=REPOSITORY
            )
        )
        trainer = opened.enter_context(running("trainer", train, folder, cwd=REPOSITORY))
        observer = Observer(servers, RUN, trainer.log, chat)
        watch(console, observer, trainer)
        faults = observer.missed()
        code = trainer.returncode()
        if code is not None:
            faults.append(f"the trainer ended with {code} before everything was seen")
        report(console, observer, faults)
        if code is not None:
            console.print(trainer.tail(), markup=False, highlight=False)
        trainer.stop()
        write_report(console, folder)
        if arguments.keep:
            hold(console, servers)
    return 1 if faults else 0


def watch(console: Console, observer: Observer, trainer: Server) -> None:
    """Say what is seen when it is seen, until it is all or nothing more can come."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    with _progress(console) as progress:
        task = progress.add_task("training", total=STEPS, loss="")
        while True:
            ended = trainer.returncode() is not None
            for name in observer.look():
                seen = observer.seen[name]
                progress.console.print(f"  {_clock(seen.at)}  {name}: {seen.detail}", markup=False)
            with contextlib.suppress(OSError):
                step, loss = observer.progress()
                progress.update(task, completed=step, loss=f"loss {loss:.2f}" if loss else "")
            if ended or observer.complete() or time.monotonic() > deadline:
                break
            time.sleep(0.25)  # a quarter of a scrape


def report(console: Console, observer: Observer, faults: list[str]) -> None:
    """The table of what was observed, and the verdict."""
    start = observer.seen["fault"].at if "fault" in observer.seen else None
    table = Table(title="What was observed, from outside", title_justify="left")
    for column in ("milestone", "time", "after the fault", "step", "what was seen"):
        right = column in ("after the fault", "step")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for name in observer.finders:
        seen = observer.seen.get(name)
        if seen is None:
            table.add_row(name, "-", "-", "-", "[red]not observed")
            continue
        after = "" if start is None else f"{seen.at - start:+.1f} s"
        step = "" if seen.step is None else str(seen.step)
        table.add_row(name, _clock(seen.at), after, step, seen.detail)
    console.print(table)
    for when, loss in observer.losses.items():
        meaning = {
            "before": f"mean of the {LOSS_SECONDS:.0f} s before the fault",
            "at": "largest between fault and rollback",
            "after": f"mean of the last {LOSS_SECONDS:.0f} s",
        }[when]
        console.print(f"  loss {when:>6}: {loss:.3f}  ({meaning})", highlight=False)
    for fault in faults:
        console.print(f"[red]missed: {fault}", highlight=False)
    if not faults:
        console.print("[green]The fault was seen, told, and undone.")


def write_report(console: Console, folder: Path) -> None:
    """What the trainer's journal has of it, as a page."""
    page = folder / "report.html"
    journal = folder / "runs" / RUN / "journal"
    command = [sys.executable, "-m", "act_exporter.cli", "report", str(journal), "-o", str(page)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=REPOSITORY)
    if done.returncode:
        console.print(f"[red]no report: {done.stderr.strip()}", highlight=False)
    else:
        console.print(f"What the journal has of it: {page}", highlight=False, soft_wrap=True)


def hold(console: Console, servers: Stack) -> None:
    """Leave the servers up until Ctrl-C."""
    for name, url in servers.urls.items():
        console.print(f"  {name:<13} {url}")
    console.print("The servers stay up until Ctrl-C.")
    with contextlib.suppress(KeyboardInterrupt):
        signal.pause()


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    columns = (
        TextColumn("step {task.completed:.0f} of {task.total:.0f}"),
        BarColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield progress


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at).strftime("%H:%M:%S.%f")[:-5]


if __name__ == "__main__":
    sys.exit(main())
