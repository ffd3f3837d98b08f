"""`pipelab play`: the command, and the server of its page, which only this machine's user can open."""

from __future__ import annotations

import html
import json
import linecache
import os
import re
import secrets
import select
import signal
import sys
import threading
import time
import traceback
import webbrowser
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from importlib.resources import files
from pathlib import Path
from socketserver import ThreadingTCPServer
from subprocess import PIPE, Popen
from typing import Annotated
from urllib.parse import parse_qsl, urlsplit

import typer

import pipelab
from pipelab.catalogue import schedules
from pipelab.cli.printing import echo, is_row
from pipelab.cli.targets import file_of, has_sizes
from pipelab.draw import wording
from pipelab.draw.bars import shapes
from pipelab.errors import UsageError, clean
from pipelab.plan.fault import line_of
from pipelab.simulation.clock import simulate

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
_GRACE_SECONDS = 60
"""The process ends a drawing itself. So much later, and so long after its own start, it is taken to be stuck."""
_LOOK_SECONDS = 0.1
"""How often the files are looked at."""
_ALIVE_SECONDS = 15
"""How often an open page is told that nothing has changed: so it is noticed that it was closed."""
_FRAME = re.compile(r'File "(.+)", line (\d+) in (.+)')


def play_command(
    target: Annotated[
        str | None,
        typer.Argument(
            help="my_file.py:MySchedule, plan.csv or a schedule's name; without it, a gallery of all schedules",
            show_default=False,
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="where to listen; if taken, the next is used")] = 8383,
    seconds: Annotated[float, typer.Option(min=0.1, help="how long a file may take to give its schedule")] = 10,
    browser: Annotated[bool, typer.Option(help="open the page in the web browser")] = True,
) -> None:
    """Show a page that follows your file, with sliders.

    The schedule is drawn again whenever the file is saved. Ctrl-C ends it.

    For example: pipelab play my_file.py:MySchedule
    """
    if not hasattr(os, "fork"):
        raise UsageError("pipelab play needs Linux or macOS; on Windows, run it in WSL")
    stage = _Stage(target, file_of(target) if target is not None else None, seconds)
    server = _listening(port, stage)
    url = f"http://127.0.0.1:{server.server_address[1]}/{server.token}/"
    echo(clean(f"pipelab play: {target or 'all schedules'} at {url} (Ctrl-C ends it)"))
    if browser:
        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
    threading.Thread(target=stage.watch, daemon=True).start()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with suppress(KeyboardInterrupt), server:
            server.serve_forever(poll_interval=0.1)
    finally:
        stage.stop()


