"""The one line in a trainer: arguments and `ACT_*` variables in, a running exporter out.

The only place of this package that reads the environment.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import torch
from torch import nn

from act_exporter.access import Access
from act_exporter.exceptions import SettingError
from act_exporter.exporter import Exporter, Reduce
from act_exporter.gradients import Scaler, Which
from act_exporter.history import Thresholds
from act_exporter.layers import Watch
from act_exporter.levels import read_levels

DEFAULT_PORT = 9460


def start_exporter(
    model: nn.Module,
    port: int | None = None,
    *,
    host: str | None = None,
    run: str | None = None,
    rank: int | None = None,
    watch: Watch = "sublayers",
    sample_every: int = 1,
    thresholds: Thresholds | None = None,
    max_overhead: float | None = 0.01,
    gradients: Which = True,
    scaler: Scaler | None = None,
    max_series: int | None = 20_000,
    journal: str | Path | None = None,
    baseline: str | Path | None = None,
    reduce: Reduce = "rank",
    targets: str | Path | None = None,
    web_config: str | Path | None = None,
) -> Exporter:
    """Watch `model` and serve its statistics on `http://host:port/metrics`.

    No other line is needed in the trainer: steps are counted by the optimizers' own `step`.
    Training is never stopped by the exporter. A port in use is logged and training goes on
    without a page.

    Args:
        model: the model, before or after DDP, FSDP or `torch.compile`, but before its first
            compiled call: later hooks do not run in a compiled graph.
        port: port of local rank 0, other ranks add theirs; default `ACT_PORT`, else 9460. 0 takes
            any free port, see `Exporter.port`.
        host: address to listen on; default `ACT_HOST`, else this machine only (127.0.0.1).
        run: the run's name, which must survive restarts; default `ACT_RUN`, else Slurm's job name,
            else the script's name.
        rank: default `RANK`, as torchrun sets it, else 0.
        watch: "sublayers", "blocks", "all", globs, or `(name, module) -> bool`; see
            `act_exporter.layers.find_taps`.
        sample_every: look at every n-th step only, and never at each fiftieth: the difference is
            what looking costs.
        max_overhead: largest share of training time that looking may cost; above it the interval
            is doubled, and the log says so. None for no limit. A hundredth by default.
        thresholds: when a step breaks a rule; the shipped alert rules fit the defaults.
        gradients: take their norms before clipping; False puts no hook on any parameter. Under DDP
            they are those of all ranks; of parameters that FSDP2 shards they are this rank's part,
            unless "all_ranks" lets the ranks add up: only where each rank has an exporter that
            was started with it, after sharding.
        scaler: the `GradScaler` in use, if any: the gradients are too large by its scale.
        max_series: how many layer series a page may have; beyond it the most nested layers (experts
            of a mixture) are judged here but not exposed, which `act_series_dropped_total` says.
            20,000 are some 80 blocks at the default watch level.
        journal: a folder for every sampled step as JSON lines, kept for 30 days; default
            `ACT_JOURNAL`, else none is written.
        baseline: a file of `act-exporter baseline`: baselines of a small run with the same layer
            names, in force from the first step on. Others are learnt.
        reduce: "rank" gives each rank a page; "global" joins the statistics of all ranks at each
            sampled step, without waiting, and rank 0 alone serves them, with `rank="all"`, and
            `act_layer_absmax_rank` for the rank that has the maximum. Each rank must ask for it,
            after `init_process_group` and with the same layers and `sample_every`; the interval is
            then never raised, `max_overhead` is only measured.
        targets: a folder in which Prometheus' `file_sd_configs` look: the exporter lists itself
            there, with its run and rank, and takes the file away when it closes; default
            `ACT_TARGETS`, else none. Served on all addresses, it is listed by the machine's name.
        web_config: a file with TLS certificate, client certificates and token, see
            `act_exporter.access`; default `ACT_WEB_CONFIG`, else everybody who reaches the port
            sees the page.

    Returns:
        The running exporter; `close()` it, or use it in a `with` statement.

    Raises:
        NothingToWatchError: the model has no module that `watch` selects.
        SettingError: an argument or variable cannot serve.
    """
    if not isinstance(model, nn.Module):
        raise SettingError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if "ACT_LOG_LEVEL" in os.environ:
        _set_log_level(os.environ["ACT_LOG_LEVEL"])
    if port is None:
        port = _variable("ACT_PORT", DEFAULT_PORT)
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65_535:
        raise SettingError(f"port={port!r} is no whole number between 0 and 65535")
    local_rank = _variable("LOCAL_RANK", 0)
    grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
    if reduce == "global" and not grouped and _variable("WORLD_SIZE", 1) == 1:
        reduce = "rank"  # one process is all of its run, and needs no group to say so
    journal = journal if journal is not None else os.environ.get("ACT_JOURNAL")
    web_config = web_config if web_config is not None else os.environ.get("ACT_WEB_CONFIG")
    access = Access(Path(web_config)) if web_config else None
    exporter = Exporter(
        model,
        run=run if run is not None else _default_run(),
        rank=rank if rank is not None else _variable("RANK", 0),
        watch=watch,
        sample_every=sample_every,
        thresholds=thresholds or Thresholds(),
        max_overhead=max_overhead,
        gradients=gradients,
        scaler=scaler,
        max_series=max_series,
        baseline=read_levels(Path(baseline)) if baseline is not None else None,
        journal=Path(journal) if journal else None,
        reduce=reduce,
    )
    host = host or os.environ.get("ACT_HOST") or "127.0.0.1"
    targets = targets if targets is not None else os.environ.get("ACT_TARGETS")
    exporter.serve(
        host,
        port + local_rank if port else 0,
        targets=Path(targets) if targets else None,
        access=access,
    )
    return exporter


def _default_run() -> str:
    script = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] else ""
    return (
        os.environ.get("ACT_RUN")
        or os.environ.get("SLURM_JOB_NAME")
        or (script if script not in ("", "-c", "-m") else "interactive")
    )


def _variable(name: str, default: int) -> int:
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
