"""What a frame of `act-exporter watch` says of a page, and that it fits into any terminal."""

from __future__ import annotations

import io
import itertools
import math
import re
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from rich.cells import cell_len
from rich.console import Console

from act_exporter.assets import assets_folder
from act_exporter.watch import conditions
from act_exporter.watch.conditions import holding
from act_exporter.watch.frame import Frame
from act_exporter.watch.page import Page, parse
from act_exporter.watch.source import Reading, Source
from act_exporter.watch.trail import Trail, sparks
from act_exporter.watch.words import count, duration, number, share
from deploy.demo.servers import wait_for

NOW = 1_800_000_000.0

# Alerts that one page cannot answer, and why.
LEFT_TO_PROMETHEUS = {
    "ActLayerHeadroomEnding": "a forecast from an hour of history",
    "ActRankSpread": "four minutes of it in a row",
    "ActUpdatesLost": "ten minutes of it in a row",
    "ActOverheadHigh": "half an hour of it",
    "ActCheckpointStale": "25 minutes of it",
    "ActCheckpointFailing": "an increase",
    "ActExporterErrors": "an increase",
    "ActJournalDropping": "an increase",
    "ActThresholdsDiffer": "the trainer's own numbers are what is judged by here",
    "ActExporterDown": "said in the headline, at once",
    "ActExporterAbsent": "a list of targets",
    "ActNodeGone": "a list of targets",
    "ActReceiverDown": "the receiver's own",
    "ActNotificationsFailing": "Alertmanager's own",
    "ActMessagesFailing": "the receiver's own",
    "ActWatchdog": "always",
}


def page(*lines: str, rank: str = "0", **layers: dict[str, float]) -> Page:
    """A page with a step, these samples (without run and rank), and layers' families."""
    samples = ["act_step 500", "act_steps_total 500", *lines]
    for name, families in layers.items():
        for family, value in families.items():
            bare, _, rule = family.partition("__")
            more = f',rule="{rule}"' if rule else ""
            samples.append(f'act_layer_{bare}{{layer="{name}",tensor="output"{more}}} {value}')
    text = []
    for sample in samples:
        head, _, value = sample.rpartition(" ")
        bare, _, labels = head.partition("{")
        text.append(f'{bare}{{run="gpt",rank="{rank}",{labels.rstrip("}")}}} {value}\n')
    return parse("".join(text).replace(",}", "}"), NOW)


def reading(of: Page, **more: object) -> Reading:
    return Reading(address="node17:9460", page=of, read_at=100.0, **more)  # type: ignore[arg-type]


def drawn(
    readings: Sequence[Reading], columns: int = 100, rows: int | None = None, layers: int = 12
) -> str:
    trail = Trail()
    trail.add(own.page for own in readings if own.page is not None)
    frame = Frame(readings=readings, trail=trail, now=101.0, wall=NOW, layers=layers, height=rows)
    console = Console(file=io.StringIO(), width=columns, highlight=False)
    console.print(frame)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


BAD = {
    "absmax": 300.0,
    "absmax_peak": 400.0,
    "absmax_baseline": 2.0,
    "absmax_window_mean": 2.0,
    "absmax_window_std": 0.1,
    "exceeded_consecutive__hard": 7,
    "depth": 1,
}
WELL = {"absmax": 1.0, "absmax_peak": 1.1, "absmax_baseline": 1.0, "depth": 0}