class _Stage:
    """What is shown, its version, and the process that draws it: no student's file runs in the server's own."""

    def __init__(self, target: str | None, file: Path | None, seconds: float) -> None:
        self.target, self.file, self.seconds = target, file, seconds
        self.version = 0
        self.saved = threading.Condition()
        self._turn = threading.Lock()
        self._process: Popen[bytes] | None = None

    def watch(self) -> None:
        """Count the file's versions. A Python file beside it may be one that it imports."""
        if self.file is None:
            return
        before = _files_beside(self.file)
        while True:
            time.sleep(_LOOK_SECONDS)
            now = _files_beside(self.file)
            if now == before:
                continue
            before = now
            with self.saved:
                self.version += 1
                self.saved.notify_all()
            process = self._process
            if process is not None and self._turn.locked():
                process.send_signal(signal.SIGUSR1)  # what is being drawn is out of date, and may not end

    def draw(self, asked: dict[str, str]) -> dict[str, str]:
        """Return the `page` of a schedule as its file is now, or its `fault` in words."""
        while True:
            with self._turn:
                version = self.version
                if self._process is None or self._process.poll() is not None:
                    self._process = self._started()
                said = _asked(self._process, asked, self.seconds + _GRACE_SECONDS)
                if not said.endswith(b"\0"):
                    self.stop()
            if version == self.version:
                break
        try:
            answer: dict[str, str] = json.loads(said.rstrip(b"\0"))
        except ValueError:
            answer = {"fault": self._unanswered(said.decode(errors="replace"), asked["schedule"])}
        return answer

    def _started(self) -> Popen[bytes]:
        """Start the process that draws, with what the student's file may need: never a module beside the file."""
        root = str(Path(pipelab.__file__).parents[1])
        run = "runpy.run_module('pipelab.cli.play', run_name='__main__')"
        torch = self.file is not None and self.file.is_file() and b"import torch" in self.file.read_bytes()
        code = f"import runpy, sys; sys.path.append({root!r}); {run}"
        command = [sys.executable, "-BPc", code, str(self.seconds), *["torch"] * torch]
        return Popen(command, stdin=PIPE, stdout=PIPE, start_new_session=True)  # noqa: S603 - pipelab's own

    def stop(self) -> None:
        """End the process that draws, and all that it started."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _unanswered(self, said: str, name: str) -> str:
        """Say why there is no answer: what the process left is the stack at its last moment, innermost line first."""
        linecache.checkcache()  # it may hold the lines of an older version
        frames = [traceback.FrameSummary(file, int(line), at) for file, line, at in _FRAME.findall(said)]
        if not frames:
            return f"{clean(name)} ended the Python it ran in: by os._exit, or a crash outside Python"
        where = f"\n  at {line_of(frames[::-1])}"
        move = "does a loop never end? Otherwise, fewer ranks or micro-batches, or pipelab play --seconds 60"
        return clean(f"{name} was stopped after {self.seconds:g} s{where}\n  try: {move}", keep="\n\t")


def _files_beside(file: Path) -> set[tuple[str, int, int, int]]:
    """Return what changes when a file or a Python file beside it, or beside what it is a link to, is saved."""
    found = set()
    for folder in {file.absolute().parent, file.resolve().parent}:
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(".py") or entry.name in (file.name, file.resolve().name):
                    with suppress(OSError):  # it has just been removed
                        stat = entry.stat()
                        found.add((entry.path, stat.st_mtime_ns, stat.st_size, stat.st_ino))
    return found


def _asked(process: Popen[bytes], asked: dict[str, str], seconds: float) -> bytes:
    """Return what a process answers, up to a zero byte; without one, the process has ended or takes too long."""
    assert process.stdin is not None
    assert process.stdout is not None
    answers, deadline, said = process.stdout.fileno(), time.monotonic() + seconds, b""
    with suppress(OSError):
        process.stdin.write(json.dumps(asked).encode() + b"\n")
        process.stdin.flush()
        while not said.endswith(b"\0") and select.select([answers], [], [], max(0.0, deadline - time.monotonic()))[0]:
            more = os.read(answers, 1 << 16)
            if not more:
                break
            said += more
    return said


class _Server(ThreadingTCPServer):
    """What listens; a thread for each question."""

    allow_reuse_address, daemon_threads = True, True

    def __init__(self, port: int, stage: _Stage) -> None:
        super().__init__(("127.0.0.1", port), _Answer)
        self.stage, self.token = stage, secrets.token_urlsafe(16)


def _listening(port: int, stage: _Stage) -> _Server:
    """Return a server at this port of this machine's own address, or at the next that is free."""
    for each in range(port, min(port + _MOST_PORTS, 65536)):
        with suppress(OSError):
            return _Server(each, stage)
    raise UsageError(f"the {_MOST_PORTS} ports from {port} on are all taken: give another, --port 9000")


