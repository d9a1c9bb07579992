"""Disks that are full, slow, failing or read-only, and checkpoints that are damaged on them."""

from __future__ import annotations

import contextlib
import errno
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tests.faults.acts import (
    back_up,
    break_model,
    fail_to_write,
    fill_disk,
    free_disk,
    hold_writer,
    make_read_only,
    make_writable,
    recover,
    release_writer,
    write_again,
)
from tests.faults.child import Act, Child, at
from tests.faults.operations import Strike
from tests.faults.scene import Stage, scene

FULL_FOR = 6
"""Operations that fail after the first: all of one save."""
EVERY = 13
"""Of the places, in `make test`; prime, so that it falls on each kind of operation."""
PAGE = 4096
DISK_BYTES = 1 << 20
"""Some twenty checkpoints of these, which take 40 kB."""


@scene("disk full at each write, in turn")
def full_at_each_write(stage: Stage) -> str:
    """Brought about by errors in place of opens, which a full disk would not refuse all."""
    acts = (*at(3, back_up), *at(12, break_model, recover))
    settings = {"total": 16, "keep": 3}
    rehearsal = stage.experiment(**settings)
    rehearsal.run(acts=acts)
    [*_, (_, operations)] = rehearsal.events()
    writes = [n for n, done in enumerate(operations, 1) if done.startswith(("write", "mkdir"))]
    ended = 0
    for number in writes if stage.thorough else writes[::EVERY]:
        run = stage.experiment(**settings)
        strike = Strike(at=number, error=errno.ENOSPC, lasts=FULL_FOR)
        codes = run.run(acts=acts, strike=strike)
        assert codes in ([0], [1]), f"{codes}\n{run.said()}"
        if codes == [1]:
            # At the start, or in a recovery that cannot be written down: said, and taken up.
            assert "No space left on device" in run.said()
            ended += 1
        run.finish()
    played = len(writes) if stage.thorough else len(writes[::EVERY])
    return (
        f"{played} writes refused: {played - ended} runs went on, {ended} ended with a sentence "
        "(at the first checkpoint, or in a recovery that could not be written down) and were "
        "resumed"
    )


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[None]:
    """A file system of its own in the folder `path`, which takes the right to mount."""
    path.mkdir(parents=True)
    options = f"size={DISK_BYTES}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], check=True)
    try:
        yield
    finally:
        # Lazily: while a process of a failed scene has a file open it would be busy.
        subprocess.run(["umount", "--lazy", path], check=True)


@scene("disk full, a real one (tmpfs)", quick=False)
def really_full(stage: Stage) -> str:
    """Full before step 8, with room for 0, 1, 2 ... pages; room again before step 23."""
    failed = []
    for pages in range(13):
        run = stage.experiment(keep=3)
        with small_disk(run.run_folder):
            acts = (Act(step=8, do=partial(fill_disk, pages * PAGE)), Act(step=23, do=free_disk))
            assert run.run(acts=acts) == [0], run.said()
            failed.append(run.said().count("could not be saved"))
            run.finish()
            # Before the disk is taken away with all that was on it.
            run.settle()
    assert failed[0] == 3, failed
    return f"13 runs trained on, {sum(failed)} saves failed, the later ones were published"


@scene("disk full when the run starts, a real one (tmpfs)", quick=False)
def full_at_the_start(stage: Stage) -> str:
    run = stage.experiment()
    with small_disk(run.run_folder):
        ballast = run.run_folder / "ballast"
        with contextlib.suppress(OSError):
            ballast.write_bytes(bytes(DISK_BYTES))
        assert run.run() == [1]
        assert "No space left on device" in run.said()
        ballast.unlink()
        run.finish()
        run.settle()
    return "refused to start, in a sentence; started once there was room"


