"""Signals that ask a trainer to end: seen here, acted upon at the next boundary by all ranks."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Iterator
from types import FrameType

log = logging.getLogger(__name__)

STOPPING = (signal.SIGTERM, signal.SIGUSR1)
"""What schedulers send before they kill: Kubernetes, systemd and torchrun the first, Slurm either
(`--signal=USR1@120`)."""


class Signals:
    """Listens for them.

    Attributes:
        received: the number of the first that came, 0 before.
    """

    def __init__(self) -> None:
        self.received = 0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """While inside, a signal is only noted; one that the program itself handles is left to it.

        Repeats are noted no further: a launcher sends the same one again to each of its children.
        """
        if threading.current_thread() is not threading.main_thread():
            # Python lets only the main thread handle signals.
            log.info("signals are left alone, since the guard does not run in the main thread")
            yield
            return
        own = [s for s in STOPPING if signal.getsignal(s) is signal.SIG_DFL]
        for number in own:
            signal.signal(number, self._note)
        try:
            yield
        finally:
            for number in own:
                if signal.getsignal(number) == self._note:
                    signal.signal(number, signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
