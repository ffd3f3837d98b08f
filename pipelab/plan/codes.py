"""Actions and values as whole numbers: what makes checking and simulating a large plan quick.

For `M` micro-batches and `S` stages, a *slot* is one (micro-batch, stage): `slot = microbatch * S + stage`. Every
action that a plan may hold has a *code*, and every value that an action gives has a number:

    codes     0 ... F ... n ... B ... 2n ... I ... 3n ... W ... 4n ... R ... 4n + S        n = M * S slots
    values    0 .. out .. n .. gin .. 2n .. gw .. 3n    and 3n itself, "always there": the batch, or the loss

    F(m,s) needs out(m,s-1)              gives out(m,s)
    B(m,s) needs out(m,s), gin(m,s+1)    gives gin(m,s), gw(m,s)
    I(m,s) needs out(m,s), gin(m,s+1)    gives gin(m,s)
    W(m,s) needs gin(m,s)                gives gw(m,s)
    R(s)   needs every gw(m,s)           (kept apart: it waits for ranks, not for one or two values)
"""

from __future__ import annotations

from collections.abc import Iterable

from pipelab.plan.actions import KINDS, Action, Kind

__all__ = ["Numbering"]

_VALUES = ("out", "gin", "gw")


class Numbering:
    """The numbers of one size of plan.

    Example:
        >>> numbering = Numbering(stages=2, microbatches=3)
        >>> code = numbering.code(Action("B", 1, 0))
        >>> numbering.action(code)
        0B1
        >>> [numbering.value_name(value) for value in numbering.needs(code)]
        ['out(1, 0)', 'gin(1, 1)']
    """

    __slots__ = ("always", "first_need", "gives", "microbatches", "second_need", "slots", "stages")

    def __init__(self, stages: int, microbatches: int) -> None:
        """Lay out the tables for `stages` x `microbatches`."""
        self.stages = stages
        self.microbatches = microbatches
        slots = self.slots = stages * microbatches
        out, gin, gw, always = 0, slots, 2 * slots, 3 * slots
        self.always = always

        before = list(range(out - 1, out + slots - 1))  # out(m, s-1)
        before[::stages] = [always] * microbatches
        after = list(range(gin + 1, gin + slots + 1))  # gin(m, s+1)
        after[stages - 1 :: stages] = [always] * microbatches
        own_out = list(range(out, out + slots))
        own_gin = list(range(gin, gin + slots))
        nothing = [always] * slots

        # Indexed by code, for F, B, I and W; `R` is handled where ranks meet.
        self.first_need = before + own_out + own_out + own_gin
        self.second_need = nothing + after + after + nothing
        # One value each, which for B stands for both: gin(m,s) is waited for, gw(m,s) only by R on the same rank.
        self.gives = own_out + own_gin + own_gin + list(range(gw, gw + slots))

    def code(self, action: Action) -> int:
        """Return the code of an action that is bound to a stage and in range."""
        stage, microbatch = action.stage, action.microbatch
        assert stage is not None
        if microbatch is None:
            return 4 * self.slots + stage
        return KINDS.index(action.kind) * self.slots + microbatch * self.stages + stage

    def kind(self, code: int) -> Kind:
        """Return the kind of the action with this code."""
        return KINDS[min(code // self.slots, 4)] if self.slots else "R"

    def action(self, code: int) -> Action:
        """Return the action with this code."""
        kind = self.kind(code)
        if kind == "R":
            return Action("R", None, code - 4 * self.slots)
        microbatch, stage = divmod(code % self.slots, self.stages)
        return Action(kind, microbatch, stage)

    def needs(self, code: int) -> list[int]:
        """Return the values that must be there before the action may start (none for `R`)."""
        if code >= 4 * self.slots:
            return []
        both = (self.first_need[code], self.second_need[code])
        return [value for value in both if value != self.always]

    def all_needs(self, code: int) -> Iterable[int]:
        """Return the values that an action needs; for `R`, every `gw` of its stage."""
        if code < 4 * self.slots:
            return self.needs(code)
        return range(code - 2 * self.slots, 3 * self.slots, self.stages)

    def givers(self, value: int) -> tuple[int, ...]:
        """Return the codes of the actions that may give a value: F; B or I; B or W."""
        family, slot = divmod(value, self.slots)
        kinds = ((0,), (1, 2), (1, 3))[family]
        return tuple(kind * self.slots + slot for kind in kinds)

    def value_name(self, value: int) -> str:
        """Return a value's name as `needs` and `gives` are written: `out(micro-batch, stage)`."""
        family, slot = divmod(value, self.slots)
        microbatch, stage = divmod(slot, self.stages)
        return f"{_VALUES[family]}({microbatch}, {stage})"