class TestConditions:
    def test_each_shipped_alert_is_judged_or_left_to_prometheus_for_a_reason(self) -> None:
        shipped = {
            rule["alert"]
            for path in Path(assets_folder(), "prometheus", "rules").glob("*.yml")
            for group in yaml.safe_load(path.read_text())["groups"]
            for rule in group["rules"]
            if "alert" in rule
        }
        judged = {condition.alert for condition in conditions._CONDITIONS}
        assert judged | LEFT_TO_PROMETHEUS.keys() == shipped
        assert not judged & LEFT_TO_PROMETHEUS.keys()

    def test_nothing_holds_on_a_healthy_page(self) -> None:
        assert holding([page(a=WELL)]) == []

    @pytest.mark.parametrize(
        ("alert", "beyond", "still"),
        [
            ("ActLayerAboveBaseline", {"absmax_peak": 100.1}, {"absmax_peak": 100.0}),
            ("ActRunaway", {"exceeded_consecutive__hard": 3}, {"exceeded_consecutive__hard": 2}),
            (
                "ActLayerAboveWindowSustained",
                {"exceeded_consecutive__sigma": 3},
                {"exceeded_consecutive__sigma": 2},
            ),
            ("ActLayerHeadroomLow", {"headroom_ratio": 0.51}, {"headroom_ratio": 0.5}),
            ("ActLayerDepthSpike", {"depth_jump_ratio": 11}, {"depth_jump_ratio": 10}),
            (
                "ActLayerDead",
                {"exceeded_consecutive__dead": 100},
                {"exceeded_consecutive__dead": 99},
            ),
            (
                "ActLayerDrift",
                {"absmax_peak": 9, "absmax_growth_ratio": 0.006},
                {"absmax_peak": 9, "absmax_growth_ratio": 0.005},
            ),
            (
                "ActLayerAboveWindow",
                {"absmax": 9, "absmax_window_mean": 3, "absmax_window_std": 1},
                {"absmax": 8, "absmax_window_mean": 3, "absmax_window_std": 1},
            ),
        ],
    )
    def test_of_layers(self, alert: str, beyond: dict, still: dict) -> None:
        base = {"absmax_peak": 1.0, "absmax_baseline": 1.0}
        assert alert in [holds.alert.name for holds in holding([page(a=base | beyond)])]
        assert alert not in [holds.alert.name for holds in holding([page(a=base | still)])]

    @pytest.mark.parametrize(
        ("alert", "beyond", "still"),
        [
            ("ActGradientRunaway", "act_grad_norm_shifted_consecutive 25", "act_loss 1"),
            ("ActGradientExplosion", "act_grad_norm_peak_ratio 21", "act_grad_norm_peak_ratio 20"),
            ("ActLossNonFinite", "act_loss NaN", "act_loss 1"),
            ("ActGradientNonFinite", "act_grad_norm +Inf", "act_grad_norm 1"),
            (
                "ActTrainerStalled",
                f"act_last_step_timestamp_seconds {NOW - 601}",
                f"act_last_step_timestamp_seconds {NOW - 599}",
            ),
            (
                "ActHooksSilent",
                'act_errors_total{stage="silent"} 1',
                'act_errors_total{stage="server"} 1',
            ),
            (
                "ActLogitsDrifting",
                'act_logit_log_partition{layer="head"} -101',
                'act_logit_log_partition{layer="head"} -99',
            ),
            (
                "ActDiagnosis",
                'act_diagnosis{verdict="resume"} 1',
                'act_diagnosis{verdict="resume"} 0',
            ),
        ],
    )
    def test_of_the_run(self, alert: str, beyond: str, still: str) -> None:
        assert [holds.alert.name for holds in holding([page(beyond)])] == [alert]
        assert holding([page(still)]) == []

    def test_a_budget_that_is_spent_counts_after_a_rollback_only(self) -> None:
        spent = "act_rollback_budget_remaining 0"
        assert holding([page(spent, 'act_run_info{generation="0"} 1')]) == []
        (holds,) = holding([page(spent, 'act_run_info{generation="1"} 1')])
        assert holds.alert.name == "ActRollbackBudgetSpent"

    def test_attention_is_judged_by_baseline_and_size(self) -> None:
        def bound(now: float) -> Page:
            return page(
                f'act_attention_logit_bound{{layer="attn"}} {now}',
                f'act_attention_logit_bound_baseline{{layer="attn"}} {now / 9}',
            )

        assert holding([bound(30)]) == []
        (holds,) = holding([bound(31)])
        assert (holds.alert.name, holds.words) == (
            "ActAttentionLogitsGrowing",
            "attn has logits of up to 9 times their baseline",
        )

    def test_the_trainers_own_threshold_is_what_counts(self) -> None:
        own = 'act_rule_threshold{rule="hard"} 500'
        assert holding([page(own, a={"absmax_peak": 400, "absmax_baseline": 1})]) == []
        assert "over 500x" in drawn(
            [reading(page(own, a={"absmax_peak": 501, "absmax_baseline": 1}))]
        )

    def test_of_several_ranks_the_worst_is_named(self) -> None:
        pages = [
            page(rank=rank, a={"absmax_peak": peak, "absmax_baseline": 1})
            for rank, peak in (("0", 200), ("1", 900), ("2", 300))
        ]
        (holds,) = holding(pages)
        assert holds.words == "a output reached 900 times its baseline"


