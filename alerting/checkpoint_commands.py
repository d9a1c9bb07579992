"""`act-alerting checkpoints`: a run's checkpoints for people who look, decide and keep.

Registered by `alerting.cli`. Nothing here imports torch: a look must not take seconds.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from alerting import help as texts
from alerting.checkpoint_table import COLUMNS, document, next_start, row, size, total_bytes
from alerting.control import ControlDirectory
from alerting.exceptions import AlertingError, ConfigError
from alerting.recovery import pins
from alerting.recovery.checkpoints import difference
from alerting.recovery.health import Health
from alerting.recovery.lineage import Checkpoint
from alerting.recovery.run_folder import overrule, read_run_folder
from alerting.table import print_table
from alerting.text import clean

VERDICTS: tuple[Health, ...] = ("suspect", "confirmed")
ONSET_MARGIN_STEPS = 10
"""TrainingGuard's default, which cannot be imported from there without torch."""

_RUN_FOLDER = typer.Argument(..., help="The folder that the TrainingGuard was given.")
_NAME = typer.Argument(..., metavar="CHECKPOINT", help="Its name, as `list` prints it.")


def application() -> typer.Typer:
    """The commands below `act-alerting checkpoints`."""
    app = typer.Typer(
        no_args_is_help=True, rich_markup_mode="markdown", help=texts.CHECKPOINTS_HELP
    )
    app.command("list", help=texts.LIST_HELP)(_list)
    app.command("verify", help=texts.VERIFY_HELP)(_verify)
    app.command("mark", help=texts.MARK_HELP)(_mark)
    app.command("pin", help=texts.PIN_HELP)(_pin)
    app.command("unpin", help=texts.UNPIN_HELP)(_unpin)
    app.command("plan", help=texts.PLAN_HELP)(_plan)
    return app


def _list(
    run_folder: Path = _RUN_FOLDER,
    as_json: bool = typer.Option(False, "--json", help="All of it, times in Unix seconds."),
) -> None:
    with _answering():
        run = read_run_folder(run_folder)
        if as_json:
            typer.echo(json.dumps(document(run), indent=1))
            return
        now = time.time()
        print_table(COLUMNS, [row(c, run, now) for c in run.checkpoints], sys.stdout)
        if run.next_start is None:
            # Else a row says it.
            _say(next_start(run))


def _verify(
    run_folder: Path = _RUN_FOLDER,
    names: list[str] = typer.Argument(
        None, metavar="[CHECKPOINT]...", help="Without: the one that the next start would take."
    ),
    everything: bool = typer.Option(False, "--all", help="All that the folder holds."),
) -> None:
    with _answering():
        run = read_run_folder(run_folder)
        if names and everything:
            raise ConfigError("name checkpoints, or say --all.")
        chosen = [run.find(name) for name in dict.fromkeys(names or [])]
        if everything:
            chosen = list(run.checkpoints)
        elif not chosen and run.next_start is not None:
            chosen = [run.next_start]
        if not chosen:
            raise ConfigError(f"{next_start(run)} Name the checkpoints to verify, or say --all.")
        bad = 0
        for number, checkpoint in enumerate(chosen, 1):
            with _progress(f"verifying {number} of {len(chosen)}", [checkpoint]) as progress:
                problem = difference(checkpoint, progress)
            if problem is not None and not checkpoint.folder.exists():
                _say(f"{checkpoint.name}: deleted meanwhile")
                continue
            bad += problem is not None
            _say(f"{checkpoint.name}: {problem or f'whole, {size(checkpoint)}'}")
        if bad:
            _fail(f"not whole: {bad} of {len(chosen)} checkpoints.", 1)


