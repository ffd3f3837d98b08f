"""Cut a batch into micro-batches, weigh their losses, and join their outputs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any, Literal, NamedTuple

import torch
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks
from torch.nn.attention.flex_attention import BlockMask

from pipelab.engine.stage.inputs import Marked, unmarked
from pipelab.engine.stage.pytree import named_leaves, rebuild, take_apart, tensors_of
from pipelab.errors import BatchError, LossError, UsageError, counted
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
    counts: list[int] = field(default_factory=list)  # how many rows each micro-batch has
    ways: list[Way] = field(default_factory=list)  # how each leaf of a micro-batch was cut
    ready: bool = False  # whether some of it was cut already, so that outputs are not joined
    weights: list[float] = field(default_factory=list)  # of the targets, the weight of each micro-batch's loss
    words: str = ""  # a description, by which processes compare them
    named: dict[str, list[str]] = field(default_factory=dict)  # of keywords, each one's description, by micro-batch
    error: BatchError | LossError | UsageError | None = None  # what is wrong with them in this process

    def take(self, known: Part) -> None:
        """Take over what is known of the same inputs or targets from another process."""
        self.words, self.pieces, self.counts = known.words, known.pieces, known.counts
        self.ready, self.weights = known.ready, known.weights


# ── How many rows has each micro-batch? ───────────────────────────────────────────────────────────────────────────────


_Sized = tuple[str, torch.Tensor, int]
"""The place of a tensor in a batch, the tensor, and the dimension of its rows."""


def rows_of(value: object, what: str, dim: int = 0) -> int:
    """Return the number of rows that all tensors of a batch share which are cut, along `dim` if they are not marked."""
    sized = [(what, value, dim)] if isinstance(value, torch.Tensor) else [*_cut_tensors(value, what, dim)]
    if not sized:
        fact = "is whole: nothing of it has rows" if tensors_of(value) else "holds no tensor"
        raise BatchError(
            f"{what} {fact}, and a batch is cut into micro-batches by its rows\n"
            "  try: a tensor, or a tuple or dict of tensors, [rows, ...]; or pipelab.microbatches([...])"
        )
    for name, tensor, along in sized:
        _require_rows(name, tensor, along)
    counts = {name: tensor.shape[along] for name, tensor, along in sized}
    if len(set(counts.values())) > 1:
        raise BatchError(_unlike(value, what, sized))
    return sized[0][1].shape[sized[0][2]]


def _leaves(value: object, what: str, dim: int, *, tokens: bool = True) -> Iterator[tuple[str, Any, Way]]:
    """Yield each leaf of a batch with its place, and how it is cut; a mark is one only if it holds ready pieces."""
    for place, leaf in named_leaves(value, (Marked,)):
        if isinstance(leaf, Marked) and leaf.how == "rows":
            yield from _leaves(leaf.value, what + place, leaf.dim, tokens=False)
        elif isinstance(leaf, Marked) and leaf.how == "whole":
            yield from ((what + place, each, Way()) for each in take_apart(leaf.value)[0])
        elif isinstance(leaf, BlockMask):
            yield what + place, leaf, Way(0 if len(leaf.kv_num_blocks) > 1 else None)  # one alone is for all rows
        else:
            yield what + place, leaf, Way(dim, tokens) if isinstance(leaf, (torch.Tensor, Marked)) else Way()


def _cut_tensors(value: object, what: str, dim: int) -> Iterator[_Sized]:
    """Yield each tensor that is cut by rows, with its place in the batch and the dimension of its rows."""
    for place, leaf, way in _leaves(value, what, dim):
        if way.dim is not None and not isinstance(leaf, Marked):
            yield place, leaf.kv_num_blocks if isinstance(leaf, BlockMask) else leaf, way.dim


def _require_rows(name: str, tensor: torch.Tensor, dim: int) -> None:
    if tensor.is_nested:
        raise BatchError(
            f"{name} is a nested tensor, whose rows have unlike lengths: pipelab does not cut it\n"
            f"  try: pipelab.microbatches([...]) of nested tensors, each of some rows of {name}.unbind(); or "
            f"torch.nested.to_padded_tensor({name}, 0.0)"
        )
    if not -tensor.dim() <= dim < tensor.dim():
        other = f"pipelab.rows({name}), if its rows are along dimension 0; or " if tensor.dim() else ""
        raise BatchError(
            f"{name} has the shape {list(tensor.shape)}, without a dimension {dim} along which it could be cut into "
            f"micro-batches\n  try: {other}pipelab.whole({name}), if every micro-batch needs all of it"
        )


def _unlike(value: object, what: str, sized: Sequence[_Sized]) -> str:
    """Return which tensor has another number of rows than most, and the choices for it."""
    usual, _ = Counter(tensor.shape[dim] for _, tensor, dim in sized).most_common(1)[0]
    alike, odd = (next(each for each in sized if (each[1].shape[each[2]] == usual) == same) for same in (True, False))
    if len(sized) == 2 and alike[1].dim() < odd[1].dim():  # the one with fewer dimensions has no rows, probably
        alike, odd = odd, alike
    facts = [f"{name} {list(tensor.shape)} has {tensor.shape[dim]}" for name, tensor, dim in (odd, alike)]
    choices = "; or ".join(_choices(*odd, alike[1].shape[alike[2]]))
    padded = f"torch.nn.utils.rnn.pad_sequence({what}, batch_first=True), if each tensor is a sequence; or "
    return (
        f"{' rows and '.join(facts)}, and all that is cut into micro-batches must have as many\n"
        f"  try: {padded * isinstance(value, (list, tuple))}{choices}"
    )


def _choices(name: str, tensor: torch.Tensor, dim: int, usual: int) -> Iterator[str]:
    """Yield what may be meant by a tensor that has another number of rows than usual."""
    yield f"pipelab.whole({name}), if every micro-batch needs all of it"
    if usual in tensor.shape:
        yield f"pipelab.rows({name}, dim={[*tensor.shape].index(usual)}), if its rows are there"
    elif usual and tensor.shape[dim] % usual == 0:
        many = tensor.shape[dim] // usual
        yield f"{name}.unflatten({dim}, ({usual}, {many})), which the stage flattens again, if each row has {many}"
    yield "Pipeline(..., batch_dim=1), if all rows are along dimension 1"
    yield "pipelab.microbatches([...]), with the pieces that you want"


def ready_counts(value: object, what: str, many: int, dim: int) -> list[int] | None:
    """Return how many rows each micro-batch has, if a part of a batch is cut already; `None` if none is."""
    found: list[int] | None = None
    for place, leaf, way in () if value is None or isinstance(value, torch.Tensor) else _leaves(value, what, dim):
        if not isinstance(leaf, Marked):
            continue
        if len(leaf.value) != many:
            raise BatchError(
                f"{place} holds {counted(len(leaf.value), 'ready micro-batch')}, and the plan has {many}\n"
                f"  try: a schedule with microbatches={len(leaf.value)}, or {counted(many, 'piece')}"
            )
        sized = [next(_cut_tensors(piece, what, way.dim or 0), None) for piece in leaf.value]
        if any(sized):  # pieces that are whole have no rows
            found = found or [each[1].shape[each[2]] if each and each[1].dim() > each[2] else 1 for each in sized]
    return found


def counts_of(value: Any, what: str, many: int, dim: int, others: list[int] | None = None) -> list[int]:
    """Return how many rows each of so many micro-batches has; `others` are those of parts that are cut already."""
    own = ready_counts(value, what, many, dim)
    known = own or others
    if own is not None and not [*_cut_tensors(value, what, dim)]:
        return own
    total = rows_of(value, what, dim)
    if known is None:
        if isinstance(value, (list, tuple)) and len(value) == many > total:
            raise BatchError(
                f"{what} holds {many} tensors of {counted(total, 'row')}, too few for {many} micro-batches\n"
                f"  try: pipelab.microbatches({what}), if each of them is a micro-batch"
            )
        return row_counts(total, many)
    if sum(known) != total:
        raise BatchError(
            f"{what} has {counted(total, 'row')}, and the ready micro-batches have {' + '.join(map(str, known))}\n"
            f"  try: pipelab.microbatches([...]) for {what} too, and pipelab.whole(...) around pieces without rows"
        )
    return known


def row_counts(rows: int, microbatches: int) -> list[int]:
    """Return how many rows each micro-batch has: as even as possible, the first ones one more."""
    if rows < microbatches:
        fewer = f"at most {counted(rows, 'micro-batch')}, or " if rows else ""
        raise BatchError(
            f"a batch of {counted(rows, 'row')} cannot fill {microbatches} micro-batches: "
            f"use {fewer}a batch of at least {microbatches} rows; "
            "drop_last=True leaves a DataLoader's short last batch out of training; evaluate it with the model itself"
        )
    each, more = divmod(rows, microbatches)
    return [each + (index < more) for index in range(microbatches)]


# ── Micro-batches of a batch, and the batch of micro-batches ──────────────────────────────────────────────────────────


class Way(NamedTuple):
    """How a leaf of a micro-batch was cut from the batch's."""

    dim: int | None = None  # the dimension of its rows; `None` if every micro-batch has all of it
    tokens: bool = False  # whether slices of a sequence cut it too


