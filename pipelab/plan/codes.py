"""Actions and values as whole numbers, so that checking and simulating a large plan is quick.

For `M` micro-batches and `S` stages, a *slot* is one (micro-batch, stage): `slot = microbatch * S + stage`. Every
action that a plan may hold has a *code*, and every value that an action gives has a number:

    codes     0 ... F ... n ... B ... 2n ... I ... 3n ... W ... 4n ... R ... 4n + S        n = M * S slots
    values    0 .. out .. n .. gin .. 2n .. gw .. 3n    and 3n itself, "always there": the batch, or the loss

Optional kinds and their values are laid out only for plans that list them, after `W` and `gw`. A move may come several
times, so each one that a plan lists has a code of its own, after all others. `TRAITS` says which
kind needs and gives which values: at most two of them are needed. What a single action needs beside them is in a table
of its own, which most plans leave empty. `R` is kept apart: it waits for ranks, not for values.
Only this module knows these numbers. All others read the tables of `Codes`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import cast

from pipelab.plan.actions import KINDS, PER_MICROBATCH, TRAITS, Action, Kind, Posting, Traits

_VALUES = tuple(dict.fromkeys(value for kind in KINDS for value in TRAITS[kind].gives))
GIVERS = {value: tuple(kind for kind in KINDS if value in TRAITS[kind].gives) for value in _VALUES}
"""By value, the kinds of action that may give it."""
ASIDE = {value for kind in PER_MICROBATCH for value in TRAITS[kind].gives[1:]}
"""The values that some kind of action gives beside another one."""
_NEIGHBOURS = {"s-1": -1, "s": 0, "s+1": 1}


def _needed(text: str) -> tuple[str, int]:
    """Return which value a kind of action needs, and of which stage: `-1` is the one before its own."""
    name, stage = text.removesuffix(")").split("(m,")
    return f"{name}(m,s)", _NEIGHBOURS[stage]


_WORDS = {"out": "output", "gin": "gradient", "again": "recomputed activation"}
_WORDS |= {"gw": "weight gradient", "weights": "new weights"}
_NEEDS = {kind: [_needed(text) for text in TRAITS[kind].needs] for kind in KINDS}


class Codes:
    """The codes and values of one size of plan.

    Attributes:
        stages: how many stages there are.
        microbatches: how many micro-batches there are.
        kinds: the kinds that are laid out: all that are not optional, and the optional ones that were asked for.
        per_microbatch: those of them that run once for each micro-batch and stage.
        values: the values of one slot that these kinds give or need, such as `out(m,s)`.
        table: the codes, by kind, micro-batch and stage: `table["B"][microbatch][stage]`. For all but `R`.
        of_kind: by kind, its codes: of micro-batch 0 and all stages, then of micro-batch 1. `R`: stage by stage.
        first_move: the lowest code of a move: see `add`.
        kind: by code, the action's kind.
        stage: by code, its stage.
        microbatch: by code, its micro-batch; -1 if it concerns all of them.
        slot: by code, its place in a list with one entry per micro-batch and stage. For all but `R` and moves.
        forwards_only: whether the plan has forwards alone.
        holds: by code, whether the rank holds an activation more after the action: `F`; but `C`, if the plan runs that
            forward again; and nothing, if it has forwards alone.
        forward: by code, whether the action is a forward.
        releases: by code, whether the action releases its stage's activation: `B`, or `W` if the backward is split.
        collective: by code, whether it is an `R`, which all ranks of its group start together.
        first_need: by code, a value that the action needs, or `always`. For all but `R` and moves, as the three that
            follow.
        second_need: by code, another one, or `always`.
        more_needs: by code, what an action needs beside these two: see `require`. Mostly empty.
        comes: by code, which of the two another stage gives, or `always`. No other value comes from another rank.
        gives: by code, the value that waiting ranks get from the action. `B` gives a second one, `gw`, which only the
            `R` of the same rank needs.
        always: the value that is there from the start.

    Example:
        >>> codes = Codes(stages=2, microbatches=3)
        >>> code = codes.table["B"][1][0]
        >>> codes.kind[code], codes.microbatch[code], codes.stage[code]
        ('B', 1, 0)
        >>> [codes.value_name(value) for value in codes.needs(code)]
        ['out(1, 0)', 'gin(1, 1)']
    """

    def __init__(
        self, stages: int, microbatches: int, kinds: Collection[Kind] = (), *, forwards_only: bool = False
    ) -> None:
        """Lay out the tables for `stages` x `microbatches`, with some of the `OPTIONAL` kinds."""
        self.stages = stages
        self.microbatches = microbatches
        self.forwards_only = forwards_only
        self.kinds = tuple(kind for kind in KINDS if kind in kinds or not TRAITS[kind].optional)
        self.per_microbatch = tuple(kind for kind in self.kinds if kind in PER_MICROBATCH)
        named = {name for kind in self.kinds for name in (*TRAITS[kind].gives, *dict(_NEEDS[kind]))}
        self.values = tuple(value for value in _VALUES if value in named)
        slots = self._slots = stages * microbatches
        many = len(self.per_microbatch)
        self.of_kind = {kind: range(at * slots, (at + 1) * slots) for at, kind in enumerate(self.per_microbatch)}
        self.table = {
            kind: [codes[first : first + stages] for first in range(0, slots, stages)]
            for kind, codes in self.of_kind.items()
        }
        for at, kind in enumerate(self.kinds[many:]):
            self.of_kind[kind] = range(many * slots + at * stages, many * slots + (at + 1) * stages)

        self.kind = cast("Sequence[Kind]", "".join(kind * len(codes) for kind, codes in self.of_kind.items()))
        self.first_move = len(self.kind)
        self.stage = list(range(stages)) * (len(self.kind) // stages)
        self.microbatch = [microbatch for microbatch in range(microbatches) for _ in range(stages)] * many
        self.microbatch += [-1] * (len(self.kind) - len(self.microbatch))
        self.holds = bytearray(self._by_kind(lambda traits: traits.in_flight > 0 and not forwards_only))
        self.forward = self._by_kind(lambda traits: traits.forward)
        self.releases = self._by_kind(lambda traits: traits.in_flight < 0)
        self.collective = self._by_kind(lambda traits: traits.collective)

        self.always = len(self.values) * slots
        self.more_needs: dict[int, tuple[int, ...]] = {}
        self._more_needers: dict[int, tuple[int, ...]] = {}
        self.first_need, self.second_need, self.comes, self.gives = list[int](), list[int](), list[int](), list[int]()
        numbers = [self.always, *range(self.always + 1)]  # one object for each: value -1, then 0 and on
        self.slot: list[int] = numbers[1 : slots + 1] * many
        for kind in self.per_microbatch:
            self._link(kind, numbers)

    def _by_kind(self, holds: Callable[[Traits], bool]) -> bytes:
        """Return, by code, what is true of its kind."""
        return b"".join(bytes([holds(TRAITS[kind])]) * len(codes) for kind, codes in self.of_kind.items())

    def _link(self, kind: Kind, numbers: list[int]) -> None:
        """Append what the codes of a kind need and give: `numbers` has one object for each value, from -1 on."""

        def by_slot(name: str, shift: int) -> list[int]:
            first = self.values.index(name) * self._slots + shift + 1
            values = numbers[first : first + self._slots]
            if shift:  # there is no stage before the first one, and none after the last one
                values[0 if shift < 0 else self.stages - 1 :: self.stages] = [self.always] * self.microbatches
            return values

        nothing = [self.always] * self._slots
        needs = [by_slot(*need) for need in _NEEDS[kind]]
        first, second = [*needs, nothing, nothing][:2]
        self.first_need += first
        self.second_need += second
        self.comes += next((needs[at] for at, (_, shift) in enumerate(_NEEDS[kind]) if shift), nothing)
        self.gives += by_slot(TRAITS[kind].gives[0], 0)

    def add(self, moves: Sequence[Action]) -> None:
        """Give each of some moves a code; what they wait for, and what waits for them, `BoundPlan` says."""
        nothing = bytes(len(moves))
        self.kind = [*self.kind, *(move.kind for move in moves)]
        self.stage += [move.stage or 0 for move in moves]
        self.microbatch += [-1 if move.microbatch is None else move.microbatch for move in moves]
        self.holds += bytes(move.traits.in_flight > 0 for move in moves)
        self.releases += bytes(move.traits.in_flight < 0 for move in moves)
        self.forward, self.collective = self.forward + nothing, self.collective + nothing

    def require(self, code: int, value: int) -> None:
        """Let an action need one more value."""
        self.more_needs[code] = (*self.more_needs.get(code, ()), value)
        self._more_needers[value] = (*self._more_needers.get(value, ()), code)

    def recompute(self, code: int) -> None:
        """Let a `C` hold the activation that its forward then does not hold, and the backward need it."""
        self.holds[self.sibling(code, "F")] = False
        for kind in self.per_microbatch:
            if TRAITS[kind].backward:
                self.require(self.sibling(code, kind), self.gives[code])

    @property
    def joins(self) -> bool:
        """Whether an action needs a value of another micro-batch, as slices and updates do."""
        number = self.microbatch
        needs = ((code, value) for code, values in self.more_needs.items() for value in values)
        return any(number[code] != number[value % self._slots] for code, value in needs)

    def of_value(self, name: str) -> range:
        """Return, by slot, the numbers of a value, such as `gin(m,s)`."""
        family = self.values.index(name)
        return range(family * self._slots, (family + 1) * self._slots)

    def posted(self, posting: Posting) -> int:
        """Return the value that a send or receive moves; -1 if its numbers are out of range."""
        step = (posting.word == "RECV") * (1 if posting.letter == "F" else -1)
        stage, microbatch = posting.stage - step, posting.microbatch
        inside = 0 <= stage < self.stages and microbatch * self.stages < self._slots
        name = "out(m,s)" if posting.letter == "F" else "gin(m,s)"
        return self.of_value(name)[microbatch * self.stages + stage] if inside else -1

    def code(self, action: Action) -> int:
        """Return the code of an action that is bound to a stage and in range."""
        stage, microbatch = action.stage, action.microbatch
        assert stage is not None
        return self.of_kind[action.kind][stage] if microbatch is None else self.table[action.kind][microbatch][stage]

    def action(self, code: int) -> Action:
        """Return the action with this code."""
        return Action(self.kind[code], None if self.microbatch[code] < 0 else self.microbatch[code], self.stage[code])

    def traits(self, code: int) -> Traits:
        """Return what holds for every action of this code's kind."""
        return TRAITS[self.kind[code]]

    def sibling(self, code: int, kind: Kind) -> int:
        """Return the code of another kind of action for the same micro-batch and stage, such as the `W` of an `I`."""
        return self.of_kind[kind][self.slot[code]]

    def needs(self, code: int) -> list[int]:
        """Return the values that must be there before the action may start (none for `R`)."""
        if self.collective[code]:
            return []
        needs = (self.first_need[code], self.second_need[code], *self.more_needs.get(code, ()))
        return [value for value in needs if value != self.always]

    def all_needs(self, code: int) -> Sequence[int]:
        """Return the values that an action needs; for `R`, every `gw` of its stage."""
        if not self.collective[code]:
            return self.needs(code)
        return self.of_value(self.traits(code).needs[0])[self.stage[code] :: self.stages]

    def all_gives(self, code: int) -> list[int]:
        """Return the values that an action gives; `B` gives two."""
        return [self.of_value(name)[self.slot[code]] for name in self.traits(code).gives]

    def givers(self, value: int) -> tuple[int, ...]:
        """Return the codes of the actions that may give a value: F; B or I; B or W."""
        family, slot = divmod(value, self._slots)
        return tuple(self.of_kind[kind][slot] for kind in GIVERS[self.values[family]] if kind in self.kinds)

    def needers(self, value: int) -> tuple[int, ...]:
        """Return the codes of the actions that may need a value: F, B, I an `out`; B, I, W a `gin`. `R` is left out."""
        family, slot = divmod(value, self._slots)
        stage = self.stage[slot]
        needs = ((self.of_kind[kind], need) for kind in self.per_microbatch for need in _NEEDS[kind])
        listed = ((codes, -shift) for codes, (name, shift) in needs if name == self.values[family])
        found = (codes[slot + shift] for codes, shift in listed if 0 <= stage + shift < self.stages)
        return (*found, *self._more_needers.get(value, ()))

    def value_name(self, value: int) -> str:
        """Return a value's name as `needs` and `gives` are written: `out(micro-batch, stage)`."""
        family, slot = divmod(value, self._slots)
        return f"{self.values[family].split('(')[0]}({self.microbatch[slot]}, {self.stage[slot]})"

    def value_words(self, value: int) -> str:
        """Return what a value is."""
        family, slot = divmod(value, self._slots)
        name = self.values[family].split("(")[0]
        return f"the {_WORDS.get(name, name)} of micro-batch {self.microbatch[slot]} from stage {self.stage[slot]}"

    def by_code(self, times: Mapping[Kind, Sequence[float]]) -> list[float]:
        """Return, by code up to the first move, the times of each kind, given by stage or by slot; of `R`, by stage."""
        listed: list[float] = []
        for kind in self.kinds:
            listed += self.by_slot(times[kind]) if kind in PER_MICROBATCH else times[kind]
        return listed

    def by_value(self, outputs: Sequence[float], gradients: Sequence[float]) -> list[float]:
        """Return, by value, the number given for the `out` or `gin` of its stage or slot; 0 for all others."""
        given = self.by_slot(outputs) + self.by_slot(gradients)
        return [*given, *[0.0] * (self.always - len(given)), 0.0]

    def by_need(self, by_value: Sequence[float]) -> list[float]:
        """Return, by code, the number of the value that comes to it; the last, of `NOTHING`, is 0."""
        return [*(by_value[value] for value in self.comes), *[0.0] * (self.first_move - len(self.comes) + 1)]

    def by_slot(self, numbers: Sequence[float]) -> list[float]:
        """Return one number per slot, from one per stage or one per slot."""
        return list(numbers) * (self._slots // len(numbers))
