"""A real Chromium, driven by the DevTools protocol; Debian's or the machine's, never one that is downloaded."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# As root, as in a container, Chromium has no sandbox; nothing is asked of other hosts.
ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
DESKTOP, PHONE = (1280, 800), (390, 844)


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """A browser of playwright's sync_api, which must not run inside an event loop."""
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: make programs")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        running = play.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        try:
            yield running
        finally:
            running.close()
