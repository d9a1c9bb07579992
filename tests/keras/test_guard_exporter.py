"""The guard with the real exporter: a layer goes bad, the run goes back, all is as before."""

from __future__ import annotations

import urllib.request

import keras

from act_exporter.integrations.keras import start_exporter
from alerting.recovery.keras import KerasGuard
from tests.keras.guarded import GUARDED, Patient, dataset, model, open_request, same


class Broken(keras.callbacks.Callback):
    """The last layer's weights are NaN before a batch, once; asks when the exporter has seen it."""

    def __init__(self, batch, exporter, folder):
        super().__init__()
        self._left, self._exporter, self._folder = batch, exporter, folder
        self.onset = None

    def on_train_batch_begin(self, batch, logs=None):
        self._left -= 1
        if self._left == 0:
            kernel = self.model.layers[-1].kernel
            kernel.assign(kernel * float("nan"))

    def on_train_batch_end(self, batch, logs=None):
        if self.onset is None and self._exporter.onset() is not None:
            self.onset = self._exporter.onset()
            open_request(self._folder, "recover")


def test_what_the_exporter_sees_is_rolled_back_and_nothing_else_changes(tmp_path):
    unwatched = model()
    unwatched.fit(dataset(), epochs=4, verbose=0, shuffle=False)
    trained = model()
    with start_exporter(trained, port=0, run="toy", watch="all") as exporter:
        settings = {name: value for name, value in GUARDED.items() if name != "run"}
        guard = KerasGuard(tmp_path, model=trained, exporter=exporter, **settings)
        broken = Broken(18, exporter, tmp_path)
        guard.fit(dataset(), epochs=4, verbose=0, callbacks=[broken, Patient(guard)])
        address = f"http://127.0.0.1:{exporter.port}/metrics"
        page = urllib.request.urlopen(address, timeout=30).read().decode()
    assert broken.onset == 18
    assert same(trained, unwatched)
    assert 'act_run_info{generation="1",rank="0",run="toy"} 1.0' in page
    assert 'act_step{rank="0",run="toy"} 28.0' in page
    errors = [line for line in page.splitlines() if line.startswith("act_errors_total{")]
    assert errors
    assert all(line.endswith(" 0.0") for line in errors)
