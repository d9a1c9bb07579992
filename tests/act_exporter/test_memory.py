"""Device memory on the page; `tests/gpu` has a device's own."""

from __future__ import annotations

import types

import pytest
import torch

from act_exporter import start_exporter
from act_exporter.memory import device_memory
from tests.act_exporter.models import gpt
from tests.act_exporter.test_exporter import value


def test_is_absent_where_there_is_no_device() -> None:
    assert device_memory() == {}
    with start_exporter(gpt(), 0) as exporter:
        assert value(exporter, "act_memory_allocated_bytes") is None


def test_is_of_the_devices_that_hold_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own answers, put in its mouth: two devices, of which one is in use."""
    card = types.SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda index: [0, 2**30][index])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    assert device_memory() == {"cuda:1": (2**30, 80 * 2**30)}
