"""A trainer for the supervisor: trains, and meets one fault, once or each time.

Arguments: run folder, file for a line a step, fault, step of the fault ("3" once, "3+" each time).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from deploy.demo.servers import wait_for
from tests.alerting.recovery.trainer import Trainer

STEPS = 20


def sleep_for_ever() -> None:
    while True:
        time.sleep(60)


def wait_to_be_told(trainer: Trainer) -> None:
    """A step that lasts until the guard has heard a signal."""
    wait_for(lambda: trainer.guard._run._signals.received, "a signal", timeout=60)


def meet(fault: str, folder: Path, trainer: Trainer) -> None:
    """Do what the fault's name says."""
    if fault == "crash":
        os._exit(3)
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "restart":
        sys.exit(75)
    if fault == "halted":
        trainer.break_model()
        trainer.ask("recover")
    if fault == "sleep":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # Its own session, as torchrun's workers have one.
        lost = subprocess.Popen([sys.executable, "-c", "input()"], start_new_session=True)
        (folder / "lost").write_text(str(lost.pid))
        sleep_for_ever()
    if fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "told":
        os.kill(os.getpid(), signal.SIGTERM)
    if fault == "asks to be told":
        os.kill(os.getppid(), signal.SIGUSR1)
        wait_to_be_told(trainer)
    if fault == "ready":
        (folder / "ready").write_text(str(os.getpid()))
        sleep_for_ever()
    if fault == "slow":
        (folder / "ready").write_text(str(os.getpid()))
        wait_to_be_told(trainer)


def catch_usr1(folder: Path) -> None:
    """Leave a sign that the signal came."""
    signal.signal(signal.SIGUSR1, lambda *_: (folder / "usr1").touch())


def main() -> None:
    folder, log, fault, when = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
    met = folder / "met"
    folder.mkdir(exist_ok=True)
    if fault == "ready":
        catch_usr1(folder)
    if fault == "import":
        raise ImportError("no such module")
    trainer = Trainer(folder, settings={"max_rollbacks": 0 if fault == "halted" else 2})
    with log.open("a") as file:
        for step, batch in trainer.guard.steps(STEPS):
            print(repr(trainer.train_step(step, batch)), file=file, flush=True)
            if step == int(when.strip("+")) and (when.endswith("+") or not met.exists()):
                met.touch()
                if fault == "deaf":
                    # Steps end, and the requests' folder cannot be seen: as on a lost mount.
                    trainer.ask("recover")
                    trainer.guard._run._mailbox.find = lambda action: None
                    while True:
                        trainer.guard._run._heartbeat.beat(0, step)
                        time.sleep(0.1)
                meet(fault, folder, trainer)


if __name__ == "__main__":
    main()
