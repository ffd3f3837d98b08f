"""Start a script in several processes, as torchrun does, and bring home what each of them said; nothing may hang."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forking import CAN_FORK, fork

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Ended:
    """How one process ended: its exit code (negative: by a signal), and what it said."""

    code: int
    out: str
    err: str


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
    """Run a script in as many processes; return how each ended. Whatever is left after `seconds` is killed and fails.

    The processes find each other by torchrun's environment variables; rank 0 holds the store. They are forked where
    they can be, unless fresh ones are asked for, in which sets of texts have other orders: see `forking`.
    """
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "script.py")
        path.write_text(textwrap.dedent(script))
        start = Started if fresh else fork
        started: list[Any] = []
        try:
            for rank in range(ranks):
                own = (env or environment()) | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                started.append(start(path, arguments, own, Path(folder, f"{rank}.out"), Path(folder, f"{rank}.err")))
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


def _said(path: Path) -> str:
    """Return what a process wrote."""
    return without_gloo(path.read_text()) if path.exists() else ""


def without_gloo(text: str) -> str:
    """Return what was printed without what torch 2.10 says of every connection."""
    return re.sub(r"^\[Gloo\] .*\n", "", text, flags=re.MULTILINE)


class Started:
    """A script in a fresh Python, with as much of a `multiprocessing` process as is needed here."""

    def __init__(self, script: Path, arguments: Sequence[str], env: dict[str, str], out: Path, err: Path) -> None:
        """Start it."""
        with out.open("w") as outs, err.open("w") as errs:
            self._process = subprocess.Popen(
                [sys.executable, str(script), *arguments], env=env, stdout=outs, stderr=errs
            )
        self.kill = self._process.kill

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
