"""Activation statistics of a model in training, for Prometheus.

    from act_exporter import start_exporter
    exporter = start_exporter(model, port=9460)

That line is all a trainer needs: each layer's statistics, their 500-step history and the first
step that broke a rule are then on http://localhost:9460/metrics.
"""

from typing import TYPE_CHECKING

from act_exporter.exceptions import ActExporterError, NothingToWatchError, SettingError, StateError
from act_exporter.exporter import Exporter
from act_exporter.history import Thresholds

if TYPE_CHECKING:
    from act_exporter.start import start_exporter

__all__ = [
    "ActExporterError",
    "Exporter",
    "NothingToWatchError",
    "SettingError",
    "StateError",
    "Thresholds",
    "start_exporter",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    # Imported when used: it needs torch, which a trainer of another framework may not have.
    if name == "start_exporter":
        try:
            from act_exporter.start import start_exporter
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ImportError(
                "start_exporter watches models of torch, which is not installed: pip install"
                " 'act-exporter[torch]'; act_exporter.integrations has exporters for Keras and for"
                " trainers that hand over arrays"
            ) from None
        return start_exporter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), "start_exporter"]
