"""An exporter on a Keras model whose samples a test can read."""

import contextlib

from act_exporter import Thresholds
from act_exporter.integrations.keras.exporter import KerasExporter
from act_exporter.integrations.keras.layers import find_taps


class Watched(KerasExporter):
    """Keeps what was taken: `taken`, the samples, and `gradients`, the norms."""

    def __init__(self, model, **settings):
        self.taken = []
        self.gradients = []
        defaults = {"run": "test", "rank": 0, "sample_every": 1, "thresholds": Thresholds()}
        super().__init__(model, **{**defaults, **settings})
        samples, norms = self._instrumentation.samples, self._instrumentation.norms

        def kept_samples():
            taken = samples()
            self.taken += taken
            return taken

        def kept_norms(scale):
            taken = norms(scale)
            self.gradients += taken
            return taken

        self._instrumentation.samples = kept_samples
        self._instrumentation.norms = kept_norms
        taps = find_taps(model, settings.get("watch", "sublayers"))
        self.layers = [(tap.layer, tap.tensor) for tap in taps]

    def row(self, layer, tensor="output", sample=-1):
        return self.taken[sample].rows[self.layers.index((layer, tensor))]

    @property
    def values(self):
        return [sample.values for sample in self.taken]

    @property
    def errors(self):
        return {stage: count for stage, count in self._errors.items() if count}


@contextlib.contextmanager
def watched(model, **settings):
    with Watched(model, **settings) as exporter:
        yield exporter
        assert exporter.errors == {}
