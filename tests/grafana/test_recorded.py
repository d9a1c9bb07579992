"""Every query of the dashboards on a real Prometheus that holds an incident, which must be seen."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from tests.grafana.dashboards import Dashboard, Panel, Target, load
from tests.grafana.pictures import WIDTH, picture
from tests.grafana.queries import Series, View
from tests.grafana.recorded import HEALTHY_RUN, RANKS, RUN, Recording, node_exporter, record
from tests.grafana.tables import rows

# The recording alone takes a minute, and more where the processors have other work.
pytestmark = pytest.mark.timeout(900)

DASHBOARDS = {dashboard.name: dashboard for dashboard in load()}
TARGETS = [
    pytest.param(name, panel, target, id=f"{name}: {panel.title} {target.refId}")
    for name, dashboard in DASHBOARDS.items()
    for panel in dashboard.panels
    for target in panel.targets
]

MAY_BE_EMPTY = {
    "what did not happen in this incident": {
        "exporter: Errors within the last minutes A",
        "exporter: Errors inside the exporter, a minute A",
        "exporter: Journal records lost, a minute A",
        "layers: NaN and Inf, elements a second A",
        "layers: Still growing: times the baseline A",
        "layers: Sampled steps in a row that a layer is dead A",
        "layers: Sampled steps in a row that a layer is saturated A",
        "layers: Attention logits: their bound over its baseline, where it is above 30 A",
        "training: Update at its learning rate, over its mean A",
        "training: Messages given up, of the last six minutes A",
        "training: Messages given up, of the last six minutes B",
        "training: Saves that failed, of the last half hour A",
        "training: Steps with a loss or a gradient that is not finite, a minute A",
        "training: Steps with a loss or a gradient that is not finite, a minute B",
    },
    "what takes longer than a minute: ten minutes, or an hour of headroom that ends": {
        "layers: An hour ahead: share of the format's largest number A",
        "training: Weights with a gradient that the update left unchanged B",
    },
    "of several ranks, each with a page; those here are one, or are joined": {
        "layers: Largest rank over the others, worst ten A",
    },
    "of ranks that are joined; it is asked of them below": {
        "layers: Which rank has the largest value A",
    },
    "memory of CUDA devices, of which there are none here": {
        "exporter: Memory of the trainer's devices, share of the limit A",
    },
}
"""Queries of which no data is no fault, by the reason."""

_TROUBLE = re.compile(r" > [\d.]+$")

EMPTY = {each: reason for reason, several in MAY_BE_EMPTY.items() for each in several}


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recording]:
    with record(tmp_path_factory.mktemp("recorded")) as recorded:
        yield recorded


def opened(recording: Recording, name: str, **chosen: list[str]) -> View:
    """The dashboard over the whole recording; of one run the one with the fault."""
    dashboard = DASHBOARDS[name]
    one = not next(each for each in dashboard.variables if each.name == "run").multi
    run = {"run": [RUN]} if one else {}
    return View(recording.url, recording.start, recording.end, dashboard, run | chosen)


def titled(dashboard: Dashboard, start: str) -> Panel:
    """The one panel that is called so, or whose title alone begins so."""
    named = [panel for panel in dashboard.panels if panel.title == start]
    (found,) = named or [each for each in dashboard.panels if each.title.startswith(start)]
    return found


def answer(view: View, title: str) -> list[Series]:
    """Of all queries of the panel of that title."""
    targets = titled(view.dashboard, title).targets
    return [series for target in targets for series in view.ask(target)]


def largest(series: Series, start: float, end: float) -> float:
    """Within that time; 0 where it has no sample in it."""
    inside = zip(series.times, series.values, strict=True)
    return max((value for at, value in inside if start <= at <= end), default=0.0)


def test_what_may_be_empty_is_still_there() -> None:
    assert set(EMPTY) <= {param.id for param in TARGETS}


class TestVariables:
    @pytest.mark.parametrize("name", DASHBOARDS)
    def test_each_offers_values(self, recording: Recording, name: str) -> None:
        view = opened(recording, name)
        asked = {each.name for each in view.dashboard.variables if each.type == "query"}
        assert set(view.options) == asked
        for variable, values in view.options.items():
            assert values, variable
        assert view.options["run"] == [RUN, HEALTHY_RUN]

    def test_several_values_ask_for_these_and_no_others(self, recording: Recording) -> None:
        """Names of layers have dots, which in a regular expression are anything."""
        layers = [recording.layer, "blocks.0.mlp.down"]
        view = opened(recording, "layers", layer=layers, tensor=["output"])
        found = {series.labels["layer"] for series in answer(view, "Times the baseline")}
        assert found == set(layers)
        expected = r'{layer=~"(blocks\\.1\\.attn\\.proj|blocks\\.0\\.mlp\\.down)"}'
        assert view.interpolate('{layer=~"$layer"}') == expected
        assert view.interpolate('{layer=~"[[layer]]"}') == expected
        assert view.interpolate('{layer=~"${layer}"}') == expected
        assert view.interpolate("${layer:regex}") == expected[9:-2].replace(r"\\", "\\")

    def test_unknown_words_are_refused(self, recording: Recording) -> None:
        with pytest.raises(KeyError, match="layers"):
            opened(recording, "layers").interpolate("$layers")


class TestQueries:
    @pytest.mark.parametrize(("name", "panel", "target"), TARGETS)
    def test_returns_data(
        self,
        recording: Recording,
        name: str,
        panel: Panel,
        target: Target,
        request: pytest.FixtureRequest,
    ) -> None:
        if "node_" in target.expr and node_exporter() is None:
            pytest.skip("no node_exporter: Debian's prometheus-node-exporter has it")
        view = opened(recording, name)
        if request.node.callspec.id not in EMPTY:
            assert view.ask(target), target.expr
            return
        view.ask(target)
        # Where trouble alone is shown there must be something that it was looked for in.
        looked_at = _TROUBLE.sub("", target.expr)
        if looked_at != target.expr:
            assert view.ask(replace(target, expr=looked_at)), looked_at

    @pytest.mark.parametrize("name", DASHBOARDS)
    def test_are_taken_for_ranks_that_are_joined(self, recording: Recording, name: str) -> None:
        view = opened(recording, name, run=[HEALTHY_RUN])
        assert view.options.get("rank", ["all"]) == ["all"]
        for panel in view.dashboard.panels:
            for target in panel.targets:
                view.ask(target)

    @pytest.mark.parametrize("name", DASHBOARDS)
    def test_nothing_is_marked_before_the_fault(self, recording: Recording, name: str) -> None:
        view = opened(recording, name)
        marks = [mark for each in view.dashboard.annotations for mark in view.marks(each)]
        assert marks
        assert min(begin for begin, _, _ in marks) >= recording.fault

    @pytest.mark.parametrize("name", DASHBOARDS)
    def test_alert_and_rollback_are_marked_when_they_were(
        self, recording: Recording, name: str
    ) -> None:
        view = opened(recording, name)
        marks = {
            title: begin
            for each in view.dashboard.annotations
            for begin, _, title in view.marks(each)
        }
        # The alert that asked for the rollback stood when that had not been scraped yet.
        assert recording.fault <= marks["ActRunaway"] <= recording.rollback + view.interval
        assert recording.fault <= marks["ActLayerAboveBaseline"] <= marks["Rolled back"]
        # A counter that rose is seen for as long as the window of the rate, four scrapes.
        assert recording.fault < marks["Rolled back"] <= recording.rollback + 4


class TestLayers:
    def test_the_heatmap_is_darkest_where_the_fault_is(self, recording: Recording) -> None:
        view = opened(recording, "layers")
        (panel,) = [each for each in view.dashboard.panels if each.type == "heatmap"]
        found = view.ask(panel.targets[0])
        worst = max(found, key=lambda each: largest(each, recording.fault, recording.end))
        assert (worst.labels["layer"], worst.labels["tensor"]) == (recording.layer, "output")
        # A hundredfold; a rule that is evaluated late has it only once the run is rolled back.
        assert largest(worst, recording.fault, recording.end) > 2
        # A row a watched tensor, named so that Grafana has them in the order of execution.
        places = sorted(int(series.name.split()[0]) for series in found)
        assert places == list(range(len(found)))
        calm = [largest(series, recording.settled, recording.fault) for series in found]
        assert max(calm) < 1

    @pytest.mark.parametrize("name", ["layers", "training"])
    def test_the_first_bad_layer_is_named(self, recording: Recording, name: str) -> None:
        (first,) = answer(opened(recording, name), "First bad layer")
        assert first.name == f"{recording.layer} output (hard)"
        assert first.values == [recording.fault_step]

    def test_so_is_how_far_it_went(self, recording: Recording) -> None:
        view = opened(recording, "layers")
        (far,) = answer(view, "Furthest above its baseline")
        assert far.name == f"{recording.layer} output"
        (kind,) = answer(view, "Verdict")
        assert kind.name == "activation"
        panel = titled(view.dashboard, "Anomalies in this range")
        (row,) = rows(panel, [view.ask(target) for target in panel.targets])
        assert (row["Layer"], row["Step"]) == (recording.layer, recording.fault_step)
        assert row["Times its baseline"] == far.values[0]

    def test_in_health_there_is_none(self, recording: Recording) -> None:
        view = opened(recording, "layers", run=[HEALTHY_RUN])
        assert answer(view, "First bad layer") == []
        assert answer(view, "Verdict") == []
        assert answer(view, "Furthest above its baseline")[0].values[0] < 10

    def test_joined_ranks_say_which_of_them_has_the_largest_value(
        self, recording: Recording
    ) -> None:
        view = opened(recording, "layers", run=[HEALTHY_RUN])
        found = answer(view, "Which rank has the largest value")
        assert {value for series in found for value in series.values} == set(range(RANKS))

    def test_over_depth_its_peak_stands_out(self, recording: Recording) -> None:
        view = opened(recording, "layers")
        (panel,) = [each for each in view.dashboard.panels if each.type == "xychart"]
        table = rows(panel, [view.ask(target) for target in panel.targets])
        assert sorted(row["Depth"] for row in table) == list(range(len(table)))
        worst = max(table, key=lambda row: float(row["Largest"]) / float(row["Baseline"]))
        assert (worst["layer"], worst["tensor"]) == (recording.layer, "output")


class TestTraining:
    def test_the_loss_has_its_peak_at_the_fault(self, recording: Recording) -> None:
        found = {series.name: series for series in answer(opened(recording, "training"), "Loss")}
        before = largest(found["loss"], recording.settled, recording.fault)
        # Of the peak, since a scrape need not meet the step that had it.
        assert largest(found["peak"], recording.fault, recording.end) > 3 * before
        assert found["loss"].values[-1] < before * 1.2

    def test_the_steps_go_back_once(self, recording: Recording) -> None:
        (step, *_) = answer(opened(recording, "training"), "Step, and that of")
        pairs = zip(step.values, step.values[1:], strict=False)
        (back,) = [(high, low) for high, low in pairs if low < high]
        assert back[0] >= recording.fault_step > back[1]
        assert step.values[-1] > recording.fault_step

    def test_what_was_done_is_counted(self, recording: Recording) -> None:
        view = opened(recording, "training")
        assert round(answer(view, "Rolled back")[0].values[0]) == 1
        assert {each.name for each in answer(view, "What the trainers answered")} >= {
            "recover: done"
        }
        generations = [each.name for each in answer(view, "Generations")]
        assert [name.split()[-1] for name in sorted(generations)] == ["0", "1"]


class TestRuns:
    def test_the_worst_run_is_told_from_the_healthy_one(self, recording: Recording) -> None:
        view = opened(recording, "runs")
        panel = titled(view.dashboard, "Runs, the worst on top")
        table = rows(panel, [view.ask(target) for target in panel.targets])
        table.sort(key=lambda row: float(row["State"]), reverse=True)
        worst, healthy = table
        assert (worst["Run"], worst["First bad layer"]) == (RUN, recording.layer)
        assert healthy["Run"] == HEALTHY_RUN
        assert float(healthy["State"]) < float(worst["State"])
        assert "First bad layer" not in healthy


class TestMachines:
    def test_gpus_are_those_of_the_page(self, recording: Recording) -> None:
        found = answer(opened(recording, "exporter"), "GPU in use")
        assert {series.values[-1] for series in found} == {96, 98}

    @pytest.mark.skipif(node_exporter() is None, reason="no node_exporter: Debian has it")
    def test_the_processors_are_in_use(self, recording: Recording) -> None:
        (cpu,) = answer(opened(recording, "exporter"), "CPU in use")
        assert 0 < max(cpu.values) <= 1.01


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_picture_is_drawn(recording: Recording, name: str, tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    picture(recording, DASHBOARDS[name], path)
    assert path.stat().st_size < 400_000
    with Image.open(path) as image:
        assert image.width == WIDTH
        assert len(image.convert("RGB").getcolors(2**24) or []) > 50
