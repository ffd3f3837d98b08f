"""Check that a rank holds what it uses: its weights are gathered, and its activations back, before each use.

rank 0 | UNSHARD F0 RESHARD … UNSHARD B0 RESHARD      one gather before each use, and a free after the last one
rank 0 | F0 OFFLOAD0 … LOAD0 B0                       what was taken away is back before its backward
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipelab.errors import require_caps
from pipelab.plan.actions import RESHARD, UNSHARD, Action
from pipelab.plan.binding import written
from pipelab.plan.bound import BoundPlan
from pipelab.plan.fault import Fault


def residency(bound: BoundPlan, gather_cap: int | Sequence[int] | None = None) -> list[Fault]:
    """Find moves that cannot be, and actions whose weights or activation are not there."""
    moves = [move for move in bound.moves if not move.action.traits.computes]
    most = len(moves) + 1 if gather_cap is None else gather_cap
    caps = require_caps(most, len(bound.lists), "gather_cap")
    sharded = {move.action.stage for move in moves if move.action.microbatch is None}
    ranks = range(len(bound.lists) if moves else 0)
    return [fault for rank in ranks for fault in _of_rank(bound, rank, sharded, caps[rank])]


def _of_rank(bound: BoundPlan, rank: int, sharded: set[int | None], cap: int) -> Iterator[Fault]:
    holding, places = _Holding(bound, rank, sharded, cap), bound.placed(rank)
    for code in bound.lists[rank]:
        if bound.codes.collective[code]:
            continue
        action = bound.codes.action(code)
        moved = holding.gather if action.microbatch is None else holding.carry
        follow = holding.run if bound.computes(code) else moved
        yield from follow(code, action, places[code])
    for stage, position in holding.gathered.items():
        hint = f"yield {_free(stage)} after the stage's last action"
        yield holding.fault(position, UNSHARD(stage), "gathers weights that nothing frees", hint)


def _free(stage: int) -> str:
    return written(RESHARD(stage))


class _Holding:
    """What a rank holds while it goes along its row."""

    def __init__(self, bound: BoundPlan, rank: int, sharded: set[int | None], cap: int) -> None:
        self.bound, self.rank, self.sharded, self.cap = bound, rank, sharded, cap
        self.gathered: dict[int, int] = {}  # by stage, the position since which its weights are gathered
        self._freed: dict[int, int] = {}  # by stage, the position
        self._reported: set[int] = set()  # stages whose lack of weights is reported already
        self._kept: dict[tuple[int, int], int | None] = {}  # by activation: since when away, or None if here

    def fault(self, position: int, action: Action, message: str, hint: str) -> Fault:
        message = f"{action} on rank {self.rank}, position {position} {message}"
        return Fault("residency", self.rank, position, action, message, hint)

    def gather(self, code: int, action: Action, position: int) -> Iterator[Fault]:
        """Follow a gather, or a free; yield its faults."""
        stage, remove = self.bound.codes.stage[code], f"remove {written(action)}"
        if action.traits.releases:
            if stage not in self.gathered:
                yield self.fault(position, action, f"frees stage {stage}, which is not gathered", remove)
            self._freed[stage] = position
            self.gathered.pop(stage, None)
        elif stage not in self.bound.stages_of.get(self.rank, ()):
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

    def carry(self, code: int, action: Action, position: int) -> Iterator[Fault]:
        """Follow what takes an activation away, or brings it back; yield its faults."""
        what, takes = self.bound.what(code), bool(action.traits.releases)
        away = self._kept.get(what)
        if what in self._kept and (away is None) == takes:
            self._kept[what] = position if takes else None
            return
        where = "is here" if away is None else f"is away since position {away}"
        why = where if what in self._kept else "the rank does not keep: it comes between F and B"
        verb = "takes away" if takes else "brings back"
        yield self.fault(position, action, f"{verb} an activation that {why}", f"remove {written(action)}")

    def run(self, code: int, action: Action, position: int) -> Iterator[Fault]:
        """Follow an action that computes; yield its faults."""
        codes = self.bound.codes
        stage, what = codes.stage[code], self.bound.what(code)
        if stage in self.sharded and stage not in self.gathered and stage not in self._reported:
            cause = f"freed at position {self._freed[stage]}" if stage in self._freed else "not gathered"
            hint = f"yield {written(UNSHARD(stage))} before it: one gather before each use"
            yield self.fault(position, action, f"needs the weights of stage {stage}, which are {cause}", hint)
            self._reported.add(stage)
        if codes.holds[code]:
            self._kept[what] = None
        elif action.traits.releases == "activations" and (since := self._kept.pop(what, None)) is not None:
            message = f"needs the activation that was taken away at position {since}"
            load = written(Action("LOAD", action.microbatch, stage))
            yield self.fault(position, action, message, f"yield {load} before it")
