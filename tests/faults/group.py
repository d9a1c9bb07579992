"""Several ranks, of which one is killed, hung, signalled or raises."""

from __future__ import annotations

import signal
from functools import partial

from tests.faults.acts import raise_error, recover, see_bad, send_signal
from tests.faults.child import Act
from tests.faults.kills import SAVING
from tests.faults.operations import Strike
from tests.faults.scene import Stage, scene

MANIFEST = f"rename {SAVING}/.manifest.json.tmp -> *"
PLACES = {
    "rank 1 of 2 killed once rank 0 has written the manifest": Strike(
        at=(MANIFEST, f"sync {SAVING}"), victim=1
    ),
    "rank 1 of 2 killed before its own file, rank 0's is written": Strike(
        at=(f"write {SAVING}/rank-00001.pt",), rank=1
    ),
    "rank 0 of 2 killed before the manifest, rank 1's file is written": Strike(
        at=(f"write {SAVING}/.manifest.json.tmp",)
    ),
    "rank 0 of 2 killed between the manifest and the checkpoint's name": Strike(
        at=(f"rename {SAVING} -> *",)
    ),
}
IN_RECOVERY = {
    "rank 1 of 2 killed in a recovery, before the new generation is written": Strike(
        at=("read checkpoints/step-00000005-g0/*", "rename .guard* -> *"), victim=1
    ),
    "rank 1 of 2 killed in a recovery, half-way through its load": Strike(
        at=("read checkpoints/step-00000005-g0/*.distcp",), rank=1
    ),
}


def killed(strike: Strike, stage: Stage) -> str:
    run = stage.experiment(ranks=2, total=22)
    run.kill(strike=strike)
    run.finish()
    return f"both ended; both resumed from {run.loaded()[0]}"


for words, strike in PLACES.items():
    scene(words)(partial(killed, strike))


def killed_in_a_recovery(strike: Strike, stage: Stage) -> str:
    run = stage.experiment(ranks=2, total=22, keep=9)
    acts = (Act(step=12, do=see_bad, rank=1), Act(step=12, do=recover))
    run.kill(acts=acts, strike=strike)
    run.finish()
    [answer] = run.answers()
    assert (answer["result"], answer["resumed_from"]) == ("done", "step-00000005-g0")
    return f"both ended; the recovery was taken up: back to {answer['resumed_from']}"


for words, strike in IN_RECOVERY.items():
    scene(words)(partial(killed_in_a_recovery, strike))


@scene("rank 2 of 4 killed, under act-alerting supervise and torchrun", quick=False)
def one_killed(stage: Stage) -> str:
    run = stage.experiment(ranks=4, total=22)
    said = run.supervise(acts=(Act(step=8, do=partial(send_signal, signal.SIGKILL), rank=2),))
    assert said.count("Started ") == 2, said
    return f"all ended and were started again; resumed from {run.loaded()[0]}"


@scene("rank 2 of 4 raises, under act-alerting supervise and torchrun", quick=False)
def one_raises(stage: Stage) -> str:
    run = stage.experiment(ranks=4, total=22)
    said = run.supervise(acts=(Act(step=8, do=raise_error, rank=2),))
    assert said.count("Started ") == 2, said
    return f"all ended and were started again; resumed from {run.loaded()[0]}"


@scene("rank 2 of 4 hangs (SIGSTOP), under act-alerting supervise and torchrun", quick=False)
def one_hangs(stage: Stage) -> str:
    run = stage.experiment(ranks=4, total=22)
    said = run.supervise(acts=(Act(step=8, do=partial(send_signal, signal.SIGSTOP), rank=2),))
    assert "has hung: no step has ended for" in said, said
    assert said.count("Started ") == 2, said
    return f"seen by the supervisor, ended and started again; resumed from {run.loaded()[0]}"


@scene("rank 2 of 4 is sent SIGTERM, under act-alerting supervise and torchrun", quick=False)
def one_signalled(stage: Stage) -> str:
    run = stage.experiment(ranks=4, total=22)
    said = run.supervise(acts=(Act(step=8, do=partial(send_signal, signal.SIGTERM), rank=2),))
    assert said.count("Started ") == 2, said
    assert run.loss().repeated == 0
    return f"all saved, ended and were started again; resumed from {run.loaded()[0]}"
