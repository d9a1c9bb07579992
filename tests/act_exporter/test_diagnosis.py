"""What kind of fault it is, by how it begins."""

from __future__ import annotations

from act_exporter.diagnosis import Diagnosis, Facts, Verdict
from act_exporter.training import Level


class Run:
    def __init__(self) -> None:
        self.diagnosis = Diagnosis(clean_steps=100)
        self.feed(steps=20)

    def feed(
        self,
        *,
        bad: int = 0,
        nonfinite: float = 0.0,
        loss: Level = "calm",
        grad: Level = "calm",
        update: Level = "calm",
        other_rate: bool = False,
        steps: int = 1,
    ) -> Verdict | None:
        facts = Facts(
            bad=bad,
            nonfinite_share=nonfinite,
            loss=loss,
            grad_norm=grad,
            update=update,
            other_rate=other_rate,
        )
        for _ in range(steps):
            verdict = self.diagnosis.observe(facts)
        return verdict


def test_health_has_no_verdict() -> None:
    assert Run().feed(steps=1000) is None


def test_layers_that_go_bad_under_calm_gradients_are_an_activation_fault() -> None:
    run = Run()
    assert run.feed(bad=3, loss="high", grad="high") == "activation"
    assert run.feed(bad=30, loss="nonfinite", grad="nonfinite", nonfinite=1.0) == "activation"


def test_a_gradient_that_explodes_first_stays_the_cause_of_what_follows() -> None:
    run = Run()
    assert run.feed(grad="high") == "gradient"
    assert run.feed(bad=10, loss="high", grad="high", steps=5) == "gradient"


def test_a_gradient_that_is_not_finite_under_finite_layers_is_a_gradient_fault() -> None:
    """A kernel whose backward overflows: every forward was finite."""
    run = Run()
    assert run.feed(grad="nonfinite") == "gradient"
    assert run.feed(bad=30, nonfinite=1.0, loss="nonfinite", grad="nonfinite") == "gradient"


def test_one_bad_batch_is_told_from_an_explosion_by_what_comes_next() -> None:
    run = Run()
    assert run.feed(loss="high", grad="high") == "gradient"
    assert run.feed(steps=2) == "gradient"
    assert run.feed() == "data"


def test_an_isolated_gradient_spike_under_a_calm_loss_is_no_bad_batch() -> None:
    run = Run()
    run.feed(grad="high")
    assert run.feed(steps=20) == "gradient"


def test_everything_non_finite_at_once_is_in_the_parameters() -> None:
    run = Run()
    assert run.feed(bad=40, nonfinite=1.0, loss="nonfinite", grad="nonfinite") == "parameters"


def test_what_begins_after_a_restored_state_is_laid_to_it() -> None:
    run = Run()
    run.feed(bad=3)
    run.diagnosis.resumed()
    assert run.feed(steps=2) is None
    assert run.feed(loss="high", grad="high") == "resume"


def test_later_it_is_not() -> None:
    run = Run()
    run.diagnosis.resumed()
    run.feed(steps=10)
    assert run.feed(bad=1) == "activation"


def test_an_update_that_is_too_large_is_laid_to_a_restored_state_only() -> None:
    run = Run()
    assert run.feed(update="high", steps=5) is None
    run.diagnosis.resumed()
    assert run.feed(other_rate=True) == "resume"
    run.diagnosis.resumed()
    assert run.feed(update="high") == "resume"
    assert run.feed(steps=20) == "resume"


def test_the_loss_alone() -> None:
    assert Run().feed(loss="nonfinite") == "loss"


def test_bad_layers_are_more_than_a_loss_that_jumped() -> None:
    run = Run()
    run.feed(loss="high")
    assert run.feed(bad=2) == "activation"


def test_a_verdict_stands_until_a_hundred_steps_were_clean() -> None:
    run = Run()
    run.feed(bad=1)
    assert run.feed(steps=99) == "activation"
    assert run.feed() is None
