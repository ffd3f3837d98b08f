"""`pipelab play`: a page that follows a file and that only this machine's user can open.

Each drawing runs in a process of its own, which imports the file anew: nothing is left of the version before.
"""

from __future__ import annotations

import faulthandler
import html
import linecache
import multiprocessing
import os
import re
import secrets
import signal
import sys
import threading
import time
import traceback
import webbrowser
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from importlib.resources import files
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from socketserver import ThreadingTCPServer
from tempfile import TemporaryDirectory
from typing import Annotated
from urllib.parse import urlsplit

import typer

from pipelab.checking.checker import check
from pipelab.cli.options import Sizes, Target, Times, grouped, untimed
from pipelab.cli.printing import echo, is_row
from pipelab.cli.targets import file_of
from pipelab.draw.notebook import faults_page
from pipelab.draw.page import page
from pipelab.errors import PipelabError, UsageError, clean
from pipelab.plan.fault import ScheduleError, line_of
from pipelab.plan.plan import Plan
from pipelab.schedule import Schedule

_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "img-src data:; connect-src 'self'; frame-src 'self'; frame-ancestors 'self'; base-uri 'none'; form-action 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_NAMES = ("127.0.0.1", "localhost")
"""The hosts that a browser may ask for. Another name that leads here is a foreign page's."""
_MOST_PORTS = 100
_LOOK_SECONDS = 0.1
"""How often the files are looked at."""
_ALIVE_SECONDS = 15
"""How often an open page is told that nothing has changed: so it is noticed that it was closed."""
_FRAME = re.compile(r'File "(.+)", line (\d+) in (.+)')
_FAULT = """<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>not drawn</title><style>
:root {{ color-scheme: light dark; }}
pre {{ padding: .8rem 1rem; border-left: 4px solid #d1242f; font: 14px/1.5 ui-monospace, monospace; \
white-space: pre-wrap; overflow-wrap: anywhere; }}
</style><pre role="alert">{}</pre></html>"""
_SPAWN = multiprocessing.get_context("spawn")

_Files = set[tuple[str, int, int, int]]


@grouped
def play(
    target: Target,
    sizes: Sizes,
    times: Times,
    port: Annotated[int, typer.Option(min=1, max=65535, help="where to listen; if taken, the next is used")] = 8383,
    seconds: Annotated[float, typer.Option(min=0.1, help="how long a file may take to give its schedule")] = 10,
    browser: Annotated[bool, typer.Option(help="open the page in the web browser")] = True,
) -> None:
    """Show a page that follows your file.

    The schedule is drawn again whenever the file is saved. Ctrl-C ends it.

    For example: pipelab play my_file.py:MySchedule
    """
    shown = _Shown(target)
    file = file_of(target)
    server = _listening(port, shown)
    url = f"http://127.0.0.1:{server.server_address[1]}/{server.token}/"
    echo(clean(f"pipelab play: {target} at {url} (Ctrl-C ends it)"))
    if browser:
        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt), TemporaryDirectory() as folder:
        while True:
            seen = _files_beside(file)
            drawn = _drawn(file, seen, Path(folder, "stack"), seconds, (target, sizes, times))
            if drawn is not None:
                shown.update(drawn)
            while _files_beside(file) == seen:
                time.sleep(_LOOK_SECONDS)


class _Shown:
    """The picture that is shown, and its version."""

    def __init__(self, target: str) -> None:
        self.target, self.picture, self.version = target, "", 0
        self.changed = threading.Condition()

    def update(self, picture: str) -> None:
        with self.changed:
            self.picture, self.version = picture, self.version + 1
            self.changed.notify_all()


def _files_beside(file: Path | None) -> _Files:
    """Return what changes when a file or a Python file beside it, or beside what it is a link to, is saved."""
    found: _Files = set()
    if file is None:
        return found
    for folder in {file.absolute().parent, file.resolve().parent}:
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(".py") or entry.name in (file.name, file.resolve().name):
                    with suppress(OSError):  # it has just been removed
                        stat = entry.stat()
                        found.add((entry.path, stat.st_mtime_ns, stat.st_size, stat.st_ino))
    return found


# ── One drawing, in a process of its own ──────────────────────────────────────────────────────────────────────────────


def _drawn(file: Path | None, seen: _Files, stack: Path, seconds: float, what: tuple[str, Sizes, Times]) -> str | None:
    """Return the picture, or what is wrong in its place; `None` if a file is saved meanwhile."""
    answers, answer = _SPAWN.Pipe(duplex=False)
    process = _SPAWN.Process(target=_draw, args=(answer, stack, seconds, *what))
    process.start()
    answer.close()
    try:
        while not answers.poll(_LOOK_SECONDS):
            if _files_beside(file) != seen:
                return None
        picture: str = answers.recv()
    except EOFError:
        return _fault(_unanswered(stack.read_text(errors="replace"), seconds, what[0]))
    finally:
        process.kill()
        process.join()
    return picture


