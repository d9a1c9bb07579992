"""What the checklist asks for and an examination does not do; it says so, with what to run.

The seed's section 5.1 has `torch.autograd.detect_anomaly`, which slows a training many times and
stops it at the first NaN of a backward: it belongs round a training's own loop, not round a batch.
Its section 5.2 asks whether a feature map is one that fused kernels of an inference framework take:
only the framework's own export can say.
"""

from __future__ import annotations

from collections.abc import Iterator

from act_exporter.doctor.finding import Finding, NeedsMoreError
from act_exporter.doctor.subject import Subject

FAULTS: dict[str, str] = {}


def check(subject: Subject) -> Iterator[Finding]:
    raise NeedsMoreError(
        "a person: for the operation that makes the first NaN of a backward, train inside"
        " `with torch.autograd.detect_anomaly():`; for whether inference kernels take a linear"
        " attention's feature map, export the model (`torch.onnx.export(model, args, dynamo=True)`)"
        " and build it with the framework that will serve it"
    )
