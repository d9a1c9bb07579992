"""What goes into a rank's file comes out of it, with `weights_only=True`."""

from __future__ import annotations

import io
import random
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch

from alerting.exceptions import CheckpointError
from alerting.recovery import rng
from alerting.recovery.staging import staged


def through_a_file(value):
    file = io.BytesIO()
    torch.save(staged(value, "it"), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        2.5,
        1 + 2j,
        "text",
        b"bytes",
        [1, [2]],
        (1, "a"),
        {1, 2},
        {"a": {1: None}},
        OrderedDict(b=1, a=2),
        Counter([3, 3, 5]),
    ],
)
def test_plain_values_come_back_with_their_type(value):
    again = through_a_file(value)
    assert again == value
    assert type(again) is type(value)


def test_numpy_numbers_become_plain_ones():
    again = through_a_file({"lr": np.float64(0.1), "n": np.int64(3), "on": np.bool_(True)})
    assert again == {"lr": 0.1, "n": 3, "on": True}
    assert [type(v) for v in again.values()] == [float, int, bool]


def test_tensors_are_copies():
    live = torch.ones(2, requires_grad=True)
    copy = staged({"w": live}, "it")["w"]
    with torch.no_grad():
        live.zero_()
    assert copy.tolist() == [1, 1]
    assert not copy.requires_grad


@pytest.mark.parametrize("value", [np.ones(2), object(), len])
def test_anything_else_is_named_with_its_place(value):
    with pytest.raises(CheckpointError, match=r"^it\['a'\]\[0\] is a "):
        staged({"a": [value]}, "it")


def test_random_states_come_back():
    def draws():
        normal = np.random.normal()  # NumPy keeps the second of a pair for later
        return random.random(), random.gauss(0, 1), normal, torch.rand(3).tolist()

    draws()
    state = through_a_file(rng.capture())
    first = draws()
    rng.restore(state)
    assert draws() == first
