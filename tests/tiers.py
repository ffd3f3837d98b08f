"""How many of the tests run. The variable TIER says so.

TIER=quick       the default: 20 examples of each property, a fifth of each sweep, no test marked `thorough`
TIER=0 ... 4     as quick, with this fifth of each sweep, and this fifth of the tests marked `thorough`
TIER=thorough    50 examples, every sweep whole, every test

A sweep is a test marked `sweep`, whose cases are drawn by their names, or what goes through `sampled`. The variable
SAMPLE names another mark that is drawn so: `make newest` runs a fifth of the tests that start processes.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from typing import TypeVar

import pytest

Case = TypeVar("Case")

TIER = os.environ.get("TIER", "quick")
THOROUGH = TIER == "thorough"
EXAMPLES = 50 if THOROUGH else 20
_SWEEPS = ("sweep", "thorough", *os.environ.get("SAMPLE", "").split())
_FIFTH = 0 if TIER in {"quick", "thorough"} else range(5).index(int(TIER))


def sampled(cases: Iterable[Case]) -> list[Case]:
    """Return the cases of a sweep that this tier runs."""
    cases = list(cases)
    return cases if THOROUGH else cases[_FIFTH % len(cases) :: 5]


def runs(item: pytest.Item) -> bool:
    """Return whether this tier runs a test."""
    if THOROUGH or not any(map(item.get_closest_marker, _SWEEPS)):
        return True
    if TIER == "quick" and item.get_closest_marker("thorough"):
        return False
    return zlib.crc32(item.nodeid.encode()) % 5 == _FIFTH