class _Answer(BaseHTTPRequestHandler):
    """What answers: the page, the picture in it, and the stream of versions."""

    server: _Server

    def do_GET(self) -> None:
        """Refuse who has no token, and whoever's browser was led here by another name or from another page."""
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        address = urlsplit("/" + self.path.lstrip("/"))
        token, _, path = address.path.removeprefix("/").partition("/")
        asked = dict(parse_qsl(address.query, keep_blank_values=True))
        answers = {"": self._page, "draw": self._draw, "versions": self._versions}
        with suppress(ConnectionError):  # the page was closed
            if (
                not secrets.compare_digest(token.encode(), self.server.token.encode())
                or re.sub(r":\d+$", "", host) not in _NAMES
                or origin not in (None, f"http://{host}")
            ):
                self._send("pipelab play prints the address to open", 403, "text/plain")
            elif path in answers:
                answers[path](asked)
            else:
                self._send("there is no such page", 404, "text/plain")

    def _page(self, asked: dict[str, str]) -> None:
        stage, name = self.server.stage, asked.get("schedule", "")
        if name in schedules or (not name and stage.target is not None and "gallery" not in asked):
            self._send(_player(name, stage))
        else:
            self._send(_gallery(stage.target))

    def _draw(self, asked: dict[str, str]) -> None:
        stage, name = self.server.stage, asked.get("schedule", "")
        answer = stage.draw(asked | {"schedule": name if name in schedules else stage.target or ""})
        self._send(answer.get("page") or _fault(answer["fault"]))

    def _versions(self, _: dict[str, str]) -> None:
        """Answer with the version now, and each that follows."""
        self._begin(200, "text/event-stream")
        stage, told = self.server.stage, -1
        while True:
            with stage.saved:
                stage.saved.wait_for(lambda: stage.version != told, timeout=_ALIVE_SECONDS)  # noqa: B023 - it ends here
            line = ":" if told == stage.version else f"data: {stage.version}"
            told = stage.version
            self.wfile.write(f"{line}\n\n".encode())

    def _send(self, text: str, status: int = 200, kind: str = "text/html") -> None:
        self._begin(status, kind)
        self.wfile.write(text.encode())

    def _begin(self, status: int, kind: str) -> None:
        self.send_response_only(status)
        for name, value in (_HEADERS | {"Content-Type": f"{kind}; charset=utf-8"}).items():
            self.send_header(name, value)
        self.end_headers()


def _filled(file: str, **parts: str) -> str:
    """Return a page with its places filled in one pass, so that what looks like a place in a name stays a name."""
    source = (files("pipelab.cli.play") / file).read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], source)


def _fault(text: str) -> str:
    """Return a page with a fault. Long lines are wrapped, rows of actions are not."""
    lines = [
        f'<span class="row">{html.escape(line)}</span>' if is_row(line) else html.escape(line)
        for line in text.splitlines()
    ]
    return _filled("fault.html", fault="\n".join(lines))


def _player(name: str, stage: _Stage) -> str:
    """Return the page around the picture: of a schedule with this name, or else of the target."""
    target = name or stage.target or ""
    sizes = "disabled hidden" if has_sizes(target) else ""
    shown = {"name": clean(target), "schedule": name, "sizes": sizes, "version": str(stage.version)}
    escaped = {place: html.escape(text) for place, text in shown.items()}
    return _filled("play.html", **escaped, sliders=_filled("sliders.html", sizes=sizes))


def _gallery(target: str | None) -> str:
    back = f'<p><a href="?">{html.escape(clean(target))}</a></p>' if target is not None else ""
    return _filled("gallery.html", back=back, cards="\n".join(_card(name) for name in schedules))


def _card(name: str) -> str:
    kind = schedules[name]
    trace = simulate(kind(4, 8))
    words = [(kind.__doc__ or "").strip().splitlines()[0], wording.figures(trace), kind.source]
    lines = "".join(f"<p>{html.escape(each.replace('`', ''))}</p>" for each in words)
    box = f'viewBox="0 0 320 {20 * trace.ranks}" preserveAspectRatio="none" aria-hidden="true"'
    bars = shapes(trace, 320 / trace.makespan, 20, words=False)
    head = f"<h2>{html.escape(name)}</h2><svg {box}>{bars}</svg>"
    return f'<a class="card" href="?schedule={html.escape(name)}">{head}{lines}</a>'
