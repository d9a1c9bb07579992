"""The one line in a trainer that uses Keras on TensorFlow."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

import keras

from act_exporter.environment import started
from act_exporter.exceptions import SettingError
from act_exporter.history import Thresholds
from act_exporter.integrations.keras.layers import Watch

if TYPE_CHECKING:
    from act_exporter.integrations.keras.exporter import KerasExporter


def start_exporter(
    model: keras.Model,
    port: int | None = None,
    *,
    host: str | None = None,
    run: str | None = None,
    watch: Watch = "sublayers",
    sample_every: int = 1,
    thresholds: Thresholds | None = None,
    max_overhead: float | None = 0.01,
    gradients: bool = True,
    optimizer: keras.optimizers.Optimizer | None = None,
    max_series: int | None = 20_000,
    journal: str | Path | None = None,
    baseline: str | Path | None = None,
    targets: str | Path | None = None,
    web_config: str | Path | None = None,
) -> KerasExporter:
    """Watch a Keras `model` and serve its statistics on `http://host:port/metrics`.

    No other line is needed around `model.fit`: steps are counted by the optimizer's own
    `iterations`. In a loop of your own, call the model with `training=True` and
    `exporter.step(n)` after each step. Training is never stopped by the exporter.

    Args:
        model: a built model, compiled or not; before the first call of a `tf.function` of your
            own that runs it, since a graph that was made before is not looked into.
        port: the page's; default `ACT_PORT`, else 9460. 0 takes any free port, see
            `Exporter.port`.
        host: address to listen on; default `ACT_HOST`, else this machine only (127.0.0.1).
        run: the run's name, which must survive restarts; default `ACT_RUN`, else Slurm's job name,
            else the script's name.
        watch: "sublayers", "blocks", "all", globs, or `(name, layer) -> bool`; see
            `act_exporter.integrations.keras.layers.find_taps`.
        sample_every: look at every n-th step only, and never at each fiftieth: the difference is
            what looking costs. With `steps_per_execution` the steps of one execution are one
            sample, numbered as the last of them.
        thresholds: when a step breaks a rule; the shipped alert rules fit the defaults.
        max_overhead: largest share of training time that looking may cost; above it the interval
            is doubled, and the log says so. None for no limit.
        gradients: take their norms, without the loss scale and before the optimizer clips them.
        optimizer: that of a loop of your own; the model's own is found.
        max_series: how many layer series a page may have; see `act_exporter.start_exporter`.
        journal: a folder for every sampled step as JSON lines, kept for 30 days; default
            `ACT_JOURNAL`, else none is written.
        baseline: a file of `act-exporter baseline`, in force from the first step on.
        targets: a folder in which Prometheus' `file_sd_configs` look; default `ACT_TARGETS`.
        web_config: a file with TLS certificate, client certificates and token, see
            `act_exporter.access`; default `ACT_WEB_CONFIG`.

    Returns:
        The running exporter; `close()` it, or use it in a `with` statement.

    Raises:
        NothingToWatchError: the model has no layer that `watch` selects.
        SettingError: an argument or variable cannot serve; Keras runs on another backend than
            TensorFlow, or the model was made for several devices (`tf.distribute`).
    """
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise SettingError(
            f"Keras runs on {backend}: here only models on TensorFlow can be watched. Arrays of any"
            " trainer can: see act_exporter.integrations.arrays"
        )
    if not isinstance(model, keras.Model):
        raise SettingError(f"model must be a keras.Model, not {type(model).__name__}")
    if model._distribute_strategy is not None:
        strategy = type(model._distribute_strategy).__name__
        raise SettingError(
            f"the model was made under {strategy}: models that tf.distribute spreads over devices"
            " cannot be watched"
        )
    # Only now: it imports TensorFlow.
    from act_exporter.integrations.keras.exporter import KerasExporter

    return started(
        functools.partial(
            KerasExporter,
            model,
            watch=watch,
            sample_every=sample_every,
            thresholds=thresholds or Thresholds(),
            max_overhead=max_overhead,
            gradients=gradients,
            optimizer=optimizer,
            max_series=max_series,
        ),
        port=port,
        host=host,
        run=run,
        rank=None,
        journal=journal,
        baseline=baseline,
        targets=targets,
        web_config=web_config,
    )
