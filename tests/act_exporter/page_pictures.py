"""Screenshots of the exporter's own page, for the documentation and for people to look at.

    python -m tests.act_exporter.page_pictures

The three in docs/images show the anomaly of a run under a guard; build/page has that run and one of
1,200 blocks, before and after its rollback, wide and narrow, light and dark.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from playwright.sync_api import Browser

from deploy.demo.servers import REPOSITORY
from tests.act_exporter.browser import NARROW, WIDE, chromium
from tests.act_exporter.page_scenes import deep, guarded

DOCS = REPOSITORY / "docs" / "images"
BUILD = REPOSITORY / "build" / "page"


def shoot(browser: Browser, port: int | None, name: str, query: str = "") -> None:
    """All of the page, in four ways."""
    for width, size in (("wide", WIDE), ("narrow", NARROW)):
        for scheme in ("light", "dark"):
            context = browser.new_context(viewport=size, color_scheme=scheme)
            page = context.new_page()
            page.goto(f"http://127.0.0.1:{port}/?hold=1&{query}")
            page.screenshot(path=BUILD / f"{name}-{width}-{scheme}.png", full_page=True)
            if name == "anomaly" and (width, scheme) != ("narrow", "dark"):
                picture = "page-narrow" if width == "narrow" else f"page-{width}-{scheme}"
                page.screenshot(path=DOCS / f"{picture}.png")
            context.close()


def main() -> None:
    DOCS.mkdir(parents=True, exist_ok=True)
    BUILD.mkdir(parents=True, exist_ok=True)
    with chromium() as browser:
        with tempfile.TemporaryDirectory() as folder, guarded(Path(folder)) as run:
            shoot(browser, run.exporter.port, "anomaly")
            run.ask("recover", "ActRunaway")
            run.go(30)
            shoot(browser, run.exporter.port, "recovered")
        with deep() as exporter:
            shoot(browser, exporter.port, "deep")
            shoot(browser, exporter.port, "deep-find", "find=blocks.70&sort=depth&page=2")


if __name__ == "__main__":
    main()
