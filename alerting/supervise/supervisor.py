"""Starts the trainer, watches it, ends it, and decides whether to start it again."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Sequence

from alerting.exit_codes import GAVE_UP, HALTED, RESTART
from alerting.supervise.budget import RestartBudget
from alerting.supervise.processes import TrainerProcesses
from alerting.supervise.settings import Limits
from alerting.supervise.watch import Watch

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5
"""Between two looks at the run folder; a trainer's own end wakes the supervisor at once."""
_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


class Supervisor:
    """Runs one trainer to its end, over as many processes as that takes.

    Args:
        command: program and arguments of the trainer; no shell sees them.
        limits: how long to wait for what.
        budget: of restarts without progress.
        watch: of the run folder; without one a hang goes unnoticed, and each restart is counted.
    """

    def __init__(
        self, command: Sequence[str], limits: Limits, budget: RestartBudget, watch: Watch | None
    ) -> None:
        self._command = command
        self._limits = limits
        self._budget = budget
        self._watch = watch
        self._stopped_by: int | None = None
        self._told_to_save = False

    def run(self) -> int:
        """Supervise until the trainer has ended for good. To be called in the main thread.

        Returns:
            The supervisor's exit code: 0, or one of `alerting.exit_codes`.
        """
        # Taken up one by one where the loop waits: no handler interrupts anything. A parent that
        # ignores SIGCHLD would have the kernel throw exit codes away.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, (*_STOP, *_PASSED_ON, signal.SIGCHLD))
        self._processes = TrainerProcesses()
        while True:
            hung = self._stopped_by is None and self._train()
            code = self._settle(hung)
            if code is not None:
                return code

    def _train(self) -> bool:
        """One process of the trainer, to its end; whether it was ended because it hung."""
        self._told_to_save = False
        if self._watch is not None:
            self._watch.begin()
        log.info(
            "Started %s as process %d.", self._command[0], self._processes.start(self._command)
        )
        complaint = None
        try:
            while self._processes.poll() is None:
                if self._stopped_by is not None:
                    self._end(self._stopped_by)
                    break
                complaint = self._watch.complaint() if self._watch is not None else None
                if complaint is not None:
                    log.error("The trainer has hung: %s. It is ended.", complaint)
                    self._end(signal.SIGTERM)
                    break
                self._take_signal(_LOOK_SECONDS)
        finally:
            # Also what a crash has left: a worker that lives on holds the device.
            self._processes.kill()
        return complaint is not None

    def _end(self, number: int) -> None:
        self._processes.signal_group(number)
        deadline = time.monotonic() + self._limits.grace_seconds
        while self._processes.poll() is None:
            left = deadline - time.monotonic()
            if left <= 0:
                log.warning(
                    "The trainer has not ended within %g s and is killed.",
                    self._limits.grace_seconds,
                )
                return
            self._take_signal(left)

    def _settle(self, hung: bool) -> int | None:
        """After the trainer's end: the exit code, or None where it is to be started again now."""
        code = self._processes.poll()
        state = self._watch.state if self._watch is not None else None
        if state == "halted" or code == HALTED:
            log.error("The guard has halted the run: it is not started again, people must look.")
            return HALTED
        if code == 0 and (state == "finished" or not (hung or self._stopped_by)):
            log.info("The trainer has ended well.")
            return 0
        if self._stopped_by is not None:
            log.info("Ended by %s; the run has not finished.", _name(self._stopped_by))
            return RESTART
        # Under torchrun each exit code becomes 1, so the guard says it in the run folder too.
        if (code == RESTART or state == "stopped") and not hung:
            if self._told_to_save:
                log.info("The trainer has saved and ended, as SIGUSR1 asked.")
                return RESTART
            log.info("The trainer asks for a new process; it is started at once.")
            return None
        return self._restart_or_give_up(_describe(code))

    def _restart_or_give_up(self, ended: str) -> int | None:
        wait = self._budget.spend(self._watch.position if self._watch is not None else None)
        if wait is None:
            log.error("The trainer %s, and no restart without progress is left.", ended)
            return GAVE_UP
        log.warning(
            "The trainer %s; it is started again in %g s. Restarts without progress left: %d.",
            ended,
            wait,
            self._budget.left,
        )
        self._pause(wait)
        return None

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._stopped_by is None and (left := deadline - time.monotonic()) > 0:
            self._take_signal(left)

    def _take_signal(self, seconds: float) -> None:
        """Wait so long for a signal, and take it up."""
        received = signal.sigtimedwait((*_STOP, *_PASSED_ON, signal.SIGCHLD), seconds)
        if received is None:
            return
        number = received.si_signo
        if number in _PASSED_ON:
            log.info("%s is passed on to the trainer.", _name(number))
            self._processes.signal(number)
            self._told_to_save |= number == signal.SIGUSR1
        elif number in _STOP:
            log.info("%s: the trainer is to end.", _name(number))
            self._stopped_by = number


def _name(number: int) -> str:
    return signal.Signals(number).name


def _describe(code: int | None) -> str:
    if code is None:
        return "does not end"
    return f"was ended by {_name(-code)}" if code < 0 else f"ended with exit code {code}"