def ways_of(value: Any, dim: int, *, tokens: bool = True) -> list[Way]:
    """Return how each leaf of a micro-batch is cut."""
    if isinstance(value, torch.Tensor):  # a small step waits for this
        return [Way(dim, tokens)]
    found = list[Way]()
    for _, leaf, way in _leaves(value, "", dim, tokens=tokens):
        ready = isinstance(leaf, Marked)
        found += ways_of(leaf.value[0], way.dim or 0, tokens=way.tokens) if ready else [way]
    return found


def split_batch(value: Any, counts: Sequence[int], dim: int = 0) -> list[Any]:
    """Return the micro-batches of a batch, in the batch's own memory: `counts[m]` rows each.

    Views of one tensor share the count of writes by which autograd notices that a saved tensor was overwritten: a stage
    that writes into its input would seem to overwrite other micro-batches. A tensor that requires a gradient has views.
    """
    if isinstance(value, torch.Tensor):
        views = value.split_with_sizes(list(counts), dim)
        return list(views) if value.requires_grad else [view.data for view in views]
    if isinstance(value, Marked):
        if value.how == "rows":
            return split_batch(value.value, counts, value.dim)
        return [unmarked(piece) for piece in (value.value if value.how != "whole" else [value.value] * len(counts))]
    if isinstance(value, BlockMask):
        return _split_block_mask(value, counts)
    leaves, spec = take_apart(value, (Marked,))
    known = (torch.Tensor, Marked, BlockMask)
    pieces = [split_batch(leaf, counts, dim) if isinstance(leaf, known) else [leaf] * len(counts) for leaf in leaves]
    return [rebuild([piece[m] for piece in pieces], spec) for m in range(len(counts))]


