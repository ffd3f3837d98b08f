"""`pipelab play`: the command, and the server of its page, which only this machine's user can open."""

from __future__ import annotations

import asyncio
import html
import json
import linecache
import os
import re
import secrets
import signal
import socket
import sys
import threading
import traceback
import webbrowser
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from importlib.resources import files
from pathlib import Path
from subprocess import PIPE, Popen
from typing import TYPE_CHECKING, Annotated

import typer

import pipelab
from pipelab.catalogue import schedules
from pipelab.cli.printing import echo, is_row
from pipelab.cli.targets import file_of, has_sizes
from pipelab.draw import colours, wording
from pipelab.draw.bars import Lanes
from pipelab.errors import UsageError, clean
from pipelab.plan.fault import line_of
from pipelab.simulation.clock import simulate

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send
    from watchfiles import Change

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
    """Show a page with sliders that draws a schedule again when its file is saved. Ctrl-C ends it.

    For example: pipelab play my_file.py:MySchedule
    """
    if not hasattr(os, "fork"):
        raise UsageError("pipelab play needs Linux or macOS; on Windows, run it in WSL")
    try:
        import uvicorn
        import watchfiles  # noqa: F401 - missing, it is named here
        from starlette.applications import Starlette  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"pipelab play needs three packages ({error})\n  try: pip install starlette uvicorn watchfiles"
        ) from error
    file = file_of(target) if target is not None else None
    token = secrets.token_urlsafe(16)
    listening = _listening(port)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}/{token}/"
    echo(clean(f"pipelab play: {target or 'all schedules'} at {url} (Ctrl-C ends it)"))
    if browser:
        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:  # asyncio.run ends all at once; uvicorn would wait for open pages
            yield

    async def serve() -> None:
        stage = _Stage(target, file, seconds)
        config = uvicorn.Config(
            _app(stage, token), log_level="critical", lifespan="off", ws="none", server_header=False
        )
        try:
            await asyncio.gather(Server(config).serve([listening]), stage.watch())
        finally:
            stage.stop()

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt), listening:
        asyncio.run(serve())


def _listening(port: int) -> socket.socket:
    """Return a socket at this port of this machine's own address, or at the next that is free."""
    for each in range(port, min(port + _MOST_PORTS, 65536)):
        with suppress(OSError):
            return socket.create_server(("127.0.0.1", each))
    raise UsageError(f"the {_MOST_PORTS} ports from {port} on are all taken: give another, --port 9000")


class _Stage:
    """What is shown, its version, and the process that draws it: no student's file runs in the server's own."""

    def __init__(self, target: str | None, file: Path | None, seconds: float) -> None:
        self.target, self.file, self.seconds = target, file, seconds
        self.version = 0
        self._saved = asyncio.Event()
        self._turn = asyncio.Lock()
        self._process: Popen[bytes] | None = None

    async def watch(self) -> None:
        """Count the file's versions. A Python file beside it may be one that it imports."""
        if self.file is None:
            return
        import watchfiles

        file = self.file

        def concerns(_: Change, path: str) -> bool:
            return path.endswith(".py") or Path(path).name in (file.name, file.resolve().name)

        folders = {file.absolute().parent, file.resolve().parent}
        async for _ in watchfiles.awatch(*folders, watch_filter=concerns, debounce=400, step=20, recursive=False):
            self.version += 1
            if self._process is not None and self._turn.locked():
                self._process.send_signal(signal.SIGUSR1)  # what is being drawn is out of date, and may not end
            self._saved.set()
            self._saved = asyncio.Event()

    async def versions(self) -> AsyncIterator[int]:
        """Yield the version now, and each that follows."""
        while True:
            saved = self._saved
            yield self.version
            await saved.wait()

    async def draw(self, asked: dict[str, str]) -> dict[str, str]:
        """Return the `page` of a schedule as its file is now, or its `fault` in words."""
        while True:
            async with self._turn:
                version = self.version
                if self._process is None or self._process.poll() is not None:
                    self._process = self._started()
                try:
                    said = await asyncio.wait_for(
                        asyncio.to_thread(_asked, self._process, asked), self.seconds + _GRACE_SECONDS
                    )
                except TimeoutError:
                    said = b""
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


