"""Actions and values as whole numbers, so that checking and simulating a large plan is quick.

For `M` micro-batches and `S` stages, a *slot* is one (micro-batch, stage): `slot = microbatch * S + stage`. Every
action that a plan may hold has a *code*, and every value that an action gives has a number:

    codes     0 ... F ... n ... B ... 2n ... I ... 3n ... W ... 4n ... R ... 4n + S        n = M * S slots
    values    0 .. out .. n .. gin .. 2n .. gw .. 3n    and 3n itself, "always there": the batch, or the loss

    F(m,s) needs out(m,s-1)              gives out(m,s)
    B(m,s) needs out(m,s), gin(m,s+1)    gives gin(m,s), gw(m,s)
    I(m,s) needs out(m,s), gin(m,s+1)    gives gin(m,s)
    W(m,s) needs gin(m,s)                gives gw(m,s)
    R(s)   needs every gw(m,s)           (kept apart: it waits for ranks, not for one or two values)

Only this module knows these numbers. All others read the tables of `Codes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from pipelab.plan.actions import KINDS, Action, Kind

PER_MICROBATCH = KINDS[:4]
"""The kinds that run once for each micro-batch and stage: all but `R`."""

_VALUES = ("out", "gin", "gw")
_GIVERS: tuple[tuple[Kind, ...], ...] = (("F",), ("B", "I"), ("B", "W"))


class Codes:
    """The codes and values of one size of plan.

    Attributes:
        stages: how many stages there are.
        microbatches: how many micro-batches there are.
        table: the codes, by kind, micro-batch and stage: `table["B"][microbatch][stage]`. For all but `R`.
        of_kind: by kind, its codes: of micro-batch 0 and all stages, then of micro-batch 1. `R`: stage by stage.
        kind: by code, the action's kind.
        stage: by code, its stage.
        microbatch: by code, its micro-batch; -1 for `R`.
        slot: by code, its place in a list with one entry per micro-batch and stage. For all but `R`.
        releases: by code, whether the action releases its stage's activation: `B`, or `W` if the backward is split.
        first_need: by code, a value that the action needs, or `always`. For all but `R`, as the two that follow.
        second_need: by code, another one, or `always`.
        gives: by code, the value that waiting ranks get from the action. `B` gives a second one, `gw`, which only the
            `R` of its own rank needs.
        always: the value that is there from the start.

    Example:
        >>> codes = Codes(stages=2, microbatches=3)
        >>> code = codes.table["B"][1][0]
        >>> codes.kind[code], codes.microbatch[code], codes.stage[code]
        ('B', 1, 0)
        >>> [codes.value_name(value) for value in codes.needs(code)]
        ['out(1, 0)', 'gin(1, 1)']
    """

    __slots__ = (
        "_slots",
        "always",
        "first_need",
        "gives",
        "kind",
        "microbatch",
        "microbatches",
        "of_kind",
        "releases",
        "second_need",
        "slot",
        "stage",
        "stages",
        "table",
    )

    def __init__(self, stages: int, microbatches: int) -> None:
        """Lay out the tables for `stages` x `microbatches`."""
        self.stages = stages
        self.microbatches = microbatches
        slots = self._slots = stages * microbatches
        self.of_kind = {kind: range(at * slots, (at + 1) * slots) for at, kind in enumerate(PER_MICROBATCH)}
        self.table = {
            kind: [codes[first : first + stages] for first in range(0, slots, stages)]
            for kind, codes in self.of_kind.items()
        }
        self.of_kind["R"] = range(4 * slots, 4 * slots + stages)

        self.kind = cast("Sequence[Kind]", "".join(kind * len(codes) for kind, codes in self.of_kind.items()))
        self.stage = list(range(stages)) * (4 * microbatches + 1)
        self.microbatch = [microbatch for microbatch in range(microbatches) for _ in range(stages)] * 4
        self.microbatch += [-1] * stages
        self.releases = b"".join(bytes([kind in "BW"]) * len(codes) for kind, codes in self.of_kind.items())

        out, gin, gw, always = 0, slots, 2 * slots, 3 * slots
        self.always = always
        before = list(range(out - 1, out + slots - 1))  # out(m, s-1)
        before[::stages] = [always] * microbatches
        after = list(range(gin + 1, gin + slots + 1))  # gin(m, s+1)
        after[stages - 1 :: stages] = [always] * microbatches
        own_out = list(range(out, out + slots))
        own_gin = list(range(gin, gin + slots))
        nothing = [always] * slots
        self.slot = own_out * 4
        self.first_need = [*before, *own_out, *own_out, *own_gin]
        self.second_need = [*nothing, *after, *after, *nothing]
        self.gives = [*own_out, *own_gin, *own_gin, *range(gw, gw + slots)]

    def code(self, action: Action) -> int:
        """Return the code of an action that is bound to a stage and in range."""
        stage, microbatch = action.stage, action.microbatch
        assert stage is not None
        return self.of_kind["R"][stage] if microbatch is None else self.table[action.kind][microbatch][stage]

    def action(self, code: int) -> Action:
        """Return the action with this code."""
        kind = self.kind[code]
        return Action(kind, None if kind == "R" else self.microbatch[code], self.stage[code])

    def sibling(self, code: int, kind: Kind) -> int:
        """Return the code of another kind of action for the same micro-batch and stage, such as the `W` of an `I`."""
        return self.of_kind[kind][self.slot[code]]

    def needs(self, code: int) -> list[int]:
        """Return the values that must be there before the action may start (none for `R`)."""
        if self.kind[code] == "R":
            return []
        both = (self.first_need[code], self.second_need[code])
        return [value for value in both if value != self.always]

    def all_needs(self, code: int) -> Sequence[int]:
        """Return the values that an action needs; for `R`, every `gw` of its stage."""
        if self.kind[code] != "R":
            return self.needs(code)
        return range(2 * self._slots + self.stage[code], 3 * self._slots, self.stages)

    def givers(self, value: int) -> tuple[int, ...]:
        """Return the codes of the actions that may give a value: F; B or I; B or W."""
        family, slot = divmod(value, self._slots)
        return tuple(self.of_kind[kind][slot] for kind in _GIVERS[family])

    def needers(self, value: int) -> tuple[int, ...]:
        """Return the codes of the actions that may need a value: F, B, I an `out`; B, I, W a `gin`. `R` is left out."""
        family, slot = divmod(value, self._slots)
        stage, of_kind = self.stage[slot], self.of_kind
        if family == 0:
            onward = (of_kind["F"][slot + 1],) if stage < self.stages - 1 else ()
            return *onward, of_kind["B"][slot], of_kind["I"][slot]
        if family == 1:
            back = (of_kind["B"][slot - 1], of_kind["I"][slot - 1]) if stage else ()
            return *back, of_kind["W"][slot]
        return ()

    def value_name(self, value: int) -> str:
        """Return a value's name as `needs` and `gives` are written: `out(micro-batch, stage)`."""
        family, slot = divmod(value, self._slots)
        return f"{_VALUES[family]}({self.microbatch[slot]}, {self.stage[slot]})"

    def by_code(self, times: Mapping[Kind, Sequence[float]]) -> list[float]:
        """Return, by code, the times of each kind, given by stage or by slot; those of `R` are given by stage."""
        listed: list[float] = []
        for kind in PER_MICROBATCH:
            listed += self.by_slot(times[kind])
        return listed + list(times["R"])

    def by_value(self, outputs: Sequence[float], gradients: Sequence[float]) -> list[float]:
        """Return, by value, the number given for the `out` or `gin` of its stage or slot; 0 for all others."""
        given = self.by_slot(outputs) + self.by_slot(gradients)
        return given + [0.0] * (self.always + 1 - len(given))

    def by_slot(self, numbers: Sequence[float]) -> list[float]:
        """Return one number per slot, from one per stage or one per slot."""
        return list(numbers) * (self._slots // len(numbers))
