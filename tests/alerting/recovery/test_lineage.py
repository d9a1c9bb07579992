"""Which checkpoint is next, and which may go: on manifests alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alerting.recovery.health import verdict
from alerting.recovery.lineage import Checkpoint, before_onset, choose, expendable, line
from alerting.recovery.manifest import Manifest


def checkpoint(number, step, *, generation=0, parents=(), kind="periodic", health="pending"):
    name = f"c{number}"
    manifest = Manifest(
        name=name,
        kind=kind,
        number=number,
        step=step,
        generation=generation,
        parent=parents[0] if parents else None,
        ancestors=tuple(parents[1:]),
        world_size=1,
        data=None,
        versions={"torch": "2"},
        created_at=0.0,
        files={},
    )
    return Checkpoint(folder=Path(name), manifest=manifest, health=verdict(health, "test"))


def names(checkpoints):
    return [c.name for c in checkpoints]


@st.composite
def histories(draw):
    """Checkpoints in the order of their making, some of them on the line, and that line."""
    found = []
    for number in range(draw(st.integers(1, 12))):
        made = checkpoint(
            number,
            draw(st.integers(0, 60)),
            kind=draw(st.sampled_from(["periodic", "periodic", "final", "backup", "emergency"])),
            health=draw(st.sampled_from(["pending", "confirmed", "suspect", "corrupt"])),
        )
        found.append(dataclasses.replace(made, pinned=draw(st.booleans())))
    own = [c for c in found if c.resumable and draw(st.booleans())]
    return found, own[::-1]


class TestLine:
    def test_it_follows_the_parents_from_the_newest_of_the_generation(self):
        found = [
            checkpoint(1, 0),
            checkpoint(2, 10, parents=["c1"]),
            checkpoint(3, 20, parents=["c2", "c1"]),
        ]
        assert names(line(found, generation=0, base=())) == ["c3", "c2", "c1"]

    def test_an_abandoned_branch_is_not_in_it_though_its_steps_are_higher(self):
        found = [
            checkpoint(1, 0),
            checkpoint(2, 10, parents=["c1"]),
            checkpoint(3, 20, parents=["c2", "c1"]),
            checkpoint(4, 15, generation=1, parents=["c2", "c1"]),
        ]
        assert names(line(found, generation=1, base=("c2", "c1"))) == ["c4", "c2", "c1"]

    def test_before_the_first_save_of_a_generation_it_is_what_it_descends_from(self):
        found = [
            checkpoint(1, 0),
            checkpoint(2, 10, parents=["c1"]),
            checkpoint(3, 20, parents=["c2"]),
        ]
        assert names(line(found, generation=1, base=("c2", "c1"))) == ["c2", "c1"]

    def test_deleted_ones_between_do_not_break_it(self):
        found = [checkpoint(1, 0), checkpoint(9, 90, parents=["c8", "c7", "c1"])]
        assert names(line(found, generation=0, base=())) == ["c9", "c1"]

    def test_backups_and_emergency_checkpoints_are_not_in_it(self):
        found = [
            checkpoint(1, 0),
            checkpoint(2, 10, kind="backup", parents=["c1"]),
            checkpoint(3, 11, kind="emergency", parents=["c1"]),
        ]
        assert names(line(found, generation=0, base=())) == ["c1"]


@pytest.mark.parametrize(
    ("step", "onset", "trusted"),
    [(489, 500, True), (490, 500, False), (500, 500, False), (0, 2, True), (0, 1, False)],
)
def test_only_what_is_older_than_the_onset_by_more_than_the_margin_is_trusted(step, onset, trusted):
    assert before_onset(step, onset, 10) is trusted


class TestExpendable:
    def test_the_newest_healthy_ones_stay(self):
        found = [checkpoint(n, n * 10, health="confirmed") for n in range(6)]
        gone = expendable(found, line=found, resumed_from=None, keep=2)
        assert names(gone) == ["c3", "c2", "c1", "c0"]

    def test_with_slow_steps_there_is_always_one_from_before_the_margin(self):
        """A save every 3 steps, confirmed after 100: what is left can be rolled back to."""
        left, margin, clean, keep = [checkpoint(0, 0)], 10, 100, 3
        for number in range(1, 100):
            step = 3 * number
            left = [
                dataclasses.replace(c, health=verdict("confirmed", "test"))
                if c.step + clean <= step
                else c
                for c in left
            ]
            left.append(checkpoint(number, step))
            gone = expendable(left, line=left, resumed_from=None, keep=keep)
            left = [c for c in left if c not in gone]
            assert any(before_onset(c.step, step + 1, margin) for c in left)
            assert len(left) <= keep + 2

    def test_and_the_one_that_the_generation_resumed_from(self):
        found = [checkpoint(n, n * 10) for n in range(6)]
        assert "c1" not in names(expendable(found, line=found, resumed_from="c1", keep=2))

    def test_bad_ones_and_backups_have_places_of_their_own(self):
        good = [checkpoint(n, n, health="confirmed") for n in range(3)]
        bad = [checkpoint(n, n, health="suspect") for n in range(3, 8)]
        backups = [checkpoint(n, n, kind="backup", health="suspect") for n in range(8, 12)]
        gone = expendable([*good, *bad, *backups], line=[*good, *bad], resumed_from=None, keep=2)
        assert set(names(gone)) == {"c0", "c3", "c4", "c5", "c8", "c9"}

    def test_what_is_pinned_stays_and_takes_no_place(self):
        found = [checkpoint(n, n * 10, health="confirmed") for n in range(6)]
        for pinned in (0, 5):
            found[pinned] = dataclasses.replace(found[pinned], pinned=True)
        gone = expendable(found, line=found, resumed_from=None, keep=2)
        assert names(gone) == ["c2", "c1"]

    @given(histories(), st.integers(2, 4), st.sampled_from([None, "c0", "c3"]))
    def test_no_deletion_leaves_fewer_than_two_healthy_ones_of_the_line(
        self, history, keep, resumed_from
    ):
        found, own = history
        gone = set(names(expendable(found, line=own, resumed_from=resumed_from, keep=keep)))
        healthy = [c for c in own if c.healthy]
        assert len([c for c in healthy if c.name not in gone]) >= min(len(healthy), keep)
        assert not gone & {c.name for c in found if c.pinned}
        assert resumed_from not in gone


class TestChoose:
    def test_a_resume_takes_the_newest_healthy_one_of_the_line(self):
        found = [checkpoint(1, 0), checkpoint(2, 10), checkpoint(3, 20, health="suspect")]
        choice = choose(found, line=found[::-1])
        assert names(choice.candidates) == ["c2", "c1"]
        assert choice.refused == {"c3": "suspect: test"}

    def test_an_anomaly_that_came_again_goes_one_further_back(self):
        own = [checkpoint(2, 10), checkpoint(1, 0)]
        choice = choose(own, line=own, onset=30, margin=2, resumed_from="c2")
        assert names(choice.candidates) == ["c1", "c2"]
        assert choice.deferred == "c2"

    def test_unless_there_is_nothing_further_back(self):
        own = [checkpoint(2, 10)]
        choice = choose(own, line=own, onset=30, margin=2, resumed_from="c2")
        assert names(choice.candidates) == ["c2"]
        assert choice.deferred is None

    @given(histories(), st.none() | st.integers(1, 70), st.integers(0, 20))
    def test_each_is_a_candidate_or_has_a_reason_and_no_candidate_is_bad(
        self, history, onset, margin
    ):
        found, own = history
        choice = choose(found, line=own, onset=onset, margin=margin, resumed_from="c3")
        assert sorted([*names(choice.candidates), *choice.refused]) == sorted(names(found))
        for candidate in choice.candidates:
            assert candidate.resumable
            assert candidate.healthy
            assert candidate in own
            assert onset is None or before_onset(candidate.step, onset, margin)
