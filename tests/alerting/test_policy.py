"""Which alert of a delivery asks for what, and what it gets."""

from __future__ import annotations

from typing import Any

import pytest

from alerting.payload import parse
from alerting.policy import Decision, Wish, judge, read
from tests.alerting.deliveries import RUN, alert, status, text

ALLOWED = frozenset({"ActRunaway", "ActLayerAboveBaseline", "ActLayerNonFinite"})
NOW = 1_800_000_000.0
RECOVER = Wish(run=RUN, action="recover", alertname="ActRunaway")
CHECKPOINT = Wish(run=RUN, action="checkpoint", alertname="ActLayerAboveBaseline")


def sort(*alerts: dict[str, Any]) -> tuple[list[Wish], list[Decision]]:
    return read(parse(text(*alerts)), ALLOWED)


def verdict(wish: Wish, **fields: Any) -> Decision | None:
    return judge(wish, status(**fields), now=NOW, backup_interval_seconds=900)


class TestRead:
    def test_a_firing_alert_on_the_list_asks_for_its_action(self) -> None:
        assert sort(alert()) == ([RECOVER], [])

    def test_a_storm_over_all_layers_is_one_wish(self) -> None:
        storm = [
            alert("ActLayerAboveBaseline", action="checkpoint", layer=f"blocks.{number}")
            for number in range(300)
        ]
        assert sort(*storm) == ([CHECKPOINT], [])

    @pytest.mark.parametrize("order", [1, -1], ids=["checkpoint first", "recover first"])
    def test_recover_outranks_checkpoint_for_the_same_run(self, order: int) -> None:
        both = [alert("ActLayerAboveBaseline", action="checkpoint"), alert()][::order]
        wishes, decisions = sort(*both)
        assert wishes == [RECOVER]
        (covered,) = decisions
        assert (covered.outcome, covered.action) == ("covered", "checkpoint")
        assert "ActRunaway" in covered.reason

    def test_each_run_has_its_own_wish_and_recoveries_come_first(self) -> None:
        wishes, decisions = sort(
            alert("ActLayerAboveBaseline", run="a", action="checkpoint"),
            alert(run="b"),
            alert("ActLayerNonFinite", run="c", action="checkpoint"),
        )
        assert [(wish.run, wish.action) for wish in wishes] == [
            ("b", "recover"),
            ("a", "checkpoint"),
            ("c", "checkpoint"),
        ]
        assert decisions == []

    def test_a_drill_stands_beside_what_is_real_and_never_in_its_way(self) -> None:
        """Whatever it asks for, and although it is not on the list."""
        drill = alert("ActDrill", action="recover")
        wishes, decisions = sort(drill, alert())
        assert wishes == [RECOVER, Wish(run=RUN, action="drill", alertname="ActDrill")]
        assert decisions == []
        assert sort(drill, alert("ActLayerAboveBaseline", action="checkpoint"))[0][0] == CHECKPOINT
        (ended,) = sort(alert("ActDrill", status="resolved"))[1]
        assert ended.outcome == "refused"

    def test_no_other_alert_can_ask_for_a_drill(self) -> None:
        wishes, (refused,) = sort(alert(action="drill"))
        assert wishes == []
        assert refused.outcome == "refused"

    def test_a_second_name_that_asks_for_the_same_is_covered(self) -> None:
        wishes, decisions = sort(
            alert("ActLayerAboveBaseline", action="checkpoint"),
            alert("ActLayerNonFinite", action="checkpoint"),
        )
        assert wishes == [CHECKPOINT]
        assert [(made.outcome, made.alertname) for made in decisions] == [
            ("covered", "ActLayerNonFinite")
        ]

    def test_a_resolved_member_of_a_firing_group_asks_for_nothing(self) -> None:
        wishes, decisions = sort(
            alert(status="resolved"), alert("ActLayerAboveBaseline", action="checkpoint")
        )
        assert wishes == [CHECKPOINT]
        assert [made.outcome for made in decisions] == ["refused"]
        assert "resolved" in decisions[0].reason

    @pytest.mark.parametrize(
        ("member", "reason"),
        [
            (alert("DropTables"), "allow-list"),
            (alert("actrunaway"), "allow-list"),
            (alert(None), "allow-list"),  # type: ignore[arg-type]
            (alert(run=None), "no `run` label"),
            (alert(run=""), "no `run` label"),
            (alert(action=None), "none of"),
            (alert(action="RECOVER"), "none of"),
            (alert(action="rm -rf /"), "none of"),
        ],
    )
    def test_refused_with_a_reason(self, member: dict[str, Any], reason: str) -> None:
        wishes, (decision,) = sort(member)
        assert wishes == []
        assert decision.outcome == "refused"
        assert reason in decision.reason

    def test_refusals_that_differ_in_nothing_are_one(self) -> None:
        _, decisions = sort(*(alert("Other", layer=f"blocks.{number}") for number in range(300)))
        assert len(decisions) == 1


class TestJudge:
    def test_a_registered_running_run_gets_what_it_asks_for(self) -> None:
        assert verdict(RECOVER) is None
        assert verdict(CHECKPOINT) is None

    def test_an_unknown_run_is_refused(self) -> None:
        decision = judge(RECOVER, None, now=NOW, backup_interval_seconds=900)
        assert decision is not None
        assert decision.outcome == "refused"
        assert "no run 'gpt'" in decision.reason

    @pytest.mark.parametrize(
        ("age", "outcome"),
        [(0.0, "limited"), (899.9, "limited"), (900.0, None), (1e6, None), (-60.0, None)],
    )
    def test_one_backup_in_an_interval(self, age: float, outcome: str | None) -> None:
        decision = verdict(CHECKPOINT, last_backup_at=NOW - age)
        assert (decision and decision.outcome) == outcome

    def test_a_recovery_is_never_delayed_by_a_backup_or_by_the_interval(self) -> None:
        assert verdict(RECOVER, last_backup_at=NOW - 1) is None

    def test_a_recovery_is_left_to_the_guards_budget(self) -> None:
        assert verdict(RECOVER, rollbacks_left=0) is None

    @pytest.mark.parametrize("state", ["finished", "halted"])
    def test_a_run_that_has_ended_is_asked_for_nothing(self, state: str) -> None:
        decision = verdict(RECOVER, state=state, generation=3)
        assert decision is not None
        assert (decision.outcome, decision.generation) == ("refused", 3)
        assert state in decision.reason

    def test_during_a_recovery_the_next_claim_decides(self) -> None:
        assert verdict(RECOVER, state="recovering") is None
