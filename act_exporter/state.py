"""Checking a saved history before any of it is taken over."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from act_exporter.exceptions import StateError

STATE_VERSION = 1

# Came after version 1 was first saved; a state without it is a state of that time.
_LATER: dict[str, Any] = {"attention": {}}


def checked_state(state: Any, own: dict[str, Any]) -> dict[str, Any]:
    """`state`, if it is of the form of `own` and its values can be.

    Args:
        state: what was loaded.
        own: what this version would save; its window and blocks may be of other sizes.

    Raises:
        StateError: it is not; says where.
    """
    if isinstance(state, dict):
        state = {**_LATER, **state}
    moved: dict[str, Any] = _like(state, {**own, **_LATER}, "exporter state")
    moved["attention"] = dict(state["attention"])
    for name, value in moved["attention"].items():
        if not (isinstance(name, str) and isinstance(value, float) and 0 < value < math.inf):
            raise StateError(f"exporter state: attention: {name!r}: {value!r} cannot be")
    if moved["version"] != STATE_VERSION:
        raise StateError(f"exporter state: version {moved['version']!r} is not known here")
    taps = moved["taps"]
    pairs = [tuple(tap) for tap in taps if isinstance(tap, list | tuple)]
    if not all(len(pair) == 2 and all(isinstance(name, str) for name in pair) for pair in pairs):
        raise StateError("exporter state: taps: expected pairs of names")
    if len(set(pairs)) != len(taps):
        raise StateError("exporter state: taps: expected pairs of names, each once")
    for part in ("baseline", "window"):
        for name, array in moved[part].items():
            if array.shape[-1] != len(taps):
                raise StateError(f"exporter state: {part}: {name} is not of {len(taps)} taps")
    baseline = moved["baseline"]
    steps = len(baseline["block"])
    learnt = baseline["values"][~np.isnan(baseline["values"])]
    _check(
        {
            **_window_checks("window", moved["window"]),
            "baseline: filled": _within(baseline["filled"], 0, steps - 1),
            "baseline: values": bool((np.isfinite(learnt) & (learnt > 0)).all()),
        }
    )
    return moved


def checked_windows(state: Any, own: dict[str, Any]) -> dict[str, Any]:
    """The windows in `state` whose names are in `own`.

    Raises:
        StateError: one of them is not of the form of `own`'s, or its values cannot be; says where.
    """
    if not isinstance(state, dict):
        raise StateError(f"exporter state: numbers: expected dict, got {type(state).__name__}")
    known = {name: part for name, part in own.items() if name in state}
    moved: dict[str, Any] = _like(state, known, "exporter state: numbers")
    for name, window in moved.items():
        if any(array.shape[-1] != 1 for array in window.values()):
            raise StateError(f"exporter state: numbers: {name} is not of one number")
        _check(_window_checks(f"numbers: {name}", window))
    return moved


def _window_checks(where: str, window: dict[str, npt.NDArray[Any]]) -> dict[str, bool]:
    size = len(window["values"])
    return {
        f"{where}: count": _within(window["count"], 0, size),
        f"{where}: next": _within(window["next"], 0, size - 1),
        f"{where}: values": bool(np.isfinite(window["values"]).all()),
    }


def _check(good: dict[str, bool]) -> None:
    for where, is_good in good.items():
        if not is_good:
            raise StateError(f"exporter state: {where} has values that cannot be")


def _within(array: npt.NDArray[Any], low: int, high: int) -> bool:
    return bool(((array >= low) & (array <= high)).all())


def _like(value: Any, own: Any, where: str) -> Any:
    """`value`, where it has the types and dimensions of `own`."""
    if not isinstance(value, type(own)):
        raise StateError(f"{where}: expected {type(own).__name__}, got {type(value).__name__}")
    if isinstance(own, dict):
        missing = sorted(own.keys() - value.keys())
        if missing:
            raise StateError(f"{where}: {missing[0]!r} is missing")
        return {key: _like(value[key], item, f"{where}: {key}") for key, item in own.items()}
    if isinstance(own, np.ndarray) and (
        value.dtype != own.dtype or value.ndim != own.ndim or not len(value)
    ):
        raise StateError(
            f"{where}: expected {own.dtype} with {own.ndim} dimensions,"
            f" got {value.dtype} with {value.ndim}"
        )
    return value
