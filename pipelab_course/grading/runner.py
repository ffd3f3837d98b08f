"""Submissions in their own processes, with limits: what `pipelab grade` calls. Needs no PyTorch in this process."""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import json
import os
import queue
import shutil
import signal
import site
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from threading import Timer
from typing import Any

import pipelab
import pipelab_course
from pipelab.errors import NO_TORCH, PipelabError, UsageError
from pipelab_course.grading.tasks import Assignment, Grade, Mark, Task

_MOST_BYTES = 64 << 20
"""Of a submission's files, and four times as many of what it writes."""

_START_SECONDS, _GRACE_SECONDS = 120, 30
"""How long the server may take to import PyTorch, and to answer after a submission's time is over."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a submission may use."""

    seconds: float = 5.0
    memory: int = 1024  # megabytes on top of what PyTorch and pipelab need; on Linux
    output: int = 256_000  # bytes that it may print
    programs: int = 8  # how many other programs it may start; it may not fork


@dataclass(frozen=True, slots=True)
class Submission:
    """A submission: the file `main` in a folder, and what tables call it."""

    name: str
    folder: Path
    main: str
    copied: str = "all"  # what of the folder it may use: all, its modules or nothing
    variant: str = ""  # homework 4's, where each submission has its own

    def files(self) -> dict[str, str]:
        """Return what its files hold, in base64, by their paths in the folder. Links are left out."""
        paths = [self.folder / self.main]
        if self.copied == "modules":
            paths += self.folder.glob("*.py")
        for at, inner, names in os.walk(self.folder) if self.copied == "all" else ():
            inner[:] = [name for name in inner if not name.startswith(".")]
            paths += [Path(at, name) for name in names if not name.startswith(".")]
        named = self.copied == "modules"  # by the teacher
        found = [each for each in dict.fromkeys(paths) if each.is_file() and (named or not each.is_symlink())]
        if not found or found[0] != paths[0]:
            raise OSError("it is a link or no file")
        if sum(path.stat().st_size for path in found) > _MOST_BYTES:
            raise OSError(f"its files have more than {_MOST_BYTES >> 20} MB")
        return {str(each.relative_to(self.folder)): base64.b64encode(each.read_bytes()).decode() for each in found}


def submissions(
    target: Path, alone: bool = False, main: str = "pipeline_homework.py"
) -> tuple[list[Submission], dict[str, str]]:
    """Return the submissions in a folder, or the one that a file or a folder is, and why each other hand-in is skipped.

    A folder is one submission if it holds `main`, the homework's file. In any other folder, each Python file is a
    submission, and so is each folder with `main` or a single Python file; or those one level deeper.
    If it is `alone`, it is one submission whatever its file is called. A target without submissions is refused.
    """
    if not target.exists():
        raise UsageError(f"there is no file or folder {target}")
    if target.is_file():
        if why := _no_python(target):
            raise UsageError(f"{target} is {why}")
        return [Submission(target.name, target.parent, target.name, "modules")], {}
    skipped: dict[str, str] = {}
    if alone or (target / main).exists():
        found = list(_of_folder(target, target.resolve().name, skipped, main))
    else:
        found = [each for path in _within(target) for each in _of(path, skipped, main)]
    if len(found) > 1 and alone:
        raise UsageError(f"{target} holds {', '.join(each.name for each in found)}: name the one to grade")
    if not found:
        whys = "".join(f"\n  {name}: {why}" for name, why in skipped.items())
        raise UsageError(f"{target} holds no submission: no Python file, and no folder with {main}{whys}")
    return found, skipped


def _within(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith((".", "__")))


def _no_python(path: Path) -> str:
    """Return why a file is no submission; nothing for a Python file."""
    kinds = {".py": "", ".ipynb": "a notebook: save it as .py", ".zip": "an archive: unpack it"}
    return kinds.get(path.suffix.lower(), "not a Python file")


def _of(path: Path, skipped: dict[str, str], main: str) -> Iterator[Submission]:
    if path.is_symlink():
        skipped[path.name] = "a link: hand in the file itself"
    elif path.is_dir():
        yield from _of_folder(path, path.name, skipped, main)
    elif why := _no_python(path):
        skipped[path.name] = why
    else:
        yield Submission(path.name, path.parent, path.name, "nothing")


def _of_folder(path: Path, name: str, skipped: dict[str, str], main: str, deeper: bool = True) -> Iterator[Submission]:
    inside = _within(path)
    files = [each.name for each in inside if each.suffix == ".py"]
    folders = [each for each in inside if each.is_dir() and deeper]
    if main in files or len(files) == 1:
        yield Submission(name, path, main if main in files else files[0])
    elif files:
        skipped[name] = f"it holds {len(files)} Python files: call one of them {main}, or grade this folder alone"
    elif folders:
        for folder in folders:
            yield from _of_folder(folder, f"{name}/{folder.name}", skipped, main, deeper=False)
    else:
        others = [f"a folder with {why}" for each in inside if ":" in (why := _no_python(each))]
        skipped[name] = (others or ["a folder without a Python file" if inside else "an empty folder"])[0]


