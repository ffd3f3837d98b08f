"""The process that runs submissions, one after the other: `python -m pipelab.labs.grading.server`.

It imports PyTorch once, and forks for each submission. A line of JSON on its standard input names the submission, and a
line on its standard output is the result. The fork runs the submission and writes its report to a file; this process
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
import select
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
from pipelab.labs.grading.tasks import AmbiguousError, Assignment, raised

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


def _graded(
    request: dict[str, Any], name: str, guard: Guard, report: Callable[..., None], replaced: Callable[[], str]
) -> dict[str, Any]:
    """Import a submission and judge it; return the marks, or the reason why there are none."""
    assignment = Assignment(**request["assignment"])
    done: dict[str, Any] = {}
    reason = ""
    try:
        report(at="while it is imported")
        module = importlib.import_module(name)
        if assignment.schedule is None:
            marks, note = homework4.judge(module, assignment.seed, lambda at: report(at=at))
        else:
            marks, note = schedules.judge(module, assignment, lambda at: report(at=at))
        done = {"marks": [asdict(mark) for mark in marks], "note": note}
    except SyntaxError as error:
        reason = f"it is not Python: {error.msg}, line {error.lineno}"
    except SystemExit as error:
        reason = f"it ends the interpreter: sys.exit({error.code})"
    except ModuleNotFoundError as error:
        reason = f"it imports {error.name}, which is not there: {raised(error)}"
    except AmbiguousError as error:
        reason, done = str(error), {"ambiguous": True}
    except MemoryError:
        reason = f"it needs more than {request['memory']} MB of memory"
    except BaseException as error:  # noqa: BLE001 - whatever a submission raises is a finding
        reason = str(error) if type(error) is LookupError else raised(error)
    allow_memory()
    if guard.refused:
        reason = f"it {guard.refused}, which the grader does not allow"
    elif other := replaced():
        reason = f"it replaces {other}"
    return done | {"reason": reason}


def _run(
    request: dict[str, Any], folder: Path, name: str, nonce: str, report_to: int, replaced: Callable[[], str]
) -> NoReturn:
    """Grade in this fork, and end it."""

    def report(**message: Any) -> None:
        write(report_to, f"{nonce}{dumps(message)}\n".encode())

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
        report(done=_graded(request, name, guard, report, replaced))
        sys.stdout.flush()
        leave(0)
    finally:
        leave(70)


# ── In the server ───────────────────────────────────────────────────────────────────────────────────────────────────


def _reap() -> list[int]:
    """Let ended processes go; return those that run below this one, on Linux."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return _descendants()


def _descendants() -> list[int]:
    found, todo = list[int](), [os.getpid()]
    while todo:
        pid = todo.pop()
        with contextlib.suppress(OSError):
            children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
            found += children
            todo += children
    return found


def _end_all(group: int) -> None:
    """End a submission's processes, also those that have left its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    until = time.monotonic() + 5
    while (left := _reap()) and time.monotonic() < until:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _copy(request: dict[str, Any], folder: Path) -> str:
    """Copy a submission to a place of its own; return the name of its module."""
    source, main = Path(request["folder"]), request["main"]
    stem = Path(main).stem.replace(".", "_")
    name = "submission" if stem in sys.modules or stem in sys.stdlib_module_names else stem
    if request["copied"] == "all":
        shutil.copytree(source, folder, dirs_exist_ok=True, symlinks=True, ignore=shutil.ignore_patterns(".*"))
        (folder / main).rename(folder / f"{name}.py")
    else:
        for path in source.glob("*.py") if request["copied"] == "modules" else ():
            if path.is_file() and path.name != main:
                shutil.copyfile(path, folder / path.name)
        shutil.copyfile(source / main, folder / f"{name}.py")
    return name


def _serve(request: dict[str, Any], replaced: Callable[[], str]) -> dict[str, Any]:
    """Run one submission, and return what became of it."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pipelab-grade-", ignore_cleanup_errors=True) as made:
        folder = Path(made).resolve()
        try:
            name = _copy(request, folder)
        except OSError as error:
            return {"reason": f"it cannot be read: {error.strerror or error}"}
        nonce = secrets.token_hex(16)
        with tempfile.TemporaryFile("ab+") as printed, tempfile.TemporaryFile("ab+") as reported:
            pid = os.fork()
            if pid == 0:
                os.setsid()
                _prctl(_DEATH_SIGNAL, signal.SIGKILL)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                report_to = os.dup(reported.fileno())
                os.dup2(printed.fileno(), 1)
                os.dup2(1, 2)
                os.dup2(report_to, 3)
                os.closerange(4, 256)  # this server's own ends, so that nobody else answers in its place
                _run(request, folder, name, nonce, 3, replaced)
            try:
                answer = _follow(request, pid, began, lambda: _reports(reported.fileno(), nonce), printed.fileno())
            finally:
                _end_all(pid)
            output = os.pread(printed.fileno(), _KEPT, 0).decode(errors="replace")
    return answer | {"seconds": time.monotonic() - began, "output": output}


def _reports(reported: int, nonce: str) -> dict[str, Any]:
    """Return what the grader in the fork has reported last under each key.

    Raises:
        ValueError: if something else has written there, which does not know the number at the beginning of each line.
    """
    messages: dict[str, Any] = {}
    for line in os.pread(reported, 1 << 22, 0).decode(errors="replace").splitlines():
        if not line.startswith(nonce) or "done" in messages:
            raise ValueError
        messages |= json.loads(line.removeprefix(nonce))
    return messages


def _follow(
    request: dict[str, Any], pid: int, began: float, reports: Callable[[], dict[str, Any]], printed: int
) -> dict[str, Any]:
    """Wait until a submission has ended or has passed a limit; return its marks or the reason."""
    reason, ended, status = "", 0, 0
    while not ended and not reason:
        if select.select([0], [], [], 0.01)[0]:
            sys.exit(0)  # nobody waits for the result any more; `_serve` ends the submission
        ended, status = os.waitpid(pid, os.WNOHANG)
        if os.fstat(printed).st_size > request["output"]:
            reason = f"it printed more than {request['output'] // 1000} kB"
        elif not ended and time.monotonic() - began > request["seconds"]:
            reason = f"it was still running after {request['seconds']:g} s{{where}}: does a loop never end?"
        elif len(_descendants()) - 1 > request["programs"]:
            reason = "it starts too many processes"
    until = time.monotonic() + _GRACE
    while not reason and (left := _reap()):
        if time.monotonic() > until:
            reason = f"it left {len(left)} process{'es' * (len(left) > 1)} running"
        time.sleep(0.01)
    try:
        reported = reports()
    except ValueError:
        reported, reason = {}, reason or "something wrote into the grader's own file"
    if not reason and "done" in reported:
        return dict(reported["done"])
    code = os.waitstatus_to_exitcode(status)
    if not reason and code < 0:
        reason = f"its process was ended by {signal.Signals(-code).name}{{where}}"
    reason = reason or f"it ended the interpreter with exit code {code}{{where}}: does it call os._exit?"
    return {"reason": reason.format(where=f" {reported['at']}" if "at" in reported else "")}


def main() -> None:
    """Answer requests until the standard input ends."""
    torch.set_num_threads(1)
    _prctl(_SUBREAPER, 1)
    replaced = watch_functions()  # once: each fork begins with the same functions
    sys.stdout.write(json.dumps({"ready": True}) + "\n")
    sys.stdout.flush()
    for line in sys.stdin.buffer:
        answer = _serve(json.loads(line), replaced)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
