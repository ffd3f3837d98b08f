"""Memory in bytes: what each stage takes, and so what the actions of a rank add and free.

rank 0  ██ weights, optimizer's state: always; gradients: from the first 0B or 0W on
          ░░ activations of 0F0: from its start to the end of 0B0 or 0I0; only its input until 0C0, if there is one
            ▒▒ what 0I0 leaves for 0W0: to the end of 0W0
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import Any, NamedTuple

from pipelab.errors import CostError
from pipelab.plan.actions import FINITE, TRAITS, Kind, finite
from pipelab.plan.bound import BoundPlan
from pipelab.plan.codes import Codes
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
        weights: of an older version that is still in use, or of a stage that is gathered, added when it starts.
        dropped: of gradients that an update has applied, when it ends.
        forgotten: of versions that no micro-batch uses any more, or of a stage that is freed, when it ends.
    """

    gradients: int
    activations: int
    outputs: int
    freed: int
    weights: int = 0
    dropped: int = 0
    forgotten: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """How many bytes each stage takes: always, and for each micro-batch.

    A number holds for every stage; a list has one number per stage. `Pipeline.memory` measures them.

    Attributes:
        weights: bytes of a stage's parameters and buffers, held all the time; in a plan with updates, once for each
            version in use.
        gradients: bytes of their gradients, held from the stage's first `B` or `W` of the step on, as after
            `optimizer.zero_grad()`; in a plan with updates, once for each update whose gradients have begun.
        gathered: bytes of a sharded stage's whole weights, held from the start of `UNSHARD` to `RESHARD`; its shard is
            then among `weights`.
        optimizer: bytes of the optimizer's state, held all the time: twice the weights for Adam.
        activations: bytes that one micro-batch's forward keeps for its backward: what autograd saves, and the stage's
            output. Held from the start of `F` to the end of `B`, or of `I` if the backward is split. If the plan runs
            the last stage again (`C`), they include its second output, where its backward needs that; the first is
            among `outputs`.
        inputs: bytes of a stage's input for one micro-batch, which are among `activations`; 0 for the batch itself. If
            the plan runs a forward again (`C`), its `F` keeps only them, and `C` the rest.
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
    gathered: Bytes = 0
    gradients: Bytes = 0
    optimizer: Bytes = 0
    activations: Bytes = 0
    inputs: Bytes = 0
    for_weight_grad: Bytes | None = None
    outputs: float = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be a size; make lists immutable, and all numbers whole ones."""
        for each in fields(self):
            value = readable(getattr(self, each.name))
            if value is not None or each.default is not None:
                object.__setattr__(self, each.name, _sizes(each.name, value))

    def always(self, bound: BoundPlan, rank: int) -> tuple[int, int]:
        """Return what a rank holds all the time: weights, and the optimizer's state."""
        mine, stages = bound.stages_of.get(rank, ()), bound.codes.stages
        weights, optimizer = (self.of(name, stages) for name in ("weights", "optimizer"))
        return sum(weights[stage] for stage in mine), sum(optimizer[stage] for stage in mine)

    def changes(self, bound: BoundPlan, rank: int) -> Iterator[Change]:
        """Yield what each of a rank's actions, and of its moves, changes, in order."""
        usual = self._without_updates(bound, rank)
        return self._with_updates(bound, rank, usual) if "U" in bound.codes.kinds else usual

    def _with_updates(self, bound: BoundPlan, rank: int, usual: Iterator[Change]) -> Iterator[Change]:
        """Yield the same with versions of weights, and with gradients for each group of micro-batches."""
        codes, stages = bound.codes, bound.codes.stages
        gradients, weights = self.of("gradients", stages), self.of("weights", stages)
        updates = [bound.listed("U", stage) for stage in range(stages)]
        versions, begun = [1] * stages, set[tuple[int, int]]()
        for code, used, change in zip(bound.lists[rank], bound.versions(rank), usual, strict=True):
            stage, traits = codes.stage[code], codes.traits(code)
            group = stage, bisect_left(updates[stage], codes.microbatch[code])
            if not bound.computes(code):
                yield change
                continue
            first = traits.weight_grad and group not in begun
            begun |= {group} if first else set()
            count = len(set(used.values()))
            more, versions[stage] = count - versions[stage], count
            yield change._replace(
                gradients=gradients[stage] * first,
                weights=max(0, more) * weights[stage],
                dropped=gradients[stage] * traits.updates,
                forgotten=max(0, -more) * weights[stage],
            )

    def _without_updates(self, bound: BoundPlan, rank: int) -> Iterator[Change]:
        codes, gradients = bound.codes, self.of("gradients", bound.codes.stages)
        usual = cache(partial(self._usual, codes))
        begun = set[int]()  # the stages that have gradients
        for code in bound.lists[rank]:
            kind, stage = codes.kind[code], codes.stage[code]
            change = usual(kind, stage, bool(codes.holds[code]))
            if TRAITS[kind].weight_grad and stage not in begun:
                begun.add(stage)
                change = change._replace(gradients=gradients[stage])
            yield change

    def _usual(self, codes: Codes, kind: Kind, stage: int, holds: bool) -> Change:
        """Return what an action changes, whichever micro-batch it is of; gradients of weights are left out."""
        traits, stages = TRAITS[kind], codes.stages
        activations, inputs = (self.of(name, stages)[stage] for name in ("activations", "inputs"))
        left = activations if self.for_weight_grad is None else self.of("for_weight_grad", stages)[stage]
        sizes = {"": 0, "gathered": 0, "activations": activations, "for_weight_grad": left}
        more = sizes[traits.holds] - sizes[traits.releases]
        if traits.again:
            more -= inputs
        elif traits.forward and not holds:
            more = inputs * (not codes.forwards_only)
        outputs = int(self.outputs) if traits.forward and stage == stages - 1 else 0
        gathered = self.of("gathered", stages)[stage]
        freed, whole = gathered * (traits.releases == "gathered"), gathered * traits.gathers
        return Change(0, max(0, more), outputs, max(0, -more), whole, 0, freed)

    def held(self, bound: BoundPlan, rank: int) -> list[int]:
        """Return, for each of a rank's actions, how many bytes the rank holds while it runs."""
        now, held = sum(self.always(bound, rank)), list[int]()
        for gradients, activations, outputs, freed, weights, dropped, forgotten in self.changes(bound, rank):
            now += gradients + activations + outputs + weights
            held.append(now)
            now -= freed + dropped + forgotten
        if not bound.moves:
            return held
        return [size for code, size in zip(bound.lists[rank], held, strict=True) if bound.computes(code)]

    def of(self, name: str, stages: int) -> Sequence[int]:
        """Return one of the sizes for every stage."""
        value = getattr(self, name)
        if not isinstance(value, Sequence):
            return [value] * stages
        if len(value) != stages:
            raise CostError(f"{name} has {len(value)} numbers for {stages} stages: give one number, or one per stage")
        return value


def _sizes(name: str, value: Any) -> int | tuple[int, ...]:
    """Return numbers of bytes as whole ones; a list as a tuple."""
    several = isinstance(value, Sequence) and name != "outputs"
    sizes = list(map(finite, value if several else (value,)))
    if not sizes or None in sizes:
        raise CostError(f"{name}={shorten(value)}: expected numbers of bytes, {FINITE}")
    whole = tuple(round(size or 0) for size in sizes)
    return whole if several else whole[0]


ACTIVATIONS = Memory(activations=1)
"""What counts activations instead of bytes."""
