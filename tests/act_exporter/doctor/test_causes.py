from __future__ import annotations

from act_exporter.doctor.causes import ordered
from act_exporter.doctor.finding import Finding, Severity

LAYERS = ["", "blocks.0", "blocks.0.norm", "blocks.0.attn", "blocks.0", "blocks.1.norm", "head", ""]


def finding(
    fault: str,
    severity: Severity,
    layer: str | None = "blocks.0.attn",
    *,
    strength: float = 1.0,
    symptom: bool = False,
    **evidence: float,
) -> Finding:
    return Finding(
        fault=fault,
        severity=severity,
        layer=layer,
        what="This.",
        change="That.",
        why="So.",
        strength=strength,
        symptom=symptom,
        evidence=evidence,
    )


def names(*findings: Finding) -> list[tuple[str, str]]:
    return [(one.severity, one.fault) for one in ordered(findings, LAYERS)]


class TestOrder:
    def test_what_is_explained_by_nothing_comes_by_severity_then_strength(self) -> None:
        assert names(
            finding("dead-units", "warning", strength=50),
            finding("odd-length", "critical"),
            finding("empty-batch", "critical", strength=2),
        ) == [("critical", "empty-batch"), ("critical", "odd-length"), ("warning", "dead-units")]

    def test_a_cause_comes_before_what_it_explains_however_strong_that_is(self) -> None:
        assert names(
            finding("large-logits", "critical", strength=300),
            finding("large-gain", "critical", "blocks.0.norm"),
        ) == [("critical", "large-gain"), ("critical", "large-logits")]

    def test_a_cause_is_as_bad_as_the_worst_that_it_explains(self) -> None:
        assert names(
            finding("softmax-overflow", "critical"),
            finding("missing-norm", "warning", "blocks.0.norm"),
        ) == [("critical", "missing-norm"), ("critical", "softmax-overflow")]

    def test_a_layer_explains_nothing_that_was_done_before_it(self) -> None:
        assert names(
            finding("large-logits", "critical"),
            finding("large-gain", "warning", "blocks.1.norm"),
        ) == [("critical", "large-logits"), ("warning", "large-gain")]

    def test_gradients_come_by_all_layers(self) -> None:
        assert names(
            finding("exploding-gradients", "critical", strength=9),
            finding("large-gain", "warning", "blocks.1.norm"),
        ) == [("critical", "large-gain"), ("critical", "exploding-gradients")]

    def test_what_has_no_layer_is_explained_by_any(self) -> None:
        assert names(
            finding("learning-rate-too-high", "critical", None, strength=9),
            finding("large-moments", "critical", "head"),
        ) == [("critical", "large-moments"), ("critical", "learning-rate-too-high")]

    def test_a_weight_that_is_too_small_makes_nothing_loud(self) -> None:
        rate = finding("learning-rate-too-high", "critical", None)
        for times, first in ((1 / 12, "learning-rate-too-high"), (12.0, "odd-weight")):
            odd = finding("odd-weight", "info", times_its_like=times)
            assert names(rate, odd)[0] == ("critical", first)
        odd = finding("odd-weight", "info", times_its_like=1 / 12)
        assert names(finding("vanishing-gradients", "warning"), odd)[0] == ("warning", "odd-weight")

    def test_what_a_batch_of_one_colour_does_to_gradients_is_the_batchs(self) -> None:
        for fault in ("dead-units", "vanishing-gradients", "exploding-gradients"):
            assert names(
                finding(fault, "critical", strength=99), finding("constant-batch", "warning", None)
            ) == [("critical", "constant-batch"), ("critical", fault)]

    def test_small_moments_are_those_of_clipping_too_early(self) -> None:
        assert names(
            finding("epsilon", "critical", None, strength=99),
            finding("clip-before-unscale", "critical", None),
        ) == [("critical", "clip-before-unscale"), ("critical", "epsilon")]

    def test_a_symptom_that_nothing_explains_stays_behind_its_equals(self) -> None:
        assert names(
            finding("spike", "warning", symptom=True, strength=9),
            finding("no-warmup", "warning", None),
        ) == [("warning", "no-warmup"), ("warning", "spike")]


def test_every_fault_named_here_is_one_that_a_check_has() -> None:
    from act_exporter.doctor import causes
    from act_exporter.doctor.checks import CHECKS

    known = {fault for check in CHECKS for fault in check.FAULTS}
    named = set(causes._EXPLAINS).union(*causes._EXPLAINS.values())
    assert named <= known
