"""The process that runs submissions, one after the other, and judges them: `python -m pipelab_course.grading.server`.

    server    imports PyTorch ── fork ──────────────── judges the record ── answer
    fork                          └ imports the submission, records ┘

A line of JSON on its standard input holds the submission, and a line on its standard output is the result. The fork
runs the submission and writes its record to a file; this process watches the time, the output and the processes, ends
all of them, and judges. It never imports a submission, so what a submission changes in Python changes no grade.

What the fork can reach beyond Python depends on the sandbox in which the runner starts this process.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import ctypes
import json
import os
import random
import re
import resource
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib import import_module, machinery
from pathlib import Path
from typing import Any, NoReturn

import torch

from pipelab_course.figures import kernel_bytes
from pipelab_course.grading import schedules
from pipelab_course.grading.tasks import HOMEWORKS, AmbiguousError, Assignment, marks_of, raised

_KEPT = 4000
"""Characters of a submission's output that the grade shows."""

_GRACE = 0.3
"""Seconds in which a submission's processes may end after it has."""

_MOST_RECORDED = 1 << 24
"""Bytes of a record; homework 4's has 600,000."""

_DOOR = re.compile(r"__(?!init__)\w+|\w+_frame|exec|eval|compile|open|getattr|vars|globals|locals|hub")
"""Names by which a file reaches what it does not import."""

_SUBREAPER, _DEATH_SIGNAL, _DUMPABLE = 36, 1, 4
"""Linux: inherit the orphans of one's descendants; be killed when the parent ends; be read by other processes."""


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _module(homework: str) -> Any:
    """Return a homework's module: `record` runs a submission, and `judge` says what each task's check found in it."""
    name = {"hw1": "homework1", "hw3": "homework3", "hw4": "homework4", "hybrid": "ring"}[homework]
    return import_module(f"pipelab_course.grading.{name}")


# ── In the fork ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _recorded(request: dict[str, Any], name: str, at: Callable[[str], None]) -> dict[str, Any]:
    """Import a submission and record what it does; return the record, or the reason why there is none."""
    assignment = Assignment(**request["assignment"])
    try:
        at("while it is imported")
        load = partial(import_module, name)
        if assignment.schedule is None:
            return {"record": _module(assignment.homework).record(load, assignment.seed, at, *assignment.own)}
        return {"record": schedules.record(load, assignment, at)}
    except SyntaxError as error:
        reason = f"it is not Python: {error.msg}, line {error.lineno}"
    except SystemExit as error:
        reason = f"it ends the interpreter: sys.exit({error.code})"
    except ModuleNotFoundError as error:
        reason = f"it imports {error.name}, which is not there: {raised(error)}"
    except AmbiguousError as error:
        return {"reason": str(error), "ambiguous": True}
    except MemoryError:
        reason = f"it needs more than {request['memory']} MB of memory"
    except BaseException as error:  # noqa: BLE001 - whatever a submission raises is a finding
        reason = str(error) if type(error) is LookupError else raised(error)
    return {"reason": reason}


def _limit(megabytes: int) -> None:
    """Allow so much memory on top of what the imports need, on Linux, and what the record needs once that is full."""
    used = kernel_bytes("/proc/self/status", "VmData")
    if used is not None:
        most = used + (megabytes << 20)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most + (64 << 20)))
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 20, 64 << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _run(request: dict[str, Any], folder: Path, name: str, report_to: int) -> NoReturn:
    """Record in this fork, and end it."""

    def report(**message: Any) -> None:
        write(report_to, f"{dumps(message)}\n".encode())

    write, dumps, leave, lift = os.write, json.dumps, os._exit, resource.setrlimit
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
        _limit(request["memory"])
        done = _recorded(request, name, lambda what: report(at=what))
        lift(resource.RLIMIT_DATA, resource.getrlimit(resource.RLIMIT_DATA)[1:] * 2)
        report(done=done)
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
        for thread in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # it has ended since
                children = [int(child) for child in thread.read_text().split()]
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


