"""The page as people see it: in headless Chromium, with scripts and without, and under axe-core."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from act_exporter import Exporter
from deploy.demo.servers import REPOSITORY, wait_for
from tests.act_exporter.browser import NARROW, WIDE, chromium
from tests.act_exporter.page_scenes import (
    DEEP_FAULT_LAYER,
    DEEP_FAULT_STEP,
    FAULT_LAYER,
    FAULT_STEP,
    Guarded,
    deep,
    guarded,
)

AXE = REPOSITORY / "tests" / "node" / "node_modules" / "axe-core" / "axe.min.js"
LARGEST = 100_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded(tmp_path_factory.mktemp("run")) as run:
        yield run


@pytest.fixture(scope="module")
def thousand() -> Iterator[Exporter]:
    with deep() as exporter:
        yield exporter


@pytest.fixture
def complaints() -> list[str]:
    """What the browser's console has said: errors, and what the policy forbade."""
    return []


def opened(
    browser: Browser, exporter: Exporter, complaints: list[str], query: str = "", **options: Any
) -> tuple[BrowserContext, Page]:
    context = browser.new_context(**{"viewport": WIDE, **options})
    page = context.new_page()
    page.on("console", lambda said: complaints.append(f"{said.type}: {said.text}"))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    answer = page.goto(f"http://127.0.0.1:{exporter.port}/{query}")
    assert answer is not None
    assert answer.status == 200
    return context, page


def state(page: Page) -> str:
    return page.locator("#state").inner_text()


@pytest.mark.parametrize("scripts", [True, False], ids=["with scripts", "without scripts"])
class TestEssentials:
    def test_of_a_run_of_twelve_blocks(
        self, browser: Browser, run: Guarded, complaints: list[str], scripts: bool
    ) -> None:
        context, page = opened(browser, run.exporter, complaints, java_script_enabled=scripts)
        said = state(page)
        assert f"{FAULT_LAYER} output went bad first, at step {FAULT_STEP}" in said
        assert "times its baseline" in said
        assert "ActLayerAboveBaseline asked for a backup checkpoint" in said
        first = page.locator("#rows tr").first
        assert FAULT_LAYER in first.inner_text()
        assert "first" in first.inner_text()
        assert page.locator("#rows tr").count() == 40
        assert page.locator("#depth svg .mark", has_text="first").is_visible()
        assert page.locator("#depth svg .mark", has_text="plateau").is_visible()
        assert page.locator("#numbers svg").count() == 3  # loss, gradient norm, learning rate
        assert complaints == []
        context.close()

    def test_of_one_of_1_200_blocks(
        self, browser: Browser, thousand: Exporter, complaints: list[str], scripts: bool
    ) -> None:
        context, page = opened(browser, thousand, complaints, java_script_enabled=scripts)
        assert f"{DEEP_FAULT_LAYER} output went bad first, at step {DEEP_FAULT_STEP}" in state(page)
        assert f"First: {DEEP_FAULT_LAYER} output" in page.locator("#depth").inner_text()
        page.get_by_role("link", name="Next").click()
        expect(page.locator("#found")).to_have_text("41 to 80 of 7,203 tensors")
        page.get_by_label("Name contains").fill("blocks.700.")
        page.get_by_label("Order").select_option("depth")
        page.get_by_role("button", name="Show").click()
        expect(page.locator("#found")).to_contain_text("1 to 5 of 5 tensors")
        assert DEEP_FAULT_LAYER in page.locator("#rows").inner_text()
        assert complaints == []
        context.close()


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
class TestForEverybody:
    def test_axe_finds_nothing(
        self, browser: Browser, run: Guarded, thousand: Exporter, size: Any, scheme: Any
    ) -> None:
        for exporter in (run.exporter, thousand):
            context, page = opened(
                browser, exporter, [], viewport=size, color_scheme=scheme, bypass_csp=True
            )
            page.add_script_tag(path=AXE)
            found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
            assert found["passes"]
            assert [
                (one["id"], [node["html"][:200] for node in one["nodes"][:3]])
                for one in found["violations"]
            ] == []
            context.close()

    def test_the_page_itself_never_scrolls_sideways(
        self, browser: Browser, run: Guarded, thousand: Exporter, size: Any, scheme: Any
    ) -> None:
        for exporter in (run.exporter, thousand):
            context, page = opened(browser, exporter, [], viewport=size, color_scheme=scheme)
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= size["width"]
            context.close()


