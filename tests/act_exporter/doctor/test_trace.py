"""What is seen of a forward."""

from __future__ import annotations

import torch
from torch import nn

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


def test_a_compiled_model_shows_its_layers_and_is_not_compiled_for_it() -> None:
    compiled: list[object] = []

    def backend(graph: torch.fx.GraphModule, _examples: object) -> object:
        compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    optimized = torch.compile(model, backend=backend)
    optimized(torch.randn(2, 4))
    before = len(compiled)
    seen = Subject(optimized, torch.randn(2, 4)).plain.seen
    assert [own.layer for own in seen if own.place.side == "output"] == ["0", "1", "2"]
    assert before == len(compiled) == 1
