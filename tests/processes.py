"""Start one of the scripts in several processes, as torchrun does; return what each of them said. Nothing may hang."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forking import CAN_FORK, fork

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "tests" / "scripts"


@dataclass(frozen=True)
class Ended:
    """How one process ended: its exit code (negative: by a signal), and what it said."""

    code: int
    out: str
    err: str

    @property
    def facts(self) -> list[dict[str, Any]]:
        """What it said, where each line is a fact in JSON."""
        return [json.loads(line) for line in self.out.splitlines()]


def environment(**more: str) -> dict[str, str]:
    """Return an environment in which this pipelab and these tests can be imported, one computing thread each."""
    paths = [str(ROOT), str(ROOT / "tests")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **more}


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_in(
    ranks: int,
    script: str,
    *arguments: str,
    seconds: float = 120,
    env: dict[str, str] | None = None,
    fresh: bool = not CAN_FORK,
) -> list[Ended]:
    """Run a script of `SCRIPTS` in as many processes; return how each ended. After `seconds`, all are killed.

    The processes find each other by torchrun's environment variables; rank 0 holds the store. They are forked where
    they can be, unless fresh ones are asked for, in which sets of texts have other orders: see `forking`.
    """
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with tempfile.TemporaryDirectory() as folder:
        start = Started if fresh else fork
        started: list[Any] = []
        try:
            for rank in range(ranks):
                own = (env or environment()) | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                said = [Path(folder, f"{rank}.{kind}") for kind in ("out", "err")]
                started.append(start(SCRIPTS / script, arguments, own, *said))
            deadline = time.monotonic() + seconds
            for process in started:
                process.join(max(0.1, deadline - time.monotonic()))
            late = [rank for rank, process in enumerate(started) if process.exitcode is None]
        finally:
            for process in started:
                if process.exitcode is None:
                    process.kill()
                    process.join()
        texts = [[_said(Path(folder, f"{rank}.{kind}")) for kind in ("out", "err")] for rank in range(ranks)]
        ended = [Ended(process.exitcode, *said) for process, said in zip(started, texts, strict=True)]
    assert not late, f"rank {late} did not end within {seconds} s:\n{shown(ended)}"
    return ended


def run_well(ranks: int, script: str, *arguments: str, silent: bool = False, **settings: Any) -> list[Ended]:
    """As `run_in`, and all end well; `silent` ones without a warning either."""
    ended = run_in(ranks, script, *arguments, **settings)
    assert all(each.code == 0 and not (silent and each.err) for each in ended), shown(ended)
    return ended


def launched(ranks: int, script: Path, *arguments: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run a script by `pipelab launch`; return how that ended, and what it said."""
    command = [sys.executable, "-m", "pipelab", "launch", "--ranks", str(ranks), str(script), *arguments]
    settings = {"env": environment(), "timeout": 120} | settings
    return subprocess.run(command, capture_output=True, text=True, check=False, **settings)


def _said(path: Path) -> str:
    """Return what a process wrote."""
    return without_gloo(path.read_text()) if path.exists() else ""


def without_gloo(text: str) -> str:
    """Return what was printed without what PyTorch says of connections, or of stores and name servers that are late.

    And without Triton's own count, at exit, of what it did not release: torch 2.15's for CUDA has one.
    """
    connections = r"\[Gloo\] |(\[rank\d+\]:)?\[W\S* \S* socket\.cpp"
    triton = r"nanobind: | - leaked | - \.\.\. skipped |See https://nanobind\."
    return re.sub(rf"^({connections}|{triton}).*\n?", "", text, flags=re.MULTILINE)


class Started:
    """A script in a fresh Python, with as much of a `multiprocessing` process as is needed here."""

    def __init__(self, script: Path, arguments: Sequence[str], env: dict[str, str], out: Path, err: Path) -> None:
        """Start it."""
        with out.open("w") as outs, err.open("w") as errs:
            self._process = subprocess.Popen(
                [sys.executable, str(script), *arguments], env=env, stdout=outs, stderr=errs
            )
        self.kill, self.pid = self._process.kill, self._process.pid

    @property
    def exitcode(self) -> int | None:
        """How it ended (negative: by a signal); `None` while it runs."""
        return self._process.poll()

    def join(self, seconds: float | None = None) -> None:
        """Wait for its end, or for so many seconds."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)


def shown(ended: list[Ended]) -> str:
    """Return what all processes said, for a failing test to show."""
    return "\n".join(f"--- rank {rank}: {each.code}\n{each.out}\n{each.err}" for rank, each in enumerate(ended))
