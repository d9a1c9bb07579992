"""The exporter of a Keras model."""

from __future__ import annotations

from typing import Any

import keras

from act_exporter.exporter import Exporter
from act_exporter.history import Thresholds
from act_exporter.instrumentation import Listener
from act_exporter.integrations.keras.instrumentation import KerasInstrumentation
from act_exporter.integrations.keras.layers import Watch, find_taps


class KerasExporter(Exporter):
    """An exporter whose tensors are taken from `model`, as `start_exporter` says."""

    def __init__(
        self,
        model: keras.Model,
        *,
        thresholds: Thresholds,
        watch: Watch = "sublayers",
        gradients: bool = True,
        optimizer: keras.optimizers.Optimizer | None = None,
        **settings: Any,
    ) -> None:
        taps = find_taps(model, watch)

        def instrumented(listener: Listener) -> KerasInstrumentation:
            return KerasInstrumentation(
                model,
                taps,
                listener,
                exceed_threshold=thresholds.exceed,
                gradients=gradients,
                optimizer=optimizer,
            )

        super().__init__(taps, instrumented, thresholds=thresholds, **settings)