def _split_block_mask(mask: BlockMask, counts: Sequence[int]) -> list[BlockMask]:
    """Return the parts of a mask of FlexAttention, by PyTorch's own function, which knows even micro-batches."""
    if len(mask.kv_num_blocks) > 1 and [*counts] != row_counts(sum(counts), len(counts)):
        raise BatchError("a BlockMask is cut evenly\n  try: pipelab.microbatches([...]) with one for each micro-batch")
    pieces, _ = split_args_kwargs_into_chunks((mask,), None, len(counts))
    return [piece for (piece,) in pieces]


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
    """How a batch is cut by rows, along `batch_dim`, into `sequences`, and those along `dim` into slices.

    Each slice has its `earlier` ones.
    """

    def __init__(self, plan: Plan, dim: int | None, batch_dim: int = 0) -> None:
        self.dim = dim
        self.batch_dim = batch_dim
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
                f"{plan.name} cuts some sequences into {counted(counts[0], 'slice')} and some into {counts[-1]}"
                f"\n  try: a multiple of {counts[-1]} micro-batches"
            )

    def part(self, name: str, value: Any, ready: list[int] | None) -> Part:
        """Return a part of a batch in micro-batches; `ready` has the rows of those that are cut already."""
        whole = self.whole(name, value, ready)
        return whole if self.dim is None else self._sliced(whole)

    def whole(self, name: str, value: Any, ready: list[int] | None) -> Part:
        """Return a part of a batch in sequences that are whole: without slices, their micro-batches."""
        many, dim, own = len(self.sequences), self.batch_dim, bool(ready and self.ready({name: value}))
        has_rows = name != "keywords" or own or any(True for _ in _cut_tensors(value, name, dim))
        counts = counts_of(value, name, many, dim, ready) if has_rows else []
        pieces = split_batch(value, counts or [0] * many, dim)
        return Part(name, True, pieces, counts, ways_of(value, dim), own)  # noqa: FBT003

    def ready(self, given: Mapping[str, Any]) -> list[int] | None:
        """Return how many rows each sequence has, if any of these values is cut already."""
        found = (ready_counts(value, name, len(self.sequences), self.batch_dim) for name, value in given.items())
        return next(filter(None, found), None)

    def _sliced(self, part: Part) -> Part:
        """Cut each sequence into its slices."""
        assert self.dim is not None
        pieces, counts = dict[int, Any](), dict[int, int]()
        for each, rows, slices in zip(part.pieces, part.counts or repeat(0), self.sequences, strict=False):
            leaves, spec = take_apart(each)
            lengths = [self._tokens(part, each) // len(slices)] * len(slices)
            cut = [
                split_batch(leaf, lengths, self.dim) if way.tokens else [leaf] * len(slices)
                for leaf, way in zip(leaves, part.ways, strict=True)
            ]
            pieces |= zip(slices, (rebuild(list(leaves), spec) for leaves in zip(*cut, strict=True)), strict=True)
            counts |= dict.fromkeys(slices, rows)
        order = sorted(pieces)
        return replace(part, pieces=[pieces[m] for m in order], counts=[counts[m] for m in order if part.counts])

    def _tokens(self, part: Part, sequence: Any) -> int:
        """Return how many tokens a sequence has: a multiple of its slices, in all tensors that are cut."""
        dim, many = self.dim or 0, len(self.sequences[0])
        named = zip(named_leaves(sequence, ()), part.ways, strict=True)
        found = {part.name + place: leaf.shape[dim : dim + 1] for (place, leaf), way in named if way.tokens}
        if len({*found.values(), None}) > 2 or torch.Size() in found.values():
            sizes = ", ".join(
                f"{name} {counted(sum(size), 'token') if size else 'no tokens'}" for name, size in found.items()
            )
            raise BatchError(
                f"along dimension {dim}, by which sequences are cut into slices, {sizes}\n"
                "  try: pipelab.rows(...) for what has rows and no tokens, of which every slice gets all"
            )
        (length,) = next(iter(found.values()), (0,))
        if length % many:
            raise BatchError(f"dimension {dim} of {part.name} has {length} tokens, not a multiple of {many} slices")
        return length

    def joined(self, pieces: list[Any], inputs: Part) -> Any:
        """Return the outputs of all micro-batches as one value; as a list, if the inputs were one."""
        if self.dim is not None:
            pieces = [join([pieces[m] for m in slices], self.dim) for slices in self.sequences]
        counts = [inputs.counts[each[0]] for each in self.sequences]
        return list(pieces) if inputs.ready else join_outputs(pieces, counts, self.batch_dim)


def join_outputs(pieces: list[Any], counts: Sequence[int], dim: int) -> Any:
    """Return outputs as one value, each tensor along its rows; as a list, if other sizes of a tensor differ."""
    leaves = zip(*(take_apart(piece)[0] for piece in pieces), strict=True)
    shapes = [[each.shape for each in leaf if isinstance(each, torch.Tensor)] for leaf in leaves]
    along = [_along_rows(each, counts, dim) for each in shapes]
    unlike = (
        len({(*shape[:at], *shape[at + 1 :]) for shape in each}) > 1 for each, at in zip(shapes, along, strict=True)
    )
    return list(pieces) if any(unlike) else join(pieces, [*map(Way, along)])


def _along_rows(shapes: Sequence[torch.Size], counts: Sequence[int], dim: int) -> int:
    """Return the dimension in which outputs have so many rows: `dim`, else 0 or 1; of `[rows, classes]` first 0."""
    order = (0, dim) if shapes and len(shapes[0]) == 2 else (dim, 0, 1)

    def fits(at: int) -> bool:
        return all(len(shape) > at and shape[at] == rows for shape, rows in zip(shapes, counts, strict=False))

    return next(filter(fits, order), 0) if counts else 0


def join(pieces: list[Any], along: int | Sequence[Way] = 0) -> Any:
    """Return micro-batches as one value, rows in the batch's order; or the slices of a dimension.

    A tensor without rows becomes one with a row per micro-batch, and one without tokens one with as many as slices. All
    is on the first micro-batch's device.
    """
    if isinstance(pieces[0], torch.Tensor) and isinstance(along, int):
        device = pieces[0].device
        short = along + 1 - pieces[0].dim()
        padded = [piece[(..., *[None] * short)] if short > 0 else piece for piece in pieces]
        return torch.cat([piece.to(device) for piece in padded], along)
    apart = [take_apart(piece) for piece in pieces]
    leaves = [*zip(*(leaves for leaves, _ in apart), strict=True)]
    ways = [Way(along)] * len(leaves) if isinstance(along, int) else along
    joined = [
        join(list(each), way.dim) if isinstance(each[0], torch.Tensor) and way.dim is not None else each[0]
        for each, way in zip(leaves, ways, strict=True)
    ]
    return rebuild(joined, apart[0][1])
