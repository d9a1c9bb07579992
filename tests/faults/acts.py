"""What happens to a trainer before a step: `Act.do` in the plans."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from typing import Any, NoReturn

from torch.distributed.checkpoint.filesystem import FileSystemWriter

from alerting.recovery import save
from tests.alerting.recovery.trainer import open_request
from tests.faults.child import Child

_RELEASED = threading.Event()
_WRITE_DATA = FileSystemWriter.write_data


def break_model(child: Child) -> None:
    """A weight a hundredfold, which the detector sees in this step."""
    child.note("bad")
    child.trainer.break_model()


def ask_for_recovery(child: Child) -> None:
    """As the receiver asks."""
    open_request(child.plan.run_folder, "recover")


def ask_for_backup(child: Child) -> None:
    """As the receiver asks."""
    open_request(child.plan.run_folder, "checkpoint")


def break_and_ask(child: Child) -> None:
    """A bad step, and the request for what follows from it."""
    break_model(child)
    ask_for_recovery(child)


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
