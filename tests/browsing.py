"""Chromium, for tests that look at pages."""

from __future__ import annotations

import shutil
import threading
import time
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

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


def complaints_of(tab, *allowed):
    """Return the list of what a tab complains about from now on: errors, what it logs, and requests to elsewhere."""
    found = []
    tab.on("pageerror", lambda error: found.append(str(error)))
    tab.on("console", lambda message: found.append(message.text))
    tab.on("request", lambda request: request.url.startswith(allowed) or found.append(request.url))
    return found


@contextmanager
def served(folder):
    """Serve a folder to this machine alone; yield its address."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
