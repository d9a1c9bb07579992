"""The exporter's own page over HTTP: what a person with a browser or curl is answered."""

from __future__ import annotations

import http.client
import math
import re
from collections.abc import Iterator, Mapping
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from act_exporter import Exporter, Thresholds, start_exporter
from act_exporter.live.alerts import Shipped
from act_exporter.live.query import Query
from tests.act_exporter.models import gpt, train
from tests.act_exporter.page_scenes import FAULT_LAYER, FAULT_STEP, guarded

QUICK = Thresholds(window=40, window_minimum=10, baseline_steps=10)


class Answer:
    """Status, headers (in lower case) and body of one request."""

    def __init__(self, exporter: Exporter, target: str = "/", method: str = "GET") -> None:
        assert exporter.port is not None
        connection = http.client.HTTPConnection("127.0.0.1", exporter.port, timeout=10)
        connection.request(method, target)
        response = connection.getresponse()
        self.status = response.status
        self.headers: Mapping[str, str] = {k.lower(): v for k, v in response.getheaders()}
        self.body = response.read()
        connection.close()

    @property
    def text(self) -> str:
        """What a reader sees, without style, script and titles of pictures."""
        body = re.sub(r"(?s)<(style|script|title)>.*?</\1>", "", self.body.decode())
        return unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body)))

    def inner(self, name: str) -> str:
        """The text of the element with an id."""
        found = re.search(rf'(?s)<(\w+) id="{name}"[^>]*>(.*?)</\1>', self.body.decode())
        assert found is not None, name
        return unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", found[2]))).strip()


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    model = gpt()
    with start_exporter(model, 0, run="test", thresholds=QUICK) as exporter:
        exporter.model = model  # type: ignore[attr-defined]
        yield exporter


def model_of(exporter: Exporter) -> nn.Module:
    found: nn.Module = exporter.model  # type: ignore[attr-defined]
    return found


class TestServer:
    def test_says_what_a_browser_may_do_with_it(self, exporter: Exporter) -> None:
        headers = Answer(exporter).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["content-type"] == "text/html; charset=utf-8"

    @pytest.mark.parametrize("target", ["/", "/metrics", "/other"])
    def test_head_is_get_without_a_body(self, exporter: Exporter, target: str) -> None:
        get, head = Answer(exporter, target), Answer(exporter, target, "HEAD")
        assert (head.status, head.body) == (get.status, b"")
        assert head.headers["content-type"] == get.headers["content-type"]

    def test_other_paths_are_not_found(self, exporter: Exporter) -> None:
        answer = Answer(exporter, "/<script>alert(1)</script>")
        assert answer.status == 404
        assert b"script" not in answer.body

    def test_an_error_is_counted_and_answered_in_words(
        self, exporter: Exporter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object) -> None:
            raise ArithmeticError("broken on purpose")

        with monkeypatch.context() as broken:
            broken.setattr("act_exporter.live.page.view_of", fail)
            answer = Answer(exporter)
        assert answer.status == 500
        assert b"training goes on" in answer.body
        train(model_of(exporter), 2)
        metrics = Answer(exporter, "/metrics").body.decode()
        assert re.search(r'^act_errors_total{.*stage="scrape".*} 1', metrics, re.MULTILINE)
        assert "Errors of the exporter 1 scrape 1" in Answer(exporter).text

    def test_has_no_asset_from_outside(self, exporter: Exporter) -> None:
        """No element loads anything: only links that a reader may follow, on this very server."""
        train(model_of(exporter), 3)

        class Collector(HTMLParser):
            found: list[tuple[str, str, str | None]] = []  # noqa: RUF012 - one parser

            def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
                self.found += [(tag, k, v) for k, v in attrs if k in ("src", "href", "action")]
                assert not [k for k, _ in attrs if k == "style" or k.startswith("on")], tag

        parser = Collector()
        parser.feed(Answer(exporter).body.decode())
        assert parser.found
        for tag, _, value in parser.found:
            assert value is not None
            assert value.startswith("/") or (tag, value) == ("link", "data:,")