def _draw(answer: Connection, stack: Path, seconds: float, target: str, sizes: Sizes, times: Times) -> None:
    """Send the picture, or what is wrong; after so many seconds, end, with the line that ran then in `stack`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the server, which ends this
    sys.dont_write_bytecode = True  # compiled files know a source by its second and its length
    with stack.open("w") as file:
        faulthandler.dump_traceback_later(seconds, exit=True, file=file)
        picture = _picture(target, sizes, times)
        faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()
    answer.send(picture)


def _picture(target: str, sizes: Sizes, times: Times) -> str:
    """Return the page of a schedule or of its faults, or what is wrong in words."""
    try:
        return _page(untimed(sizes.find(target)), times)
    except PipelabError as error:
        lead = "" if isinstance(error, UsageError) else f"{type(error).__name__}: "
        return _fault(f"{lead}{error}")
    except (Exception, SystemExit):  # noqa: BLE001 - whatever a file raises is shown
        return _fault(traceback.format_exc())


def _page(subject: Schedule | Plan, times: Times) -> str:
    faults = check(subject)
    if not faults:
        return page(times.simulated(subject))
    if faults.plan is not None and find_spec("matplotlib"):
        return faults_page(faults)
    raise ScheduleError(faults, faults.subject)


def _unanswered(stack: str, seconds: float, target: str) -> str:
    """Say why there is no answer: what the process left is the stack at its last moment, innermost line first."""
    linecache.checkcache()  # it may hold the lines of an older version
    frames = [traceback.FrameSummary(file, int(line), at) for file, line, at in _FRAME.findall(stack)]
    if not frames:
        return f"{target} ended the Python it ran in: by os._exit, or a crash outside Python"
    move = "does a loop never end? Otherwise, fewer ranks or micro-batches, or pipelab play --seconds 60"
    return f"{target} was stopped after {seconds:g} s\n  at {line_of(frames[::-1])}\n  try: {move}"


def _fault(text: str) -> str:
    """Return a page with a fault. Long lines are wrapped, rows of actions are not."""
    lines = [
        f'<span style="white-space: pre">{html.escape(line)}</span>' if is_row(line) else html.escape(line)
        for line in clean(text, keep="\n\t").splitlines()
    ]
    return _FAULT.format("\n".join(lines))


# ── The server ────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Server(ThreadingTCPServer):
    """What listens; a thread for each question."""

    allow_reuse_address, daemon_threads = True, True

    def __init__(self, port: int, shown: _Shown) -> None:
        super().__init__(("127.0.0.1", port), _Answer)
        self.shown, self.token = shown, secrets.token_urlsafe(16)


def _listening(port: int, shown: _Shown) -> _Server:
    """Return a server at this port of this machine's own address, or at the next that is free."""
    for free in range(port, min(port + _MOST_PORTS, 65536)):
        with suppress(OSError):
            return _Server(free, shown)
    raise UsageError(f"the {_MOST_PORTS} ports from {port} on are all taken: give another, --port 9000")


class _Answer(BaseHTTPRequestHandler):
    """What answers: the page, the picture in it, and the stream of versions."""

    server: _Server

    def do_GET(self) -> None:
        """Refuse requests without the token, and those that came by another name or from another page."""
        token, _, path = urlsplit("/" + self.path.lstrip("/")).path.removeprefix("/").partition("/")
        with suppress(ConnectionError):  # the page was closed
            if not self._is_our_page() or not secrets.compare_digest(token.encode(), self.server.token.encode()):
                self._send("pipelab play prints the address to open", 403, "text/plain")
            elif path == "":
                name = html.escape(clean(self.server.shown.target))
                source = (files("pipelab.cli") / "play.html").read_text(encoding="utf-8")
                self._send(source.replace("{{name}}", name))
            elif path == "draw":
                self._send(self.server.shown.picture)
            elif path == "versions":
                self._versions()
            else:
                self._send("there is no such page", 404, "text/plain")

    def _is_our_page(self) -> bool:
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        return re.sub(r":\d+$", "", host) in _NAMES and origin in (None, f"http://{host}")

    def _versions(self) -> None:
        """Answer with the version now, and each that follows."""
        self._begin(200, "text/event-stream")
        shown, told = self.server.shown, 0
        while True:
            with shown.changed:
                shown.changed.wait_for(lambda: shown.version != told, timeout=_ALIVE_SECONDS)  # noqa: B023 - it ends here
            line = ":" if told == shown.version else f"data: {shown.version}"
            told = shown.version
            self.wfile.write(f"{line}\n\n".encode())

    def _send(self, text: str, status: int = 200, kind: str = "text/html") -> None:
        self._begin(status, kind)
        self.wfile.write(text.encode())

    def _begin(self, status: int, kind: str) -> None:
        self.send_response_only(status)
        for name, value in (_HEADERS | {"Content-Type": f"{kind}; charset=utf-8"}).items():
            self.send_header(name, value)
        self.end_headers()
