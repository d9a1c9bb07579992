"""The command line of the supervisor; only imported by `alerting.cli`."""

from __future__ import annotations

import logging
import shutil
import sys
from pathlib import Path

import typer

from alerting.exceptions import ConfigError
from alerting.help import SUPERVISE_HELP
from alerting.logs import configure_logging
from alerting.supervise.budget import RestartBudget
from alerting.supervise.settings import Limits
from alerting.supervise.supervisor import Supervisor
from alerting.supervise.watch import Watch

log = logging.getLogger(__name__)

DEFAULTS = Limits()


def register(app: typer.Typer) -> None:
    """Add `supervise` to the commands of `app`."""

    # What follows the program is its own, whether or not there is a -- before it.
    @app.command(help=SUPERVISE_HELP, context_settings={"allow_interspersed_args": False})
    def supervise(
        command: list[str] = typer.Argument(..., help="The trainer: program and arguments."),
        run_folder: Path | None = typer.Option(None, help="The guard's run folder."),
        stall_seconds: float = typer.Option(
            DEFAULTS.stall_seconds, min=0, help="It has hung if no step ends for so long; 0: never."
        ),
        start_seconds: float = typer.Option(
            DEFAULTS.start_seconds, min=0, help="The same until a process's first step has ended."
        ),
        request_seconds: float = typer.Option(
            DEFAULTS.request_seconds,
            min=0,
            help="It has hung if a request to recover is open for so long; 0: never.",
        ),
        grace_seconds: float = typer.Option(
            DEFAULTS.grace_seconds, min=0, help="From SIGTERM to SIGKILL."
        ),
        max_restarts: int = typer.Option(
            DEFAULTS.max_restarts, min=0, help="Restarts in a row without progress."
        ),
    ) -> None:
        limits = Limits(
            stall_seconds=stall_seconds,
            start_seconds=start_seconds,
            request_seconds=request_seconds,
            grace_seconds=grace_seconds,
            max_restarts=max_restarts,
        )
        try:
            code = _supervise(command, run_folder, limits)
        except ConfigError as error:
            typer.echo(f"act-alerting: {error}", err=True)
            code = 2
        sys.exit(code)


def _supervise(command: list[str], run_folder: Path | None, limits: Limits) -> int:
    """Run the supervisor; its exit code.

    Raises:
        ConfigError: ACT_LOG_LEVEL is wrong, there is no such program, or this is not Linux.
    """
    if sys.platform != "linux":
        raise ConfigError(
            "supervise needs Linux, whose kernel tells it of the trainer's processes."
        )
    if shutil.which(command[0]) is None:
        raise ConfigError(f"{command[0]} is no program that can be started.")
    configure_logging()
    if run_folder is None:
        log.warning(
            "Without --run-folder only crashes are noticed, not hangs, and each restart is counted."
        )
    watch = Watch(run_folder, limits) if run_folder is not None else None
    budget = RestartBudget(run_folder, limits.max_restarts)
    return Supervisor(command, limits, budget, watch).run()
