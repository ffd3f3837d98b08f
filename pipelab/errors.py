"""The errors that pipelab raises on purpose: one class for each kind of mistake.

All of them derive from `PipelabError`, so `except pipelab.PipelabError` catches what pipelab says about your input, and
nothing else. `ScheduleError` is in `plan/fault.py`, beside the faults that it holds.
"""

from __future__ import annotations

import operator
import reprlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "MOST_SLOTS", "NO_TORCH", "BatchError", "CostError", "DeviceError", "EngineError", "FormatError", "LossError",
    "PipelabError", "RankError", "SplitError", "StageError", "StepTimeoutError", "UsageError", "VerificationError",
    "clean", "counted", "require_caps", "require_size", "require_slots", "require_suffix",
]  # fmt: skip

MOST_SLOTS = 1 << 22
"""How many stages times micro-batches a plan may have. One of this size is checked and simulated in about 4 GB."""

NO_TORCH = """this needs PyTorch, which is not installed
  try: pip install "torch>=2.12\""""
"""What is said where PyTorch is missing: pipelab is installed without it."""


class PipelabError(Exception):
    """The base of every error that pipelab raises on purpose."""


class UsageError(PipelabError):
    """A size, a name, a file or an option is not possible, or the pipeline is closed."""


class FormatError(PipelabError):
    """A text or file is not in the expected notation, or a file cannot be written in the format of its suffix."""


class CostError(PipelabError):
    """A cost or a number of bytes is negative, not a number, or a list whose length is not the number of stages."""


class EngineError(PipelabError):
    """The base of the errors that can occur while a plan is executed on tensors."""


class SplitError(EngineError):
    """A model cannot be cut into the stages that were asked for."""


class DeviceError(EngineError):
    """A list of devices does not fit the plan, or a device does not exist."""


class BatchError(EngineError):
    """A batch cannot be cut into the plan's micro-batches."""


class LossError(EngineError):
    """A loss function returned something that cannot be a loss."""


class StageError(EngineError):
    """A stage raised while it ran one action, or gave a NaN or an infinity while the pipeline watched for it.

    `rank`, `stage` and `action` say where; the original error, if there is one, is the cause (`__cause__`).
    """

    def __init__(self, message: str, rank: int, stage: int, action: object) -> None:
        """Keep the place beside the message."""
        super().__init__(message)
        self.rank = rank
        self.stage = stage
        self.action = action

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by the arguments, so that the error crosses process borders."""
        return type(self), (self.args[0], self.rank, self.stage, self.action)


class StepTimeoutError(EngineError):
    """No action began or ended for `timeout` seconds; the message says what every rank was doing or waiting for."""


class RankError(EngineError):
    """Another process of the pipeline failed or is gone; `rank` says which one (-1 if that is not known)."""

    def __init__(self, message: str, rank: int) -> None:
        """Keep the rank beside the message."""
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by the arguments, so that the error crosses process borders."""
        return type(self), (self.args[0], self.rank)


class VerificationError(EngineError):
    """The pipeline's gradients differ from the plain model's."""


def clean(text: str, keep: str = "") -> str:
    r"""Return a text for a terminal or a page: unprintable characters, such as escape codes, are spelled out.

    Example:
        >>> clean("red \x1b[31m\n")
        'red \\x1b[31m\\n'
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in keep else each.encode("unicode_escape").decode() for each in text
    )


def counted(number: int, noun: str) -> str:
    """Return how many there are of something: `1 rank`, `2 micro-batches`."""
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith(('ch', 'ss')) else 's'}"


def require_size(name: str, value: Any, most: int = MOST_SLOTS) -> int:
    """Return a positive whole number as Python's `int`."""
    try:
        size = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        size = 0
    if size < 1:
        raise UsageError(f"{name}={value!r}: expected a whole number, at least 1")
    if size > most:
        raise UsageError(f"{name}={reprlib.repr(size)}: expected a whole number, at most {most}")
    return size


def require_slots(stages: int, microbatches: int) -> None:
    """Refuse a plan that would fill the memory."""
    if stages * microbatches > MOST_SLOTS:
        raise UsageError(
            f"{counted(stages, 'stage')} x {counted(microbatches, 'micro-batch')} are {stages * microbatches:,}: a "
            f"plan may have at most {MOST_SLOTS:,}\n  try: {counted(MOST_SLOTS // stages, 'micro-batch')} or fewer"
        )


def require_caps(memory_cap: Any, ranks: int, name: str = "memory_cap") -> list[int]:
    """Return the cap of every rank, from one number or one per rank, which is an argument called `name`."""
    if not isinstance(memory_cap, Sequence) or isinstance(memory_cap, str):
        return [require_size(name, memory_cap, sys.maxsize)] * ranks
    if len(memory_cap) != ranks:
        count = f"{counted(len(memory_cap), 'number')} for {counted(ranks, 'rank')}"
        raise UsageError(f"{name} has {count}: give one number, or one per rank")
    return [require_size(name, cap, sys.maxsize) for cap in memory_cap]


def require_suffix(path: Path, what: str, known: Sequence[str]) -> str:
    """Return a file name's suffix in small letters."""
    suffix = path.suffix.lower()
    if suffix not in known:
        wanted = suffix or "a file without a suffix"
        raise FormatError(f"{path.name}: {what} cannot be written as {wanted}; use one of {' '.join(known)}")
    return suffix