class TestHeadline:
    def test_waits_before_the_first_step(self, exporter: Exporter) -> None:
        answer = Answer(exporter)
        assert "Nothing to judge yet" in answer.inner("state")
        assert "18" not in answer.inner("state")
        assert "There is a profile from the first sampled step on" in answer.text

    def test_says_that_no_baseline_is_there_yet(self, exporter: Exporter) -> None:
        train(model_of(exporter), 3)
        said = Answer(exporter).inner("state")
        assert "All is well at step 3" in said
        assert "None has a baseline yet" in said

    def test_says_how_far_the_largest_is_from_its_baseline(self, exporter: Exporter) -> None:
        train(model_of(exporter), 40)
        said = Answer(exporter).inner("state")
        assert "All is well at step 40" in said
        assert re.search(r"the largest is [\d.]+ times its baseline", said)

    def test_names_the_layer_that_went_first_and_how_far(self, exporter: Exporter) -> None:
        train(model_of(exporter), 40)
        exporter.inject_fault("blocks.0.mlp.down", 5000.0, 42)
        train(model_of(exporter), 6)
        answer = Answer(exporter)
        said = answer.inner("state")
        assert "Anomaly" in said
        assert "blocks.0.mlp.down output went bad first, at step 42" in said
        times = re.search(r"It was ([\d,]+) times its baseline in that step", said)
        assert times is not None
        assert 2500 < float(times[1].replace(",", "")) < 10_000
        assert "An activation fault" in said
        assert "No guard in this process" in said
        for alert in ("ActRunaway", "ActLayerAboveBaseline", "ActDiagnosis"):
            assert alert in answer.text
        assert "First: blocks.0.mlp.down output" in answer.text
        first_row = re.search(r"<tbody.*?</tr>", answer.body.decode(), re.DOTALL)
        assert first_row is not None
        assert "blocks.0.mlp.down" in first_row[0]

    @pytest.mark.parametrize("factor", [math.nan, math.inf])
    def test_says_nan_and_infinity(self, exporter: Exporter, factor: float) -> None:
        train(model_of(exporter), 20)
        exporter.inject_fault("blocks.1.attn.proj", factor, 22)
        train(model_of(exporter), 3)
        answer = Answer(exporter)
        assert "blocks.1.attn.proj output went bad first, at step 22" in answer.inner("state")
        assert "It had NaN or Inf in that step" in answer.inner("state")
        assert "ActLayerNonFinite" in answer.text
        assert "NaN or Inf:" in answer.text

    def test_judges_by_the_trainers_own_thresholds(self) -> None:
        model = gpt()
        own = Thresholds(hard=1000, window=40, window_minimum=10, baseline_steps=10)
        with start_exporter(model, 0, thresholds=own) as exporter:
            train(model, 40)
            exporter.inject_fault("blocks.0.mlp.down", 300.0, 42)
            train(model, 3)
            assert "ActLayerAboveBaseline" not in Answer(exporter).text
            assert "dotted: 1,000 times the baseline" in Answer(exporter).text

    def test_a_guard_s_backup_and_rollback_are_told(self, tmp_path: Path) -> None:
        with guarded(tmp_path) as run:
            said = Answer(run.exporter).text
            assert f"{FAULT_LAYER} output went bad first, at step {FAULT_STEP}" in said
            assert "ActLayerAboveBaseline asked for a backup checkpoint" in said
            assert re.search(r"backup checkpoint step-\d+-g0-backup saved", said)
            assert "Rollbacks: 0, 2 left" in said
            run.ask("recover", "ActRunaway")
            run.go(20)
            answer = Answer(run.exporter)
            assert "All is well" in answer.inner("state")
            assert f"The last anomaly began at step {FAULT_STEP}" in answer.inner("state")
            assert "The run was rolled back to step 120" in answer.inner("state")
            assert re.search(r"rolled back from step \d+ to step-00000120-g0", answer.text)
            assert "generation 1" in answer.inner("generation")
            assert "Rollbacks: 1, 1 left" in answer.text
            # The lines go on over it, with a mark.
            assert 'class="turn"' in answer.body.decode()

    def test_without_a_guard_it_says_so(self, exporter: Exporter) -> None:
        assert "No guard in this process" in Answer(exporter).text


