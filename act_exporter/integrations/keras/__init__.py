"""The exporter of Keras 3 on TensorFlow.

    from act_exporter.integrations.keras import start_exporter
    exporter = start_exporter(model, port=9460)

That line is all that `model.fit` needs. Statistics are made in the graph and read once a sampled
step; history, metrics, rules, journal and pages are those of a torch model.
"""

from act_exporter.integrations.keras.start import start_exporter

__all__ = ["start_exporter"]
