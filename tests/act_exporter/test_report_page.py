"""The report's page itself: needs nothing else, runs nothing, and can be read by everybody."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from deploy.demo.servers import REPOSITORY
from tests.act_exporter.journals import note, steady, write
from tests.act_exporter.test_report import page_of, text_of

AXE = REPOSITORY / "tests" / "node" / "node_modules" / "axe-core" / "axe.min.js"
EVIL = '<script>alert("1")</script>&amp;$x_1$ 層'
LAYERS = ("a", EVIL, "c")


class References(HTMLParser):
    """Collects what a page refers to, and its elements."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.elements: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "srcset", "data", "action", "poster"):
                self.found.append(value or "")
            self.found += re.findall(r"url\(([^)]*)\)", value or "")

    def handle_data(self, data: str) -> None:
        self.found += re.findall(r"url\(([^)]*)\)|@import\s+(\S+)", data)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a layer whose name would be a script, with a rollback that all is known of."""
    bad = {(step, EVIL): 500.0 for step in range(250, 260)}
    told = [
        note("checkpoint", 200, name="step-200", kind="periodic", health="pending", why="<b>"),
        note("onset", 250, layer=EVIL, tensor="output", rule="hard", verdict="activation"),
        note("request", 257, id="1", action="recover", alert="<i>Alert", created_at=1.8e9 + 255),
        note("checkpoint", 259, name="step-259", kind="emergency", health="suspect", why="people"),
        {**note("rollback", 259, to=1), "time": 1.8e9 + 259.2},
        {
            **note("rollback", 200, onset=250, from_step=259, resumed_from="step-200"),
            **{"time": 1.8e9 + 259.3, "resumed_step": 200},
            **{"why": ["step-259: its kind, <u>emergency"], "remedies": ["skipping <s>"]},
        },
    ]
    numbers = [
        note("training", step, loss="NaN" if step == 255 else 2 + step % 5, grad_norm=1.0)
        for step in range(1, 260)
    ]
    again = [
        {**entry, "time": entry["time"] + 59.5}
        for entry in steady(LAYERS, range(201, 360), generation=1)
    ]
    entries = [*steady(LAYERS, range(1, 260), bad), *told, *numbers, *again]
    return page_of(write(tmp_path_factory.mktemp("page"), entries))


def test_refers_to_nothing_outside(page: str) -> None:
    references = References(page)
    outside = [it for it in references.found if it[:1] != "#" and not it.startswith("data:image/")]
    assert outside == []
    assert "script" not in references.elements
    assert "Content-Security-Policy" in page


def test_names_from_the_run_are_text(page: str) -> None:
    assert EVIL in text_of(page)
    assert {"b", "i", "u", "s"}.isdisjoint(References(page).elements)
    assert "skipping <s>" in text_of(page)


def test_has_one_first_heading_and_a_name_for_each_picture(page: str) -> None:
    elements = References(page).elements
    assert elements.count("h1") == 1
    assert elements.count("h2") >= 5
    pictures = re.findall(r"<svg [^>]*>", page)
    assert len(pictures) == 2
    assert all(re.search(r'role="img" aria-label="[^"]{20,}"', picture) for picture in pictures)


def test_no_two_elements_have_the_same_id(page: str) -> None:
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids)) > 0


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        yield chromium
        chromium.close()


def opened(browser: Browser, file: Path, **options: object) -> tuple[Page, list[str]]:
    """The page as a browser shows it, and all that the browser complains about."""
    view = browser.new_page(**options)  # type: ignore[arg-type]
    said: list[str] = []
    view.on("console", lambda message: said.append(message.text))
    view.on("pageerror", lambda error: said.append(str(error)))
    view.on("request", lambda request: said.append(request.url))
    view.goto(file.as_uri())
    return view, said


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 380])
def test_a_browser_has_nothing_to_complain_about(
    browser: Browser, page: str, tmp_path: Path, width: int, scheme: str
) -> None:
    file = tmp_path / "report.html"
    file.write_text(page)
    options = {"viewport": {"width": width, "height": 800}, "color_scheme": scheme}
    view, said = opened(browser, file, **options)
    assert [it for it in said if it != file.as_uri() and not it.startswith("data:")] == []
    # The page itself does not scroll sideways; what is wide scrolls in itself.
    assert view.evaluate("document.documentElement.scrollWidth") <= width
    view.close()
    # Of axe alone: the page lets no script run.
    view, _ = opened(browser, file, bypass_csp=True, **options)
    view.add_script_tag(path=AXE)
    violations = view.evaluate("axe.run().then(found => found.violations)")
    assert [(it["id"], it["nodes"][0]["html"][:200]) for it in violations] == []
    view.close()
