"""The process that runs submissions, one after the other: `python -m pipelab.labs.grading.server`.

It imports PyTorch once, and forks for each submission. A line of JSON on its standard input names the submission, and a
line on its standard output is the result. The fork runs the submission and reports through a pipe; this process
watches the time, the output and the processes, and ends all of them.

This is no sandbox. It stops accidents and simple tricks, not an attacker: code that calls the C library can do
whatever the user who grades can do.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import random
import secrets
import selectors
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch

from pipelab.labs.grading import homework4, schedules
from pipelab.labs.grading.guard import Guard, allow_memory, limit_memory, watch_functions
from pipelab.labs.grading.tasks import Assignment, raised

__all__ = ["main"]

_KEPT = 4000
"""Characters of a submission's output that the grade shows."""

_GRACE = 0.3
"""Seconds in which a submission's processes may end after it has."""

_SUBREAPER, _DEATH_SIGNAL = 36, 1
"""Linux: inherit the orphans of one's descendants; be killed when the parent ends."""


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


# ── In the fork ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _graded(request: dict[str, Any], name: str, guard: Guard, report: Callable[..., None]) -> dict[str, Any]:
    """Import a submission and judge it; return the marks, or the reason why there are none."""
    assignment = Assignment(**request["assignment"])
    replaced = watch_functions()
    try:
        report(at="while it is imported")
        module = importlib.import_module(name)
        if assignment.schedule is None:
            marks, note = homework4.judge(module, assignment.seed, lambda at: report(at=at))
        else:
            marks, note = schedules.judge(module, assignment, lambda at: report(at=at))
        reason = ""
    except SyntaxError as error:
        reason = f"it is not Python: {error.msg}, line {error.lineno}"
    except SystemExit as error:
        reason = f"it ends the interpreter: sys.exit({error.code})"
    except ModuleNotFoundError as error:
        reason = f"it imports {error.name}, which is not there: {raised(error)}"
    except LookupError as error:
        reason = str(error) if type(error) is LookupError else raised(error)
    except MemoryError:
        reason = f"it needs more than {request['memory']} MB of memory"
    except BaseException as error:  # noqa: BLE001 - whatever a submission raises is a finding
        reason = raised(error)
    allow_memory()
    if guard.refused:
        reason = f"it {guard.refused}, which the grader does not allow"
    elif other := replaced():
        reason = f"it replaces {other}"
    return {"reason": reason} if reason else {"marks": [asdict(mark) for mark in marks], "note": note}


def _run(request: dict[str, Any], folder: Path, name: str, nonce: str, pipe: int) -> NoReturn:
    """Grade in this fork, and end it."""

    def report(**message: Any) -> None:
        write(pipe, f"{nonce}{dumps(message)}\n".encode())

    write, dumps, leave = os.write, json.dumps, os._exit
    try:
        for variable in ("HOME", "TMPDIR", "TEMP", "TMP", "TORCHINDUCTOR_CACHE_DIR"):
            os.environ[variable] = str(folder)
        tempfile.tempdir = str(folder)
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        sys.argv = [f"{name}.py"]
        sys.dont_write_bytecode = True
        random.seed(request["assignment"]["seed"])
        torch.manual_seed(request["assignment"]["seed"])
        guard = Guard(str(folder), request["programs"])
        limit_memory(request["memory"])
        sys.addaudithook(guard)
        report(done=_graded(request, name, guard, report))
        sys.stdout.flush()
        leave(0)
    finally:
        leave(70)


# ── In the server ───────────────────────────────────────────────────────────────────────────────────────────────────


def _descendants() -> list[int]:
    """Return the processes below this one, on Linux."""
    found, todo = list[int](), [os.getpid()]
    while todo:
        pid = todo.pop()
        with contextlib.suppress(OSError):
            children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
            found += children
            todo += children
    return found


def _left() -> list[int]:
    """Return what runs below this process, once what is about to end has had the time to."""
    until = time.monotonic() + _GRACE
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = _descendants()
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.01)


