"""What is seen of a forward."""

from __future__ import annotations

import torch

from act_exporter.doctor.subject import Subject
from tests.act_exporter.architectures import ARCHITECTURES


def test_torchs_own_encoder_shows_its_layers_in_eval_mode() -> None:
    model = ARCHITECTURES["encoder"].build()
    batch = ARCHITECTURES["encoder"].batch()
    layers = []
    for training in (True, False):
        model.train(training)
        layers.append([own.layer for own in Subject(model, batch).plain.seen])
    assert "encoder.layers.1.linear2" in layers[1]
    assert layers[0] == layers[1]
    assert torch.backends.mha.get_fastpath_enabled()
