"""Run torchrun in this process, and say at the end in few words what failed."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence

from torch.distributed import run as torch_run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

__all__ = ["decisive", "torchrun"]

_MOST_LINES = 24
"""How many lines of a message are repeated; all of it stands above."""


def torchrun(arguments: Sequence[str]) -> str | None:
    """Start processes as torchrun does, and wait for them; it is this process that gets and passes on signals.

    Args:
        arguments: what the word torchrun would be followed by.

    Returns:
        If a process failed, torchrun's report and then the decisive words; else `None`.
    """
    try:
        torch_run.run(torch_run.parse_args(list(arguments)))
    except ChildFailedError as error:
        return f"{str(error).strip()}\n\n{decisive(error.failures)}"
    return None


def decisive(failures: Mapping[int, ProcessFailure]) -> str:
    """Return what failed first, in few words.

    That is an error that a process was ended by; else what ended a process without a word, a signal or an exit code. A
    `RankError` says what a process heard of another one; SIGTERM is what torchrun sends to those that are left.

    Args:
        failures: how each process ended that failed, by rank.
    """
    order = sorted(failures, key=lambda rank: (failures[rank].timestamp, rank))
    told = {rank: words for rank in order if (words := _told(failures[rank]))}
    own = [rank for rank in told if not told[rank].startswith("RankError: ")]
    if own:
        alike = len(own) == len(failures) > 1 and len(set(told.values())) == 1
        return _message(
            "every rank failed alike" if alike else f"rank {own[0]} {_did(told[own[0]])} first", told[own[0]]
        )
    silent = [rank for rank in order if rank not in told]
    struck = [rank for rank in silent if failures[rank].exitcode != -signal.SIGTERM]
    first = next(iter(struck or ([] if told else silent)), None)
    ended = "" if first is None else f"rank {first} ended first, {_how(failures[first].exitcode)}"
    if not told:
        return f"pipelab: {ended}"
    witness = next(iter(told))
    return _message(f"{ended}; rank {witness} says" if ended else f"rank {witness} says", told[witness])


def _did(words: str) -> str:
    """Return what a process did that ended with these words: who waits in vain is not the one that failed."""
    return "gave up waiting" if words.startswith("StepTimeoutError: ") else "failed"


def _told(failure: ProcessFailure) -> str:
    """Return the error that a process left in its file, if it left one."""
    message = failure.error_file_data.get("message")
    return str(message.get("message", "")) if isinstance(message, dict) else ""


def _how(code: int) -> str:
    """Return how a process ended, by its exit code: negative for a signal."""
    if code >= 0:
        return f"with exit code {code}: what it said itself, if anything, stands above"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"killed by {name}{', as the system does where memory runs out' if name == 'SIGKILL' else ''}"


def _message(lead: str, words: str) -> str:
    lines = words.strip().splitlines()
    more = [f"  … and {len(lines) - _MOST_LINES} lines more, above"] if len(lines) > _MOST_LINES else []
    return "\n".join([f"pipelab: {lead}:", *lines[:_MOST_LINES], *more])