class TestHeadline:
    def test_the_earliest_onset_of_all_ranks(self) -> None:
        first = 'act_onset_step{layer="a",tensor="output",rule="hard"} 480'
        later = 'act_onset_step{layer="b",tensor="output",rule="hard"} 490'
        shown = drawn([reading(page(later, rank="0")), reading(page(first, rank="3", a=BAD))])
        assert " ANOMALY since step 480  First was a (output, rank 3), at 200 times" in shown

    def test_a_layer_that_has_no_place_on_the_page_is_named_all_the_same(self) -> None:
        onset = 'act_onset_step{layer="far.away",tensor="input",rule="nonfinite"} 480'
        shown = " ".join(drawn([reading(page(onset))]).split())
        assert "First was far.away (input), which has no place on the page." in shown

    def test_a_verdict_without_a_layer(self) -> None:
        shown = drawn([reading(page('act_diagnosis{verdict="gradient"} 1', a=WELL))])
        assert " FAULT in gpt  A gradient fault: the gradient exploded" in shown

    def test_an_alert_for_people_without_a_verdict(self) -> None:
        shown = drawn([reading(page(a={**WELL, "headroom_ratio": 0.7}))])
        assert " WARNING  a output is at 0.70 of its number format." in shown
        assert "near end" in shown

    def test_layers_that_the_hard_rule_cannot_judge_yet_are_said(self) -> None:
        shown = drawn([reading(page(a=WELL, b={"absmax": 1.0, "absmax_peak": 1.0}))])
        assert "in 2 tensors, of which 1 have no baseline yet." in shown
        assert "no base" in shown

    def test_a_fault_on_purpose_is_said(self) -> None:
        shown = drawn([reading(page('act_injected_fault{layer="a"} 100', a=WELL))])
        assert "On purpose: a fault is injected into a, factor 100." in shown

    def test_a_step_that_takes_twenty_is_no_longer_taken_for_a_step(self) -> None:
        on_time = page(f"act_last_step_timestamp_seconds {NOW - 18}")
        late = page(f"act_last_step_timestamp_seconds {NOW - 20}")
        # A second has passed since the page came.
        assert "stalled?" not in drawn([reading(on_time, rate=1.0)])
        assert "stalled?" in drawn([reading(late, rate=1.0)])


@pytest.fixture(scope="module")
def odd() -> list[Reading]:
    """Many ranks, layers and alerts, odd names, and numbers as large as there are."""
    names = [f"model.layers.{n}.self_attn.o_proj" for n in range(300)]
    names += ["名前" * 30, "e\u0301" * 40, "👩‍🚀" * 20, "x" * 300]
    layers = {
        name: {**BAD, "depth": place, "exceeded_consecutive__nonfinite": place % 2}
        for place, name in enumerate(names)
    }
    for name, value in (("huge", 1.79e308), ("zero", 0.0), ("lost", math.nan), ("end", math.inf)):
        layers[name] = dict.fromkeys(BAD, value)
    samples = [
        f'act_onset_step{{layer="{names[3]}",tensor="output",rule="hard"}} 480',
        'act_diagnosis{verdict="activation"} 1',
        "act_loss 1e300",
        "act_grad_norm -1e-300",
    ]
    pages = [page(*samples, rank=str(rank), **layers) for rank in range(9)]
    away = Reading(address="gone:1", problem="cannot be reached: " + "x" * 200, away_since=NOW)
    return [*map(reading, pages), away]


