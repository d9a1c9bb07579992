"""What became of each tap over the last steps, and which rules it broke."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from act_exporter import SettingError, StateError, Thresholds
from act_exporter.history import RULES, History, Layers, Onset
from act_exporter.rows import COLUMNS, Column
from act_exporter.sample import Sample
from act_exporter.taps import Tap
from act_exporter.transfer import arrays_of, tensors_of

THRESHOLDS = Thresholds(window=40, window_minimum=10, baseline_steps=10, peak_seconds=120)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def tap(layer: str) -> Tap:
    return Tap(layer=layer, tensor="output", kind=layer)


class Run:
    """A history fed with the absmax of each tap; None for a tap that did not run."""

    def __init__(self, *layers: str) -> None:
        self.clock = Clock()
        self.history = History([tap(layer) for layer in layers], THRESHOLDS, self.clock)
        self.step = 0

    def feed(self, *absmax: float | None, nan: int = 0, steps: int = 1) -> Layers:
        for _ in range(steps):
            layers = self.history.observe(self.sample(*absmax, nan=nan), 1e-3)
        return layers

    def sample(
        self, *absmax: float | None, nan: int = 0, depth: list[float] | None = None
    ) -> Sample:
        self.step += 1
        self.clock.now += 1
        rows = np.zeros((len(absmax), COLUMNS))
        for row, value in zip(rows, absmax, strict=True):
            if value is not None:
                row[Column.CALLS] = 1
                row[Column.NAN] = nan
            if value is not None and not math.isnan(value):
                row[Column.COUNT] = 4
                row[Column.SUM_SQUARES] = value**2
                row[Column.MIN], row[Column.MAX] = -value, value / 2
        places = np.arange(len(absmax), dtype=float) if depth is None else np.array(depth)
        return Sample(self.step, 0.0, rows, {}, places, np.full(len(absmax), 65504.0))


def of(layers: Layers, field: str, rule: str, tap: int = 0) -> float:
    return float(getattr(layers, field)[RULES.index(rule), tap])  # type: ignore[call-overload]


@pytest.fixture
def run() -> Run:
    """Settled at 1 for 40 steps."""
    run = Run("a", "b")
    run.feed(1.0, 1.0, steps=40)
    return run


class TestPeak:
    def test_a_spike_is_held_for_two_minutes(self, run: Run) -> None:
        run.feed(50.0, 1.0)
        run.clock.now += 110
        assert run.feed(1.0, 1.0).peak[0] == 50
        run.clock.now += 20
        assert run.feed(1.0, 1.0).peak[0] == 1

    def test_is_the_last_step_where_steps_are_slow(self, run: Run) -> None:
        run.clock.now += 1_000
        assert run.feed(2.0, 1.0).peak[0] == 2

    def test_is_never_nan(self, run: Run) -> None:
        assert run.feed(math.nan, 1.0, nan=3).peak[0] == 1


def with_moments(run: Run, low: float, high: float, mean: float, std: float) -> Sample:
    """A sample of one tap, 1,000 elements."""
    sample = run.sample(1.0)
    row = sample.rows[0]
    row[Column.COUNT] = 1_000
    row[Column.SUM] = 1_000 * mean
    row[Column.SUM_SQUARES] = 1_000 * (std**2 + mean**2)
    row[Column.MIN], row[Column.MAX] = low, high
    return sample


class TestSaturation:
    """All elements at one end or the other."""

    FREE = (-1.0, 1.0, 0.0, 0.6)  # tanh of what is normal, or a little more
    ENDS = (-1.0, 1.0, 0.1, 0.99)
    GATES = (0.0, 1.0, 0.3, 0.45)  # 30 % open, the rest shut

    @pytest.mark.parametrize("ends", [ENDS, GATES])
    def test_is_counted_where_it_came_about(self, ends: tuple[float, float, float, float]) -> None:
        run = Run("gate")
        run.history.observe(with_moments(run, *self.FREE), None)
        for count in (1, 2):
            layers = run.history.observe(with_moments(run, *ends), None)
            assert of(layers, "consecutive", "saturated") == count
        assert layers.onset is None  # no reason to roll back

    def test_is_no_fault_where_it_was_so_from_the_start(self) -> None:
        """A mask, a one-hot choice."""
        run = Run("mask")
        for _ in range(3):
            layers = run.history.observe(with_moments(run, *self.ENDS), None)
        assert of(layers, "exceeded_steps", "saturated") == 0

    def test_a_constant_and_a_few_elements_have_none(self) -> None:
        run = Run("gate")
        run.history.observe(with_moments(run, *self.FREE), None)
        layers = run.history.observe(with_moments(run, 1.0, 1.0, 1.0, 0.0), None)
        few = with_moments(run, *self.ENDS)
        few.rows[0, Column.COUNT : Column.SUM_SQUARES + 1] /= 20
        layers = run.history.observe(few, None)
        assert of(layers, "exceeded_steps", "saturated") == 0


class TestHardRule:
    def test_counts_only_above_a_hundred_times_the_baseline(self, run: Run) -> None:
        assert of(run.feed(100.0, 1.0), "consecutive", "hard") == 0
        layers = run.feed(101.0, 1.0)
        assert of(layers, "consecutive", "hard") == 1
        assert of(layers, "exceeded_steps", "hard") == 1
        assert of(layers, "exceeded_steps", "hard", tap=1) == 0

    def test_is_silent_without_a_baseline(self) -> None:
        run = Run("a")
        run.feed(1.0, steps=5)
        assert of(run.feed(1e9), "consecutive", "hard") == 0
        assert run.history.onset is None

    def test_bad_steps_do_not_enter_the_baseline_of_others(self, run: Run) -> None:
        run.feed(1e6, 1.0, steps=30)
        assert list(run.feed(1e6, 1.0).baseline) == [1, 1]


class TestConsecutive:
    def test_counts_steps_in_a_row_and_holds_their_maximum(self, run: Run) -> None:
        run.feed(500.0, 1.0, steps=3)
        layers = run.feed(1.0, 1.0)
        assert of(layers, "consecutive", "hard") == 3
        run.clock.now += 130
        assert of(run.feed(1.0, 1.0), "consecutive", "hard") == 0

    def test_a_step_in_which_the_module_did_not_run_says_nothing(self, run: Run) -> None:
        run.feed(500.0, 1.0, steps=2)
        run.feed(None, 1.0)
        assert of(run.feed(500.0, 1.0), "consecutive", "hard") == 3

    def test_of_a_module_that_never_runs_again_is_forgotten(self, run: Run) -> None:
        run.feed(500.0, 1.0, steps=3)
        run.feed(None, 1.0, steps=2)
        run.clock.now += 130
        assert np.isnan(of(run.feed(None, 1.0), "consecutive", "hard"))


class TestSigmaRule:
    def test_breaks_above_five_deviations(self, run: Run) -> None:
        layers = run.feed(1.06, 1.0)  # the deviation of a constant series is 1 % of its mean
        assert of(layers, "consecutive", "sigma") == 1
        assert of(layers, "consecutive", "hard") == 0

    def test_is_no_onset(self, run: Run) -> None:
        run.feed(2.0, 1.0, steps=5)
        assert run.history.onset is None


class TestNonFinite:
    def test_counts_elements_and_steps(self, run: Run) -> None:
        run.feed(1.0, 1.0, nan=2)
        layers = run.feed(math.nan, 1.0, nan=2)
        assert list(layers.nonfinite[:, 0]) == [4, 0, 0]
        assert of(layers, "consecutive", "nonfinite") == 2

    def test_does_not_enter_the_window(self, run: Run) -> None:
        before = run.feed(1.0, 1.0).window_mean[0]
        assert run.feed(math.nan, math.nan, nan=1, steps=60).window_mean[0] == before


class TestOnset:
    def test_is_the_first_bad_step_and_its_first_layer(self, run: Run) -> None:
        run.feed(1.0, 500.0)
        run.feed(500.0, 500.0)
        assert run.history.onset == Onset(41, "b", "output", "hard")

    def test_of_two_rules_in_one_step_the_first_layer_counts(self, run: Run) -> None:
        run.feed(math.nan, 500.0, nan=1)
        assert run.history.onset == Onset(41, "a", "output", "nonfinite")

    def test_a_spike_that_passes_is_forgotten_after_a_clean_stretch(self, run: Run) -> None:
        run.feed(500.0, 1.0)
        run.feed(1.0, 1.0, steps=99)
        assert run.history.onset == Onset(41, "a", "output", "hard")
        run.feed(1.0, 1.0)
        assert run.history.onset is None

    def test_an_anomaly_that_goes_on_keeps_its_first_step(self, run: Run) -> None:
        for _ in range(5):
            run.feed(500.0, 1.0)
            run.feed(1.0, 1.0, steps=60)
        assert run.history.onset == Onset(41, "a", "output", "hard")

    def test_a_reset_forgets_it_with_peaks_and_counts(self, run: Run) -> None:
        run.feed(500.0, 1.0, steps=5)
        run.history.reset()
        assert run.history.onset is None
        layers = run.feed(1.0, 1.0)
        assert (layers.peak[0], of(layers, "consecutive", "hard")) == (1, 0)
        assert of(layers, "exceeded_steps", "hard") == 5  # a counter never falls
        assert layers.baseline[0] == 1


class TestRebaseline:
    def test_learns_anew(self, run: Run) -> None:
        run.history.rebaseline()
        assert np.isnan(run.feed(7.0, 1.0).baseline[0])
        assert run.feed(7.0, 1.0, steps=20).baseline[0] == 7


class TestState:
    def test_goes_on_as_if_nothing_had_happened(self, run: Run) -> None:
        other = Run("a", "b")
        other.history.load_state_dict(run.history.state_dict())
        ours, theirs = run.feed(1.5, 1.1), other.feed(1.5, 1.1)
        for name in ("baseline", "window_mean", "window_std"):
            assert list(getattr(ours, name)) == list(getattr(theirs, name))

    def test_taps_are_matched_by_name(self, run: Run) -> None:
        run.feed(1.0, 1.04, steps=5)
        other = Run("new", "b", "a")
        other.history.load_state_dict(run.history.state_dict())
        layers = other.feed(1.0, 1.0, 1.0)
        assert np.isnan(layers.baseline[0])
        assert list(layers.baseline[1:]) == [1, 1]
        assert layers.window_mean[1] > layers.window_mean[2]

    def test_can_be_saved_with_weights_only(self, run: Run, tmp_path: object) -> None:
        path = f"{tmp_path}/state.pt"
        torch.save(tensors_of(run.history.state_dict()), path)
        other = Run("a", "b")
        other.history.load_state_dict(arrays_of(torch.load(path, weights_only=True)))
        assert list(other.feed(1.0, 1.0).baseline) == [1, 1]

    @pytest.mark.parametrize(
        "tensor", [torch.empty(2, device="meta"), torch.zeros(2, dtype=torch.bfloat16)]
    )
    def test_a_tensor_that_is_no_array_is_named(self, tensor: torch.Tensor) -> None:
        with pytest.raises(StateError, match=r"exporter state: window: count: a tensor of"):
            arrays_of({"window": {"count": tensor}})

    def test_other_thresholds_keep_what_is_settled(self, run: Run) -> None:
        thresholds = Thresholds(window=20, window_minimum=10, baseline_steps=50)
        other = History([tap("a"), tap("b")], thresholds, Clock())
        other.load_state_dict(run.history.state_dict())
        rows = np.zeros((2, COLUMNS))
        rows[:, [Column.CALLS, Column.COUNT]] = 1
        layers = other.observe(Sample(41, 0.0, rows, {}, np.arange(2.0), np.ones(2)), None)
        assert list(layers.baseline) == [1, 1]
        assert layers.window_mean[0] == pytest.approx(0.95)  # nineteen of 1, one of 0

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda state: state.pop("window"), "'window' is missing"),
            (lambda state: state.update(version=9), "version 9 is not known"),
            (lambda state: state.update(taps="a"), "taps: expected list"),
            (lambda state: state.update(taps=[1, 2]), "expected pairs of names"),
            (lambda state: state.update(taps=[["a", "output"]] * 2), "each once"),
            (lambda state: state.update(taps=[["a", "output"]]), "not of 1 taps"),
            (lambda state: state["window"].update(count=None), "count: expected ndarray"),
            (lambda state: state["window"].update(values=np.zeros((3, 2), np.float32)), "float64"),
            (lambda state: state["window"]["next"].fill(40), "next has values"),
            (lambda state: state["window"]["count"].fill(-1), "count has values"),
            (lambda state: state["window"]["values"].fill(math.nan), "values has values"),
            (lambda state: state["baseline"]["values"].fill(-1), "baseline: values has"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_a_mangled_state_changes_nothing(self, run: Run, change: object, message: str) -> None:
        state = run.history.state_dict()
        change(state)  # type: ignore[operator]
        other = Run("a", "b")
        other.feed(1.0, 1.0, steps=20)
        with pytest.raises(StateError, match=message):
            other.history.load_state_dict(state)
        assert other.feed(1.0, 1.0).baseline[0] == 1


class TestThresholds:
    @pytest.mark.parametrize(
        "wrong",
        [{"hard": 0}, {"sigma": -1.0}, {"window": 2.5}, {"peak_seconds": "1m"}, {"hard": True}],
    )
    def test_name_the_wrong_one(self, wrong: dict[str, object]) -> None:
        with pytest.raises(SettingError, match=next(iter(wrong))):
            Thresholds(**wrong)  # type: ignore[arg-type]

    def test_a_window_that_never_fills_is_an_error(self) -> None:
        with pytest.raises(SettingError, match="window_minimum=200"):
            Thresholds(window=100)


class TestDead:
    def test_a_tensor_of_zeros(self) -> None:
        run = Run("a", "b")
        layers = run.feed(0.0, 1.0, steps=3)
        assert of(layers, "consecutive", "dead") == 3
        assert of(layers, "consecutive", "dead", tap=1) == 0

    def test_one_that_no_longer_changes(self) -> None:
        run = Run("a")
        run.feed(1.0)
        run.feed(1.1)
        assert of(run.feed(1.1, steps=5), "consecutive", "dead") == 5
        assert of(run.feed(1.2), "exceeded_steps", "dead") == 5

    def test_one_that_is_constant_by_design_is_alive(self) -> None:
        """Rotary tables never change; that is not a layer that died."""
        assert of(Run("a").feed(1.0, steps=50), "consecutive", "dead") == 0

    def test_is_no_bad_step(self) -> None:
        run = Run("a")
        run.feed(0.0, steps=50)
        assert run.history.onset is None


class TestOrderOfOnset:
    def test_is_the_first_in_the_order_of_execution(self) -> None:
        """Registered the other way round, as heads and embeddings of one class often are."""
        run = Run("late", "early")
        run.feed(1.0, 1.0, steps=40)
        sample = run.sample(1e6, 1e6, depth=[5.0, 1.0])
        layers = run.history.observe(sample, None)
        assert layers.onset == Onset(sample.step, "early", "output", "hard")


class TestHeadroom:
    def test_is_the_peak_over_the_largest_number_of_the_dtype(self, run: Run) -> None:
        run.feed(65504.0 / 2, 1.0)
        assert run.feed(1.0, 1.0).headroom[0] == pytest.approx(0.5)


class TestBaselineOfASickRun:
    def test_is_not_learnt_while_a_layer_is_not_finite(self) -> None:
        run = Run("a", "b")
        for _ in range(60):
            run.history.observe(run.sample(1.0, math.nan, nan=1), 1e-3)
        assert np.isnan(run.feed(1.0, 1.0).baseline).all()

    def test_is_not_learnt_while_loss_or_gradient_say_so(self) -> None:
        run = Run("a")
        for _ in range(60):
            layers = run.history.observe(run.sample(1.0), 1e-3, sick=True)
        assert np.isnan(layers.baseline[0])
        assert run.feed(1.0, steps=20).baseline[0] == 1

    def test_one_from_elsewhere_is_in_force_at_once_and_stays(self) -> None:
        run = Run("a", "b")
        run.history.set_baseline({("a", "output"): 2.0, ("gone", "output"): 3.0})
        assert of(run.feed(201.0, 1.0), "consecutive", "hard") == 1
        assert list(run.feed(9.0, 1.0, steps=500).baseline) == [2, 1]


class TestRow:
    def test_a_dip_below_the_limit_does_not_end_a_row_over_it(self, run: Run) -> None:
        """A layer that a learning rate drives to and fro at the limit is not well."""
        for value in (101.0, 99.0, 101.0):
            layers = run.feed(value, 1.0)
        assert of(layers, "consecutive", "hard") == 3
        assert of(layers, "exceeded_steps", "hard") == 2

    def test_half_of_the_limit_does(self, run: Run) -> None:
        run.feed(101.0, 1.0, steps=2)
        run.feed(49.0, 1.0)
        assert of(run.feed(101.0, 1.0), "consecutive", "hard") == 2  # held, of the row before

    def test_no_row_begins_below_the_limit(self, run: Run) -> None:
        assert of(run.feed(99.0, 1.0, steps=5), "consecutive", "hard") == 0
