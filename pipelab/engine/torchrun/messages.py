"""Values of any type on the way between processes: pickled tensors of the newer types cannot be read back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from pipelab.engine.device.streams import Lane
from pipelab.engine.stage.errors import stage_error
from pipelab.engine.stage.pytree import Spec, map_leaves, map_tensors, rebuild, take_apart, tensors_of
from pipelab.engine.stage.snapshot import unchanged
from pipelab.engine.stage.stage import Stage
from pipelab.engine.torchrun.groups import PipelineReplica
from pipelab.errors import EngineError

__all__ = ["Form", "Marks", "form_of", "learn_forms", "pack", "unpack"]


@dataclass(frozen=True, slots=True)
class _Packed:
    """A tensor's bytes, and what they mean."""

    content: torch.Tensor
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def tensor(self) -> torch.Tensor:
        """Return the tensor."""
        return self.content.view(self.dtype).as_strided(self.shape, self.strides)


def pack(value: Any) -> Any:
    """Return a value as it can be pickled and sent: its tensors as bytes, on the processor, without history or gaps.

    Example:
        >>> unpack(pack({"small": torch.ones(2, dtype=torch.float8_e4m3fn), "name": "x"}))
        {'small': tensor([1., 1.], dtype=torch.float8_e4m3fn), 'name': 'x'}
    """
    return map_tensors(_packed, value)


def unpack(value: Any) -> Any:
    """Return the value that was packed."""
    return map_leaves(_Packed, _Packed.tensor, value)


def _packed(tensor: torch.Tensor) -> Any:
    plain = tensor.detach().cpu()
    if plain.layout != torch.strided or plain.is_nested or plain.is_quantized:
        return plain  # these are pickled as they are
    dense = torch.empty_like(plain).copy_(plain)
    content = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
    return _Packed(content, dense.dtype, tuple(dense.shape), dense.stride())


