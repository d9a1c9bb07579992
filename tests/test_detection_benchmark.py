"""The evaluation's own machinery, on runs of a few steps; its figures are `make bench`'s."""

from __future__ import annotations

import numpy as np
import pytest

from tests.benchmarks import recordings, scores
from tests.benchmarks.detectors import DETECTORS
from tests.benchmarks.faults import FAULTS, Fault, nan_weight, weights
from tests.benchmarks.recordings import START, Recording, load, record_faults, record_healthy
from tests.benchmarks.replay import Rule, Verdicts, _episodes, merged, read_rules, replay

PACE = 15.0
NAN = Fault("one NaN weight", nan_weight, "blocks.2.mlp.down", float("nan"), steps=6)
NOTHING = Fault("nothing", weights, "head", 1.0, steps=6)
RULES = [
    Rule(
        "level:act_layer_absmax:copy",
        "max without (instance, job) (act_layer_absmax)",
        0,
        (),
        False,
    ),
    Rule("Copied", "level:act_layer_absmax:copy{layer='head'} > 0", 30, (("severity", "info"),)),
    Rule("Nowhere", "act_no_such_metric > 1"),
    Rule("Absent", "absent(act_step)"),
    Rule("Stalled", "time() - max by (run) (act_last_step_timestamp_seconds) > 10"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recording]:
    folder = tmp_path_factory.mktemp("recordings")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(recordings.PREFIXES, "plain", (recordings.PREFIXES["plain"][0], 8))
        record_faults("plain", PACE, [NAN, NOTHING], folder)
    record_healthy("seed 1", PACE, 10, folder)
    found = [load(path) for path in folder.glob("*.pickle.gz")]
    return {recording.name: recording for recording in found}


@pytest.fixture(scope="module")
def verdicts(runs: dict[str, Recording], tmp_path_factory: pytest.TempPathFactory) -> Verdicts:
    rules = [*read_rules(), *RULES]
    groups = [[run] for run in runs.values()]
    folders = [tmp_path_factory.mktemp("replay") for _ in groups]
    parts = [replay(group, folder, rules) for group, folder in zip(groups, folders, strict=True)]
    return merged(parts, rules)


def of(runs: dict[str, Recording], fault: Fault) -> Recording:
    return next(
        run for run in runs.values() if run.fault == fault or run.name.startswith(fault.name)
    )


class TestRecording:
    def test_each_fault_begins_from_the_same_healthy_steps(self, runs) -> None:
        ill, well = of(runs, NAN), of(runs, NOTHING)
        assert ill.losses[:8] == well.losses[:8]
        assert np.isnan(ill.losses[8:]).all()
        assert np.isfinite(well.losses).all()
        assert ill.destroyed()
        assert not well.destroyed()
        assert ill.first_bad_step(100.0) == 9

    def test_a_step_lasts_as_long_as_its_pace_says(self, runs) -> None:
        run = of(runs, NOTHING)
        assert [when for when, _ in run.pages] == [START + PACE * step for step in range(1, 15)]
        assert run.step_at(START + 9 * PACE + 1) == 9


class TestReplay:
    def test_the_shipped_rule_sees_the_fault_at_its_first_scrape_and_nothing_before(
        self, runs, verdicts
    ) -> None:
        ill = of(runs, NAN)
        assert scores.alarm(["ActLayerNonFinite"], verdicts)(ill) == 9
        assert set(verdicts.firings["ActLayerNonFinite"]) == {ill.name}
        found = scores.score(scores.alarm(["ActRunaway"], verdicts), list(runs.values()))
        assert found["recall"] == {"one NaN weight": 1.0, "nothing": None}
        assert found["delay_steps"] == {"median": 3.0, "max": 3}

    def test_recorded_series_and_holds_are_as_in_prometheus(self, runs, verdicts) -> None:
        (firing,) = verdicts.firings["Copied"][of(runs, NOTHING).name]
        assert firing.since == START + PACE * 3 + 1
        assert firing.labels["layer"] == "head"

    def test_simulated_time_is_what_rules_compare_with(self, verdicts) -> None:
        assert verdicts.firings["Stalled"] == {}

    def test_what_cannot_be_judged_is_named_with_the_reason(self, verdicts) -> None:
        assert "act_no_such_metric" in verdicts.skipped["Nowhere"]
        assert "absent" in verdicts.skipped["Absent"]
        assert not verdicts.skipped.keys() & verdicts.firings.keys()

    def test_an_alert_that_pauses_is_two(self) -> None:
        values = [(0.0, 1.0), (15.0, 2.0), (30.0, 9.0), (60.0, 3.0), (75.0, 4.0)]
        found = list(_episodes(15, {}, values))
        assert [(firing.since, firing.largest) for firing in found] == [(15, 9), (75, 4)]


class TestDetectors:
    @pytest.mark.parametrize("name", DETECTORS)
    def test_each_sees_a_spike_and_not_the_level_before_it(self, name: str) -> None:
        values = np.random.default_rng(0).normal(1.0, 0.01, (300, 2))
        values[250, 1] = 5000
        verdicts = DETECTORS[name](values)
        assert np.argwhere(verdicts).tolist() == [[250, 1]]


class TestFaults:
    def test_names_are_unique_and_each_function_names_its_source(self) -> None:
        assert len({fault.name for fault in FAULTS}) == len(FAULTS)
        for fault in FAULTS:
            text = fault.inflict.__doc__ or ""
            assert "Source:" in text or fault.kind == "exp from the start"
            assert fault.trainee in recordings.PREFIXES

    def test_each_kind_has_several_sizes_or_places(self) -> None:
        kinds = [fault.kind for fault in FAULTS]
        single = {kind for kind in kinds if kinds.count(kind) < 2}
        assert single == {"exp from the start"}
