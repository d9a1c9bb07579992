"""Become the trainer, and be told when the supervisor dies: run by its path, then replaced.

The kernel's signal on a parent's death can only be asked for by the child itself, between fork and
exec. Python's `preexec_fn` would do it in a copy of a process whose threads are gone; this is a
process of its own. Not SIGKILL: torchrun passes SIGTERM on to workers in sessions of their own,
which SIGKILL would leave without a parent on the device.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Arguments: the supervisor's process id, then program and arguments of the trainer."""
    supervisor, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != supervisor:
        sys.exit("the supervisor has died")
    # Python ignores these for itself, and an exec would hand that on.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)  # noqa: S606
    except OSError as error:
        sys.exit(f"{command[0]} cannot be started: {error.strerror}")


if __name__ == "__main__":
    main()
