"""What processes tell each other when something goes wrong, through the store that all of them share.

failed        which rank failed first, and of what
heard/<rank>  this process knows
left/<rank>   how this process left: it closed its pipeline, or ended
waits/<rank>  the number of the call in which this process has been waiting for long
done/<rank>   this process needs the store no more: the one that holds it may end
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipelab.engine.torchrun.store import SilentStoreError, Store, torchrun_holds_the_store

__all__ = ["Notice", "Notices", "linger"]

_LINGERING_SECONDS = 3.0
"""How long a process that fails waits for the others to hear of it, before it raises and perhaps ends."""


@dataclass(frozen=True, slots=True)
class Notice:
    """That a rank failed.

    Attributes:
        rank: which one; -1 if nobody can tell.
        told: what it failed of.
        alive: whether its process is still there.
    """

    rank: int
    told: str
    alive: bool


class Notices:
    """One process's view of them.

    Args:
        store: a corner of the store that all processes of a job share.
        rank: this process.
        everyone: what every process told of itself.
    """

    def __init__(self, store: Store, rank: int, everyone: Sequence[dict[str, Any]]) -> None:
        """Note who is there."""
        self._store = store
        self._rank = rank
        self._everyone = everyone
        self._holds_store = rank == 0 and not torchrun_holds_the_store()

    def news(self) -> Notice | None:
        """Return who failed first; `None` if nobody did, as far as is known."""
        try:
            return Notice(**json.loads(self._store.get("failed"))) if self._store.check(["failed"]) else None
        except SilentStoreError as error:
            return Notice(-1, f"{error}: its host, or the network to it, is gone", alive=False)
        except RuntimeError:
            return Notice(0, "the process that holds this job's store is gone: rank 0, or torchrun itself", alive=False)

    def note(self, rank: int, told: str, *, alive: bool = False) -> Notice:
        """Say that a rank failed, unless another was named before. Return who failed first."""
        notice = Notice(rank, told, alive)
        with contextlib.suppress(RuntimeError):  # the store may be gone with the process that held it
            self._store.compare_set("failed", "", json.dumps(asdict(notice)))
            return self.news() or notice
        return notice

    def tell(self, rank: int, told: str, *, alive: bool = False) -> Notice:
        """Say that a rank failed, unless another was named before; wait until all others know. Return who failed."""
        notice = self.note(rank, told, alive=alive)
        with contextlib.suppress(RuntimeError):
            self._store.set(f"heard/{self._rank}", "")
            linger(self._store, self._others("heard", notice))
        self._take_leave(notice)
        return notice

    def hear(self, notice: Notice) -> None:
        """Say that this process knows."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"heard/{self._rank}", "")
        self._take_leave(notice)

    def leave(self, how: str) -> None:
        """Say how this process leaves: `"it closed its pipeline"`. Nothing comes of it in a fork of the process."""
        if os.getpid() != self._everyone[self._rank]["pid"]:
            return
        with contextlib.suppress(RuntimeError):
            self._store.set(f"left/{self._rank}", how)
        self._take_leave(None)

    def wait(self, number: int) -> None:
        """Say that this process waits for others in its so-many-th call."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"waits/{self._rank}", str(number))

    def absent(self, number: int) -> list[int]:
        """Return the ranks that have not said that they wait in their so-many-th call too."""
        others = [each for each in range(len(self._everyone)) if each != self._rank]
        with contextlib.suppress(RuntimeError):
            return [
                each
                for each in others
                if not self._store.check([f"waits/{each}"]) or int(self._store.get(f"waits/{each}")) < number
            ]
        return []

    def gone(self) -> tuple[int, str] | None:
        """Return a rank that left, or whose process ended, and how that is known; `None` if none is known to have."""
        own = self._everyone[self._rank]
        for each, process in enumerate(self._everyone):
            if each == self._rank:
                continue
            with contextlib.suppress(RuntimeError):
                if self._store.check([f"left/{each}"]):
                    return each, f"rank {each} is gone: {self._store.get(f'left/{each}').decode()}"
            here = all(process[key] == own[key] for key in ("host", "processes"))
            if here and not _alive(process["pid"]):
                return each, f"rank {each} is gone: process {process['pid']} on {process['host']} was killed, or ended"
        return None

    def _take_leave(self, notice: Notice | None) -> None:
        """Use the store no more; if this process holds it, wait until nobody does."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"done/{self._rank}", "")
            if self._holds_store:
                linger(self._store, self._others("done", notice))

    def _others(self, word: str, notice: Notice | None) -> list[str]:
        dead = None if notice is None or notice.alive else notice.rank
        return [f"{word}/{each}" for each in range(len(self._everyone)) if each not in (self._rank, dead)]


def linger(store: Store, keys: list[str]) -> None:
    """Wait until all keys are there, but not for long."""
    deadline = time.monotonic() + _LINGERING_SECONDS
    while keys and not store.check(keys) and time.monotonic() < deadline:
        time.sleep(0.02)


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
