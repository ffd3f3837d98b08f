"""Who is gone: processes that closed their pipeline, and processes that ended without a word."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

__all__ = ["Store", "gone"]


class Store(Protocol):
    """What all processes of a job share: torchrun's store, or a corner of it."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""

    def get(self, key: str) -> bytes:
        """Return a value, waiting for it."""

    def check(self, keys: list[str]) -> bool:
        """Tell whether all of these are there."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write a value if there is none yet; return what is there."""


def gone(store: Store, rank: int, everyone: Sequence[dict[str, Any]]) -> tuple[int, str] | None:
    """Return a rank that is gone, and how that is known; `None` if none is known to be.

    Args:
        store: where a process that leaves says so.
        rank: this process, which is not asked.
        everyone: what every process told of itself.
    """
    for each, process in enumerate(everyone):
        if each == rank:
            continue
        if store.check([f"left/{each}"]):
            return each, f"rank {each} is gone: {store.get(f'left/{each}').decode()}"
        here = all(process[key] == everyone[rank][key] for key in ("host", "processes"))
        if here and not _alive(process["pid"]):
            return each, f"rank {each} is gone: process {process['pid']} on {process['host']} was killed, or ended"
    return None


def _alive(pid: int) -> bool:
    """Tell whether a process of this machine still runs; one that is dead and not yet buried does not."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return False
    except (OSError, IndexError):  # another user's process, or a system without /proc
        return True
    return state not in "ZX"