@scene("checkpoints' folder becomes read-only (bind mount)", quick=False)
def read_only(stage: Stage) -> str:
    run = stage.experiment(keep=9)
    acts = (Act(step=8, do=make_read_only), Act(step=18, do=make_writable))
    assert run.run(acts=acts) == [0], run.said()
    failed = run.said().count("could not be saved")
    assert failed == 2, run.said()
    assert "Read-only file system" in run.said()
    return f"trained on, {failed} saves failed, the next was published"


@scene("a file in the place of the checkpoints' folder")
def file_in_place(stage: Stage) -> str:
    run = stage.experiment()
    run.run_folder.mkdir()
    run.checkpoints.write_text("")
    assert run.run() == [1]
    assert "is a file; checkpoints need a folder" in run.said()
    run.checkpoints.unlink()
    run.finish()
    return "refused to start, in a sentence; started once it was gone"


@scene("slow writer: a save takes longer than the interval to the next")
def slow_writer(stage: Stage) -> str:
    run = stage.experiment(keep=9)
    acts = (Act(step=4, do=hold_writer), Act(step=13, do=release_writer))
    assert run.run(acts=acts, patient=False, step_seconds=0.02) == [0], run.said()
    said = run.said()
    assert "step 5: published checkpoint step-00000005-g0" in said
    assert run.loss().repeated == 0
    assert not (run.checkpoints / "step-00000010-g0").exists()
    return "trained on meanwhile; published at its end, and one due meanwhile was made after it"


@scene("failing writer: an error in each save for 10 steps")
def failing_writer(stage: Stage) -> str:
    run = stage.experiment(keep=9)
    acts = (Act(step=4, do=fail_to_write), Act(step=14, do=write_again))
    assert run.run(acts=acts) == [0], run.said()
    failed = run.said().count("could not be saved")
    assert failed == 2
    assert not list(run.checkpoints.glob(".*"))
    return f"trained on, {failed} saves failed and were cleared away, the next was published"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def alter(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncated": truncate,
    "emptied": empty,
    "altered in one byte": alter,
    "removed": Path.unlink,
}
FILES = ("__0_0.distcp", ".metadata", "rank-00000.pt")


def damaged(damage: Callable[[Path], None], stage: Stage) -> str:
    loaded = set()
    for file in FILES:
        run = stage.experiment(keep=9)
        run.kill(strike=Strike(at=("mkdir checkpoints/.saving-step-00000015-g0",)))
        damage(run.checkpoints / "step-00000010-g0" / file)
        run.finish()
        assert run.health("step-00000010-g0") == "corrupt"
        loaded |= set(run.loaded())
    assert loaded == {"step-00000005-g0"}, loaded
    return f"of each {', '.join(FILES)}: found corrupt, resumed from step-00000005-g0"


for words, damage in DAMAGES.items():
    scene(f"a file of the newest checkpoint {words}", damages=len(FILES))(partial(damaged, damage))


def alter_checkpoint(name: str, child: Child) -> None:
    alter(child.plan.run_folder / "checkpoints" / name / "rank-00000.pt")


@scene("a file of the checkpoint that a recovery would take is altered", damages=1)
def damaged_before_a_recovery(stage: Stage) -> str:
    run = stage.experiment(keep=9)
    alter_it = partial(alter_checkpoint, "step-00000005-g0")
    acts = at(12, alter_it, break_model, recover)
    assert run.run(acts=acts) == [0], run.said()
    assert run.loaded() == ["step-00000000-g0"]
    return "found corrupt, rolled back to step-00000000-g0"


@scene("a manifest or a verdict of the newest checkpoint is mangled", damages=1)
def mangled(stage: Stage) -> str:
    for file in ("manifest.json", "health.json"):
        run = stage.experiment(keep=9)
        run.kill(strike=Strike(at=("mkdir checkpoints/.saving-step-00000015-g0",)))
        (run.checkpoints / "step-00000010-g0" / file).write_text("{")
        run.finish()
        assert run.loaded() == ["step-00000005-g0"]
    return "not trusted, resumed from step-00000005-g0"