@dataclass(frozen=True, slots=True)
class TensorForm:
    """A tensor's shape, type and strides as it travels, and whether its gradient is wanted."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...]
    learns: bool

    def room(self, device: torch.device) -> torch.Tensor:
        """Return an empty tensor of this form, without gaps."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)

    def laid(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return the numbers of a tensor as they lie in such a room: the order of later sums depends on it."""
        tensor = tensor.detach().resolve_conj().resolve_neg()
        if tensor.stride() == self.strides and tensor.device == device:
            return tensor
        return self.room(device).copy_(tensor)

    def __str__(self) -> str:
        """Return shape and type, such as `[4, 6] float32`."""
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True, slots=True)
class Form:
    """The form of a value: its parts, and how they are put together.

    Attributes:
        spec: what `trees.rebuild` needs.
        parts: each tensor's form; `None` where the value holds `None`.
    """

    spec: Spec
    parts: tuple[TensorForm | None, ...]

    @property
    def learns(self) -> list[bool]:
        """For each tensor, whether its gradient is wanted."""
        return [part.learns for part in self.parts if part is not None]

    def room(self, device: torch.device) -> list[torch.Tensor]:
        """Return empty tensors for a value of this form."""
        return [part.room(device) for part in self.parts if part is not None]

    def room_for_gradients(self, device: torch.device) -> list[torch.Tensor]:
        """Return empty tensors for the gradients that come back for a value of this form."""
        return [part.room(device) for part in self._learning]

    def parcels(self, value: Any, device: torch.device) -> list[torch.Tensor]:
        """Return the tensors of a value as they travel."""
        parts = [part for part in self.parts if part is not None]
        return [part.laid(tensor, device) for part, tensor in zip(parts, tensors_of(value), strict=True)]

    def value(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the value whose tensors these are, those that learn as the next stage must see them."""
        wanted = iter(self.learns)
        rest = (tensor.detach().requires_grad_(next(wanted)) for tensor in tensors)
        return rebuild([None if part is None else next(rest) for part in self.parts], self.spec)

    def gradients(self, tensors: Sequence[torch.Tensor], there: Sequence[bool]) -> Any:
        """Return gradients as a stage takes them: one for each tensor of the value, or `None`.

        Args:
            tensors: what arrived: see `parcels_of_gradients`.
            there: which of them are gradients: see `which_came`.
        """
        rest = iter([tensor if came else None for tensor, came in zip(tensors, there, strict=True)])
        found = [next(rest) if part.learns else None for part in self.parts if part is not None]
        return found[0] if len(found) == 1 else found

    def which_came(self, gradients: Any) -> list[bool]:
        """Return which of the gradients that the stage before wants there are."""
        return [gradient is not None for _, gradient in self._wanted(gradients)]

    def parcels_of_gradients(self, gradients: Any, device: torch.device) -> list[torch.Tensor]:
        """Return those of a stage's input gradients that the stage before wants, as they travel; zeros for `None`."""
        return [
            part.room(device).zero_() if gradient is None else part.laid(gradient, device)
            for part, gradient in self._wanted(gradients)
        ]

    def misfit(self, value: Any, giver: str, rows: int) -> str:
        """Return how a value differs from this form, which others of as many rows had; "" if it does not.

        Args:
            value: what a stage gave.
            giver: which stage.
            rows: of how many rows.
        """
        parts, spec = take_apart(value)
        if len(parts) != len(self.parts) or not all(map(_fits, parts, self.parts)):
            return (
                f"gives {form_of(value, giver)}, where micro-batches of {rows} rows gave {self} before: between "
                "processes a stage's output has one shape and type\n  try: engine='threads', where it may change"
            )
        if spec != self.spec:
            new, old = (" ".join(str(each).split()) for each in (spec, self.spec))
            return (
                f"gives its tensors in {new}, where micro-batches of {rows} rows gave them in {old} before: "
                "between processes a stage's output is always put together alike, with keys in the same order\n"
                "  try: engine='threads', where that may change"
            )
        learns = [part.requires_grad for part in parts if part is not None]
        if learns != self.learns:
            return (
                f"gives tensors with a history {learns}, where micro-batches of {rows} rows gave {self.learns} before: "
                "between processes the same gradients come back for every micro-batch\n"
                "  try: engine='threads', where that may change"
            )
        return ""

    def _wanted(self, gradients: Any) -> list[tuple[TensorForm, torch.Tensor | None]]:
        every = gradients if isinstance(gradients, list) else [gradients]
        parts = [part for part in self.parts if part is not None]
        return [(part, gradient) for part, gradient in zip(parts, every, strict=True) if part.learns]

    @property
    def _learning(self) -> list[TensorForm]:
        return [part for part in self.parts if part is not None and part.learns]

    def __str__(self) -> str:
        """Return the parts, such as `[4, 6] float32`."""
        return ", ".join(map(str, self.parts))


def form_of(value: Any, giver: str) -> Form:
    """Return the form of a value.

    Args:
        value: what a stage gave.
        giver: which stage, for the message.

    Raises:
        EngineError: if it holds anything but tensors.
    """
    parts, spec = take_apart(value)
    stranger = next((part for part in parts if not (part is None or isinstance(part, torch.Tensor))), None)
    if stranger is not None:
        raise EngineError(
            f"{giver} gives {type(stranger).__name__} among its outputs: between processes only tensors travel, in "
            "tuples, lists and dicts; make it a tensor, or use engine='threads'"
        )
    if not all(part is None or _is_plain(part) for part in parts):
        raise EngineError(
            f"{giver} gives a sparse, nested or quantized tensor: between processes only plain ones travel; use "
            "to_dense(), to_padded_tensor() or dequantize(), or engine='threads'"
        )
    forms = [
        None
        if part is None
        else TensorForm(tuple(part.shape), part.dtype, torch.empty_like(part).stride(), part.requires_grad)
        for part in parts
    ]
    return Form(spec, tuple(forms))


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized


def _fits(part: Any, expected: TensorForm | None) -> bool:
    if expected is None:
        return part is None
    return isinstance(part, torch.Tensor) and part.shape == expected.shape and part.dtype == expected.dtype


_TAG = 1
"""On the processor, gradients take the same way; those have the tag 0."""


class Marks:
    """The marks that one stage sends and receives in a step.

    One at least travels with every micro-batch, so that the backwards of frozen stages keep their place in the plan.

    Args:
        group: what connects processors.
        ranks: the rank in it of each rank of the pipeline.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        """Begin with nothing under way."""
        self._group = group
        self._ranks = ranks
        self._sent: list[dist.Work] = []
        self._coming: dict[int, tuple[dist.Work, torch.Tensor, int]] = {}

    def send(self, there: Sequence[bool], peer: int) -> None:
        """Begin to send which gradients of a micro-batch there are."""
        marks = torch.tensor(there or [False], dtype=torch.uint8)
        self._sent.append(self._group.send([marks], self._ranks[peer], _TAG))

    def receive(self, microbatch: int, count: int, peer: int) -> None:
        """Begin to receive which of so many gradients of a micro-batch there are."""
        marks = torch.empty(count or 1, dtype=torch.uint8)
        self._coming[microbatch] = self._group.recv([marks], self._ranks[peer], _TAG), marks, count

    def under_way(self, microbatch: int) -> list[dist.Work]:
        """Return what to wait for before a micro-batch's marks are taken."""
        return [self._coming[microbatch][0]] if microbatch in self._coming else []

    def take(self, microbatch: int) -> list[bool]:
        """Return which gradients of a micro-batch came; they have been waited for."""
        _, marks, count = self._coming.pop(microbatch)
        return list(map(bool, marks.tolist()))[:count]

    def finish(self) -> None:
        """Wait until all is sent."""
        for work in self._sent:
            work.wait()

    def clear(self) -> None:
        """Let go of the step."""
        self._sent.clear()
        self._coming.clear()


def learn_forms(
    part: PipelineReplica,
    place: int,
    runners: Sequence[Stage],
    lane: Lane,
    group: dist.ProcessGroup,
    inputs: Sequence[Any],
    counts: Sequence[int],
    *,
    learning: bool,
) -> dict[int, list[Form]]:
    """Return, by number of rows, the form of what each stage gives; all processes of a pipeline must call it.

    For each number of rows that micro-batches have, the first such micro-batch runs forward, stage by stage: a process
    sends what its stage made, form and all, to the next stage's process. Buffers and random state are as before
    afterwards; hooks on the modules see it.

    Args:
        part: the pipeline.
        place: this process's rank in it.
        runners: the stages.
        lane: what this process runs on.
        group: the pipeline's processes.
        inputs: the micro-batches.
        counts: how many rows each has.
        learning: whether gradients will come back.

    Raises:
        StageError: if a stage raises.
        EngineError: if a stage gives anything but tensors.
    """
    plan = part.plan
    ranks = [plan.replicas[stage][0] for stage in range(plan.stages)]
    found: dict[int, list[Form]] = {}
    for count in sorted(set(counts)):
        microbatch = list(counts).index(count)
        forms: list[Form] = [Form(None, ())] * (plan.stages - 1)
        value: Any = inputs[microbatch]
        for stage, (here, there) in enumerate(pairwise(ranks)):
            if place == here:
                value = _try(part, place, runners[stage], microbatch, value, lane, learning=learning)
                forms[stage] = form_of(value, f"stage {stage}")
                if there != here:
                    sent = (forms[stage].parts, pack(value))
                    dist.send_object_list([sent], group=group, group_dst=there)
            elif place == there:
                box: list[Any] = [None]
                dist.recv_object_list(box, group=group, group_src=here)
                parts, packed = box[0]
                value = unpack(packed)
                forms[stage] = Form(take_apart(value)[1], parts)
                value = forms[stage].value(tensors_of(value))
        found[count] = forms
    return found


def _try(
    part: PipelineReplica, place: int, runner: Stage, microbatch: int, value: Any, lane: Lane, *, learning: bool
) -> Any:
    """Run a stage forward, leaving no trace in it."""
    given = value if lane.takes is None else lane.takes(value)
    try:
        with unchanged([runner.module]), torch.set_grad_enabled(learning):
            if learning:
                return runner.forward(microbatch, given, {}, None)  # type: ignore[arg-type]  # no stage but the last needs a loss
            return runner.evaluate(microbatch, given, {}, None)
    except EngineError:
        raise
    except Exception as error:
        number = part.microbatches[microbatch]
        where = (part.ranks[place], runner.index, number, lane.runs_on)
        raise stage_error(error, f"{runner.index}F{number}", *where, partial=False) from error
