"""The exporter on a model in training: what a user of `start_exporter` gets."""

from __future__ import annotations

import http.client
import logging
import math
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text
from torch import nn

from act_exporter import Exporter, SettingError, StateError, Thresholds, start_exporter
from act_exporter.levels import learn_levels, write_levels
from act_exporter.records import Reader
from act_exporter.torch_exporter import TorchExporter
from deploy.demo.servers import wait_for
from tests.act_exporter.models import gpt, train

QUICK = Thresholds(window=40, window_minimum=10, baseline_steps=10)
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("ACT_", "SLURM_")) or name in ("RANK", "LOCAL_RANK"):
            monkeypatch.delenv(name)


@pytest.fixture
def model() -> nn.Module:
    return gpt()


@pytest.fixture
def exporter(model: nn.Module) -> Iterator[Exporter]:
    with start_exporter(model, 0, run="test", thresholds=QUICK) as exporter:
        yield exporter


def page(exporter: Exporter, accept: str = "text/plain") -> str:
    request = urllib.request.Request(
        f"http://127.0.0.1:{exporter.port}/metrics", headers={"Accept": accept}
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        body: str = response.read().decode()
        return body


def value(exporter: Exporter, name: str, **labels: str) -> float | None:
    """The value of one sample of the page, or None where it is absent."""
    for family in parse_text(page(exporter)):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return float(sample.value)
    return None


class TestPage:
    @pytest.mark.parametrize(
        ("accept", "parse"), [("text/plain", parse_text), (OPENMETRICS, parse_openmetrics)]
    )
    def test_is_what_the_parsers_take(
        self, model: nn.Module, exporter: Exporter, accept: str, parse: object
    ) -> None:
        train(model, 30)
        families: list[Metric] = list(parse(page(exporter, accept)))  # type: ignore[operator]
        names = {sample.name for family in families for sample in family.samples}
        assert {
            "act_layer_absmax_peak",
            "act_layer_absmax_baseline",
            "act_layer_absmax_window_std",
            "act_layer_nonfinite_total",
            "act_step",
            "act_errors_total",
        } <= names
        for family in families:
            assert family.documentation, family.name
            for sample in family.samples:
                assert sample.labels["run"] == "test"
                assert sample.labels["rank"] == "0"
                assert sample.timestamp is None

    def test_counters_are_there_at_zero_after_the_first_step(
        self, model: nn.Module, exporter: Exporter
    ) -> None:
        train(model, 1)
        assert value(exporter, "act_layer_nonfinite_total", layer="norm", kind="nan") == 0
        assert value(exporter, "act_errors_total", stage="hook") == 0

    def test_has_no_baseline_and_window_before_there_is_one(
        self, model: nn.Module, exporter: Exporter
    ) -> None:
        train(model, 5)
        assert value(exporter, "act_layer_absmax", layer="norm") is not None
        assert value(exporter, "act_layer_absmax_baseline", layer="norm") is None
        assert value(exporter, "act_layer_absmax_window_mean", layer="norm") is None

    def test_layer_names_are_escaped(self) -> None:
        model = nn.Sequential()
        model.add_module('a"b\\c\nd', nn.Linear(2, 2))
        with start_exporter(model, 0) as exporter:
            model(torch.ones(1, 2)).sum().backward()
            exporter.step(1)
            assert value(exporter, "act_layer_calls_total", layer='a"b\\c\nd') == 1

    def test_other_families_can_join(self, exporter: Exporter) -> None:
        from prometheus_client import Gauge

        Gauge("my_own", "Mine.", registry=exporter.registry).set(3)
        assert value(exporter, "my_own") == 3

    def test_other_paths_lead_to_it(self, exporter: Exporter) -> None:
        base = f"http://127.0.0.1:{exporter.port}"
        assert b"/metrics" in urllib.request.urlopen(base, timeout=30).read()
        with pytest.raises(urllib.error.HTTPError, match="404") as caught:
            urllib.request.urlopen(f"{base}/other", timeout=30)
        caught.value.close()


class TestTraining:
    def test_is_bitwise_what_it_is_without_us(self) -> None:
        def run(watched: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
            model = gpt()
            exporter = start_exporter(model, 0) if watched else None
            torch.manual_seed(5)
            train(model, 20, torch.optim.AdamW(model.parameters(), lr=1e-2))
            if exporter is not None:
                exporter.close()
            return [p.detach().clone() for p in model.parameters()], torch.get_rng_state()

        plain, watched = run(False), run(True)
        assert all(map(torch.equal, plain[0], watched[0]))
        assert torch.equal(plain[1], watched[1])

    def test_steps_loss_and_learning_rate_need_no_other_line(
        self, model: nn.Module, exporter: Exporter
    ) -> None:
        exporter.record(loss=torch.tensor(2.5), grad_norm=1.5)
        train(model, 3)
        assert value(exporter, "act_step") == 3
        assert value(exporter, "act_steps_total") == 3
        assert value(exporter, "act_loss") == 2.5
        assert value(exporter, "act_grad_norm") == 1.5
        assert value(exporter, "act_learning_rate") == 0.01

    def test_a_run_that_hangs_before_its_first_step_has_a_time(self, model: nn.Module) -> None:
        before = time.time()
        with start_exporter(model, 0) as exporter:
            assert (value(exporter, "act_last_step_timestamp_seconds") or 0) >= before

    def test_a_fault_is_seen_in_its_layer(self, model: nn.Module, exporter: Exporter) -> None:
        train(model, 30)
        assert exporter.onset() is None
        with torch.no_grad():
            model.get_submodule("blocks.1.attn.qkv").weight.mul_(1e4)
        train(model, 3)
        assert exporter.onset() == 31
        labels = {"layer": "blocks.1.attn.proj", "tensor": "input"}
        assert value(exporter, "act_layer_exceeded_consecutive", rule="hard", **labels) == 3
        assert value(exporter, "act_layer_exceeded_steps_total", rule="hard", layer="embed") == 0

    def test_every_tenth_step_only(self, model: nn.Module) -> None:
        with start_exporter(model, 0, sample_every=10) as exporter:
            train(model, 25)
            # The step under way when we came is looked at, and then each tenth after it.
            assert value(exporter, "act_layer_calls_total", layer="norm") == 3
            assert value(exporter, "act_step") == 25

    def test_goes_on_when_our_own_code_fails(
        self,
        model: nn.Module,
        exporter: Exporter,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        def fail(*_: object) -> None:
            raise RuntimeError("broken")

        monkeypatch.setattr("act_exporter.history.History.observe", fail)
        monkeypatch.setattr("act_exporter.probe.Probe.record", fail)
        exporter.record(loss=1.0)
        train(model, 3)
        assert value(exporter, "act_errors_total", stage="step") == 3
        assert value(exporter, "act_errors_total", stage="record") == 1
        assert caplog.text.count("broken") == 2  # once a cause

    @pytest.mark.parametrize("why", ["scaler", "bad loss"])
    def test_a_fault_is_seen_although_the_optimizer_is_skipped(
        self, model: nn.Module, exporter: Exporter, why: str
    ) -> None:
        """A loss scaler skips steps with overflows, many loops those with a bad loss."""
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", enabled=why == "scaler")
        for step in range(30):
            if step == 5:
                with torch.no_grad():
                    model.get_parameter("blocks.1.attn.qkv.weight").fill_(math.nan)
            loss = model(torch.randint(0, 256, (2, 8))).square().mean()
            if why == "bad loss" and not loss.isfinite():
                continue
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert value(exporter, "act_step") == 5
        labels = {"layer": "blocks.1.attn.proj", "tensor": "input"}
        assert (value(exporter, "act_layer_nonfinite_total", kind="nan", **labels) or 0) > 0
        held = value(exporter, "act_layer_exceeded_consecutive", rule="nonfinite", **labels)
        assert (held or 0) >= 3
        assert exporter.onset() == 6

    def test_the_cost_is_measured_and_kept_to(
        self, model: nn.Module, caplog: pytest.LogCaptureFixture
    ) -> None:
        """By a clock for which a sampled step takes half as long again."""
        now = 0.0
        with TorchExporter(
            model,
            run="test",
            rank=0,
            watch="norm",
            sample_every=1,
            thresholds=QUICK,
            max_overhead=0.3,
            gradients=False,
            clock=lambda: now,
        ) as exporter:
            exporter.serve("127.0.0.1", 0)
            for _ in range(1400):
                now += 1.5 if exporter._instrumentation.sampling else 1.0
                train(model, 1)
            assert value(exporter, "act_sample_interval_steps") == 2
            assert value(exporter, "act_overhead_ratio") == pytest.approx(0.25)
            calls = value(exporter, "act_layer_calls_total", layer="norm")
            assert (calls or 0) < 1400 * 49 / 50
        assert caplog.text.count("each 2. step is sampled") == 1

    def test_a_wrong_loss_costs_the_loss_only(self, model: nn.Module, exporter: Exporter) -> None:
        exporter.record(loss=torch.ones(3), grad_norm=1.0)
        train(model, 1)
        assert value(exporter, "act_layer_calls_total", layer="norm") == 1
        assert value(exporter, "act_loss") is None
        assert value(exporter, "act_errors_total", stage="record") == 1

    def test_silence_is_said(
        self, model: nn.Module, exporter: Exporter, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A model in evaluation mode trains here; its forwards do not count."""
        model.eval()
        train(model, 8)
        assert value(exporter, "act_errors_total", stage="silent") == 1
        assert caplog.text.count("no watched layer ran") == 1

    def test_one_layer_whose_hooks_are_silent_is_counted_and_named(
        self, model: nn.Module, exporter: Exporter, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A layer is put in another's place: what was watched never runs again."""
        train(model, 2)
        model.norm = nn.LayerNorm(16)
        train(model, 120)
        assert value(exporter, "act_errors_total", stage="silent") == 1
        assert "norm did not run in 100 sampled steps" in caplog.text

    def test_a_compiled_optimizer_step_compiles_nothing_of_ours(self, model: nn.Module) -> None:
        torch._dynamo.reset()
        with start_exporter(model, 0, thresholds=QUICK) as exporter:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            step = torch.compile(optimizer.step, backend="eager")
            torch._dynamo.utils.counters.clear()
            for _ in range(3):
                model(torch.randint(0, 256, (2, 8))).square().mean().backward()
                step()
            assert value(exporter, "act_step") == 3
            breaks = str(torch._dynamo.utils.counters["graph_break"])
            assert "history" not in breaks

    def test_is_seen_by_many_scrapers_at_once(self, model: nn.Module, exporter: Exporter) -> None:
        """Pages are whole while training goes on, and training does not mind them."""
        stop = threading.Event()
        pages: list[str] = []

        def scrape() -> None:
            while not stop.is_set():
                pages.append(page(exporter, OPENMETRICS))

        threads = [threading.Thread(target=scrape) for _ in range(3)]
        for thread in threads:
            thread.start()
        train(model, 60)
        stop.set()
        for thread in threads:
            thread.join()
        assert len(pages) >= 3
        for text in pages[:: len(pages) // 3]:
            assert list(parse_openmetrics(text))  # raises where one is torn
        assert value(exporter, "act_errors_total", stage="scrape") == 0


class TestGradients:
    def clipping(self, model: nn.Module) -> float:
        """One step of a trainer that clips; the norm that it saw before."""
        optimizer = getattr(model, "optimizer", torch.optim.SGD(model.parameters(), lr=0.01))
        model.optimizer = optimizer
        model(torch.randint(0, 256, (2, 8))).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
        return float(norm)

    def test_need_no_other_line(self, model: nn.Module, exporter: Exporter) -> None:
        norm = self.clipping(model)
        assert value(exporter, "act_grad_norm") == pytest.approx(norm, rel=1e-5)
        layer = value(exporter, "act_layer_grad_norm", layer="blocks.1.attn.proj")
        assert layer is not None
        assert 0 < layer < norm
        assert value(exporter, "act_loss_scale") is None

    def test_what_is_recorded_wins(self, model: nn.Module, exporter: Exporter) -> None:
        exporter.record(grad_norm=7.0)
        for _ in range(2):
            self.clipping(model)
            assert value(exporter, "act_grad_norm") == 7.0
        assert value(exporter, "act_layer_grad_norm", layer="head") is not None

    def test_a_recorded_loss_scale_is_taken_out(self, model: nn.Module, exporter: Exporter) -> None:
        exporter.record(loss_scale=4.0)
        norm = self.clipping(model)
        assert value(exporter, "act_grad_norm") == pytest.approx(norm / 4, rel=1e-5)
        assert value(exporter, "act_loss_scale") == 4

    @pytest.mark.parametrize("fused", [True, False])
    def test_what_a_scaler_skips_is_no_anomaly(self, model: nn.Module, fused: bool) -> None:
        """A fused optimizer's step is called by the scaler even where it is to do nothing."""
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=fused)
        with start_exporter(model, 0, scaler=scaler) as exporter:
            for step in range(4):
                loss = model(torch.randint(0, 256, (2, 8))).square().mean()
                scaler.scale(loss * (math.inf if step in (0, 3) else 1)).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                norm = value(exporter, "act_grad_norm")
                assert norm is None if step == 0 else norm is not None and math.isfinite(norm)
            assert value(exporter, "act_loss_scale") == 8
            assert value(exporter, "act_errors_total", stage="gradient") == 0
            assert exporter.onset() is None

    def test_nan_in_one_layer_is_on_the_page(self, model: nn.Module, exporter: Exporter) -> None:
        weight = model.get_parameter("blocks.1.mlp.down.weight")
        weight.register_hook(lambda gradient: gradient * math.nan)
        self.clipping(model)
        assert math.isnan(value(exporter, "act_grad_norm") or 0)
        assert math.isnan(value(exporter, "act_layer_grad_norm", layer="blocks.1.mlp.down") or 0)
        assert math.isfinite(value(exporter, "act_layer_grad_norm", layer="blocks.0") or math.nan)

    def test_can_be_left_out(self, model: nn.Module) -> None:
        with start_exporter(model, 0, gradients=False) as exporter:
            self.clipping(model)
            assert value(exporter, "act_grad_norm") is None
            assert value(exporter, "act_step") == 1

    def test_of_every_second_step_only(self, model: nn.Module) -> None:
        with start_exporter(model, 0, sample_every=2) as exporter:
            norms = [self.clipping(model) for _ in range(4)]
            assert value(exporter, "act_grad_norm") == pytest.approx(norms[2], rel=1e-5)

    def test_none_remain_of_a_pause_or_a_step_undone(
        self, model: nn.Module, exporter: Exporter
    ) -> None:
        with exporter.paused():
            self.clipping(model)
        exporter.reset(generation=1)
        train(gpt(), 1)
        exporter.step(1)
        assert value(exporter, "act_grad_norm") is None


class TestGuardsSide:
    def test_an_explicit_step_counts_from_then_on(
        self, model: nn.Module, exporter: Exporter
    ) -> None:
        exporter.step(400)
        train(model, 1)
        exporter.step(401)
        assert value(exporter, "act_step") == 401
        assert value(exporter, "act_steps_total") == 1

    def test_every_tenth_step_may_be_told(self, model: nn.Module) -> None:
        with start_exporter(model, 0, sample_every=10) as exporter:
            for step in range(10, 60, 10):
                before = time.time()
                train(model, 10)
                exporter.step(step)
                assert value(exporter, "act_step") == step
                assert value(exporter, "act_steps_total") == step
                assert (value(exporter, "act_last_step_timestamp_seconds") or 0) >= before
            assert (value(exporter, "act_layer_calls_total", layer="norm") or 0) >= 30

    def test_nothing_counts_while_paused(self, model: nn.Module, exporter: Exporter) -> None:
        with exporter.paused():
            train(model, 2)
        assert value(exporter, "act_step") == 0
        assert value(exporter, "act_layer_calls_total", layer="norm") is None

    def test_a_reset_begins_a_generation(self, model: nn.Module, exporter: Exporter) -> None:
        train(model, 30)
        with torch.no_grad():
            model.get_submodule("blocks.1.mlp.up").weight.mul_(1e5)
        train(model, 3)
        exporter.reset(generation=1)
        exporter.step(30)
        assert exporter.onset() is None
        assert value(exporter, "act_run_info", generation="1") == 1
        assert value(exporter, "act_step") == 30
        assert value(exporter, "act_steps_total") == 33
        assert value(exporter, "act_layer_absmax_peak") is None

    def test_a_state_goes_into_a_new_exporter(
        self, model: nn.Module, exporter: Exporter, tmp_path: Path
    ) -> None:
        train(model, 30)
        torch.save(exporter.state_dict(), tmp_path / "state.pt")
        other_model = gpt()
        with start_exporter(other_model, 0, thresholds=QUICK) as other:
            other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
            train(other_model, 1)
            assert value(other, "act_step") == 31
            baseline = value(exporter, "act_layer_absmax_baseline", layer="norm")
            assert value(other, "act_layer_absmax_baseline", layer="norm") == baseline

    @pytest.mark.parametrize(
        "state",
        [
            None,
            {},
            {"step": -1, "history": {}},
            {"step": 1},
            {"step": 1, "history": {}, "rate": 1.0},
            {"step": 1, "history": {}, "learning_rate": math.nan},
        ],
    )
    def test_a_mangled_state_is_an_error(self, exporter: Exporter, state: object) -> None:
        with pytest.raises(StateError, match="exporter state"):
            exporter.load_state_dict(state)  # type: ignore[arg-type]


class TestStart:
    def test_a_port_in_use_costs_the_page_and_nothing_else(
        self, model: nn.Module, exporter: Exporter, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert exporter.port is not None
        with start_exporter(gpt(), exporter.port) as second:
            assert second.port is None
            assert f"no metrics on 127.0.0.1:{exporter.port}" in caplog.text
        train(model, 1)
        assert value(exporter, "act_step") == 1

    def test_the_port_is_free_again_after_closing(self, model: nn.Module) -> None:
        first = start_exporter(model, 0)
        port = first.port
        first.close()
        first.close()
        with start_exporter(model, port) as second:
            assert second.port == port

    def test_listens_on_this_machine_only(self, exporter: Exporter) -> None:
        assert exporter.port is not None
        with socket.socket() as other:
            # Free on another loopback address means that it does not listen on all of them.
            other.bind(("127.0.0.2", exporter.port))

    @pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 on this machine")
    def test_ipv6(self, model: nn.Module) -> None:
        with start_exporter(model, 0, host="::1") as exporter:
            url = f"http://[::1]:{exporter.port}/metrics"
            assert b"act_step" in urllib.request.urlopen(url, timeout=30).read()

    def test_a_forked_worker_does_not_hold_the_port(self, model: nn.Module) -> None:
        exporter = start_exporter(model, 0)
        port = exporter.port
        read, write = os.pipe()
        child = os.fork()
        if child == 0:  # a DataLoader worker that outlives its trainer
            os.close(write)
            os.read(read, 1)
            os._exit(0)
        exporter.close()
        try:
            with start_exporter(model, port) as second:
                assert second.port == port
        finally:
            os.close(write)
            os.close(read)
            os.waitpid(child, 0)

    def test_variables(self, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for name, setting in {
            "ACT_RUN": "from-env",
            "ACT_PORT": str(port - 1),
            "ACT_LOG_LEVEL": "debug",
            "RANK": "9",
            "LOCAL_RANK": "1",
        }.items():
            monkeypatch.setenv(name, setting)
        with start_exporter(model) as exporter:
            assert (exporter.run, exporter.port) == ("from-env", port)
            assert value(exporter, "act_step", rank="9") == 0
        assert logging.getLogger("act_exporter").level == logging.DEBUG
        logging.getLogger("act_exporter").setLevel(logging.NOTSET)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"port": 70_000}, "port=70000"),
            ({"port": "9460"}, "port='9460'"),
            ({"max_overhead": 1.5}, "max_overhead=1.5"),
            ({"run": "a\udcff"}, "must be a name that can be printed"),
            ({"sample_every": 0}, "sample_every=0"),
            ({"run": ""}, "run='' must be a name"),
            ({"gradients": "global"}, "gradients='global'"),
        ],
    )
    def test_a_wrong_argument_is_named(
        self, model: nn.Module, options: dict[str, object], message: str
    ) -> None:
        with pytest.raises(SettingError, match=message):
            start_exporter(model, **{"port": 0, **options})  # type: ignore[arg-type]
        assert not model._forward_pre_hooks

    @pytest.mark.parametrize("name", ["ACT_PORT", "RANK", "ACT_LOG_LEVEL"])
    def test_a_wrong_variable_is_named(
        self, model: nn.Module, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        monkeypatch.setenv(name, "loud")
        with pytest.raises(SettingError, match=f"{name}='loud'"):
            start_exporter(model)

    def test_a_port_beyond_the_last_costs_the_page_only(
        self, model: nn.Module, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("LOCAL_RANK", "1")
        with start_exporter(model, 65_535) as exporter:
            assert exporter.port is None

    def test_a_forked_child_can_close_it(self, exporter: Exporter) -> None:
        child = os.fork()
        if child == 0:
            exporter.close()
            os._exit(0)
        wait_for(lambda: os.waitpid(child, os.WNOHANG) == (child, 0), "the child's end")
        assert value(exporter, "act_step") == 0

    def test_a_closed_exporter_answers_nobody(self, model: nn.Module) -> None:
        first = start_exporter(model, 0, run="old")
        assert first.port is not None
        connection = http.client.HTTPConnection("127.0.0.1", first.port, timeout=30)
        connection.request("GET", "/metrics")
        assert b'run="old"' in connection.getresponse().read()
        first.close()
        with start_exporter(model, first.port, run="new"):
            connection.request("GET", "/metrics")
            assert b'run="new"' in connection.getresponse().read()
        connection.close()

    def test_a_model_must_be_a_module(self) -> None:
        with pytest.raises(SettingError, match="not list"):
            start_exporter([], 0)  # type: ignore[arg-type]


class TestJudgement:
    """What the page says of a run that goes wrong, and of one that does not."""

    def spoil(self, model: nn.Module, factor: float) -> None:
        with torch.no_grad():
            model.get_submodule("blocks.1.attn.qkv").weight.mul_(factor)

    def test_a_healthy_run_has_no_verdict_and_no_onset(
        self, model: nn.Module, exporter: Exporter
    ) -> None:
        train(model, 40)
        verdicts = self.verdicts(exporter)
        assert set(verdicts) == {"activation", "gradient", "data", "parameters", "resume", "loss"}
        assert not any(verdicts.values())
        assert value(exporter, "act_onset_step") is None

    def test_a_fault_in_a_layer_is_called_so_and_placed(
        self, model: nn.Module, exporter: Exporter, caplog: pytest.LogCaptureFixture
    ) -> None:
        train(model, 40)
        self.spoil(model, 1e4)
        train(model, 1)
        assert self.in_force(exporter) == ["activation"]
        where = {"layer": "blocks.1.attn.proj", "tensor": "input"}
        assert value(exporter, "act_onset_step", rule="hard", **where) == 41
        assert (value(exporter, "act_layer_depth_jump_ratio", **where) or 0) > 50
        assert value(exporter, "act_layer_depth", layer="embed") == 0
        train(model, 5)
        assert caplog.text.count("blocks.1.attn.proj went bad first") == 1

    def test_a_gradient_that_is_not_finite_is_called_so(
        self, model: nn.Module, exporter: Exporter
    ) -> None:
        train(model, 40)
        exporter.record(grad_norm=math.nan)
        train(model, 1)
        assert self.in_force(exporter) == ["gradient"]
        assert value(exporter, "act_grad_norm_nonfinite_total") == 1

    def test_what_goes_wrong_after_a_rollback_is_laid_to_it(
        self, model: nn.Module, exporter: Exporter
    ) -> None:
        train(model, 40)
        exporter.reset(generation=1)
        self.spoil(model, 1e4)
        train(model, 1)
        assert self.in_force(exporter) == ["resume"]

    @pytest.mark.parametrize(
        ("rate", "verdicts"), [(1e-3, []), (1.1e-3, []), (3e-3, ["resume"]), (1e-4, ["resume"])]
    )
    def test_a_learning_rate_that_is_not_the_saved_one_is_a_resume_fault(
        self, rate: float, verdicts: list[str], caplog: pytest.LogCaptureFixture
    ) -> None:
        """A scheduler that was not saved, a configuration that changed meanwhile."""
        before, after = gpt(), gpt()
        with start_exporter(before, 0) as exporter:
            train(before, 3, torch.optim.AdamW(before.parameters(), lr=1e-3))
            state = exporter.state_dict()
        with start_exporter(after, 0) as exporter:
            exporter.load_state_dict(state)
            train(after, 2, torch.optim.AdamW(after.parameters(), lr=rate))
            assert self.in_force(exporter) == verdicts
        assert ("with the restored state came 0.001" in caplog.text) == bool(verdicts)

    def test_a_gradient_that_runs_away_has_an_onset_for_the_guard(
        self, model: nn.Module, exporter: Exporter
    ) -> None:
        """Or the guard would refuse the rollback that ActGradientRunaway asks for."""
        for norm in [*[1.0] * 80, *[1e4] * 40]:
            exporter.record(grad_norm=norm)
            train(model, 1)
        assert (value(exporter, "act_grad_norm_shifted_consecutive") or 0) >= 25
        onset = exporter.onset()
        assert onset is not None
        assert 78 <= onset <= 82
        exporter.reset(generation=1)
        assert exporter.onset() is None

    def test_loss_between_two_scrapes_is_held(self, model: nn.Module, exporter: Exporter) -> None:
        for loss in (*[2.0] * 35, 90.0, 2.0):
            exporter.record(loss=loss)
            train(model, 1)
        assert value(exporter, "act_loss") == 2
        assert value(exporter, "act_loss_peak") == 90
        assert value(exporter, "act_loss_nonfinite_total") == 0
        assert value(exporter, "act_loss_window_mean") == 2

    def test_the_time_of_a_scrape_is_told_by_the_next(self, exporter: Exporter) -> None:
        assert value(exporter, "act_scrape_duration_seconds") is None
        assert (value(exporter, "act_scrape_duration_seconds") or 0) > 0

    def verdicts(self, exporter: Exporter) -> dict[str, float]:
        return {
            sample.labels["verdict"]: sample.value
            for family in parse_text(page(exporter))
            for sample in family.samples
            if sample.name == "act_diagnosis"
        }

    def in_force(self, exporter: Exporter) -> list[str]:
        return [verdict for verdict, force in self.verdicts(exporter).items() if force]


class Experts(nn.Module):
    """Blocks with a router and many experts, of which each has a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.unused: tuple[int, int] | None = None
        self.twice: tuple[int, int] | None = None
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "router": nn.Linear(4, 64),
                    "experts": nn.ModuleList(nn.Linear(4, 4) for _ in range(64)),
                }
            )
            for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, block in enumerate(self.blocks):
            gate = block["router"](x).softmax(-1)
            for number, expert in enumerate(block["experts"]):
                if (place, number) != self.unused:
                    x = x + gate[..., number, None] * expert(x)
                if (place, number) == self.twice:
                    expert(x)
        return x


def shown(exporter: Exporter, model: Experts, step: int) -> set[str]:
    """The layers that are on the page after a step."""
    model(torch.randn(2, 4)).sum().backward()
    exporter.step(step)
    samples = [s for family in parse_text(page(exporter)) for s in family.samples]
    return {
        s.labels["layer"]
        for s in samples
        if s.name.startswith("act_layer_") and "tensor" in s.labels
    }


class TestMaxSeries:
    def test_what_is_left_out_is_counted_named_and_no_router(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = Experts()
        with start_exporter(model, 0, watch="all", max_series=500) as exporter:
            model(torch.randn(2, 4)).sum().backward()
            exporter.step(1)
            samples = [s for family in parse_text(page(exporter)) for s in family.samples]
            layers = [
                s for s in samples if s.name.startswith("act_layer_") and "tensor" in s.labels
            ]
            assert 0 < len(layers) <= 500
            assert {f"blocks.{n}.router" for n in range(4)} <= {s.labels["layer"] for s in layers}
            dropped = value(exporter, "act_series_dropped_total", family="layer") or 0
            assert dropped > 1000
            assert "not on the page" in caplog.text
            assert "experts" in caplog.text

    def test_what_is_left_out_is_judged_all_the_same(self) -> None:
        model = Experts()
        with start_exporter(model, 0, watch="all", max_series=500) as exporter:
            with torch.no_grad():
                model.blocks[3]["experts"][63].weight.fill_(math.nan)
            model(torch.randn(2, 4)).sum().backward()
            exporter.step(1)
            assert exporter.onset() == 1
            assert value(exporter, "act_onset_step", layer="blocks.3.experts.63") == 1

    def test_what_is_left_out_is_on_the_page_where_it_is_worst(self) -> None:
        """The rules see no more than the page: a fault in any expert must reach them."""
        model = Experts()
        with start_exporter(model, 0, watch="all", max_series=500) as exporter:
            before = shown(exporter, model, step=1)
            assert "blocks.3.experts.40" not in before
            with torch.no_grad():
                model.blocks[3]["experts"][40].weight.fill_(math.nan)
            during = shown(exporter, model, step=2)
            assert "blocks.3.experts.40" in during
            assert value(
                exporter,
                "act_layer_exceeded_consecutive",
                layer="blocks.3.experts.40",
                rule="nonfinite",
            )
            # What has a place of its own keeps it, and as many series as before are shown.
            assert {f"blocks.{n}.router" for n in range(4)} <= during
            assert len(during) == len(before)

    def test_what_is_left_out_is_on_the_page_where_it_is_used_least_and_most(self) -> None:
        model = Experts()
        with start_exporter(model, 0, watch="all", max_series=1_500) as exporter:
            model.unused, model.twice = (1, 7), (2, 9)
            layers = shown(exporter, model, step=1)
            assert {"blocks.1.experts.7", "blocks.2.experts.9"} <= layers
            assert len(layers) < 60

    @pytest.mark.parametrize("limit", [0, -1, 2.5, True])
    def test_a_limit_that_cannot_be_is_an_error(self, limit: object) -> None:
        with pytest.raises(SettingError, match="max_series"):
            start_exporter(gpt(), 0, max_series=limit)  # type: ignore[arg-type]


class TestJournal:
    def test_holds_every_sampled_step_and_what_happened(
        self, model: nn.Module, tmp_path: Path
    ) -> None:
        with start_exporter(model, 0, thresholds=QUICK, journal=tmp_path / "journal") as exporter:
            train(model, 40)
            with torch.no_grad():
                model.get_submodule("blocks.1.attn.qkv").weight.mul_(1e4)
            train(model, 1)
            exporter.reset(generation=1)
            train(model, 1)
            taps = len(exporter._training.layers.calls)  # type: ignore[union-attr]
            assert value(exporter, "act_journal_dropped_total", reason="queue") == 0
        records = list(Reader(tmp_path / "journal").records())
        assert [record.step for record in records if record.layer == "embed"] == [*range(1, 43)]
        assert len(records) == 42 * taps
        assert {record.generation for record in records if record.step > 41} == {1}
        notes = list(Reader(tmp_path / "journal").notes())
        once = [note for note in notes if note.kind in ("onset", "clean", "rollback")]
        assert [(note.kind, note.step) for note in once] == [
            *[("onset", 41), ("rollback", 41), ("onset", 42)]
        ]
        assert once[0].fields["layer"] == "blocks.1.attn.proj"
        assert once[0].fields["verdict"] == "activation"

    def test_holds_the_numbers_of_the_run_at_each_sampled_step(
        self, model: nn.Module, tmp_path: Path
    ) -> None:
        with start_exporter(model, 0, sample_every=3, journal=tmp_path) as exporter:
            for loss in (4.0, 3.0, math.nan, 2.0):
                exporter.record(loss=loss)
                train(model, 3)
        found: dict[int, dict[str, Any]] = defaultdict(dict)
        for note in Reader(tmp_path).notes():
            if note.kind == "training":
                found[note.step] |= note.fields
        assert list(found) == [1, 4, 7, 10]
        assert [numbers["loss"] for numbers in found.values()] == [4.0, 3.0, "NaN", 2.0]
        assert all(numbers["learning_rate"] == 0.01 for numbers in found.values())
        assert all(numbers["grad_norm"] > 0 for numbers in found.values())

    def test_says_once_where_taps_lie_and_what_their_baselines_are(
        self, model: nn.Module, tmp_path: Path
    ) -> None:
        with start_exporter(model, 0, thresholds=QUICK, journal=tmp_path) as exporter:
            train(model, 30)
            depth = exporter._training.layers.depth  # type: ignore[union-attr]
            baseline = exporter._training.layers.baseline  # type: ignore[union-attr]
        notes = list(Reader(tmp_path).notes())
        depths = [note for note in notes if note.kind == "depth"]
        assert [note.fields["depth"] for note in depths] == depth.tolist()
        assert {note.step for note in depths} == {1}
        learnt = [note for note in notes if note.kind == "baseline"]
        named = {(note.fields["layer"], note.fields["tensor"]) for note in learnt}
        assert len(learnt) == len(named) == np.isfinite(baseline).sum() > 0
        assert {note.fields["absmax"] for note in learnt} == set(baseline[~np.isnan(baseline)])

    def test_takes_notes_of_others(self, model: nn.Module, tmp_path: Path) -> None:
        with start_exporter(model, 0, journal=tmp_path) as exporter:
            train(model, 2)
            exporter.note("checkpoint", name="a", kind="backup", step=1, seconds=math.inf)
            exporter.note("odd", what=object())
            wait_for(
                lambda: value(exporter, "act_errors_total", stage="journal") == 1,
                "the error to be counted",
            )
        (note,) = (n for n in Reader(tmp_path).notes() if n.kind in ("checkpoint", "odd"))
        assert note.step == 1
        assert note.fields == {"name": "a", "kind": "backup", "seconds": "Infinity"}

    def test_no_note_is_too_much_without_one(self, model: nn.Module) -> None:
        with start_exporter(model, 0) as exporter:
            exporter.note("checkpoint", name="a")
            assert value(exporter, "act_errors_total", stage="journal") == 0

    def test_a_folder_that_cannot_be_is_counted_and_training_goes_on(
        self, model: nn.Module, tmp_path: Path
    ) -> None:
        (tmp_path / "file").write_text("in the way")
        with start_exporter(model, 0, journal=tmp_path / "file" / "journal") as exporter:
            train(model, 3)
            wait_for(
                lambda: value(exporter, "act_errors_total", stage="journal") == 1,
                "the error to be counted",
            )
            assert value(exporter, "act_step") == 3

    def test_the_variable_names_the_folder(
        self, model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("ACT_JOURNAL", str(tmp_path / "journal"))
        with start_exporter(model, 0):
            train(model, 1)
        assert list(Reader(tmp_path / "journal").records())

    def test_baselines_of_a_small_run_are_in_force_in_the_large_one(
        self, model: nn.Module, tmp_path: Path
    ) -> None:
        with start_exporter(model, 0, journal=tmp_path / "journal"):
            train(model, 110)  # one in fifty is not sampled
        levels = learn_levels(Reader(tmp_path / "journal"))
        write_levels(tmp_path / "baseline.json", levels)
        large = gpt()
        with start_exporter(large, 0, baseline=tmp_path / "baseline.json") as exporter:
            train(large, 1)
            found = value(exporter, "act_layer_absmax_baseline", layer="embed")
            assert found == levels.absmax["embed", "output"]
            assert value(exporter, "act_layer_absmax_baseline", layer="head") is not None

    def test_a_baseline_file_that_is_none_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(SettingError, match=r"baseline.*nothing\.json"):
            start_exporter(gpt(), 0, baseline=tmp_path / "nothing.json")
