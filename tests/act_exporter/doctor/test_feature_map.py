"""What feature maps do with extreme inputs."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from act_exporter.doctor.feature_map import feature_map
from tests.act_exporter.doctor.attentions import elu1


@pytest.mark.parametrize(
    ("phi", "growth", "positive"),
    [
        (torch.exp, "exponential", True),
        (torch.sinh, "exponential", False),
        (elu1, "linear", True),
        (torch.relu, "linear", True),
        (F.softplus, "linear", True),
        (F.gelu, "linear", False),
        (torch.square, "power", True),
        (torch.sigmoid, "bounded", True),
        (torch.tanh, "bounded", False),
        (lambda x: x.softmax(-1), "bounded", True),
        (lambda x: x.clamp(max=5).exp(), "bounded", True),
    ],
)
def test_growth_and_sign(phi, growth, positive) -> None:
    found = feature_map(phi)
    assert (found.growth, found.positive) == (growth, positive)
    assert found.bounded == (growth == "bounded")


def test_a_map_that_overflows_is_exponential_and_infinite() -> None:
    found = feature_map(lambda x: torch.exp(x * x))
    assert found.growth == "exponential"
    assert found.largest == float("inf")


def test_what_returns_no_tensor_is_no_feature_map() -> None:
    with pytest.raises(TypeError, match="returns a tensor"):
        feature_map(lambda x: x.tolist())