def _asked(process: Popen[bytes], asked: dict[str, str]) -> bytes:
    """Return what a process answers, up to a zero byte; without one, the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    said = b""
    with suppress(OSError):
        process.stdin.write(json.dumps(asked).encode() + b"\n")
        process.stdin.flush()
        while not said.endswith(b"\0") and (more := os.read(process.stdout.fileno(), 1 << 16)):
            said += more
    return said


def _app(stage: _Stage, token: str) -> ASGIApp:
    """Return what answers: the page, the picture in it, and the stream of versions."""
    from starlette.applications import Starlette
    from starlette.responses import HTMLResponse, PlainTextResponse, StreamingResponse
    from starlette.routing import Route

    async def page(request: Request) -> Response:
        name = request.query_params.get("schedule", "")
        if name in schedules or (not name and stage.target is not None and "gallery" not in request.query_params):
            return HTMLResponse(_player(name, stage), headers=_HEADERS)
        return HTMLResponse(await asyncio.to_thread(_gallery, stage.target), headers=_HEADERS)

    async def draw(request: Request) -> Response:
        asked = dict(request.query_params)
        asked["schedule"] = name if (name := asked.get("schedule", "")) in schedules else stage.target or ""
        answer = await stage.draw(asked)
        shown = answer.get("page") or _fault(answer["fault"])
        return HTMLResponse(shown, headers=_HEADERS)

    async def versions(_: Request) -> Response:
        lines = (f"data: {version}\n\n" async for version in stage.versions())
        return StreamingResponse(lines, media_type="text/event-stream", headers=_HEADERS)

    paths = {"": page, "draw": draw, "versions": versions}
    app = Starlette(routes=[Route(f"/{token}/{path}", endpoint) for path, endpoint in paths.items()])

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse who has no token, and whoever's browser was led here by another name or from another page."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get("host", ""), headers.get("origin")
        knows = secrets.compare_digest(scope["path"].partition("/")[2].partition("/")[0].encode(), token.encode())
        if knows and re.sub(r":\d+$", "", host) in _NAMES and origin in (None, f"http://{host}"):
            await app(scope, receive, send)
        else:
            await PlainTextResponse("pipelab play prints the address to open", 403)(scope, receive, send)

    return guarded


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
    """Return a page with a card for each schedule that comes with pipelab."""
    back = f'<p><a href="?">{html.escape(clean(target))}</a></p>' if target is not None else ""
    return _filled("gallery.html", back=back, cards="\n".join(_card(name) for name in schedules))


def _card(name: str) -> str:
    """Return a schedule's card: a small picture, its figures, and where it comes from."""
    kind = schedules[name]
    trace = simulate(kind(4, 8))
    lanes = Lanes(trace)
    bars = "".join(
        f'<path fill="{colours.of(bar.action)}" d="M{bar.start:g} {rank + (bar.half == "lower") / 2:g}'
        f'H{bar.end:g}v{0.9 if bar.half == "whole" else 0.45}H{bar.start:g}z"/>'
        for rank in range(trace.ranks)
        for bar in lanes.bars(rank)
    )
    words = [(kind.__doc__ or "").strip().splitlines()[0], wording.figures(trace), kind.source]
    lines = "".join(f"<p>{html.escape(each.replace('`', ''))}</p>" for each in words)
    box = f'viewBox="0 0 {trace.makespan:g} {trace.ranks}" preserveAspectRatio="none" aria-hidden="true"'
    head = f"<h2>{html.escape(name)}</h2><svg {box}>{bars}</svg>"
    return f'<a class="card" href="?schedule={html.escape(name)}">{head}{lines}</a>'
