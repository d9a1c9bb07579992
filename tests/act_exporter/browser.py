"""Debian's Chromium, driven by Playwright; nothing is fetched."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator

from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
WIDE = {"width": 1280, "height": 900}
NARROW = {"width": 375, "height": 812}


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A headless one."""
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    assert path is not None, f"none of {', '.join(NAMES)} is on the PATH"
    with sync_playwright() as playwright:
        # Its sandbox needs rights that containers do not give; all that it opens is our own page.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
