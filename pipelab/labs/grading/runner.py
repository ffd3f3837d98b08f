"""Submissions in processes of their own, with limits: what `pipelab grade` calls. Needs no PyTorch in this process."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pipelab
from pipelab.errors import PipelabError, UsageError
from pipelab.labs.grading.tasks import HOMEWORK, Assignment, Grade, Mark, Task

__all__ = ["GraderError", "Limits", "Submission", "grade", "submissions"]

_START_SECONDS, _GRACE_SECONDS = 120, 30
"""How long the server may take to import PyTorch, and to answer after a submission's time is over."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a submission may use.

    Attributes:
        seconds: its time.
        memory: megabytes on top of what PyTorch and pipelab need; on Linux.
        output: bytes that it may print.
        programs: how many other programs it may start; it may not fork.
    """

    seconds: float = 5.0
    memory: int = 1024
    output: int = 256_000
    programs: int = 8


@dataclass(frozen=True, slots=True)
class Submission:
    """A submission: a file, or a folder with the file `main` and what it needs."""

    source: Path
    main: str

    @property
    def name(self) -> str:
        """What tables call it."""
        return self.source.name


def submissions(target: Path) -> list[Submission]:
    """Return the submissions in a folder, or the one that is a file.

    Each Python file in a folder is a submission, and so is each folder in it that holds `pipeline_homework.py` or a
    single Python file.

    Raises:
        UsageError: if there is none.
    """
    if target.is_file():
        return [Submission(target, target.name)]
    if not target.is_dir():
        raise UsageError(f"there is no file or folder {target}")
    found: list[Submission] = []
    for path in sorted(target.iterdir()):
        if path.suffix == ".py" and path.is_file():
            found.append(Submission(path, path.name))
        elif path.is_dir():
            files = sorted(file.name for file in path.glob("*.py"))
            main = HOMEWORK if HOMEWORK in files else files[0] if len(files) == 1 else ""
            if main:
                found.append(Submission(path, main))
    if not found:
        raise UsageError(f"{target} holds no submission: no Python file, and no folder with {HOMEWORK}")
    return found


def grade(
    found: Sequence[Submission], assignment: Assignment, limits: Limits | None = None, workers: int = 1
) -> Iterator[Grade]:
    """Grade submissions, several at a time, and yield each grade as soon as it is there.

    Closing the iterator ends what is running.

    Args:
        found: the submissions.
        assignment: what to grade.
        limits: what each may use.
        workers: how many run at the same time.

    Raises:
        UsageError: if the system cannot fork: Windows.
        GraderError: if the grader's own process does not start.
    """
    if not hasattr(os, "fork"):
        raise UsageError("pipelab grade needs Linux or macOS; on Windows, run it in WSL")
    limits = limits or Limits()
    servers = [_Server() for _ in range(min(workers, len(found)))]
    free: queue.SimpleQueue[_Server] = queue.SimpleQueue()
    for server in servers:
        free.put(server)

    def one(submission: Submission) -> Grade:
        server = free.get()
        try:
            return _grade(server, submission, assignment, limits)
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
    request = {"source": str(submission.source.resolve()), "main": submission.main, "assignment": asdict(assignment)}
    answer = server.ask(request | asdict(limits), limits.seconds + _GRACE_SECONDS)
    reason = answer.get("reason", "")
    if reason:
        marks = [Mark(task, 0, found="not graded") for task in assignment.tasks()]
    else:
        marks = [Mark(**(mark | {"task": Task(**mark["task"])})) for mark in answer["marks"]]
    seconds, output = answer.get("seconds", 0.0), answer.get("output", "")
    return Grade(submission.name, marks, reason, answer.get("note", ""), seconds, output)


class _Server:
    """The process that runs submissions; a new one is started if one is lost."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return the answer to a request; if there is none, the reason."""
        if self._closed:
            return {"reason": "grading was stopped"}
        process = self._process or self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            return self._answer(process, seconds)
        except (OSError, ValueError, EOFError, TimeoutError) as error:
            self._stop()
            why = "gave no answer in time" if isinstance(error, TimeoutError) else "ended while the submission ran"
            return {"reason": f"the grader's own process {why}: does the submission end other processes?"}

    def close(self) -> None:
        """End the process and what it runs."""
        self._closed = True
        self._stop()

    def _start(self) -> subprocess.Popen[bytes]:
        where = str(Path(pipelab.__file__).parents[1])
        paths = os.pathsep.join(filter(None, (where, os.environ.get("PYTHONPATH"))))
        fixed = {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
        self._process = process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pipelab.labs.grading.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | fixed | {"PYTHONHASHSEED": "0"},
            start_new_session=True,
        )
        try:
            self._answer(process, _START_SECONDS)
        except (OSError, ValueError, EOFError, TimeoutError) as error:
            self._stop()
            raise GraderError(
                f"the grader's process does not start: {type(error).__name__}; its output is above"
            ) from error
        return process

    @staticmethod
    def _answer(process: subprocess.Popen[bytes], seconds: float) -> dict[str, Any]:
        assert process.stdout is not None
        line, until = bytearray(), time.monotonic() + seconds
        while not line.endswith(b"\n"):
            left = until - time.monotonic()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                raise TimeoutError
            piece = os.read(process.stdout.fileno(), 1 << 16)
            if not piece:
                raise EOFError
            line += piece
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _stop(self) -> None:
        """End the process: first let it end the submission, as it does when its input ends."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()
