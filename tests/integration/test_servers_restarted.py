"""A server is stopped in the middle of an incident and started again: still one rollback."""

from __future__ import annotations

import time

import pytest

from deploy.demo.servers import Server
from tests.integration.scene import Scene

RESEND_SECONDS = 75.0
"""Prometheus sends an alert that goes on firing again after its `--rules.alert.resend-delay`, a
minute unless it is told otherwise, and Alertmanager keeps alerts in memory only."""

GROUP_INTERVAL_SECONDS = 20.0
"""How often Alertmanager looks at people's group again: its 5 minutes, divided by the stack."""


def end(server: Server, how: str) -> None:
    """End it in order, or as a crash would."""
    if how == "SIGTERM":
        server.stop()
    else:
        server.kill()
    assert server.returncode() is not None


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_alertmanager_is_away_when_the_incident_begins(scene: Scene, how: str) -> None:
    """Nobody is told while it is away; when it is back, the trainer and people both are."""
    scene.assert_nothing_happened()
    end(scene.stack.alertmanager, how)
    fault = scene.start_fault()
    scene.wait(
        lambda: {"ActRunaway", "ActLayerAboveBaseline"} <= scene.firing(), "alerts in Prometheus"
    )
    scene.wait(
        lambda: (scene.value("prometheus_notifications_errors_total") or 0) > 0,
        "a notification that did not arrive",
    )
    assert scene.recoveries() == []
    assert (scene.worst_ratio() or 0) > 100

    back = time.time()
    scene.stack.alertmanager.start()
    rollback = scene.wait_for_rollback(RESEND_SECONDS)
    scene.assert_went_back_before(fault, rollback)
    scene.wait(scene.messages, "people's message", RESEND_SECONDS)
    assert scene.messages()[0]["at"] > back
    scene.wait_until_healthy_again(rollback)
    scene.assert_one_rollback()


def test_alertmanager_is_killed_between_the_request_and_the_message(scene: Scene) -> None:
    """It has told the trainer and not yet people, and forgets both; people are told after all."""
    fault = scene.start_fault()
    rollback = scene.wait_for_rollback()
    # People's message follows the first alert by group_wait, 2 s here.
    scene.stack.alertmanager.kill()
    scene.assert_went_back_before(fault, rollback)
    scene.stack.alertmanager.start()
    # The first that it hears may be that ActRunaway is over. Then it has looked at people's group,
    # found nothing to say, and looks again after group_interval.
    patience = RESEND_SECONDS + GROUP_INTERVAL_SECONDS
    scene.wait(scene.messages, "people's message", patience)
    scene.wait_until_healthy_again(rollback)
    scene.assert_one_rollback()


def test_receiver_is_away_when_the_alert_is_delivered(scene: Scene) -> None:
    """Alertmanager keeps on trying, and the delivery that arrives at last leads to the rollback."""
    scene.assert_nothing_happened()
    scene.stack.receiver.kill()
    fault = scene.start_fault()
    failed = 'alertmanager_notification_requests_failed_total{integration="webhook"}'
    scene.wait(
        lambda: (scene.value(failed) or 0) > 0 and "ActRunaway" in scene.firing(),
        "a delivery that did not arrive",
    )

    scene.stack.receiver.start()
    rollback = scene.wait_for_rollback()
    scene.assert_went_back_before(fault, rollback)
    scene.wait(scene.messages, "people's message")
    scene.wait_until_healthy_again(rollback)
    scene.assert_one_rollback()


def test_receiver_is_killed_right_after_its_request(scene: Scene) -> None:
    """The guard acts on the request alone; the next receiver takes up the answer."""
    # Away at first, so that the step is held before the guard can be asked.
    scene.stack.receiver.kill()
    fault = scene.start_fault()
    scene.wait(lambda: "ActRunaway" in scene.firing(), "ActRunaway in Prometheus")
    with scene.step_held():
        scene.stack.receiver.start()
        scene.stack.receiver.wait_for(scene.open_recovery, "a request")
        scene.stack.receiver.kill()
        assert scene.status()["generation"] == 0
    scene.wait(lambda: scene.status()["generation"] == 1, "a rollback without the receiver")
    scene.wait(lambda: not scene.open_recovery(), "an answer")

    scene.stack.receiver.start()
    rollback = scene.wait_for_rollback()
    scene.assert_went_back_before(fault, rollback)
    scene.wait_until_healthy_again(rollback)
    scene.assert_one_rollback()
