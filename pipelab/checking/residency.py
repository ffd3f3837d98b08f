"""What a rank holds beside computing: every use has its weights gathered, and its activation there.

rank 0 | UNSHARD F0 RESHARD … UNSHARD B0 RESHARD      one gather before each use, and a free after the last one
rank 0 | F0 OFFLOAD0 … LOAD0 B0                       what was taken away is back before its backward
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from pipelab.errors import require_caps
from pipelab.plan.actions import Action
from pipelab.plan.binding import written
from pipelab.plan.bound import BoundPlan, Move
from pipelab.plan.fault import Fault

_RELEASES = ("B", "I")
"""The kinds that need what a forward kept, and release it."""


def residency(bound: BoundPlan, gather_cap: int | Sequence[int] | None = None) -> list[Fault]:
    """Find moves that cannot be, and actions whose weights or activation are not there.

    Args:
        bound: the plan.
        gather_cap: how many stages' gathered weights a rank may hold: one number, or one per rank.
    """
    caps = [len(bound.moves)] * len(bound.rows)
    if gather_cap is not None:
        caps = require_caps(gather_cap, len(bound.rows), "gather_cap")
    listed = [move for move in bound.moves if not move.reduces]
    sharded = {move.what[1] for move in listed if move.action.microbatch is None}
    by_rank = {rank: list(moves) for rank, moves in groupby(listed, key=lambda move: move.rank)}
    ranks = range(len(bound.rows)) if sharded else by_rank
    return [fault for rank in ranks for fault in _of_rank(bound, rank, by_rank.get(rank, []), sharded, caps[rank])]


def _of_rank(bound: BoundPlan, rank: int, moves: list[Move], sharded: set[int], cap: int) -> Iterator[Fault]:
    holding = _Holding(bound, rank, sharded, cap)
    waiting = moves[::-1]
    for index, code in enumerate(bound.rows[rank]):
        while waiting and waiting[-1].before <= index:
            yield from holding.moved(waiting.pop())
        yield from holding.ran(code, bound.position(rank, index))
    for move in reversed(waiting):
        yield from holding.moved(move)
    for stage, position in holding.gathered.items():
        hint = f"yield {_free(stage)} after the stage's last action"
        yield holding.fault(position, Action("UNSHARD", None, stage), "gathers weights that nothing frees", hint)


def _free(stage: int) -> str:
    return written(Action("RESHARD", None, stage))


class _Holding:
    """What a rank holds while it goes along its row.

    Attributes:
        gathered: by stage, the position since which its weights are gathered.
    """

    def __init__(self, bound: BoundPlan, rank: int, sharded: set[int], cap: int) -> None:
        self.bound, self.rank, self.sharded, self.cap = bound, rank, sharded, cap
        self.gathered: dict[int, int] = {}
        self._freed: dict[int, int] = {}  # by stage, the position
        self._reported: set[int] = set()  # stages whose lack of weights is reported already
        self._kept: dict[tuple[int | None, int], int | None] = {}  # by activation: since when away, or None if here

    def fault(self, position: int, action: Action, message: str, hint: str) -> Fault:
        message = f"{action} on rank {self.rank}, position {position} {message}"
        return Fault("residency", self.rank, position, action, message, hint)

    def moved(self, move: Move) -> Iterator[Fault]:
        """Follow a move; yield its faults."""
        action, position, stage = move.action, move.position, move.what[1]
        if action.kind == "UNSHARD":
            yield from self._gathered(move)
        elif action.microbatch is not None:
            yield from self._carried(move)
        else:
            if stage not in self.gathered:
                hint = f"remove {written(action)}"
                yield self.fault(position, action, f"frees stage {stage}, which is not gathered", hint)
            self._freed[stage] = position
            self.gathered.pop(stage, None)

    def _gathered(self, move: Move) -> Iterator[Fault]:
        action, position, stage = move.action, move.position, move.what[1]
        remove = f"remove {written(action)}"
        if stage not in self.bound.stages_of.get(self.rank, ()):
            yield self.fault(position, action, f"gathers a stage that rank {self.rank} does not hold", remove)
        elif stage in self.gathered:
            twice = f"gathers stage {stage}, which is gathered since position {self.gathered[stage]}"
            hint = f"{remove}, or free the stage before it with {_free(stage)}"
            yield self.fault(position, action, f"{twice}: one gather before each use", hint)
        else:
            self.gathered[stage] = position
            self._reported.discard(stage)
            if len(self.gathered) > self.cap:
                held = ", ".join(map(str, self.gathered))
                message = f"makes rank {self.rank} hold the weights of stages {held} (cap {self.cap})"
                hint = f"free a stage before it, such as with {_free(next(iter(self.gathered)))}"
                yield self.fault(position, action, message, hint)

    def _carried(self, move: Move) -> Iterator[Fault]:
        action, what, away = move.action, move.what, self._kept.get(move.what)
        if what in self._kept and (away is None) == (action.kind == "OFFLOAD"):
            self._kept[what] = move.position if action.kind == "OFFLOAD" else None
            return
        where = "is here" if away is None else f"is away since position {away}"
        why = where if what in self._kept else "the rank does not keep: it comes between F and B"
        verb = "takes away" if action.kind == "OFFLOAD" else "brings back"
        yield self.fault(move.position, action, f"{verb} an activation that {why}", f"remove {written(action)}")

    def ran(self, code: int, position: int) -> Iterator[Fault]:
        """Follow an action that computes; yield its faults."""
        codes = self.bound.codes
        action, stage = codes.action(code), codes.stage[code]
        if codes.collective[code]:
            return
        if stage in self.sharded and stage not in self.gathered and stage not in self._reported:
            cause = f"freed at position {self._freed[stage]}" if stage in self._freed else "not gathered"
            hint = f"yield {written(Action('UNSHARD', None, stage))} before it: one gather before each use"
            yield self.fault(position, action, f"needs the weights of stage {stage}, which are {cause}", hint)
            self._reported.add(stage)
        if codes.holds[code]:
            self._kept[action.microbatch, stage] = None
        elif action.kind in _RELEASES and (since := self._kept.pop((action.microbatch, stage), None)) is not None:
            message = f"needs the activation that was taken away at position {since}"
            load = written(Action("LOAD", action.microbatch, stage))
            yield self.fault(position, action, message, f"yield {load} before it")
