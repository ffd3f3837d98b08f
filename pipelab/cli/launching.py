"""Start a script in several processes: torchrun, for those who have never met it."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from pipelab.errors import LoadError

__all__ = ["launch_script", "torchrun_line"]


def torchrun_line(script: str, ranks: int, arguments: list[str]) -> list[str]:
    """Return the words of the line that starts a script in as many processes on this machine.

    Example:
        >>> " ".join(torchrun_line("train.py", 4, ["--steps", "10"]))
        'torchrun --standalone --nproc-per-node 4 train.py --steps 10'
    """
    return ["torchrun", "--standalone", "--nproc-per-node", str(ranks), script, *arguments]


def launch_script(script: str, ranks: int, arguments: list[str]) -> bool:
    """Say what is run, and run it, in this process: signals reach torchrun itself. Tell whether all went well.

    If a process failed, the last lines say in few words which one, and why: torchrun's own report is long.

    Raises:
        LoadError: if there is no such script.
    """
    if not Path(script).is_file():
        beside = ", ".join(sorted(found.name for found in Path(script).parent.glob("*.py"))[:8])
        raise LoadError(f"there is no file {script}" + (f"; beside it: {beside}" if beside else ""))
    line = torchrun_line(script, ranks, arguments)
    shown = shlex.join(line)
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // ranks))
        shown = f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']} {shown}"
    sys.stdout.write(shown + "\n")
    sys.stdout.flush()
    from pipelab.engine.processes.torchrun import torchrun

    failed = torchrun(line[1:])
    if failed:
        sys.stderr.write(failed + "\n")
    return not failed