class TestSize:
    @pytest.mark.parametrize("columns", [20, 40, 80, 109, 110, 160, 300])
    @pytest.mark.parametrize("rows", [5, 12, 24, 30, 60])
    def test_fits_whatever_is_on_the_page(
        self, odd: list[Reading], columns: int, rows: int
    ) -> None:
        lines = drawn(odd, columns, rows, layers=400).splitlines()
        assert len(lines) <= rows
        assert max(map(cell_len, lines)) <= columns
        assert any("ANOMALY" in line for line in lines)

    def test_on_80_by_24_the_first_layer_its_row_and_the_depths_are_seen(self) -> None:
        onset = 'act_onset_step{layer="a",tensor="output",rule="hard"} 480'
        others = {f"layer{n}": {**WELL, "depth": n + 2.0} for n in range(40)}
        verdict = 'act_diagnosis{verdict="activation"} 1'
        lines = drawn([reading(page(onset, verdict, a=BAD, **others))], 80, 24).splitlines()
        assert len(lines) == 24
        assert any(line.startswith("▲ a output") for line in lines)
        assert "▲ a output was first" in lines[-1]
        assert lines[-2].startswith("   0.1│") or lines[-2].startswith("     1│")

    def test_where_there_is_room_as_many_layers_as_asked_for(self) -> None:
        layers = {f"layer{n}": WELL for n in range(40)}
        shown = drawn([reading(page(**layers))], 160, 60, layers=25)
        assert (
            sum(line.startswith("layer") and "output" in line for line in shown.splitlines()) == 25
        )


class TestDepths:
    def test_growth_stands_on_the_baseline(self) -> None:
        grown = {**WELL, "absmax_peak": 1000.0, "depth": 1}
        shown = drawn([reading(page(a=WELL, b=grown, c={**WELL, "depth": 2}))])
        columns = [line.split("│")[1] for line in shown.splitlines() if "│" in line]
        assert [column[:9] for column in columns] == [
            *["   ██"] * 6,
            *["░░ ░░ ░░"] * 2,
        ]

    def test_what_is_not_finite_has_a_sign(self) -> None:
        broken = {**WELL, "depth": 1, "exceeded_consecutive__nonfinite": 2}
        shown = drawn([reading(page(a=WELL, b=broken))])
        top = next(line for line in shown.splitlines() if "│" in line)
        assert top.split("│")[1] == "   ××"  # noqa: RUF001  # the sign

    def test_of_more_layers_than_columns_the_worst_are_seen(self) -> None:
        layers = {f"layer{n}": {**WELL, "depth": n} for n in range(1000)}
        layers["layer777"] = {**WELL, "absmax_peak": 500.0, "depth": 777}
        shown = drawn([reading(page(**layers))], columns=80)
        top = [line for line in shown.splitlines() if "│" in line][1]
        assert top.split("│")[1].strip() == "█"


class TestTrail:
    def test_heights_are_between_a_third_of_the_baseline_and_the_hard_rule(self) -> None:
        assert "".join(sparks([0.0, 1.0, 2.0, math.nan, math.inf], 0.0, 2.0, False)) == "▁▅█ ×"  # noqa: RUF001
        assert "".join(sparks([0.0, 1.0, 2.0, math.nan, math.inf], 0.0, 2.0, True)) == "_=# !"

    def test_a_spike_is_not_lost_where_readings_share_a_sign(self) -> None:
        trail = Trail()
        for n in range(500):
            value = 50.0 if n == 123 else 1.0
            trail.add([page(a={"absmax": value, "absmax_baseline": 1.0})])
        values = trail.of("gpt", "a", "output", width=8)
        assert len(values) == 8
        assert sorted(values)[-2:] == [1.0, 50.0]

    def test_nan_between_two_readings_is_seen(self) -> None:
        trail = Trail()
        for total in (5, 5, 6, 6):
            trail.add(
                [
                    page(
                        f'act_layer_nonfinite_total{{layer="a",tensor="output"}} {total}',
                        a={"absmax": 1.0, "absmax_baseline": 1.0},
                    )
                ]
            )
        assert trail.of("gpt", "a", "output", width=4) == [1.0, 1.0, math.inf, 1.0]

    def test_a_layer_that_comes_later_begins_later(self) -> None:
        trail = Trail()
        trail.add([page()])
        trail.add([page(a={"absmax": 1.0, "absmax_baseline": 1.0})])
        first, second = trail.of("gpt", "a", "output", width=4)
        assert math.isnan(first)
        assert second == 1.0


