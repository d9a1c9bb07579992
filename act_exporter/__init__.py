"""Activation statistics of a model in training, for Prometheus.

    from act_exporter import start_exporter
    exporter = start_exporter(model, port=9460)

That line is all a trainer needs: each layer's statistics, their 500-step history and the first
step that broke a rule are then on http://localhost:9460/metrics.
"""

from act_exporter.exceptions import ActExporterError, NothingToWatchError, SettingError, StateError
from act_exporter.exporter import Exporter
from act_exporter.history import Thresholds
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
