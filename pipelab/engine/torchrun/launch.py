"""Start a script under torchrun, and end with a short report of the first failure.

`python -m pipelab.engine.torchrun.launch script.py …` is what torchrun starts in each process: the script, inside
PyTorch's `record`, which leaves the error that ends it in a file for torchrun.
"""

from __future__ import annotations

import re
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from traceback import FrameSummary

from torch.distributed import run as torch_run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, record

from pipelab.plan.fault import line_of

__all__ = ["decisive", "run_script", "torchrun"]


def torchrun(arguments: Sequence[str]) -> str | None:
    """Start processes as torchrun does, wait for them and forward signals to them.

    Args:
        arguments: torchrun's own, and then the script with its arguments.

    Returns:
        If a process failed, torchrun's report and then the short one; else `None`.
    """
    try:
        torch_run.run(torch_run.parse_args(list(arguments)))
    except ChildFailedError as error:
        return f"{str(error).strip()}\n\n{decisive(error.failures)}"
    return None


@record
def run_script() -> None:
    """Run the script that the first argument names, as if Python had been started with it."""
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


def decisive(failures: Mapping[int, ProcessFailure]) -> str:
    """Return a short report of the first failure.

    That is an error that ended a process, or else a signal or an exit code. A `RankError` only repeats a failure of
    another process, and torchrun sends SIGTERM to the remaining ones.

    Args:
        failures: by rank, how each failed process ended.
    """
    errors = {rank: _error(failure) for rank, failure in failures.items()}

    def order(rank: int) -> tuple[int, int, int]:
        if errors[rank]:
            kind = 2 if errors[rank].startswith("RankError: ") else 0
        else:
            kind = 3 if failures[rank].exitcode == -signal.SIGTERM else 1
        return kind, failures[rank].timestamp, rank

    first = min(failures, key=order)
    error = errors[first]
    if not error:
        return f"pipelab: rank {first} ended first, {_how(failures[first].exitcode)}"
    if error.startswith("StepTimeoutError: "):  # it names the rank that hangs, which is another one than its own
        return f"pipelab: a call timed out:\n{error}"
    return f"pipelab: rank {first} {'says' if error.startswith('RankError: ') else 'failed first'}:\n{error}"


def _error(failure: ProcessFailure) -> str:
    """Return the error that `record` stored for a process, with the line that raised it; "" if there is none."""
    found = failure.error_file_data.get("message")
    if not isinstance(found, dict):
        return ""
    words = str(found["message"])
    frames = re.findall(r'^  File "(.+)", line (\d+), in (.+)$', str(found["extraInfo"]["py_callstack"]), re.MULTILINE)
    if not frames or "\n  at " in words:
        return words
    return f"{words}\n  at {line_of([FrameSummary(file, int(line), name) for file, line, name in frames])}"


def _how(code: int) -> str:
    """Return how a process ended, by its exit code: negative for a signal."""
    if code >= 0:
        return f"with exit code {code}: what it printed, if anything, stands above"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"killed by {name}{', as the system does where memory runs out' if name == 'SIGKILL' else ''}"


if __name__ == "__main__":
    run_script()
