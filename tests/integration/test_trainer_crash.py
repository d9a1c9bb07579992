"""The trainer dies in the middle of an incident."""

from __future__ import annotations

import re

from tests.integration.scene import Scene

STARTS = re.compile(r"step (\d+): going on from checkpoint \S+ in generation (\d+)")


def test_a_crash_neither_silences_the_alarm_nor_leads_back_into_the_fault(scene: Scene) -> None:
    """People's alert stays; the same command goes on from before the fault, and answers."""
    # Without the receiver the trainer goes on with the fault, and saves what it must not resume.
    scene.stack.receiver.kill()
    fault = scene.start_fault()
    scene.wait(lambda: "ActRunaway" in scene.firing(), "ActRunaway in Prometheus")
    scene.wait(
        lambda: len([c for c in scene.checkpoints().values() if c["step"] >= fault]) >= 2,
        "checkpoints with the fault in them",
    )
    with scene.step_held():
        scene.stack.receiver.start()
        scene.stack.receiver.wait_for(scene.open_recovery, "a request")
        scene.trainer.kill()
    scene.stack.receiver.wait_for(scene.recoveries, "the request's row")

    prometheus = scene.stack.prometheus
    prometheus.wait_for(
        lambda: scene.value('max_over_time(up{job="act-exporter"}[4s])') == 0,
        "4 scrapes without the trainer",
    )
    assert "ActLayerAboveBaseline" in scene.firing()
    # There is nobody to roll back any more.
    assert "ActRunaway" not in scene.firing()
    assert [row["result"] for row in scene.recoveries()] == [None]

    scene.trainer.start()
    answered = scene.wait(
        lambda: scene.recoveries()[0]["result"], "the answer of the next process", timeout=60
    )
    # Its own detector has seen no bad step, so there is nothing to undo.
    assert answered == "refused"
    scene.wait(
        lambda: (
            scene.value('up{job="act-exporter"}') == 1
            and (scene.value("act_step{RUN}") or 0) > fault
            and (scene.worst_ratio() or 1e9) < 100
        ),
        "healthy steps beyond the fault's",
    )
    ((step, generation),) = STARTS.findall(scene.trainer.log.read_text())
    assert generation == "0"
    assert 0 < int(step) < fault
    assert scene.recoveries("done") == []
    assert scene.status()["state"] == "running"
    assert scene.value("max_over_time(act_rollbacks_total{RUN}[1h])") == 0
    assert "ActRunaway" not in scene.firing()
    assert "ActLayerAboveBaseline" in scene.firing()