class TestTable:
    @pytest.mark.parametrize(
        "query",
        [
            "page=0", "page=-1", "page=99", "page=1e3", "page=%00", "page=" + "9" * 5000,
            "page=%D9%A1", "sort=worse", "sort=%27", "hold=maybe", "&&&=;", "%ff%fe=%ff",
            "a" * 4000,            "&".join(f"a{n}=1" for n in range(100)),
        ],
    )  # fmt: skip
    def test_garbage_gives_the_first_page(self, exporter: Exporter, query: str) -> None:
        train(model_of(exporter), 2)
        answer = Answer(exporter, f"/?{query}")
        assert answer.status == 200
        assert answer.inner("found") == "1 to 15 of 15 tensors"
        assert answer.inner("pages") == "Page 1 of 1"

    def test_finds_by_name(self, exporter: Exporter) -> None:
        train(model_of(exporter), 2)
        answer = Answer(exporter, "/?find=MLP.down+in&sort=depth")
        assert answer.inner("found") == "1 to 2 of 2 tensors whose name contains “MLP.down in”"
        rows = re.findall(r"<bdi>(.*?)</bdi>", answer.body.decode())
        assert rows == ["blocks.0.mlp.down input", "blocks.1.mlp.down input"]

    def test_what_is_asked_is_not_repeated_unescaped(self, exporter: Exporter) -> None:
        attack = "%22%3E%3Cscript%3Ealert(1)%3C/script%3E"
        answer = Answer(exporter, f"/?find={attack}&page={attack}&sort={attack}")
        assert answer.status == 200
        assert b"<script>alert" not in answer.body
        assert "No tensor whose name contains" in answer.text

    def test_its_order_of_execution_is_the_models(self, exporter: Exporter) -> None:
        train(model_of(exporter), 2)
        body = Answer(exporter, "/?sort=depth").body.decode()
        rows = re.findall(r"<bdi>(.*?)</bdi>", body)
        assert rows[0] == "embed output"
        assert rows[-1] == "head output"

    def test_links_keep_what_was_asked(self) -> None:
        assert Query.of("find=a%26b&sort=depth").link(page=2) == "/?find=a%26b&sort=depth&page=2"
        assert Query.of("hold=1&page=3").link(hold=False, page=1) == "/?"


class TestNames:
    def test_are_shown_and_never_markup(self) -> None:
        model = nn.Sequential()
        names = ["<img src=x onerror=alert(1)>", "a\"b'c&d", "层-ü", "tab\there\u202e", "x" * 400]
        for name in names:
            model.add_module(name, nn.Linear(2, 2))
        with start_exporter(model, 0, run="<b>run</b>", watch="all") as exporter:
            model(torch.ones(1, 2)).sum().backward()
            exporter.step(1)
            answer = Answer(exporter)
        assert b"<img" not in answer.body
        assert b"<b>" not in answer.body
        for shown in ("<img src=x onerror=alert(1)>", "a\"b'c&d", "层-ü", "tab\\there\\u202e", "…"):
            assert shown in answer.text

    def test_one_layer_that_is_all_zero_is_drawn(self) -> None:
        layer = nn.Linear(2, 2)
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
        with start_exporter(layer, 0, run="zero") as exporter:
            for step in range(1, 4):
                layer(torch.zeros(1, 2)).sum().backward()
                exporter.step(step)
            answer = Answer(exporter)
        assert answer.status == 200
        assert "1 to 1 of 1 tensors" in answer.text
        assert "dead 3" in answer.text


def test_joined_ranks_have_one_page_with_the_holder() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = gpt()
        with start_exporter(model, 0, reduce="global") as exporter:
            train(model, 8)
            exporter.onset()
            answer = Answer(exporter)
            assert "rank all" in answer.text
            assert '<th scope="col">Rank</th>' in answer.body.decode()
    finally:
        dist.destroy_process_group()


def test_each_limit_is_a_number() -> None:
    """What the page compares by is found in each rule that it judges."""
    shipped = Shipped(Thresholds())
    from act_exporter.live.words import _CONDITIONS

    for name in _CONDITIONS:
        assert math.isfinite(shipped.alerts[name].limit), name
    assert shipped.alerts["ActLayerHeadroomLow"].limit == 0.5
    assert shipped.alerts["ActRunaway"].limit == 3
    assert shipped.limit("act_attention_logit_bound") == 30
