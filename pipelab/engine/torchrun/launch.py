"""Start a script under torchrun, and repeat at the end in few words what failed.

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

_MOST_LINES = 24
"""How many lines of a message are repeated; all of it stands above."""


def torchrun(arguments: Sequence[str]) -> str | None:
    """Start processes as torchrun does, and wait for them; it is this process that gets and passes on signals.

    Args:
        arguments: torchrun's own, and then the script with its arguments.

    Returns:
        If a process failed, torchrun's report and then the decisive words; else `None`.
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
    """Return what failed first, in few words.

    That is an error that ended a process; else what ended a process without an error, a signal or an exit code. A
    `RankError` says what a process learned of another one; SIGTERM is what torchrun sends to those that are left.

    Args:
        failures: how each process ended that failed, by rank.
    """
    order = sorted(failures, key=lambda rank: (failures[rank].timestamp, rank))
    errors = {rank: error for rank in order if (error := _error(failures[rank]))}
    own = [rank for rank in errors if not errors[rank].startswith("RankError: ")]
    if own:
        error = errors[own[0]]
        if len(own) == len(failures) > 1 and len(set(errors.values())) == 1:
            return _message("every rank failed alike", error)
        # who waited in vain is not the one that failed: the error names that one
        return _message(
            "a call timed out" if error.startswith("StepTimeoutError: ") else f"rank {own[0]} failed first", error
        )
    silent = [rank for rank in order if rank not in errors]
    struck = [rank for rank in silent if failures[rank].exitcode != -signal.SIGTERM]
    first = next(iter(struck or ([] if errors else silent)), None)
    ended = "" if first is None else f"rank {first} ended first, {_how(failures[first].exitcode)}"
    if not errors:
        return f"pipelab: {ended}"
    witness = next(iter(errors))
    return _message(f"{ended}; rank {witness} says" if ended else f"rank {witness} says", errors[witness])


def _error(failure: ProcessFailure) -> str:
    """Return the error that `record` left of a process, with the line that raised it; "" if there is none."""
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


def _message(lead: str, words: str) -> str:
    lines = words.strip().splitlines()
    more = [f"  … and {len(lines) - _MOST_LINES} lines more, above"] if len(lines) > _MOST_LINES else []
    return "\n".join([f"pipelab: {lead}:", *lines[:_MOST_LINES], *more])


if __name__ == "__main__":
    run_script()
