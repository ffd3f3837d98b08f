"""A plan bound to stages and turned into codes, which `check` and `simulate` walk through.

Binding keeps every item that may be in a legal plan and records a fault for every other item. `check` still checks
the rest of the plan, so that a student sees all mistakes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, islice
from typing import TYPE_CHECKING, NamedTuple

from pipelab.errors import MOST_SLOTS
from pipelab.plan.actions import OPTIONAL, TRAITS, Action, Item, Kind, Pair, Posting, halves_of
from pipelab.plan.binding import (
    NO_RANK,
    After,
    Place,
    Refusal,
    StagesOfRank,
    ask,
    bind_action,
    require_slices,
    stages_by_name,
    stages_by_placement,
    within,
)
from pipelab.plan.codes import ASIDE, Codes
from pipelab.plan.fault import Fault

if TYPE_CHECKING:
    from pipelab.plan.order import Traversal

MOST_ACTIONS = 4 * MOST_SLOTS
"""How many actions the rows of a plan may list in all; a plan in which every backward is split has three per slot."""
_MOST_MOVES = 1 << 20
"""How many items more than the limit make a row endless, whatever they are."""
_MOVES = tuple(kind for kind, traits in TRAITS.items() if not traits.computes)


def endless_limit(stages: int, microbatches: int) -> int:
    """Return how many actions that compute a rank may list before pipelab considers its row endless.

    Example:
        >>> endless_limit(stages=4, microbatches=8)
        320
    """
    return 8 * stages * microbatches + 64


def is_endless(row: Sequence[object], limit: int) -> bool:
    """Return whether a row has more than `limit` actions that compute, or far more moves: no rule limits them."""
    more = len(row) - limit
    return more > 0 and (more > _MOST_MOVES or sum(map(_is_move, row)) < more)


def read(row: list[object], items: Iterable[object], limit: int) -> list[object]:
    """Extend a row one by one, until it is endless or its items end; return it."""
    items, more = iter(items), limit + 1
    while more and len(row) <= limit + _MOST_MOVES:
        before = len(row)
        row.extend(islice(items, more))
        more = sum(map(_is_move, row[before:])) if len(row) == before + more else 0
    return row


def _is_move(item: object) -> bool:
    return isinstance(item, Action) and item.kind in _MOVES


def named_sizes(
    rows: Sequence[Sequence[object]], ranks: int, stages: int | None, microbatches: int | None
) -> tuple[int, int]:
    """Return the (stages, micro-batches) that were given, or else those that the rows name.

    A mistake such as `F(10**9)` must not make a table of that size. Every (micro-batch, stage) needs two actions, so
    numbers far above the number of actions are ignored here, and reported as out of range.
    """
    halves = (half for row in rows for item in row for half in halves_of(item))
    actions = [half for half in halves if isinstance(half, Action)]
    enough = min(max(1 << 12, 8 * len(actions)), MOST_SLOTS)
    room = max(1 << 16, enough)
    if stages is None:
        most = min(enough, max(room // (microbatches or 1), ranks))
        named = max((action.stage for action in actions if within(action.stage, most)), default=ranks - 1) + 1
        stages = max(named, ranks if any(action.stage is None for action in actions) else 1)
    if microbatches is None:
        named = max((action.microbatch for action in actions if within(action.microbatch, enough)), default=0) + 1
        microbatches = min(named, max(room // stages, 1))
    return stages, microbatches


class _NotLaidOutError(Exception):
    """A row lists an optional kind, which few plans do: the plan is bound again, with codes for it."""


class Move(NamedTuple):
    """What a rank lists and does not compute: a move, or an all-reduce that runs beside computing."""

    rank: int
    code: int
    action: Action


@dataclass
class BoundPlan:
    """A plan as codes, rank by rank.

    Attributes:
        codes: the tables that say what a code means.
        lists: per rank, the codes of its legal items, in order, each code once (an `R` once per rank).
        computing: the same without what does not compute; of a plan that only computes, the same lists.
        places: per rank, where each code is in the row as written; `None` where code `i` of `computing` is item `i`.
        pairs: the codes of the forwards that open an overlapped pair.
        rank_of_slot: by slot, the rank that must run the stage for the micro-batch, or -1 if that is not known.
        rank_of: by code, the rank that lists it (the first of several), or -1.
        faults: the faults of single items.
        names_ranks: whether `rank_of_slot` comes from a placement rather than from the forwards that were found.
        reduces: for each `R` that is listed, by code, the ranks that list it.
        automatic: the codes of the `R` that pipelab inserted; see `all_reduce`.
        walk: a walk through the whole plan, kept once the plan is known to be right.
        beside: whether the all-reduces run beside computing, so that they are in no row.
        postings: by rank, the sends and receives that its row lists, if the plan lists any: see `Plan`.
    """

    codes: Codes
    rank_of_slot: list[int]
    rank_of: list[int]
    names_ranks: bool
    lists: list[list[int]] = field(default_factory=list)
    computing: list[list[int]] = field(default_factory=list)
    places: list[dict[int, int] | None] = field(default_factory=list)
    pairs: set[int] = field(default_factory=set)
    faults: list[Fault] = field(default_factory=list)
    reduces: dict[int, list[int]] = field(default_factory=dict)
    automatic: set[int] = field(default_factory=set)
    walk: Traversal | None = None
    beside: bool = False
    postings: Sequence[Sequence[tuple[int, Posting]]] = ()

    @classmethod
    def bind(
        cls,
        rows: Sequence[Sequence[object]],
        stages: int,
        microbatches: int,
        place: Place | None,
        after: After | None = None,
        kinds: Collection[Kind] = (),
        *,
        forwards_only: bool = False,
    ) -> BoundPlan:
        """Bind rows of items to stages, and turn them into codes: also of those optional kinds that the rows list."""
        codes = Codes(stages, microbatches, kinds, forwards_only=forwards_only)
        rank_of_slot, fault = ([], None) if place is None else ask(place, stages, microbatches, len(rows))
        bound = cls(
            codes=codes,
            rank_of_slot=rank_of_slot or [NO_RANK] * (stages * microbatches),
            rank_of=[NO_RANK] * len(codes.kind),
            names_ranks=bool(rank_of_slot),
            faults=[] if fault is None else [fault],
        )
        try:
            bound._bind_rows(rows)
        except _NotLaidOutError:
            names = [item.kind for row in rows for item in row if isinstance(item, Action)]
            return cls.bind(rows, stages, microbatches, place, after, [kind for kind in OPTIONAL if kind in names])
        for code in codes.of_kind.get("C", ()):
            if bound.rank_of[code] != NO_RANK:
                codes.recompute(code)
        if "U" in codes.kinds:
            bound._bind_updates()
        if after is not None and (fault := require_slices(after, codes, bound.rank_of_slot)):
            bound.faults.append(fault)
        return bound

    def _bind_rows(self, rows: Sequence[Sequence[object]]) -> None:
        codes, moves = self.codes, list[Action]()
        if self.names_ranks:
            by_rank = stages_by_placement(self.rank_of_slot, codes, len(rows))
        else:
            by_rank = stages_by_name(rows, codes)
        for rank, row in enumerate(rows):
            self._bind_row(rank, row, by_rank[rank], moves)
        if moves:
            codes.add(moves)
        else:
            self.lists = self.computing
        if not self.names_ranks:
            listed = zip(*map(self.ranks_of, codes.per_microbatch), strict=True)
            self.rank_of_slot = [next((rank for rank in ranks if rank != NO_RANK), NO_RANK) for ranks in listed]

    def computes(self, code: int) -> bool:
        """Whether a rank does nothing else during an action."""
        return code < self.codes.first_move and not (self.beside and self.codes.collective[code])

    @property
    def moves(self) -> list[Move]:
        """What does not compute, rank by rank, in order."""
        if self.lists is self.computing:
            return []
        listed = ((rank, code) for rank, row in enumerate(self.lists) for code in row if not self.computes(code))
        return [Move(rank, code, self.codes.action(code)) for rank, code in listed]

    def with_reduces_beside(self) -> BoundPlan:
        """Return the same plan with its all-reduces in no row."""
        if not self.reduces:
            return self
        rows = [[code for code in row if not self.codes.collective[code]] for row in self.computing]
        places: list[dict[int, int] | None] = [self.placed(rank) for rank in range(len(rows))]
        return replace(self, computing=rows, places=places, beside=True, walk=None)

    def placed(self, rank: int) -> dict[int, int]:
        """Return, by code, where it is in a rank's row as written."""
        places = self.places[rank]
        return {code: at for at, code in enumerate(self.lists[rank])} if places is None else dict(places)

    @property
    def replicas(self) -> dict[int, tuple[int, ...]]:
        """Return, for each stage, the ranks that hold it."""
        holders: dict[int, list[int]] = {stage: [] for stage in range(self.codes.stages)}
        for rank, stages in sorted(self.stages_of.items()):
            for stage in stages:
                holders[stage].append(rank)
        return {stage: tuple(ranks) for stage, ranks in holders.items()}

    @cached_property
    def stages_of(self) -> dict[int, set[int]]:
        """Return, for each rank that holds a stage, the stages that it holds."""
        found: dict[int, set[int]] = {}
        for rank, stage in set(zip(self.rank_of_slot, self.codes.stage, strict=False)):
            if rank != NO_RANK:
                found.setdefault(rank, set()).add(stage)
        return found

    @property
    def misplaced(self) -> bool:
        """Whether some action may be on another rank than `rank_of_slot` says."""
        right = (self.rank_of_slot, [NO_RANK] * len(self.rank_of_slot))
        return any(self.ranks_of(kind) not in right for kind in self.codes.per_microbatch)

    @property
    def written_reduces(self) -> set[int]:
        """Return the codes of the all-reduces that the plan's author wrote, and so may have misplaced."""
        return self.reduces.keys() - self.automatic

    @property
    def needs_aside(self) -> bool:
        """Whether an action needs a value that walks take as given: its place in the row is still to be checked."""
        kinds = self.codes.per_microbatch
        return bool(self.written_reduces) or any(not ASIDE.isdisjoint(TRAITS[kind].needs) for kind in kinds)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of action that some rank lists."""
        return tuple(kind for kind in self.codes.kinds if any(rank != NO_RANK for rank in self.ranks_of(kind)))

    def ranks_of(self, kind: Kind) -> list[int]:
        """Return, by slot, the rank that lists its action of one kind, or -1."""
        codes = self.codes.of_kind[kind]
        return self.rank_of[codes.start : codes.stop]

    def route(self, microbatch: int) -> list[int]:
        """Return, by stage, the rank that must run it for a micro-batch, or -1."""
        stages = self.codes.stages
        return self.rank_of_slot[microbatch * stages : (microbatch + 1) * stages]

    def items(self, rank: int) -> tuple[Item, ...]:
        """Return a rank's actions, bound to stages, pairs as pairs."""
        actions = [self.codes.action(code) for code in self.lists[rank]]
        if not self.pairs:
            return tuple(actions)
        listed = iter(zip(self.lists[rank], actions, strict=True))
        return tuple(Pair(action, next(listed)[1]) if code in self.pairs else action for code, action in listed)

    def what(self, code: int) -> tuple[int, int]:
        """Return what a move moves: the weights of a stage, `(-1, stage)`, or an activation, `(micro-batch, stage)`."""
        return self.codes.microbatch[code], self.codes.stage[code]

    def with_moves(self, rank: int) -> dict[int, list[int]]:
        """Return, by code that computes, itself and the moves about it: gathers and loads are of what follows."""
        found: dict[int, list[int]] = {}
        latest = coming = list[int]()
        for code in self.lists[rank]:
            if self.computes(code):
                latest, coming = found.setdefault(code, [*coming, code]), []
            elif coming or self.codes.traits(code).holds or not latest:
                coming.append(code)
            else:
                latest.append(code)
        latest += coming
        return found

    def awaited(self) -> dict[int, list[int]]:
        """Return, by code, which moves it waits for: its stage's gather, if it is the first use, and its load."""
        found: dict[int, list[int]] = {}
        for row in self.lists if self.lists is not self.computing else ():
            there: dict[tuple[int, int], int] = {}
            for code in row:
                weights, activation = (-1, self.codes.stage[code]), self.what(code)
                if self.codes.collective[code]:
                    continue
                if not self.computes(code):
                    there |= {activation: code} if self.codes.traits(code).holds else {}
                elif moves := [there.pop(each) for each in (weights, activation) if each in there]:
                    found[code] = moves
        return found

    @cached_property
    def giver_of(self) -> list[int]:
        """By value, the code of the action that gives it; -1 if no rank lists one."""
        giver_of = [-1] * (self.codes.always + 1)
        for kind in reversed(self.kinds):
            given = [self.codes.of_value(value) for value in TRAITS[kind].gives]
            for code, rank, *values in zip(self.codes.of_kind[kind], self.ranks_of(kind), *given, strict=True):
                for value in values if rank != NO_RANK else ():
                    giver_of[value] = code
        return giver_of

    def inputs(self, code: int) -> list[tuple[int, int]]:
        """Return each value that an action needs and the code of the action that gives it."""
        return [(value, self.giver_of[value]) for value in self.codes.needs(code)]

    def listed(self, kind: Kind, stage: int) -> list[int]:
        """Return the micro-batches whose action of an optional kind the plan lists for a stage, in their order."""
        listed = self.codes.of_kind[kind][stage :: self.codes.stages] if kind in self.codes.kinds else ()
        return [microbatch for microbatch, code in enumerate(listed) if self.rank_of[code] != NO_RANK]

    def versions(self, rank: int) -> list[dict[int, int]]:
        """Return, for each of a rank's actions and moves, the versions of its stage's weights in use after it.

        By micro-batch in flight, the version that its forward used; under -1, the newest one. Version 0 is the first.

        Example:
            >>> import pipelab
            >>> pipelab.Plan.parse("0F0 0F1 0B0 0U0 0B1").bound.versions(0)[2:4]
            [{-1: 0, 1: 0}, {-1: 1, 1: 0}]
        """
        codes = self.codes
        used: dict[int, dict[int, int]] = {stage: {-1: 0} for stage in range(codes.stages)}
        found = []
        for code in self.lists[rank]:
            here, microbatch = used[codes.stage[code]], codes.microbatch[code]
            if codes.traits(code).updates:
                here[-1] += 1
            elif codes.forward[code]:
                here[microbatch] = here[-1]
            elif codes.releases[code] and self.computes(code):
                here.pop(microbatch, None)
            found.append(dict(here))
        return found

    def in_flight(self, rank: int) -> list[int]:
        """Return, for each of a rank's actions, how many stage activations the rank holds after it.

        A forward adds one; if the plan runs it again, `C` adds it instead, and the forward's input counts as none. The
        full backward releases it, or the weight gradient if the backward is split. A rank from which activations are
        sent away holds them no more from the action after that on, and again from the action after their load on; what
        an action releases then counts while it runs.
        """
        holds, releases, row = self.codes.holds, self.codes.releases, self.lists[rank]
        changes = [holds[code] - releases[code] for code in row]
        counts = list(accumulate(changes))
        if row is self.computing[rank]:
            return counts
        carried = any(change for code, change in zip(row, changes, strict=True) if not self.computes(code))
        return [
            max(count, count - change * carried)
            for code, count, change in zip(row, counts, changes, strict=True)
            if self.computes(code)
        ]

    def index_of(self, rank: int) -> dict[int, int]:
        """Return, by code, its index among a rank's codes."""
        return {code: index for index, code in enumerate(self.computing[rank])}

    def position(self, rank: int, index: int) -> int:
        """Return where the rank's `index`-th code is in its row as written."""
        places = self.places[rank]
        return index if places is None else places[self.computing[rank][index]]

    def _bind_updates(self) -> None:
        """Let each `U` need the gradients of its whole group, and the update before it."""
        codes, gradients, weights = self.codes, self.codes.of_value("gw(m,s)"), self.codes.of_value("weights(m,s)")
        for stage, ranks in self.replicas.items():
            before = -1
            for microbatch in self.listed("U", stage):
                code = codes.table["U"][microbatch][stage]
                for other in range(before + 1, microbatch):
                    codes.require(code, gradients[other * codes.stages + stage])
                if before >= 0:
                    codes.require(code, weights[before * codes.stages + stage])
                before = microbatch
                if len(ranks) > 1:
                    action, rank = codes.action(code), self.rank_of[code]
                    position = self.position(rank, self.computing[rank].index(code))
                    parts = f"{len(ranks)} ranks have a part of the stage's gradients each"
                    hint = "list updates only for stages that are on one rank"
                    self._refuse(
                        rank, position, action, ("wrong-rank", f"{action} is on rank {rank}, but {parts}", hint)
                    )

    def _bind_row(self, rank: int, row: Sequence[object], stages_of_rank: StagesOfRank, moves: list[Action]) -> None:
        """Append the codes of one row; an item that cannot be bound becomes a fault."""
        table, laid_out, rank_of = self.codes.table, self.codes.per_microbatch, self.rank_of
        stages, microbatches = self.codes.stages, self.codes.microbatches
        endless = is_endless(row, endless_limit(stages, microbatches))
        listed: list[int] = []
        positions: list[int] = []
        before = len(self.pairs), len(moves)
        for position, item in enumerate(row):
            # The common case first, in as few steps as Python allows: an F, B, I or W of this size.
            if type(item) is Action and type(item.microbatch) is int:
                microbatch, stage = item.microbatch, item.stage
                if stage is None:
                    stage = stages_of_rank.get(microbatch)  # type: ignore[assignment]  # a tuple falls through
                if (
                    type(stage) is int
                    and 0 <= microbatch < microbatches
                    and 0 <= stage < stages
                    and item.kind in laid_out
                ):
                    code = table[item.kind][microbatch][stage]
                    if rank_of[code] == NO_RANK:
                        rank_of[code] = rank
                        listed.append(code)
                        positions.append(position)
                    elif not endless:
                        repeated = _repeated(rank, position, self.codes.action(code), rank_of[code])
                        self._refuse(rank, position, item, repeated)
                    continue
            if not endless:
                legal = self._bound(rank, position, item, stages_of_rank, moves)
                listed += legal
                positions += [position] * len(legal)
        if endless:
            self.faults.append(_endless(rank, row, stages, microbatches))
        self.lists.append(listed)
        self.computing.append(listed if len(moves) == before[1] else [code for code in listed if self.computes(code)])
        regular = len(listed) == len(row) and (len(self.pairs), len(moves)) == before
        self.places.append(None if regular else dict(zip(listed, positions, strict=True)))

    def _bound(
        self, rank: int, position: int, item: object, stages_of_rank: StagesOfRank, moves: list[Action]
    ) -> list[int]:
        """Return the codes of a pair, an `R`, or a move; none if it cannot be bound."""
        codes = [self._code(rank, position, half, stages_of_rank, moves) for half in halves_of(item)]
        legal = [code for code in codes if code is not None]
        if len(legal) == 2:
            self.pairs.add(legal[0])
        return legal

    def _code(
        self, rank: int, position: int, item: object, stages_of_rank: StagesOfRank, moves: list[Action]
    ) -> int | None:
        """Return the code of one action and record its rank; record the fault of an illegal action."""
        if isinstance(item, Action) and item.kind in OPTIONAL and item.kind not in self.codes.per_microbatch:
            raise _NotLaidOutError
        action = bind_action(rank, position, item, self.codes, stages_of_rank)
        if not isinstance(action, Action):
            self._refuse(rank, position, item, action)
            return None
        if not action.traits.computes:
            moves.append(action)
            return self.codes.first_move + len(moves) - 1
        code, collective = self.codes.code(action), action.traits.collective
        # Every rank of its group lists an R once; rows are bound in order, so rank_of holds the last rank that did.
        first = self.rank_of[code]
        if first == rank or (first != NO_RANK and not collective):
            self._refuse(rank, position, item, _repeated(rank, position, action, first))
            return None
        self.rank_of[code] = rank
        if collective:
            self.reduces.setdefault(code, []).append(rank)
        return code

    def _refuse(self, rank: int, position: int, item: object, refusal: Refusal) -> None:
        code, message, hint = refusal
        self.faults.append(Fault(code, rank, position, item, message, hint))


def _repeated(rank: int, position: int, action: Action, first: int) -> Refusal:
    """Return why an action may not be there: a rank lists it already."""
    message = f"{action} appears again on rank {rank}, position {position}; it was first on rank {first}"
    each = " on each rank" if action.traits.collective else ""
    return "duplicate", message, f"remove one of the two: every action runs exactly once{each}"


def _endless(rank: int, row: Sequence[object], stages: int, microbatches: int) -> Fault:
    limit = endless_limit(stages, microbatches)
    many = f"rank {rank} lists more than {limit} actions, where {2 * microbatches} per stage are enough"
    hint = "end the loop after the last backward, so that the generator stops"
    return Fault("endless", rank, limit, row[limit], f"{many}; pipelab cut the row off", hint)
