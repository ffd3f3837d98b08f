"""The caller's autocast, which is per thread, carried into the workers.

As in plain training, forwards and losses run under it and backwards do not: a backward computes in the types that its
forward chose.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch

__all__ = ["Contexts", "callers_autocast", "switched_off"]

Contexts = Sequence["partial[torch.autocast]"]
"""What enters the caller's autocast, one for each kind of device."""


def callers_autocast(kinds: Iterable[str]) -> Contexts:
    """Return what makes another thread's autocast the caller's, for these kinds of device.

    Example:
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     len(callers_autocast(["cpu"]))
        1
    """
    return [
        partial(
            torch.autocast,
            kind,
            dtype=torch.get_autocast_dtype(kind),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )
        for kind in sorted(set(kinds))
        if torch.is_autocast_enabled(kind)
    ]


@contextmanager
def switched_off(contexts: Contexts) -> Iterator[None]:
    """Leave autocast for a while; the weights that it has cast stay cast."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context(enabled=False))
        yield
