"""What happens to a trainer before a step: `Act.do` in the plans."""

from __future__ import annotations

import errno
import functools
import os
import subprocess
import threading
import time
from typing import Any, NoReturn

from torch.distributed.checkpoint.filesystem import FileSystemWriter

from alerting.control import Action, ControlDirectory
from alerting.recovery import save
from alerting.recovery.training_state import TrainingState
from tests.alerting.recovery.trainer import request_of
from tests.faults.child import Child
from tests.faults.deadline import until

_RELEASED = threading.Event()
_WRITE_DATA = FileSystemWriter.write_data


def break_model(child: Child) -> None:
    """A weight a hundredfold, which the detector sees in this step."""
    child.note("bad")
    child.trainer.break_model()


def see_bad(child: Child) -> None:
    """The detector sees something bad in this step; the weights stay, which all ranks share."""
    child.trainer.detector.see_bad()


def ask(
    action: Action, child: Child, *, run: str = "toy", generation: int = 0, apart: float = 0.0
) -> bool:
    """Open a request, as a receiver does whose clock is so many seconds ahead."""
    request = request_of(action, generation, run, time.time() + apart)
    return ControlDirectory(child.plan.run_folder / "control").claim(request)


recover = functools.partial(ask, "recover")
back_up = functools.partial(ask, "checkpoint")


def ask_in_the_recovery(child: Child) -> None:
    """A request of each kind, when the checkpoint is about to be loaded."""
    restore = TrainingState.restore

    def asking(state: TrainingState, *arguments: Any) -> None:
        for action in ("recover", "checkpoint"):
            child.note("claimed", action, ask(action, child))
        restore(state, *arguments)

    TrainingState.restore = asking  # type: ignore[method-assign]


def mangle_request(child: Child) -> None:
    """A request that is none."""
    (child.plan.run_folder / "control" / "requests" / "checkpoint.json").write_text("{")


def set_clock(ahead: float, child: Child) -> None:
    """From now on the process's clock is so many seconds ahead."""
    now = time.time
    time.time = lambda: now() + ahead


def send_signal(number: int, child: Child) -> None:
    """To this process."""
    os.kill(os.getpid(), number)


def raise_error(child: Child) -> None:
    """As a user's code may."""
    raise RuntimeError("the user's own")


def hold_writer(child: Child) -> None:
    """What is to be written waits until `release_writer`."""
    write = save._write

    def held(*arguments: Any) -> float:
        assert _RELEASED.wait(60)
        return write(*arguments)

    save._write = held


def release_writer(child: Child) -> None:
    """See `hold_writer`."""
    _RELEASED.set()


def release_writer_in_the_recovery(child: Child) -> None:
    """See `hold_writer`; the training thread itself waits for it then."""

    def release() -> None:
        control = ControlDirectory(child.plan.run_folder / "control")
        until(lambda: (status := control.status()) is not None and status.state == "recovering")
        _RELEASED.set()

    threading.Thread(target=release, daemon=True).start()


def fail_to_write(child: Child) -> None:
    """Each save has an error until `write_again`."""

    def failing(*_: Any, **__: Any) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error")

    FileSystemWriter.write_data = failing  # type: ignore[method-assign]


def write_again(child: Child) -> None:
    """See `fail_to_write`."""
    FileSystemWriter.write_data = _WRITE_DATA  # type: ignore[method-assign]


def fill_disk(left: int, child: Child) -> None:
    """All but `left` bytes of the run folder's disk are taken."""
    disk = os.statvfs(child.plan.run_folder)
    ballast = child.plan.run_folder / "ballast"
    ballast.write_bytes(bytes(disk.f_bavail * disk.f_frsize - left))


def free_disk(child: Child) -> None:
    """See `fill_disk`."""
    (child.plan.run_folder / "ballast").unlink()


def make_read_only(child: Child) -> None:
    """The checkpoints' folder: by a mount, since root writes whatever the mode says."""
    folder = child.plan.run_folder / "checkpoints"
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)


def make_writable(child: Child) -> None:
    """See `make_read_only`."""
    folder = child.plan.run_folder / "checkpoints"
    subprocess.run(["umount", "--lazy", folder], check=True)
