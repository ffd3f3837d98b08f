"""Chromium, for tests that look at pages."""

from __future__ import annotations

import shutil
import time

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def wait_until(tab, holds, seconds=60):
    """Wait until an expression holds. Playwright's own waiting needs an eval, which the page forbids."""
    deadline = time.monotonic() + seconds
    while not tab.evaluate(holds):
        assert time.monotonic() < deadline, holds
        tab.wait_for_timeout(20)
