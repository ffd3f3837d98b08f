"""Start a script in several processes: torchrun, for those who have never met it."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from pipelab.errors import LoadError

__all__ = ["become", "torchrun_line"]


def torchrun_line(script: str, ranks: int, arguments: list[str]) -> list[str]:
    """Return the words of the line that starts a script in as many processes on this machine.

    Example:
        >>> " ".join(torchrun_line("train.py", 4, ["--steps", "10"]))
        'torchrun --standalone --nproc-per-node 4 train.py --steps 10'
    """
    return ["torchrun", "--standalone", "--nproc-per-node", str(ranks), script, *arguments]


def become(script: str, ranks: int, arguments: list[str]) -> None:
    """Say what is run, and run it in place of this process: its exit code and its signals are the command's own.

    Raises:
        LoadError: if there is no such script.
    """
    if not Path(script).is_file():
        beside = ", ".join(sorted(found.name for found in Path(script).parent.glob("*.py"))[:8])
        raise LoadError(f"there is no file {script}" + (f"; beside it: {beside}" if beside else ""))
    line = torchrun_line(script, ranks, arguments)
    environment = dict(os.environ)
    shown = shlex.join(line)
    if "OMP_NUM_THREADS" not in environment:
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // ranks))
        shown = f"OMP_NUM_THREADS={environment['OMP_NUM_THREADS']} {shown}"
    sys.stdout.write(shown + "\n")
    sys.stdout.flush()
    # torchrun is `python -m torch.distributed.run`: this Python's own, wherever the word torchrun leads.
    os.execve(sys.executable, [sys.executable, "-m", "torch.distributed.run", *line[1:]], environment)  # noqa: S606
