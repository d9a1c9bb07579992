"""Requests at moments that do not suit, and clocks that do not agree."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.faults.acts import (
    ask_in_the_recovery,
    back_up,
    break_model,
    hold_writer,
    mangle_request,
    recover,
    release_writer_in_the_recovery,
    set_clock,
)
from tests.faults.child import Act, at
from tests.faults.experiment import Experiment
from tests.faults.operations import Strike
from tests.faults.scene import Stage, scene

BAD_STEP = 12
"""Step 10 is within the margin of 2, so the way back is to step 5."""
HOUR, DAY = 3600.0, 86400.0


def trained(run: Experiment, *acts: Act, **plan: Any) -> list[dict[str, Any]]:
    """The answers, when it has trained to the end."""
    assert run.run(acts=acts, **plan) == [0], run.said()
    assert not list((run.run_folder / "control" / "requests").glob("*.json"))
    return run.answers()


@scene("a request to recover while a save is being written")
def during_a_save(stage: Stage) -> str:
    run = stage.experiment(keep=9)
    acts = (*at(4, hold_writer), *at(9, release_writer_in_the_recovery, break_model, recover))
    [answer] = trained(run, *acts, patient=False)
    assert answer["resumed_from"] == "step-00000005-g0", answer
    return "the save was finished first; rolled back to it, step-00000005-g0"


@scene("two requests at once: to recover and to back up")
def two_at_once(stage: Stage) -> str:
    run = stage.experiment(keep=9)
    told = {a["action"]: a for a in trained(run, *at(BAD_STEP, break_model, recover, back_up))}
    assert told["recover"]["checkpoint"] == told["checkpoint"]["checkpoint"] is not None
    assert [told[action]["result"] for action in ("recover", "checkpoint")] == ["done", "done"]
    return "the recovery came first; its emergency checkpoint is the backup"


@scene("two requests while another recovery goes on, one of each kind")
def during_a_recovery(stage: Stage) -> str:
    run = stage.experiment(keep=9)
    told = trained(run, *at(BAD_STEP, ask_in_the_recovery, break_model, recover))
    claimed = [event[1:] for event in run.events() if event[0] == "claimed"]
    assert claimed == [["recover", False], ["checkpoint", True]]
    assert sorted(a["action"] for a in told if a["result"] == "done") == ["checkpoint", "recover"]
    assert len(run.loaded()) == 1
    return "the second recovery could not be opened; the backup is the emergency checkpoint"


@scene("a request just before the end")
def before_the_end(stage: Stage) -> str:
    run = stage.experiment(keep=9)
    told = {a["action"]: a for a in trained(run, *at(29, break_model), *at(30, recover, back_up))}
    assert told["recover"]["resumed_from"] == "step-00000025-g0", told
    assert told["checkpoint"]["result"] == "done"
    return "rolled back from step 30 to step-00000025-g0, and trained to the end"


@scene("requests for another run, and for another generation")
def for_others(stage: Stage) -> str:
    run = stage.experiment()
    acts = (
        *at(8, partial(recover, run="other"), partial(back_up, generation=7)),
        *at(14, partial(recover, generation=7), partial(back_up, run="other")),
    )
    results = [answer["result"] for answer in trained(run, *acts)]
    assert results == ["refused"] * 4
    assert run.loaded() == []
    return "all four refused, nothing was done"


@scene("the same request again after the rollback, and one with nothing bad seen")
def repeated(stage: Stage) -> str:
    run = stage.experiment(keep=9)
    acts = (
        *at(BAD_STEP, break_model, recover),
        *at(15, recover),
        *at(17, partial(recover, generation=1)),
    )
    results = [answer["result"] for answer in trained(run, *acts)]
    assert sorted(results) == ["done", "refused", "refused"]
    assert len(run.loaded()) == 1
    return "rolled back once; both others refused"


@scene("a mangled request")
def mangled(stage: Stage) -> str:
    run = stage.experiment()
    told = trained(run, *at(8, mangle_request), *at(12, back_up))
    assert [answer["result"] for answer in told] == ["done"]
    return "set aside; the next request was answered"


@scene("clocks apart: the receiver's a day behind, and a day ahead")
def receivers_clock(stage: Stage) -> str:
    for apart in (-DAY, DAY):
        run = stage.experiment(keep=9)
        [answer] = trained(run, *at(BAD_STEP, break_model, partial(recover, apart=apart)))
        assert answer["resumed_from"] == "step-00000005-g0"
    return "rolled back to step-00000005-g0 both times"


@scene("the trainer's clock goes back an hour, then SIGKILL")
def back_an_hour(stage: Stage) -> str:
    run = stage.experiment(keep=2)
    last_save = Strike(at=("mkdir checkpoints/.saving-step-00000025-g0",))
    run.kill(acts=at(8, partial(set_clock, -HOUR)), strike=last_save)
    run.finish()
    assert run.loaded() == ["step-00000020-g0"]
    return "resumed from the newest, step-00000020-g0; the oldest ones had been deleted"


@scene("the trainer's clock goes a day ahead, then a recovery, then SIGKILL with the clock right")
def ahead_a_day(stage: Stage) -> str:
    run = stage.experiment(keep=9)
    acts = (*at(3, partial(set_clock, DAY)), *at(BAD_STEP, break_model, recover))
    run.kill(acts=acts, strike=Strike(at=("mkdir checkpoints/.saving-step-00000020-g1",)))
    run.finish()
    assert run.loaded() == ["step-00000005-g0", "step-00000015-g1"]
    return "rolled back to step-00000005-g0, then resumed from the newest, step-00000015-g1"
