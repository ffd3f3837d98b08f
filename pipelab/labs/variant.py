"""A student's own numbers, which follow from a name: `--variant ada`."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Variant:
    """The numbers of one student; those without a name are the assignments' own.

    Attributes:
        microbatches: how many micro-batches homework 4 runs.
        rows: rows of each of them.
        forward, backward: milliseconds of a stage of Practical 9 for the whole batch.
    """

    microbatches: int = 4
    rows: int = 4
    forward: float = 20.0
    backward: float = 40.0


def variant(name: str) -> Variant:
    """Return a student's numbers; capital letters and spaces around the name make no difference.

    Example:
        >>> variant("ada") == variant(" Ada"), variant("ada") == variant("bob"), variant("")
        (True, False, Variant(microbatches=4, rows=4, forward=20.0, backward=40.0))
    """
    if not (name := name.strip().casefold()):
        return Variant()
    choose = random.Random(f"pipelab {name}")  # noqa: S311 - other numbers, not secret ones
    forward = float(choose.randint(12, 30))
    backward = float(round(forward * choose.choice((1.5, 1.75, 2.25, 2.5))))
    return Variant(choose.randint(5, 9), choose.randint(3, 9), forward, backward)
