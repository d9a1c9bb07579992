"""The loop of `act-exporter watch`: asks, draws, and leaves the terminal as it was."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from rich.console import Console, ConsoleDimensions
from rich.live import Live

from act_exporter.exceptions import SettingError
from act_exporter.watch.conditions import holding
from act_exporter.watch.frame import Frame
from act_exporter.watch.source import PATIENCE_SECONDS, Reading, Source
from act_exporter.watch.trail import Trail

WELL, ANOMALY, NO_ANSWER = 0, 1, 2
"""Exit codes of a single frame."""

# A page of thousands of tensors takes the exporter some 20 ms of the training process.
_SHORTEST_SECONDS = 0.5

# Ages go on counting between two answers, and a terminal of another size is drawn on at once.
_DRAWN_SECONDS, _LOOKED_SECONDS = 1.0, 0.1

# An answer is there before the next one is asked for, or not at all.
_PATIENCE = 0.9

# Beside a layer's name, so that in a pipe no line is cut.
_BESIDE_NAME = 100

_ENDS = (signal.SIGTERM, signal.SIGHUP)


def show(
    addresses: Sequence[str], *, interval: str, once: bool, layers: int, console: Console
) -> int:
    """Watch the exporters until interrupted, or print what they say once.

    Once only where that is asked for, and where the console is no terminal that could be drawn on.

    Args:
        addresses: of the exporters.
        interval: time from one question to the next, such as "2s".
        once: whether to print and return.
        layers: rows of the table of layers.
        console: where to draw.

    Returns:
        `WELL`, `ANOMALY` or `NO_ANSWER` of what was printed; 0 after a Ctrl-C.

    Raises:
        SettingError: an address or the interval is none.
    """
    screen = Screen(addresses, interval=seconds_of(interval), layers=layers, console=console)
    if once or not console.is_terminal or console.is_dumb_terminal:
        return screen.once()
    screen.watch()
    return WELL


def seconds_of(text: str) -> float:
    """The seconds of "2", "2s" or "0.5 s".

    Raises:
        SettingError: it is none of that, or too short.
    """
    found = re.fullmatch(r"(\d+(?:\.\d*)?)\s*s?", text.strip())
    if found is None or float(found[1]) < _SHORTEST_SECONDS:
        raise SettingError(f"interval={text!r} must be seconds, {_SHORTEST_SECONDS:g} at least")
    return float(found[1])


class Screen:
    """Watches some exporters.

    Args:
        addresses: of the exporters.
        interval: seconds from one question to the next.
        layers: rows of the table of layers.
        console: where to draw.

    Raises:
        SettingError: one of the addresses is none.
    """

    def __init__(
        self, addresses: Sequence[str], *, interval: float, layers: int, console: Console
    ) -> None:
        self._changed = threading.Event()
        distinct = dict.fromkeys(addresses)
        self._sources = [Source(address, self._changed.set) for address in distinct]
        self._interval = interval
        self._layers = layers
        self._console = console
        self._trail = Trail()

    def once(self) -> int:
        """Print one frame, as long as it gets, and return the exit code."""
        for source in self._sources:
            source.ask(PATIENCE_SECONDS)
        for source in self._sources:
            source.wait(2 * PATIENCE_SECONDS)
        readings = self._readings()
        self._take_in(readings)
        if not self._console.is_terminal:
            pages = [reading.page for reading in readings if reading.page is not None]
            names = [len(layer.name) for page in pages for layer in page.layers.values()]
            self._console.width = max(self._console.width, max(names, default=0) + _BESIDE_NAME)
        self._console.print(self._frame())
        return _code(readings)

    def watch(self) -> None:
        """Draw until Ctrl-C, on a screen of its own that is gone afterwards."""
        live = Live(console=self._console, screen=True, auto_refresh=False)
        with _interruptible(), live:
            while True:
                due = time.monotonic() + self._interval
                for source in self._sources:
                    source.ask(self._interval * _PATIENCE)
                self._draw_until(due, live)
                self._take_in(self._readings())

    def _draw_until(self, due: float, live: Live) -> None:
        drawn_at, size = 0.0, ConsoleDimensions(0, 0)
        while (now := time.monotonic()) < due:
            changed = self._changed.is_set() or self._console.size != size
            if changed or now > drawn_at + _DRAWN_SECONDS:
                self._changed.clear()
                drawn_at, size = now, self._console.size
                live.update(self._frame(size.height), refresh=True)
            self._changed.wait(min(due - now, _LOOKED_SECONDS))

    def _readings(self) -> list[Reading]:
        return [source.reading for source in self._sources]

    def _take_in(self, readings: Sequence[Reading]) -> None:
        """One more reading on the trail, of those that answer."""
        answers = [reading for reading in readings if reading.problem is None]
        self._trail.add(reading.page for reading in answers if reading.page is not None)

    def _frame(self, height: int | None = None) -> Frame:
        return Frame(
            readings=self._readings(),
            trail=self._trail,
            now=time.monotonic(),
            wall=time.time(),
            layers=self._layers,
            height=height,
            corner="" if height is None else f"every {self._interval:g} s, Ctrl-C ends",
        )


def _code(readings: Sequence[Reading]) -> int:
    pages = [reading.page for reading in readings if reading.page is not None]
    ill = any(page.onset is not None or page.verdict is not None for page in pages)
    if ill or any(holds.alert.severity != "info" for holds in holding(pages)):
        return ANOMALY
    return WELL if len(pages) == len(readings) else NO_ANSWER


@contextmanager
def _interruptible() -> Iterator[None]:
    """In the block Ctrl-C ends it, and what else ends a process lets it tidy up first.

    Their status is 128 and the signal's number, as shells have it.
    """

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in _ENDS}
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
