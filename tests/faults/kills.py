"""SIGKILL of a single process: at random moments, and before each operation on a file."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from functools import partial
from typing import Any

from tests.faults.acts import back_up, break_model, recover
from tests.faults.child import at
from tests.faults.deadline import until
from tests.faults.experiment import Experiment
from tests.faults.operations import Strike
from tests.faults.scene import Stage, scene

KILLS = 50
QUICK_KILLS = 4
STEPS_PER_KILL = 8
LEAST_STEPS = 400
"""Two seconds: of a few kills none may come too late because this process had to wait."""
START_SECONDS = 0.3
"""A process of these is in its first step after about 0.2 s."""

SAVING = "checkpoints/.saving-step-00000010-g0"
PLACES = {
    "before a checkpoint's data": (f"write {SAVING}/*.distcp",),
    "between the data of a checkpoint and its manifest": (f"write {SAVING}/.manifest.json.tmp",),
    "between the manifest's bytes and its name": (f"rename {SAVING}/.manifest.json.tmp -> *",),
    "between the manifest and the checkpoint's name": (f"rename {SAVING} -> *",),
    "between the checkpoint's name and the folder's sync": (
        f"rename {SAVING} -> *",
        "sync checkpoints",
    ),
    "between the deletion's line in the log and the deletion": ("rename * -> *.deleting-*",),
    "half-way through a deletion": ("rename * -> *.deleting-*", "remove *", "remove *"),
}

IN_RECOVERY = {
    "before the intent": ("rename .guard.json.tmp -> *", "rename .guard.json.tmp -> *"),
    "in the emergency checkpoint": ("write *-emergency/rank-00000.pt",),
    "between emergency checkpoint and verdicts": ("sync *-emergency", "sync checkpoints"),
    "in a verdict": ("*-emergency", "rename checkpoints/step-00000010-g0/.health* -> *"),
    "while checking the hashes": ("read checkpoints/step-00000005-g0/__0_0.distcp",),
    "before the new generation": ("read checkpoints/step-00000005-g0/*", "rename .guard* -> *"),
    "half-way through the load": ("read checkpoints/step-00000005-g0/__0_0.distcp",) * 2,
    "before the answer": ("write control/answers/*",),
    "between the answer and the request's removal": ("remove control/requests/recover.json",),
    "before the intent is cleared": ("sync control/requests", "rename .guard.json.tmp -> *"),
}
BAD_STEP = 12
"""Step 10 is within the margin of 2 and gets a verdict; the way back is to step 5."""


@scene(f"SIGKILL at {KILLS} random moments ({QUICK_KILLS} in `make test`)")
def at_random(stage: Stage) -> str:
    kills = KILLS if stage.thorough else QUICK_KILLS
    chance = random.Random(5)
    run = stage.experiment(total=max(kills * STEPS_PER_KILL, LEAST_STEPS), keep=2)
    when: Counter[str] = Counter()
    plan: dict[str, Any] = {"patient": False, "step_seconds": 0.004}
    while sum(when.values()) < kills:
        before = len(run.steps())
        processes = run.start(**plan)
        # A third die while they start and resume; of the others each wherever in a step, a save or
        # a deletion so many steps and microseconds lead.
        if chance.random() < 1 / 3:
            time.sleep(chance.random() * START_SECONDS)
        else:
            goal = before + chance.randint(1, STEPS_PER_KILL)
            until(lambda p=processes, g=goal: len(run.steps()) >= g or not p[0].is_alive())
            time.sleep(chance.random() * 0.01)
        processes[0].kill()
        if run.end(processes) == [0]:
            break
        when[_moment(run, before)] += 1
    run.finish()
    assert sum(when.values()) == kills, f"the run ended after {when}"
    moments = ", ".join(f"{count} {moment}" for moment, count in sorted(when.items()))
    return f"{kills} killed ({moments}); each next process resumed"


def _moment(run: Experiment, before: int) -> str:
    """Where a process died, by what it left."""
    left = {p.name.split("-")[0] for p in run.checkpoints.glob(".*")} if before else set()
    if ".deleting" in left:
        return "deleting"
    if ".saving" in left:
        return "saving"
    return "between saves" if len(run.steps()) > before else "starting"


def killed(place: tuple[str, ...], stage: Stage) -> str:
    run = stage.experiment(keep=2)
    run.kill(strike=Strike(at=place))
    run.finish()
    return f"resumed from {run.loaded()[0]}"


for words, place in PLACES.items():
    scene(f"SIGKILL {words}")(partial(killed, place))


@scene("SIGKILL while a process resumes, half-way through the load")
def in_a_resume(stage: Stage) -> str:
    run = stage.experiment()
    run.kill(strike=Strike(at=PLACES["between the data of a checkpoint and its manifest"]))
    # Read once for the hashes, and once more to be loaded.
    run.kill(strike=Strike(at=("read */__0_0.distcp",) * 2))
    run.finish()
    return f"resumed from {run.loaded()[0]}"


def in_recovery(place: tuple[str, ...], stage: Stage) -> str:
    # To an end at which the budget is not given back yet.
    run = stage.experiment(total=24, keep=9)
    requests = at(BAD_STEP, break_model, recover, back_up)
    run.kill(acts=requests, strike=Strike(at=place))
    # Again at the same place, where the recovery that is taken up comes by it; then to the end.
    run.run(strike=Strike(at=place[-1:]))
    run.finish()
    answers = {answer["action"]: answer for answer in run.answers()}
    ledger = json.loads((run.run_folder / "guard.json").read_text())
    assert answers.keys() == {"recover", "checkpoint"}
    assert not list((run.run_folder / "control" / "requests").glob("*.json"))
    assert ledger["recovery"] is None
    answer = answers["recover"]
    if answer["result"] == "refused":
        # Nothing was on disk yet: a crash like any other, and nothing bad in the weights loaded.
        assert ledger["generation"] == ledger["rollbacks_used"] == 0
        return f"resumed from {run.loaded()[0]}; the request: refused, no bad step since"
    assert answer["resumed_from"] == "step-00000005-g0"
    assert answer["resumed_from"] in run.loaded()
    # Paid for once, however often it was begun.
    assert ledger["generation"] == ledger["rollbacks_used"] == 1
    return f"rolled back to {answer['resumed_from']}, generation {answer['generation']}"


for words, place in IN_RECOVERY.items():
    scene(f"SIGKILL in a recovery, {words}")(partial(in_recovery, place))


@scene("SIGKILL before each operation on a file", quick=False)
def everywhere(stage: Stage) -> str:
    """Of a run with saves, deletions, a backup and a recovery; then resumed."""
    acts = (*at(3, back_up), *at(BAD_STEP, break_model, recover))
    settings = {"total": 16, "keep": 2}
    rehearsal = stage.experiment(**settings)
    rehearsal.run(acts=acts)
    [*_, (_, operations)] = rehearsal.events()
    for number in range(1, len(operations) + 1):
        run = stage.experiment(**settings)
        run.kill(acts=acts, strike=Strike(at=number))
        run.finish()
    return (
        f"{len(operations)} runs killed, before operation 1, 2 ... {len(operations)}, of saves, "
        "deletions, a backup and a recovery; each resumed"
    )
