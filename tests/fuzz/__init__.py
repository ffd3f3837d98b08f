"""Random attacks: `make fuzz` runs them for minutes, and the tests run each with a few seeds.

A kind of attack is a function `fuzz_<kind>(seed)` in a module of this folder. It returns what went wrong, or `None`; an
exception is a failure too. Three attributes of the function are optional:

- `seeds`: how many seeds the tests try (1)
- `seconds`: after how many seconds a try counts as a hang (60)
- `dist`: whether it starts several processes (False)
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable

Fuzz = Callable[[int], str | None]


def kinds() -> dict[str, Fuzz]:
    """Return every kind of attack by name, in the order of the alphabet."""
    modules = [each.name for each in pkgutil.iter_modules(__path__) if not each.name.startswith("_")]
    found = (vars(importlib.import_module(f"{__name__}.{name}")).items() for name in modules)
    own = {name.removeprefix("fuzz_"): each for members in found for name, each in members if name.startswith("fuzz_")}
    return dict(sorted(own.items()))


def limit(kind: Fuzz) -> float:
    """Return after how many seconds a try counts as a hang."""
    return getattr(kind, "seconds", 60.0)