def _written(request: dict[str, Any], folder: Path) -> str:
    """Write a submission's files into its own folder; return the name of its module."""
    stem = Path(request["main"]).stem.replace(".", "_")
    name = "submission" if stem in sys.modules or stem in sys.stdlib_module_names else stem
    for path, data in request["files"].items():
        file = folder / (f"{name}.py" if path == request["main"] else path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(base64.b64decode(data))
    return name


def _reaches(source: bytes) -> set[str]:
    """Return what a Python file imports, and names in it that lead to other modules, to frames or to code."""
    try:
        nodes = [*ast.walk(ast.parse(source))] if len(source) <= 1 << 20 else []
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()  # nor is it imported
    called, found = {node.func for node in nodes if isinstance(node, ast.Call)}, set[str]()
    for node in nodes:
        name = getattr(node, "attr", getattr(node, "id", ""))
        module = isinstance(node, ast.Attribute) and node not in called and name.strip("_") in sys.stdlib_module_names
        if isinstance(node, ast.Import | ast.ImportFrom):
            parent = f"{node.module or ''}." if isinstance(node, ast.ImportFrom) else ""
            found |= {parent + alias.name for alias in node.names}
        elif module or _DOOR.fullmatch(name):
            found.add(name)
    return found


def _own_sources(request: dict[str, Any]) -> list[bytes]:
    """Return the Python files that run with a submission: what it imports, and what may shadow an installed module."""
    files = {path: base64.b64decode(data) for path, data in request["files"].items() if path.endswith(".py")}
    own = [at for at in files if at == request["main"] or machinery.PathFinder.find_spec(re.findall(r"\w+", at)[0])]
    for at in own:  # it grows
        imported = {word for name in _reaches(files[at]) for word in re.findall(r"\w+", name)}
        own += [other for other in files if other not in own and imported & {*re.findall(r"\w+", other)[:-1]}]
    return [files[at] for at in own]


def _to_read(request: dict[str, Any]) -> str:
    """Say by what a homework reaches beyond its start file."""
    known = _reaches(HOMEWORKS[request["assignment"]["homework"]].template.read_bytes())
    sources = _own_sources(request)
    long = [f"{len(source) >> 20} MB of Python" for source in sources if len(source) > 1 << 20]
    found = long or sorted(set[str]().union(*map(_reaches, sources)) - known)
    return f"to read by eye: {', '.join(found)}" if found and request["assignment"]["schedule"] is None else ""


def _serve(request: dict[str, Any]) -> dict[str, Any]:
    """Run one submission and judge it; return what became of it."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pipelab-grade-", ignore_cleanup_errors=True) as made:
        folder = Path(made).resolve()
        name = _written(request, folder)
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
                os.closerange(4, 256)  # this server's own ends, so that no other process answers in its place
                _run(request, folder, name, 3)
            try:
                answer = _follow(request, pid, began, reported.fileno(), printed.fileno())
            finally:
                _end_all(pid)
            output = os.pread(printed.fileno(), _KEPT, 0).decode(errors="replace")
    seconds = time.monotonic() - began
    if "record" in answer:
        answer = _judged(answer["record"], Assignment(**request["assignment"]))
    return answer | {"seconds": seconds, "output": output, "to_read": _to_read(request)}


def _judged(record: Any, assignment: Assignment) -> dict[str, Any]:
    """Return the marks for a record, or the reason why it is none."""
    try:
        if assignment.schedule is None:
            found, note = _module(assignment.homework).judge(record, assignment.seed, *assignment.own)
            marks = marks_of(found, assignment.weighed())
        else:
            marks, note = schedules.judge(record, assignment)
    except Exception as error:  # noqa: BLE001 - whatever a record that is none leads to
        return {"reason": f"what it sent to the grader cannot be judged: {error}"}
    return {"marks": [asdict(mark) for mark in marks], "note": note, "reason": ""}


def _follow(request: dict[str, Any], pid: int, began: float, reports: int, printed: int) -> dict[str, Any]:
    """Wait until a submission has ended or has passed a limit; return its record or the reason."""
    reason, status = _awaited(request, pid, began, printed)
    reason = reason or _left_running()
    reported: dict[str, Any] = {}
    try:
        for line in os.pread(reports, _MOST_RECORDED, 0).decode(errors="replace").splitlines():
            reported |= json.loads(line)  # the last one counts
        if not reason and "done" in reported:
            if "record" in (done := reported["done"]):
                return {"record": done["record"]}
            reason = str(done.get("reason") or "it sent nothing")[:_KEPT]
            return {"reason": reason, "ambiguous": done.get("ambiguous") is True}
    except (ValueError, TypeError, AttributeError, RecursionError):
        reported, reason = {}, reason or "something wrote into the grader's own file"
    code = os.waitstatus_to_exitcode(status)
    if not reason and code < 0:
        reason = f"its process was ended by {signal.Signals(-code).name}{{where}}"
    reason = reason or f"it ended the interpreter with exit code {code}{{where}}: does it call os._exit?"
    return {"reason": reason.format(where=f" {reported['at']}" if "at" in reported else "")}


def _awaited(request: dict[str, Any], pid: int, began: float, printed: int) -> tuple[str, int]:
    """Wait until a submission has ended or has passed a limit; return which one, and the status of its process."""
    while True:
        if select.select([0], [], [], 0.01)[0]:
            sys.exit(0)  # the result is no longer wanted; `_serve` ends the submission
        ended, status = os.waitpid(pid, os.WNOHANG)
        if os.fstat(printed).st_size > request["output"]:
            return f"it printed more than {request['output'] // 1000} kB", status
        if not ended and time.monotonic() - began > request["seconds"]:
            return f"it was still running after {request['seconds']:g} s{{where}}: does a loop never end?", status
        if len(_descendants()) - 1 > request["programs"]:
            return "it starts too many processes", status
        if ended:
            return "", status


def _left_running() -> str:
    """Return how many processes a submission has left that do not end soon."""
    until = time.monotonic() + _GRACE
    while left := _reap():
        if time.monotonic() > until:
            return f"it left {len(left)} process{'es' * (len(left) > 1)} running"
        time.sleep(0.01)
    return ""


def main() -> None:
    """Answer requests until the standard input ends, or until a submission has left something in this sandbox."""
    torch.set_num_threads(1)
    _prctl(_SUBREAPER, 1)
    _prctl(_DUMPABLE, 0)  # no fork may look into this process, or change it
    sys.stdout.write(json.dumps({"ready": True}) + "\n")
    sys.stdout.flush()
    before = os.listdir(tempfile.gettempdir())
    for line in sys.stdin.buffer:
        try:
            request = json.loads(line)
            _module(request["assignment"]["homework"])  # what it imports and writes is not the submission's
            before = os.listdir(tempfile.gettempdir())
            answer = _serve(request)
        except (OSError, RecursionError) as error:  # such as a full disk, or folders in folders without end
            answer = {"reason": f"it cannot be run: {getattr(error, 'strerror', None) or error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
        if sys.argv[1:] and (os.listdir(tempfile.gettempdir()) != before or _reap()):
            break


if __name__ == "__main__":
    main()
