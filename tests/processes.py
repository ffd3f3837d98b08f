"""Start a script in several processes, as torchrun does, and bring home what each of them said; nothing may hang."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

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


def run_in(ranks: int, script: str, *arguments: str, seconds: float = 120, env: dict[str, str] | None = None):
    """Run a script in as many processes; return how each ended. Whatever is left after `seconds` is killed and fails.

    The processes find each other by torchrun's environment variables; rank 0 holds the store.
    """
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "script.py")
        path.write_text(textwrap.dedent(script))
        outs = [Path(folder, f"{rank}.{kind}") for rank in range(ranks) for kind in ("out", "err")]
        files = [out.open("w") for out in outs]
        started = []
        for rank in range(ranks):
            own = (env or environment()) | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            started.append(
                subprocess.Popen(
                    [sys.executable, str(path), *arguments],
                    env=own,
                    stdout=files[2 * rank],
                    stderr=files[2 * rank + 1],
                )
            )
        deadline = time.monotonic() + seconds
        late = []
        for rank, process in enumerate(started):
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                late.append(rank)
                process.send_signal(signal.SIGKILL)
                process.wait()
        for file in files:
            file.close()
        texts = [
            re.sub(r"^\[Gloo\] .*\n", "", out.read_text(), flags=re.MULTILINE) for out in outs
        ]  # torch 2.10 says it
        ended = [Ended(process.returncode, *texts[2 * rank : 2 * rank + 2]) for rank, process in enumerate(started)]
    assert not late, f"rank {late} did not end within {seconds} s:\n{shown(ended)}"
    return ended


def shown(ended: list[Ended]) -> str:
    """Return what all processes said, for a failing test to show."""
    return "\n".join(f"--- rank {rank}: {each.code}\n{each.out}\n{each.err}" for rank, each in enumerate(ended))