def grade(
    found: Sequence[Submission], assignment: Assignment, limits: Limits | None = None, workers: int = 1
) -> Iterator[Grade]:
    """Grade submissions, `workers` at the same time, and yield each grade as soon as it is there.

    Closing the iterator ends what is running. A system that cannot fork, Windows, is refused.
    """
    if not hasattr(os, "fork"):
        raise UsageError("pipelab grade needs Linux or macOS; on Windows, run it in WSL")
    servers = [_Server() for _ in range(min(workers, len(found)))]
    free: queue.SimpleQueue[_Server] = queue.SimpleQueue()
    for server in servers:
        free.put(server)

    def one(submission: Submission) -> Grade:
        server = free.get()
        try:
            return _grade(server, submission, assignment, limits or Limits())
        finally:
            free.put(server)

    pool = ThreadPoolExecutor(max_workers=len(servers))
    try:
        for future in as_completed([pool.submit(one, submission) for submission in found]):
            yield future.result()
    finally:
        for server in servers:
            server.close()
        pool.shutdown(cancel_futures=True)


class GraderError(PipelabError):
    """The grader's own process does not start, so nothing can be graded."""


def _grade(server: _Server, submission: Submission, assignment: Assignment, limits: Limits) -> Grade:
    try:
        own = asdict(replace(assignment, variant=submission.variant or assignment.variant))
        request = {"main": submission.main, "files": submission.files(), "assignment": own}
        answer = server.ask(request | asdict(limits), limits.seconds + _GRACE_SECONDS)
    except (OSError, RecursionError) as error:
        answer = {"reason": f"it cannot be read: {getattr(error, 'strerror', None) or error}"}
    if answer["reason"]:
        marks = [Mark(task, 0, found="not graded") for task in assignment.tasks()]
    else:
        marks = [Mark(**(mark | {"task": Task(**mark["task"])})) for mark in answer["marks"]]
    return Grade(submission.name, **(answer | {"marks": marks}))


@cache
def sandbox() -> list[str]:
    """Return the beginning of a command that runs in a sandbox; nothing if bubblewrap is missing or is not allowed to.

    In it there are Python, what it needs, and an empty folder for temporary files. There is no network, no other
    process, and no right that would lift a limit.
    """
    program, torch = shutil.which("bwrap"), importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        raise UsageError(NO_TORCH)
    needed = ["/usr", "/bin", "/lib", "/lib64", "/etc/alternatives", "/etc/ld.so.cache", "/etc/passwd"]
    needed += ["/sys/devices/system/cpu", sys.base_prefix, sys.prefix, str(Path(sys.executable).resolve().parents[1])]
    needed += ["/etc/localtime", site.getusersitepackages(), str(Path(torch.origin).parents[1])]
    needed += [str(Path(str(package.__file__)).parent) for package in (pipelab, pipelab_course)]
    command = [program or "bwrap", "--unshare-all", "--as-pid-1", "--die-with-parent", "--new-session"]
    command += ["--cap-drop", "ALL", "--proc", "/proc", "--dev", "/dev"]
    command += ["--size", str(4 * _MOST_BYTES), "--tmpfs", "/tmp"]  # noqa: S108 - in the sandbox
    command += [word for place in dict.fromkeys(needed) for word in ("--ro-bind-try", place, place)]
    solutions = Path(pipelab.__file__).with_name("teacher")  # in a teacher's wheel
    command += ["--tmpfs", str(solutions)] if solutions.is_dir() else []
    command += [word for place in ("/dev", "/proc", "/") for word in ("--remount-ro", place)]
    tried = program and subprocess.run([*command, sys.executable, "-c", ""], capture_output=True, check=False)  # noqa: S603
    return command if tried and tried.returncode == 0 else []


class _Server:
    """The process that runs submissions; a new one is started if one is lost."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return the answer to a request; if there is none, not even from a second process, the reason."""
        for _ in range(2):  # a submission on another worker may have ended the first, where nothing prevents that
            if self._closed:
                return {"reason": "grading was stopped"}
            try:
                if self._process is None:
                    self._start()
                return self._answer(json.dumps(request).encode() + b"\n", seconds)
            except (OSError, ValueError):
                self._stop()
        return {"reason": "the grader's own process ended or gave no answer: does it end other processes?"}

    def close(self) -> None:
        """End the process and what it runs."""
        self._closed = True
        self._stop()

    def _start(self) -> None:
        where = str(Path(pipelab.__file__).parents[1])
        paths = os.pathsep.join(filter(None, (where, os.environ.get("PYTHONPATH"))))
        fixed = {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
        told = {name: os.environ[name] for name in ("PATH", "LANG", "LD_LIBRARY_PATH", "TMPDIR") if name in os.environ}
        self._process = subprocess.Popen(  # noqa: S603 - pipelab's own
            [*sandbox(), sys.executable, "-P", "-m", "pipelab_course.grading.server", *["sandboxed"] * bool(sandbox())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=told | fixed | {"PYTHONHASHSEED": "0"},  # without the teacher's keys and tokens
            start_new_session=True,
        )
        try:
            self._answer(b"", _START_SECONDS)
        except (OSError, ValueError) as error:
            self._stop()
            raise GraderError("the grader's process does not start; its output is above") from error

    def _answer(self, request: bytes, seconds: float) -> dict[str, Any]:
        """Send a request, and return the answer; a process that gives none in time is ended, which ends the line."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        timer = Timer(seconds, process.kill)
        timer.start()
        try:
            process.stdin.write(request)
            process.stdin.flush()
            answer: dict[str, Any] = json.loads(process.stdout.readline())
        finally:
            timer.cancel()
        return answer

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            self._end(process)
            assert process.stdout is not None
            process.stdout.close()

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        """End a process: first let it end the submission, as it does when its input ends."""
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