class TestWords:
    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (math.nan, "-"),
            (math.inf, "inf"),
            (0.0, "0"),
            (1.2345, "1.23"),
            (312.4, "312"),
            (4567.8, "4568"),
            (123456.0, "1.2e5"),
            (1.9e300, "1.9e300"),
            (0.00001234, "1.2e-5"),
            (-0.5, "-0.5"),
        ],
    )
    def test_numbers(self, value: float, text: str) -> None:
        assert number(value) == text

    def test_others(self) -> None:
        assert [count(n) for n in (math.nan, 3.0, 9999.0, 10_000.0, 2.5e7)] == [
            "-",
            "3",
            "9999",
            "10k",
            "25M",
        ]
        assert [duration(n) for n in (0.2, 59.0, 125.0, 7200.0, 200_000.0)] == [
            "0 s",
            "59 s",
            "2 min",
            "2 h",
            "2 d",
        ]
        assert [share(n) for n in (math.nan, 0.004, 0.0999, 0.51)] == ["-", "0.4%", "10.0%", "51%"]


class TestSource:
    def test_asks_no_second_time_while_an_answer_drips_in(self) -> None:
        """Each part comes within the patience, all of it does not."""
        asked = []

        def serve(server: socket.socket) -> None:
            connection, _ = server.accept()
            asked.append(connection)
            connection.sendall(b"HTTP/1.0 200 OK\r\n")
            for part in itertools.count():
                if part >= 5 and asked_again.is_set():
                    break
                time.sleep(0.1)
                connection.sendall(b"X-Slow: yes\r\n")
            connection.sendall(b'\r\nact_step{run="gpt",rank="0"} 7\n')
            connection.close()

        heard, asked_again = threading.Event(), threading.Event()
        with socket.create_server(("127.0.0.1", 0)) as server:
            thread = threading.Thread(target=serve, args=[server])
            thread.start()
            source = Source(f"127.0.0.1:{server.getsockname()[1]}", heard.set)
            source.ask(0.4)
            wait_for(lambda: asked, "the first request")
            for _ in range(3):
                source.ask(0.4)
            asked_again.set()
            assert heard.wait(30)
            source.wait(30)
            thread.join()
            server.settimeout(0)
            with pytest.raises(BlockingIOError):
                server.accept()
        assert source.reading.problem == "has not answered within 0.4 s"

    def test_the_rate_is_of_the_steps_that_ended(self) -> None:
        source = Source("node17", lambda: None)

        def rate(at: float, steps: float) -> float:
            samples = {"act_last_step_timestamp_seconds": at, "act_steps_total": steps}
            return source._rate(Page({n: [({}, v)] for n, v in samples.items()}, {}, NOW))

        assert math.isnan(rate(100.0, 10))
        assert math.isnan(rate(100.0, 10))
        assert rate(104.0, 12) == 0.5
        assert rate(106.0, 18) == pytest.approx(8 / 6)
        # Another process answers there.
        assert math.isnan(rate(200.0, 1))

    def test_the_age_of_a_step_is_by_the_trainers_clock(self) -> None:
        found = re.search(
            r"0 +500 +- +(\d+ s)",
            drawn([reading(page(f"act_last_step_timestamp_seconds {NOW - 7}"))]),
        )
        assert found is not None
        assert found[1] == "8 s"
