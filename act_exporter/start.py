"""The one line in a trainer that uses torch: arguments in, a running exporter out."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import nn

from act_exporter.environment import started, variable
from act_exporter.exceptions import SettingError
from act_exporter.gradients import Scaler, Which
from act_exporter.history import Thresholds
from act_exporter.layers import Watch
from act_exporter.torch_exporter import Reduce, TorchExporter


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
) -> TorchExporter:
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
    grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
    if reduce == "global" and not grouped and variable("WORLD_SIZE", 1) == 1:
        reduce = "rank"  # one process is all of its run, and needs no group to say so
    return started(
        functools.partial(
            TorchExporter,
            model,
            watch=watch,
            sample_every=sample_every,
            thresholds=thresholds or Thresholds(),
            max_overhead=max_overhead,
            gradients=gradients,
            scaler=scaler,
            max_series=max_series,
            reduce=reduce,
        ),
        port=port,
        host=host,
        run=run,
        rank=rank,
        journal=journal,
        baseline=baseline,
        targets=targets,
        web_config=web_config,
    )
