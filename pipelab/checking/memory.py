"""Memory in bytes: what each stage takes, and so what the actions of a rank add and free.

rank 0  ██ weights, optimizer's state: always; gradients: from the first 0B or 0W on
          ░░ activations of 0F0: from its start to the end of 0B0 or 0I0
            ▒▒ what 0I0 leaves for 0W0: to the end of 0W0
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from pipelab.errors import CostError
from pipelab.plan.actions import FINITE, finite
from pipelab.plan.bound import BoundPlan
from pipelab.plan.fault import readable, shorten

Bytes = float | Sequence[float]
"""One number for all stages, or one per stage."""


class Change(NamedTuple):
    """What an action changes in its rank's memory, in bytes.

    Attributes:
        gradients: of parameters, added when it starts.
        activations: added when it starts.
        outputs: of the model, added when it starts.
        freed: of activations, when it ends.
    """

    gradients: int
    activations: int
    outputs: int
    freed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """How many bytes each stage takes: always, and for each micro-batch.

    A number holds for every stage; a list has one number per stage. `Pipeline.memory` measures them.

    Attributes:
        weights: bytes of a stage's parameters and buffers, held all the time.
        gradients: bytes of their gradients, held from the stage's first `B` or `W` of the step on, as after
            `optimizer.zero_grad()`.
        optimizer: bytes of the optimizer's state, held all the time: twice the weights for Adam.
        activations: bytes that one micro-batch's forward keeps for its backward: what autograd saves, and the stage's
            output. Held from the start of `F` to the end of `B`, or of `I` if the backward is split.
        for_weight_grad: bytes that `I` leaves for `W` for one micro-batch, held from `I` to the end of `W`; as many as
            `activations` if left out. While `I` runs, the larger of both is held.
        outputs: bytes of the model's output for one micro-batch, which the last stage keeps until the step's end.

    Example:
        >>> import pipelab
        >>> memory = Memory(weights=400, gradients=400, activations=[100, 80])
        >>> for fault in pipelab.check(pipelab.GPipe(2, 8), memory_cap=[1600, 1400], memory=memory):
        ...     print(fault)
        memory-cap: 1B0 would make rank 1 hold 1,440 bytes (cap 1,400)
          try: begin with fewer forwards on rank 1
            rank 1 | … F4 F5 F6 F7 B0 B1 B2 B3 B4 …
                                   ^^

    Raises:
        CostError: if a number is negative or not finite, or a size is of another type.
    """

    weights: Bytes = 0
    gradients: Bytes = 0
    optimizer: Bytes = 0
    activations: Bytes = 0
    for_weight_grad: Bytes | None = None
    outputs: float = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be a size; make lists immutable, and all numbers whole ones."""
        for each in fields(self):
            value = readable(getattr(self, each.name))
            if value is None and each.default is None:
                continue
            several = isinstance(value, Sequence) and each.name != "outputs"
            sizes = [finite(size) for size in (value if several else (value,))]
            if not sizes or None in sizes:
                raise CostError(f"{each.name}={shorten(value)}: expected numbers of bytes, {FINITE}")
            whole = tuple(round(size or 0) for size in sizes)
            object.__setattr__(self, each.name, whole if several else whole[0])

    def always(self, bound: BoundPlan, rank: int) -> tuple[int, int]:
        """Return what a rank holds all the time: weights, and the optimizer's state."""
        mine, stages = bound.stages_of.get(rank, ()), bound.codes.stages
        weights, optimizer = (self._of(name, stages) for name in ("weights", "optimizer"))
        return sum(weights[stage] for stage in mine), sum(optimizer[stage] for stage in mine)

    def changes(self, bound: BoundPlan, rank: int) -> Iterator[Change]:
        """Yield what each of a rank's actions changes, in order.

        Raises:
            CostError: if a list does not have one number per stage.
        """
        codes, stages = bound.codes, bound.codes.stages
        gradients, activations = self._of("gradients", stages), self._of("activations", stages)
        leaves = activations if self.for_weight_grad is None else self._of("for_weight_grad", stages)
        without_gradients, usual = set(range(stages)), dict[tuple[str, int], Change]()
        for code in bound.rows[rank]:
            kind = codes.kind[code], codes.stage[code]
            if kind in usual:
                yield usual[kind]
                continue
            traits, stage = codes.traits(code), codes.stage[code]
            sizes = {"": 0, "activations": activations[stage], "for_weight_grad": leaves[stage]}
            more = sizes[traits.holds] - sizes[traits.releases]
            outputs = int(self.outputs) if traits.forward and stage == stages - 1 else 0
            usual[kind] = Change(0, max(0, more), outputs, max(0, -more))
            first = "gw(m,s)" in traits.gives and stage in without_gradients
            without_gradients -= {stage} if first else set()
            yield usual[kind]._replace(gradients=gradients[stage]) if first else usual[kind]

    def held(self, bound: BoundPlan, rank: int) -> list[int]:
        """Return, for each of a rank's actions, how many bytes the rank holds while it runs."""
        now, held = sum(self.always(bound, rank)), []
        for *added, freed in self.changes(bound, rank):
            now += sum(added)
            held.append(now)
            now -= freed
        return held

    def _of(self, name: str, stages: int) -> Sequence[int]:
        """Return one of the sizes for every stage."""
        value = getattr(self, name)
        if not isinstance(value, Sequence):
            return [value] * stages
        if len(value) != stages:
            raise CostError(f"{name} has {len(value)} numbers for {stages} stages: give one number, or one per stage")
        return value
