"""What processes report to each other when something goes wrong, through the store that all of them share.

failure        the first failure: which rank, and what happened
status/<rank>  what this process is doing, written every few seconds while it is in a call
exit/<rank>    how this process left: it closed its pipeline, or ended
done/<rank>    this process has read the failure, or has left: it does not need the store any more
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

from pipelab.engine.torchrun.store import AnsweringStore, SilentStoreError, torchrun_holds_the_store

_LINGERING_SECONDS = 3.0
"""How long a process that fails waits until the others have read its failure, before it raises."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of a rank.

    Attributes:
        rank: which one; -1 if unknown.
        message: what happened.
        alive: whether its process still runs.
    """

    rank: int
    message: str
    alive: bool


@dataclass(frozen=True, slots=True)
class PublishedStatus:
    """What a process was doing a few seconds ago.

    Attributes:
        call: the number of the call it was in.
        doing: a description of what it was doing.
        computing: whether it was running an action, rather than waiting.
    """

    call: int
    doing: str
    computing: bool


class Failures:
    """Reports this process's failures to the others, and reads theirs.

    Args:
        store: a part of the store that all processes of a job share.
        rank: this process.
        everyone: every process's info.
    """

    def __init__(self, store: AnsweringStore, rank: int, everyone: Sequence[dict[str, Any]]) -> None:
        self._store = store
        self._rank = rank
        self._everyone = everyone
        self._others = [each for each in range(len(everyone)) if each != rank]
        self._holds_store = rank == 0 and not torchrun_holds_the_store()

    def first_failure(self) -> Failure | None:
        """Return the first failure; `None` if none is known."""
        try:
            return Failure(**json.loads(self._store.get("failure"))) if self._store.check(["failure"]) else None
        except SilentStoreError as error:
            return Failure(-1, f"{error}: its host, or the network to it, is gone", alive=False)
        except RuntimeError:
            return Failure(0, "the process that holds this job's store is gone: rank 0, or torchrun", alive=False)

    def report(self, rank: int, message: str, *, alive: bool = False) -> Failure:
        """Record that a rank failed, and wait a little until all others have read it; return the first failure."""
        failure = Failure(rank, message, alive)
        with contextlib.suppress(RuntimeError):  # the store may be gone with the process that held it
            self._store.compare_set("failure", "", json.dumps(asdict(failure)))  # an earlier failure stays
            failure = self.first_failure() or failure
        self._finish(lingers=True, dead=None if failure.alive else failure.rank)
        return failure

    def acknowledge(self, failure: Failure) -> None:
        """Record that this process has read a failure, and wait a little until all have.

        When the first process ends, torchrun kills all others, perhaps before they have raised.
        """
        self._finish(lingers=True, dead=None if failure.alive else failure.rank)

    def announce_exit(self, how: str) -> None:
        """Record how this process leaves: `"it closed its pipeline"`. A fork of the process records nothing."""
        if os.getpid() == self._everyone[self._rank]["pid"]:
            with contextlib.suppress(RuntimeError):
                self._store.set(f"exit/{self._rank}", how)
            self._finish(lingers=self._holds_store)

    def find_dead_rank(self) -> tuple[int, str] | None:
        """Return a rank that left, or whose process ended, with a message; `None` if none is known."""
        own = self._everyone[self._rank]
        for rank in self._others:
            process = self._everyone[rank]
            with contextlib.suppress(RuntimeError):
                if self._store.check([f"exit/{rank}"]):
                    return rank, f"rank {rank} is gone: {self._store.get(f'exit/{rank}').decode()}"
            here = all(process[key] == own[key] for key in ("host", "processes"))
            if here and not _runs(process["pid"]):
                return rank, f"rank {rank} is gone: process {process['pid']} on {process['host']} was killed, or ended"
        return None

    def publish(self, status: PublishedStatus) -> None:
        """Record what this process is doing."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"status/{self._rank}", json.dumps(asdict(status)))

    def statuses(self, call: int) -> dict[int, PublishedStatus | None]:
        """Return the status of each other rank in call number `call`; `None` for a rank without one."""
        found: dict[int, PublishedStatus | None] = {}
        with contextlib.suppress(RuntimeError):
            for rank in self._others:
                key = f"status/{rank}"
                status = PublishedStatus(**json.loads(self._store.get(key))) if self._store.check([key]) else None
                found[rank] = status if status and status.call >= call else None
        return found

    def _finish(self, *, lingers: bool, dead: int | None = None) -> None:
        """Stop using the store; with `lingers`, wait a little until the others do not need it either."""
        keys = [f"done/{rank}" for rank in self._others if rank != dead]
        deadline = time.monotonic() + _LINGERING_SECONDS
        with contextlib.suppress(RuntimeError):
            self._store.set(f"done/{self._rank}", "")
            while lingers and keys and not self._store.check(keys) and time.monotonic() < deadline:
                time.sleep(0.02)


def _runs(pid: int) -> bool:
    """Return whether a process of this machine runs: a zombie does not."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return False
    except (OSError, IndexError):  # another user's process, or a system without /proc
        return True
    return state not in "ZX"