def _mark(
    run_folder: Path = _RUN_FOLDER,
    name: str = _NAME,
    health: str = typer.Argument(..., metavar="suspect|confirmed", help="Your verdict."),
    reason: str = typer.Option(..., help="A sentence for those who read it later."),
) -> None:
    with _answering():
        chosen = next((h for h in VERDICTS if h == health), None)
        if chosen is None:
            raise ConfigError(f"the verdict must be {' or '.join(VERDICTS)}, not {health!r}.")
        if not reason.strip():
            raise ConfigError("--reason: say why, in a sentence.")
        checkpoint = read_run_folder(run_folder).find(name)
        with _progress("verifying", [checkpoint]) as progress, _changing(checkpoint):
            overrule(checkpoint, chosen, reason.strip(), progress)
        # Read again: what the guard has said meanwhile counts too.
        run = read_run_folder(run_folder)
        record = run.find(name).health
        _say(f"{name} is {record.health}: {record.reason}")
        _say(next_start(run))


def _pin(
    run_folder: Path = _RUN_FOLDER,
    name: str = _NAME,
    reason: str = typer.Option("", help="A sentence for those who read it later."),
) -> None:
    with _answering():
        checkpoint = read_run_folder(run_folder).find(name)
        with _changing(checkpoint):
            pins.pin(checkpoint.folder, reason.strip())
        _say(f"{name} is pinned: it stays until it is unpinned")


def _unpin(run_folder: Path = _RUN_FOLDER, name: str = _NAME) -> None:
    with _answering():
        checkpoint = read_run_folder(run_folder).find(name)
        with _changing(checkpoint):
            was = pins.unpin(checkpoint.folder)
        _say(f"{name} is no longer pinned" if was else f"{name} was not pinned")


def _plan(
    run_folder: Path = _RUN_FOLDER,
    onset: int = typer.Option(..., min=1, metavar="STEP", help="The first bad step."),
    margin: int = typer.Option(
        ONSET_MARGIN_STEPS,
        min=0,
        metavar="STEPS",
        help="The guard's onset_margin_steps: only what is older by more is trusted.",
    ),
    verify: bool = typer.Option(True, help="Read the files, as the guard does; or be quick."),
    dry_run: bool = typer.Option(
        False, "--dry-run", help="Says in a script what is always so: nothing is changed."
    ),
) -> None:
    del dry_run
    with _answering():
        run = read_run_folder(run_folder)
        with _progress("verifying", list(run.line) if verify else []) as progress:
            plan = run.plan(onset, margin, lambda c: difference(c, progress) if verify else None)
        for checkpoint, why in plan.passed_over:
            _say(f"not {checkpoint.name}: {why}")
        if plan.target is None:
            _fail(f"nothing to roll back to from step {onset}: the guard would halt the run.", 1)
        steps = onset - plan.target.step
        _say(f"{plan.target.name}, {steps} steps before step {onset}: a rollback takes this")
        if not verify:
            typer.echo("its files were not verified; the guard takes an older one if they are bad")
        status = ControlDirectory(run_folder / "control").status()
        if status is not None and status.rollbacks_left == 0:
            typer.echo("the run has no rollback left: asked for one, the guard halts it")


@contextlib.contextmanager
def _progress(what: str, checkpoints: list[Checkpoint]) -> Iterator[Callable[[int], None]]:
    """A bar of the bytes to read, where there is a terminal; the function yielded moves it on."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(
        *columns,
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task(what, total=sum(map(total_bytes, checkpoints)))
        yield lambda read: progress.advance(task, read)


@contextlib.contextmanager
def _changing(checkpoint: Checkpoint) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if not checkpoint.folder.exists():
            _fail(f"{checkpoint.name} was deleted meanwhile.", 1)
        _fail(f"{checkpoint.name} cannot be changed: {error}", 1)


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    """Errors as one sentence and an exit code; what the store warns of, likewise."""
    logging.basicConfig(format="act-alerting: %(message)s", level=logging.WARNING)
    try:
        yield
    except ConfigError as error:
        _fail(str(error), 2)
    except (AlertingError, OSError) as error:
        _fail(str(error), 1)


def _say(sentence: str) -> None:
    # Reasons are what somebody wrote into a file: they must not steer the terminal.
    typer.echo(clean(sentence))


def _fail(sentence: str, code: int) -> NoReturn:
    typer.echo(f"act-alerting: {clean(sentence)}", err=True)
    raise typer.Exit(code)