class TestKeyboard:
    def test_reaches_form_table_and_pages(
        self, browser: Browser, run: Guarded, complaints: list[str]
    ) -> None:
        context, page = opened(browser, run.exporter, complaints, viewport=NARROW)
        reached = []
        for _ in range(10):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("document.activeElement.id"))
            outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            assert outline == "solid" or not reached[-1]
        assert reached[:6] == ["hold", "find", "sort", "show", "scroll", "next"]
        page.locator("#scroll").focus()
        page.keyboard.press("ArrowRight")
        # Not wait_for_function, which evaluates in the page: its policy forbids that.
        scrolled = "document.getElementById('scroll').scrollLeft"
        wait_for(lambda: page.evaluate(scrolled) > 0, "the table scrolls")
        context.close()


class TestRefreshing:
    def test_shows_what_is_new_and_leaves_the_reader_alone(
        self, browser: Browser, run: Guarded, complaints: list[str]
    ) -> None:
        context, page = opened(browser, run.exporter, complaints)
        page.get_by_label("Name contains").fill("half typed")
        page.evaluate("scrollTo(0, 600)")
        run.go(3)
        now = run.exporter._training.step
        expect(page.locator("#numbers dd strong").first).to_have_text(f"{now}", timeout=20_000)
        assert page.evaluate("document.activeElement.id") == "find"
        assert page.get_by_label("Name contains").input_value() == "half typed"
        assert page.evaluate("scrollY") == 600
        page.locator("#next").focus()
        run.go(1)
        expect(page.locator("#numbers dd strong").first).to_have_text(f"{now + 1}", timeout=20_000)
        assert page.evaluate("document.activeElement.id") == "next"
        assert complaints == []
        context.close()

    def test_can_be_stopped(self, browser: Browser, run: Guarded, complaints: list[str]) -> None:
        context, page = opened(browser, run.exporter, complaints)
        page.locator("#hold").click()
        expect(page.locator("#hold")).to_have_text("Refresh by itself again")
        assert page.evaluate("document.body.dataset.hold") == ""
        assert "http-equiv" not in page.content()
        context.close()

    def test_without_scripts_the_page_reloads_itself(self, run: Guarded) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{run.exporter.port}/") as answer:
            body = answer.read().decode()
        assert '<noscript><meta http-equiv="refresh" content="15"></noscript>' in body

    def test_says_so_when_nothing_answers(
        self, browser: Browser, run: Guarded, complaints: list[str]
    ) -> None:
        context, page = opened(browser, run.exporter, complaints)
        context.set_offline(True)
        expect(page.locator("#fresh")).to_contain_text("No answer", timeout=20_000)
        context.set_offline(False)
        expect(page.locator("#fresh")).not_to_contain_text("No answer", timeout=20_000)
        context.close()


@pytest.mark.parametrize("query", ["", "?sort=depth&page=9", "?find=blocks.7"])
def test_is_below_100_kb(run: Guarded, thousand: Exporter, query: str) -> None:
    for exporter in (run.exporter, thousand):
        with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/{query}") as answer:
            assert len(answer.read()) < LARGEST


def test_is_below_100_kb_when_everything_is_bad_and_names_are_long(tmp_path: Path) -> None:
    """Each tensor with a wild line, a long name full of what is escaped, and NaN in it."""
    import torch
    from torch import nn

    from act_exporter import start_exporter

    class Wild(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.step += 1
            wild = 10.0 ** (self.step * 7 % 30 - 15)
            return x * 0 + (wild if self.step % 9 else float("nan"))

    model = nn.Sequential()
    model.add_module("start", nn.Linear(1, 1))
    for number in range(60):
        model.add_module(f"<'\"&>{number:03}" * 12, Wild())
    with start_exporter(model, 0, watch="all", gradients=False) as exporter:
        for step in range(1, 600):
            model(torch.ones(1, 1))
            exporter.step(step)
        with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/") as answer:
            assert len(answer.read()) < LARGEST