def _end_all(group: int) -> None:
    """End a submission's processes, also those that have left its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    until = time.monotonic() + 5
    while (left := _descendants()) and time.monotonic() < until:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _copy(source: Path, folder: Path, main: str) -> str:
    """Copy a submission, a file or a folder, to a place of its own; return the name of its module."""
    stem = Path(main).stem.replace(".", "_")
    taken = stem in sys.modules or stem in sys.stdlib_module_names
    name = "submission" if taken else stem
    if source.is_dir():
        shutil.copytree(source, folder, dirs_exist_ok=True, symlinks=True)
        (folder / main).rename(folder / f"{name}.py")
    else:
        shutil.copyfile(source, folder / f"{name}.py")
    return name


def _serve(request: dict[str, Any]) -> dict[str, Any]:
    """Run one submission, and return what became of it."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pipelab-grade-", ignore_cleanup_errors=True) as made:
        folder = Path(made).resolve()
        try:
            name = _copy(Path(request["source"]), folder, request["main"])
        except OSError as error:
            return {"reason": f"it cannot be read: {error.strerror or error}"}
        nonce = secrets.token_hex(16)
        results, pipe = os.pipe()
        outputs, output = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            _prctl(_DEATH_SIGNAL, signal.SIGKILL)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.closerange(3, pipe)  # this server's own ends, so that nobody else answers in its place
            os.closerange(pipe + 1, 256)
            _run(request, folder, name, nonce, pipe)
        os.close(pipe)
        os.close(output)
        watched = _Watched(pid, results, outputs, nonce)
        try:
            answer = watched.follow(request, began)
        finally:
            _end_all(pid)
            os.close(results)
            os.close(outputs)
    return answer | {"seconds": time.monotonic() - began, "output": watched.printed[:_KEPT].decode(errors="replace")}


class _Watched:
    """A submission that is running: what it printed, and what its grader reported."""

    def __init__(self, pid: int, results: int, outputs: int, nonce: str) -> None:
        self.pid, self.results, self.outputs, self.nonce = pid, results, outputs, nonce.encode()
        self.printed, self.reported = bytearray(), bytearray()
        for end in (results, outputs):
            os.set_blocking(end, False)

    def follow(self, request: dict[str, Any], began: float) -> dict[str, Any]:
        """Wait until the submission has ended or has passed a limit; return its marks or the reason."""
        reason, status = "", None
        with selectors.DefaultSelector() as ready:
            for end in (self.results, self.outputs, 0):
                ready.register(end, selectors.EVENT_READ)
            while status is None and not reason:
                for key, _ in ready.select(0.02):
                    if key.fd == 0:
                        sys.exit(0)  # nobody waits for the result any more; `_serve` ends the submission
                    if not self._read(key.fd):
                        ready.unregister(key.fd)
                ended, code = os.waitpid(self.pid, os.WNOHANG)
                status = code if ended else None
                if len(self.printed) > request["output"]:
                    reason = f"it printed more than {request['output'] // 1000} kB"
                elif time.monotonic() - began > request["seconds"]:
                    reason = (
                        f"it was still running after {request['seconds']:g} s{self._where()}: does a loop never end?"
                    )
                elif len(_descendants()) - 1 > request["programs"]:
                    reason = "it starts too many processes"
        self._read(self.results)
        self._read(self.outputs)
        if status is None:
            return {"reason": reason}
        done = self._done()
        if left := _left():
            return {"reason": f"it left {len(left)} process{'es' * (len(left) > 1)} running"}
        if done is None:
            return {"reason": self._how_it_ended(status)}
        return done

    def _read(self, end: int) -> bool:
        """Read what has come through a pipe; return whether more may come."""
        into = self.printed if end == self.outputs else self.reported
        try:
            while len(into) < 1 << 22:
                piece = os.read(end, 1 << 16)
                if not piece:
                    return False
                into += piece
        except BlockingIOError:
            pass
        return len(into) < 1 << 22

    def _messages(self) -> list[dict[str, Any]] | None:
        """Return what the grader in the fork reported; `None` if something else wrote into its pipe."""
        lines = bytes(self.reported).splitlines()
        if not all(line.startswith(self.nonce) for line in lines):
            return None
        try:
            return [json.loads(line[len(self.nonce) :]) for line in lines]
        except ValueError:
            return None

    def _done(self) -> dict[str, Any] | None:
        messages = self._messages()
        if messages is None:
            return {"reason": "something wrote into the grader's own pipe"}
        done = [message["done"] for message in messages if "done" in message]
        return done[0] if len(done) == 1 else None

    def _where(self) -> str:
        places = [message["at"] for message in self._messages() or [] if "at" in message]
        return f" {places[-1]}" if places else ""

    def _how_it_ended(self, status: int) -> str:
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            return f"its process was ended by {signal.Signals(-code).name}{self._where()}"
        return f"it ended the interpreter with exit code {code}{self._where()}: does it call os._exit?"


def main() -> None:
    """Answer requests until the standard input ends."""
    torch.set_num_threads(1)
    _prctl(_SUBREAPER, 1)
    sys.stdout.write(json.dumps({"ready": True}) + "\n")
    sys.stdout.flush()
    for line in sys.stdin.buffer:
        answer = _serve(json.loads(line))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
