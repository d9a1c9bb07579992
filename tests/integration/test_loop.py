"""From a layer that goes bad to training that goes on, with real servers and a real trainer."""

from __future__ import annotations

import requests

from tests.integration.scene import Scene

REPEAT_SECONDS = 20.0
"""Alertmanager's repeat_interval on the trainer's route, 5 minutes, as the stack divides it."""


def test_a_bad_layer_is_rolled_back_once_and_people_are_told(scene: Scene) -> None:
    """One fault, one rollback; repeats of its alerts and stale deliveries make no second one."""
    scene.assert_nothing_happened()
    fault = scene.start_fault()

    rollback = scene.wait_for_rollback()
    scene.assert_went_back_before(fault, rollback)
    assert rollback["alert"] == "ActRunaway"
    emergency = scene.checkpoints()[rollback["checkpoint"]]
    assert emergency["kind"] == "emergency"
    assert emergency["step"] >= fault
    assert emergency["health"] == "suspect"

    alerts = scene.wait(
        lambda: [
            alert
            for alert in scene.stack.alerts()
            if alert["labels"]["alertname"] == "ActLayerAboveBaseline"
        ],
        "ActLayerAboveBaseline in Alertmanager",
    )
    for alert in alerts:
        assert {receiver["name"] for receiver in alert["receivers"]} == {"trainer", "people"}
    scene.wait(
        lambda: any("ActLayerAboveBaseline" in message["text"] for message in scene.messages()),
        "people's message",
    )
    scene.wait(
        lambda: any("ActLayerAboveBaseline" in seen for seen in scene.bot.texts()),
        "the same by the receiver's bot, signed",
    )
    (told,) = scene.wait(
        lambda: [seen for seen in scene.bot.texts() if "was rolled back" in seen],
        "the outcome by the same bot",
    )
    for part in (
        f"to step {rollback['resumed_step']}",
        f"checkpoint {rollback['resumed_from']}",
        f"First bad step: {rollback['onset']}",
        f"Emergency checkpoint: {rollback['checkpoint']}",
        f"Rollbacks left: {scene.status()['rollbacks_left']}",
    ):
        assert part in told
    scene.wait_until_healthy_again(rollback)

    # The alert for people is held for 6 minutes, so Alertmanager sends it to the receiver again
    # after repeat_interval. This is the one test that waits for it: it takes 20 s, and what a
    # repeat does is the same whichever server was stopped before.
    scene.wait(
        lambda: scene.rows(
            "SELECT * FROM deliveries"
            " WHERE received_at >= (SELECT min(received_at) FROM deliveries) + ?",
            REPEAT_SECONDS,
        ),
        "a repeated delivery",
        timeout=2 * REPEAT_SECONDS,
    )
    # And the very delivery that asked for the rollback, once more: a stale one from a queue.
    (delivery,) = scene.rows("SELECT * FROM deliveries WHERE id = ?", rollback["delivery_id"])
    token = (scene.stack.database.parent / "token").read_text()
    answer = requests.post(
        f"{scene.stack.urls['receiver']}/alerts",
        data=delivery["payload"].encode(),
        headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
        timeout=30,
    )
    assert answer.ok, answer.text
    scene.wait(lambda: scene.recoveries("refused"), "a refusal by the guard")
    scene.assert_one_rollback()
    assert len(scene.recoveries()) == 2
    assert len([seen for seen in scene.bot.texts() if "was rolled back" in seen]) == 1
