"""The exporter of a torch model."""

from __future__ import annotations

import inspect
from typing import Any, Literal, get_args

from torch import nn

from act_exporter.exceptions import SettingError
from act_exporter.exporter import Exporter
from act_exporter.gradients import Scaler, Which
from act_exporter.history import Thresholds
from act_exporter.instrumentation import Listener
from act_exporter.layers import Watch, find_taps
from act_exporter.ranks import Ranks
from act_exporter.torch_instrumentation import TorchInstrumentation
from act_exporter.transfer import arrays_of, tensors_of

Reduce = Literal["rank", "global"]
"""Whether each rank has a page of its own, or rank 0 one for all."""


class TorchExporter(Exporter):
    """An exporter whose tensors are taken by hooks on `model`, as `start_exporter` says."""

    def __init__(
        self,
        model: nn.Module,
        *,
        thresholds: Thresholds,
        watch: Watch = "sublayers",
        gradients: Which = True,
        scaler: Scaler | None = None,
        reduce: Reduce = "rank",
        **settings: Any,
    ) -> None:
        if reduce not in get_args(Reduce):
            raise SettingError(f"reduce={reduce!r} is neither 'rank' nor 'global'")
        taps = find_taps(model, watch)
        recorded = list(inspect.signature(self.record).parameters)

        def instrumented(listener: Listener) -> TorchInstrumentation:
            return TorchInstrumentation(
                model,
                taps,
                listener,
                exceed_threshold=thresholds.exceed,
                gradients=gradients,
                scaler=scaler,
                ranks=Ranks(taps, recorded, listener.count_error) if reduce == "global" else None,
            )

        super().__init__(taps, instrumented, thresholds=thresholds, **settings)

    def state_dict(self) -> dict[str, Any]:
        """Step, learning rate, baselines and windows: tensors, numbers and strings only."""
        state: dict[str, Any] = tensors_of(super().state_dict())
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state; layers that it does not know learn anew.

        Raises:
            StateError: not such a state; nothing was loaded.
        """
        super().load_state_dict(arrays_of(state))
