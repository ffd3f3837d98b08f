"""Cut a batch into micro-batches, weigh their losses, and join their outputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from pipelab.engine.stage.pytree import rebuild, take_apart, tensors_of
from pipelab.errors import BatchError, LossError
from pipelab.plan.fault import shorten
from pipelab.plan.plan import Plan

Reduction = Literal["mean", "sum"] | Callable[[Any], float | torch.Tensor]
"""How a loss averages over its rows, which determines the weight of each micro-batch's loss."""


@dataclass(slots=True)
class Part:
    """The inputs of a call, or its targets, in micro-batches."""

    name: str  # `"x"` or `"y"`
    here: bool  # whether this process was given them
    pieces: list[Any] = field(default_factory=list)  # without numbers if this process was given none
    weights: list[float] = field(default_factory=list)  # of the targets, the weight of each micro-batch's loss
    words: str = ""  # a description, by which processes compare them
    error: BatchError | LossError | None = None  # what is wrong with them in this process

    @property
    def counts(self) -> list[int]:
        """How many rows each micro-batch has."""
        return [len(tensors_of(piece)[0]) for piece in self.pieces]


def rows_of(value: object, what: str) -> int:
    """Return the number of rows (the size of dimension 0) that all tensors of a batch share."""
    tensors = tensors_of(value)
    if not tensors:
        raise BatchError(f"{what} holds no tensor: expected a tensor, or a tuple or dict of tensors, [rows, ...]")
    flat = next((tensor for tensor in tensors if tensor.dim() == 0), None)
    if flat is not None:
        raise BatchError(f"{what} holds a tensor without dimensions: dimension 0 must be the rows of the batch")
    counts = sorted({tensor.shape[0] for tensor in tensors})
    if len(counts) > 1:
        raise BatchError(
            f"the tensors in {what} have {' and '.join(map(str, counts))} rows: they must have the same\n"
            f"  try: for sequences of unlike length, torch.nn.utils.rnn.pad_sequence({what}, batch_first=True)"
        )
    return counts[0]


def row_counts(rows: int, microbatches: int) -> list[int]:
    """Return how many rows each micro-batch has: as even as possible, the first ones one more."""
    if rows < microbatches:
        fewer = f"at most {rows} micro-batch{'es' if rows != 1 else ''}, or " if rows else ""
        raise BatchError(
            f"a batch of {rows} row{'s' if rows != 1 else ''} cannot fill {microbatches} micro-batches: "
            f"use {fewer}a batch of at least {microbatches} rows; "
            "drop_last=True leaves a DataLoader's short last batch out"
        )
    each, more = divmod(rows, microbatches)
    return [each + (index < more) for index in range(microbatches)]


def split_batch(value: Any, counts: list[int], dim: int = 0) -> list[Any]:
    """Return the micro-batches of a batch, in the batch's own memory: `counts[m]` rows each.

    With another `dim`, they are slices of it.

    Views of one tensor share the count of writes by which autograd notices that a saved tensor was overwritten: a stage
    that writes into its input would seem to overwrite other micro-batches. A tensor that requires a gradient has views.
    """
    if isinstance(value, torch.Tensor):
        pieces = value.split(counts, dim)
        return list(pieces) if value.requires_grad else [piece.data for piece in pieces]
    leaves, spec = take_apart(value)
    pieces = [
        split_batch(leaf, counts, dim) if isinstance(leaf, torch.Tensor) else [leaf] * len(counts) for leaf in leaves
    ]
    return [rebuild(list(piece), spec) for piece in zip(*pieces, strict=True)]


def weights_of(reduction: Reduction, counts: list[int], targets: list[Any]) -> list[float]:
    """Return the weight of each micro-batch's loss in the loss of the batch."""
    if reduction == "sum":
        return [1.0] * len(counts)
    if reduction == "mean":
        rows = sum(counts)
        return [count / rows for count in counts]
    weights = [_weight(reduction(target), microbatch) for microbatch, target in enumerate(targets)]
    total = sum(weights)
    if not 0 < total < math.inf:
        raise BatchError(f"the weights of the micro-batches sum to {total:g}: the loss cannot be averaged")
    return [weight / total for weight in weights]


def _weight(given: Any, microbatch: int) -> float:
    try:
        weight = float(given)
    except Exception:  # noqa: BLE001 - of None, a text, a tensor of several numbers, a complex one
        weight = math.nan
    if not 0 <= weight < math.inf:
        raise BatchError(
            f"reduction returned {shorten(given)} for micro-batch {microbatch}: expected a finite number, 0 or more\n"
            "  try: a function from a target to how many rows its loss averages over, such as len"
        )
    return weight


class Cut:
    """How a batch is cut by rows into `sequences`, and those along `dim` into slices, each with its `earlier` ones."""

    def __init__(self, plan: Plan, dim: int | None) -> None:
        self.dim = dim
        self.sequences: list[list[int]] = []
        after = plan.after if dim is not None else None
        of: dict[int, list[int]] = {}
        for microbatch in range(plan.microbatches):
            before = [] if after is None else list(after(microbatch, 0))
            of[microbatch] = of[max(before)] if before else []
            if not before:
                self.sequences.append(of[microbatch])
            of[microbatch].append(microbatch)
        self.earlier = [] if dim is None else [each[: each.index(m)] for m, each in sorted(of.items())]
        if len(counts := sorted(set(map(len, self.sequences)))) > 1:
            raise BatchError(
                f"{plan.name} cuts some sequences into {counts[0]} slices and some into {counts[-1]}, of unequal length"
                f"\n  try: a multiple of {counts[-1]} micro-batches"
            )

    def rows(self, value: Any, what: str) -> list[Any]:
        """Return the sequences of a batch, whole: without slices, its micro-batches."""
        return split_batch(value, row_counts(rows_of(value, what), len(self.sequences)))

    def pieces(self, value: Any, what: str) -> list[Any]:
        """Return the micro-batches of a batch."""
        rows = self.rows(value, what)
        if self.dim is None:
            return rows
        found: dict[int, Any] = {}
        for each, slices in zip(rows, self.sequences, strict=True):
            (length,) = {tensor.shape[self.dim] for tensor in tensors_of(each)}
            if length % len(slices):
                raise BatchError(
                    f"dimension {self.dim} of {what} has {length} tokens, not a multiple of {len(slices)} slices"
                )
            found |= zip(slices, split_batch(each, [length // len(slices)] * len(slices), self.dim), strict=True)
        return [found[microbatch] for microbatch in sorted(found)]

    def joined(self, pieces: list[Any]) -> Any:
        """Return the outputs of all micro-batches as one value."""
        if self.dim is None:
            return join(pieces)
        return join([join([pieces[m] for m in slices], self.dim) for slices in self.sequences])


def join(pieces: list[Any], dim: int = 0) -> Any:
    """Return the outputs of all micro-batches as one value, rows in the batch's order; or the slices of `dim`.

    A tensor without rows becomes one with a row per micro-batch. All is on the first micro-batch's device.
    """
    if isinstance(pieces[0], torch.Tensor):
        device = pieces[0].device
        return torch.cat([(piece.reshape(1) if piece.dim() == 0 else piece).to(device) for piece in pieces], dim)
    apart = [take_apart(piece) for piece in pieces]
    leaves = [
        join(list(each), dim) if isinstance(each[0], torch.Tensor) else each[0]
        for each in zip(*(leaves for leaves, _ in apart), strict=True)
    ]
    return rebuild(leaves, apart[0][1])
