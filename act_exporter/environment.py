"""What a trainer's one line leaves out is read from the environment: run, port, folders.

The only place of this package that reads it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from act_exporter.access import Access
from act_exporter.exceptions import SettingError
from act_exporter.exporter import Exporter
from act_exporter.levels import read_levels

DEFAULT_PORT = 9460

AnyExporter = TypeVar("AnyExporter", bound=Exporter)


def started(
    make: Callable[..., AnyExporter],
    *,
    port: int | None,
    host: str | None,
    run: str | None,
    rank: int | None,
    journal: str | Path | None,
    baseline: str | Path | None,
    targets: str | Path | None,
    web_config: str | Path | None,
) -> AnyExporter:
    """Make an exporter and serve it.

    Args:
        make: takes run, rank, journal and baseline as `Exporter` has them.
        port: as of `start_exporter`, and so are all others.
        host: see there.
        run: see there.
        rank: see there.
        journal: see there.
        baseline: see there.
        targets: see there.
        web_config: see there.

    Returns:
        What was made.

    Raises:
        SettingError: an argument or variable cannot serve.
    """
    if "ACT_LOG_LEVEL" in os.environ:
        _set_log_level(os.environ["ACT_LOG_LEVEL"])
    if port is None:
        port = variable("ACT_PORT", DEFAULT_PORT)
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65_535:
        raise SettingError(f"port={port!r} is no whole number between 0 and 65535")
    local_rank = variable("LOCAL_RANK", 0)
    rules = _place(web_config, "ACT_WEB_CONFIG")
    access = Access(rules) if rules is not None else None
    made = make(
        run=run if run is not None else _default_run(),
        rank=rank if rank is not None else variable("RANK", 0),
        journal=_place(journal, "ACT_JOURNAL"),
        baseline=read_levels(Path(baseline)) if baseline is not None else None,
    )
    made.serve(
        host or os.environ.get("ACT_HOST") or "127.0.0.1",
        port + local_rank if port else 0,
        targets=_place(targets, "ACT_TARGETS"),
        access=access,
    )
    return made


def _place(given: str | Path | None, name: str) -> Path | None:
    place = given if given is not None else os.environ.get(name)
    return Path(place) if place else None


def _default_run() -> str:
    script = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] else ""
    return (
        os.environ.get("ACT_RUN")
        or os.environ.get("SLURM_JOB_NAME")
        or (script if script not in ("", "-c", "-m") else "interactive")
    )


def variable(name: str, default: int) -> int:
    """A whole number from the environment.

    Raises:
        SettingError: it is none.
    """
    value = os.environ.get(name, "")
    if not value:
        return default
    try:
        return int(value)
    except ValueError:
        raise SettingError(f"{name}={value!r} is no whole number") from None


def _set_log_level(level: str) -> None:
    try:
        logging.getLogger("act_exporter").setLevel(level.upper())
    except ValueError:
        raise SettingError(f"ACT_LOG_LEVEL={level!r} is no log level, such as INFO") from None
