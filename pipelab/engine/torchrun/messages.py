"""What travels between processes: values as tensors in buffers of a known shape, and which gradients are there.

A process needs a buffer for a value before the value arrives, so it must know the shapes. They are learned on real
rows: before the first step with micro-batches of a new size, one micro-batch runs forward through all stages, process
by process, and buffers and random state are restored afterwards.

A stage may leave a part of its input unused, and then no gradient comes back for that part. The receiver's buffer
exists all the same, so zeros travel, and beside them which gradients are present: to an optimizer with weight decay,
`None` and zeros are not the same. That goes from processor to processor, also where gradients go from GPU to GPU, so
nobody waits for a GPU to read it.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from pipelab.engine.device.streams import RankStream
from pipelab.engine.stage.errors import stage_error
from pipelab.engine.stage.pytree import Spec, map_tensors, rebuild, take_apart, tensors_of
from pipelab.engine.stage.snapshot import unchanged
from pipelab.engine.stage.stage import Stage
from pipelab.engine.torchrun.groups import PipelineReplica
from pipelab.errors import EngineError

__all__ = ["GradientPresence", "ValueMeta", "from_bytes", "learn_metas", "meta_of", "to_bytes"]


def to_bytes(value: Any) -> bytes:
    """Return a value as it can be sent: its tensors on the processor, without history or gaps.

    PyTorch's own format knows every type of tensor; a pickled tensor of a newer type cannot be read back.

    Example:
        >>> from_bytes(to_bytes({"small": torch.ones(2, dtype=torch.float8_e4m3fn), "name": "x"}))
        {'small': tensor([1., 1.], dtype=torch.float8_e4m3fn), 'name': 'x'}
    """
    buffer = io.BytesIO()
    torch.save(map_tensors(lambda tensor: tensor.detach().cpu().clone(), value), buffer)
    return buffer.getvalue()


def from_bytes(data: bytes) -> Any:
    """Return the value that was sent."""
    return torch.load(io.BytesIO(data), weights_only=False)


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """A tensor's shape, type and strides as it travels, and whether its gradient is wanted."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...]
    learns: bool

    def empty_buffers(self, device: torch.device) -> torch.Tensor:
        """Return an empty tensor of this shape, without gaps."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)

    def contiguous(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return the numbers of a tensor as they lie in such a buffer: the order of later sums depends on it."""
        tensor = tensor.detach().resolve_conj().resolve_neg()
        if tensor.stride() == self.strides and tensor.device == device:
            return tensor
        return self.empty_buffers(device).copy_(tensor)

    def __str__(self) -> str:
        """Return shape and type, such as `[4, 6] float32`."""
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True, slots=True)
class ValueMeta:
    """What is known of a value before it arrives: its tensors, and how they are put together.

    Attributes:
        spec: what `trees.rebuild` needs.
        parts: each tensor's; `None` where the value holds `None`.
    """

    spec: Spec
    parts: tuple[TensorMeta | None, ...]

    @property
    def learns(self) -> list[bool]:
        """For each tensor, whether its gradient is wanted."""
        return [part.learns for part in self.parts if part is not None]

    def empty_buffers(self, device: torch.device) -> list[torch.Tensor]:
        """Return empty tensors for a value of this meta."""
        return [part.empty_buffers(device) for part in self.parts if part is not None]

    def gradient_buffers(self, device: torch.device) -> list[torch.Tensor]:
        """Return empty tensors for the gradients that come back for a value of this meta."""
        return [part.empty_buffers(device) for part in self._learning]

    def messages(self, value: Any, device: torch.device) -> list[torch.Tensor]:
        """Return the tensors of a value as they travel."""
        parts = [part for part in self.parts if part is not None]
        return [part.contiguous(tensor, device) for part, tensor in zip(parts, tensors_of(value), strict=True)]

    def value(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the value whose tensors these are, those that learn as the next stage must see them."""
        wanted = iter(self.learns)
        rest = (tensor.detach().requires_grad_(next(wanted)) for tensor in tensors)
        return rebuild([None if part is None else next(rest) for part in self.parts], self.spec)

    def gradients(self, tensors: Sequence[torch.Tensor], there: Sequence[bool]) -> Any:
        """Return gradients as a stage takes them: one for each tensor of the value, or `None`.

        Args:
            tensors: what arrived: see `gradient_messages`.
            there: which of them are gradients: see `present`.
        """
        rest = iter([tensor if came else None for tensor, came in zip(tensors, there, strict=True)])
        found = [next(rest) if part.learns else None for part in self.parts if part is not None]
        return found[0] if len(found) == 1 else found

    def present(self, gradients: Any) -> list[bool]:
        """Return which of the gradients that the stage before wants there are."""
        return [gradient is not None for _, gradient in self._wanted(gradients)]

    def gradient_messages(self, gradients: Any, device: torch.device) -> list[torch.Tensor]:
        """Return those of a stage's input gradients that the stage before wants, as they travel; zeros for `None`."""
        return [
            part.empty_buffers(device).zero_() if gradient is None else part.contiguous(gradient, device)
            for part, gradient in self._wanted(gradients)
        ]

    def misfit(self, value: Any, giver: str, rows: int) -> str:
        """Return how a value differs from this one, which others of as many rows had; "" if it does not.

        Args:
            value: what a stage gave.
            giver: which stage.
            rows: of how many rows.
        """
        parts, spec = take_apart(value)
        if len(parts) != len(self.parts) or not all(map(_fits, parts, self.parts)):
            return (
                f"gives {meta_of(value, giver)}, where micro-batches of {rows} rows gave {self} before: between "
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

    def _wanted(self, gradients: Any) -> list[tuple[TensorMeta, torch.Tensor | None]]:
        every = gradients if isinstance(gradients, list) else [gradients]
        parts = [part for part in self.parts if part is not None]
        return [(part, gradient) for part, gradient in zip(parts, every, strict=True) if part.learns]

    @property
    def _learning(self) -> list[TensorMeta]:
        return [part for part in self.parts if part is not None and part.learns]

    def __str__(self) -> str:
        """Return the parts, such as `[4, 6] float32`."""
        return ", ".join(map(str, self.parts))


def meta_of(value: Any, giver: str) -> ValueMeta:
    """Return what a receiver must know of a value.

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
    metas = [
        None
        if part is None
        else TensorMeta(tuple(part.shape), part.dtype, torch.empty_like(part).stride(), part.requires_grad)
        for part in parts
    ]
    return ValueMeta(spec, tuple(metas))


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized


def _fits(part: Any, expected: TensorMeta | None) -> bool:
    if expected is None:
        return part is None
    return isinstance(part, torch.Tensor) and part.shape == expected.shape and part.dtype == expected.dtype


_TAG = 1
"""On the processor, gradients take the same way; those have the tag 0."""


class GradientPresence:
    """Which gradients are present, as one stage sends and receives that in a step.

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
        flags = torch.tensor(there or [False], dtype=torch.uint8)
        self._sent.append(self._group.send([flags], self._ranks[peer], _TAG))

    def receive(self, microbatch: int, count: int, peer: int) -> None:
        """Begin to receive which of so many gradients of a micro-batch there are."""
        flags = torch.empty(count or 1, dtype=torch.uint8)
        self._coming[microbatch] = self._group.recv([flags], self._ranks[peer], _TAG), flags, count

    def under_way(self, microbatch: int) -> list[dist.Work]:
        """Return what to wait for before it is known which gradients of a micro-batch are present."""
        return [self._coming[microbatch][0]] if microbatch in self._coming else []

    def take(self, microbatch: int) -> list[bool]:
        """Return which gradients of a micro-batch came; they have been waited for."""
        _, flags, count = self._coming.pop(microbatch)
        return list(map(bool, flags.tolist()))[:count]

    def finish(self) -> None:
        """Wait until all is sent."""
        for work in self._sent:
            work.wait()

    def clear(self) -> None:
        """Let go of the step."""
        self._sent.clear()
        self._coming.clear()


def learn_metas(
    part: PipelineReplica,
    place: int,
    runners: Sequence[Stage],
    stream: RankStream,
    group: dist.ProcessGroup,
    inputs: Sequence[Any],
    counts: Sequence[int],
    *,
    learning: bool,
) -> dict[int, list[ValueMeta]]:
    """Return, by number of rows, what is known of what each stage gives; all processes of a pipeline must call it.

    For each number of rows that micro-batches have, the first such micro-batch runs forward, stage by stage: a process
    sends what its stage made, shapes and all, to the next stage's process. Buffers and random state are as before
    afterwards; hooks on the modules see it.

    Args:
        part: the pipeline.
        place: this process's rank in it.
        runners: the stages.
        stream: what this process runs on.
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
    found: dict[int, list[ValueMeta]] = {}
    for count in sorted(set(counts)):
        microbatch = list(counts).index(count)
        metas: list[ValueMeta] = [ValueMeta(None, ())] * (plan.stages - 1)
        value: Any = inputs[microbatch]
        for stage, (here, there) in enumerate(pairwise(ranks)):
            if place == here:
                value = _try(part, place, runners[stage], microbatch, value, stream, learning=learning)
                metas[stage] = meta_of(value, f"stage {stage}")
                if there != here:
                    sent = (metas[stage].parts, to_bytes(value))
                    dist.send_object_list([sent], group=group, group_dst=there)
            elif place == there:
                box: list[Any] = [None]
                dist.recv_object_list(box, group=group, group_src=here)
                parts, data = box[0]
                value = from_bytes(data)
                metas[stage] = ValueMeta(take_apart(value)[1], parts)
                value = metas[stage].value(tensors_of(value))
        found[count] = metas
    return found


def _try(
    part: PipelineReplica, place: int, runner: Stage, microbatch: int, value: Any, stream: RankStream, *, learning: bool
) -> Any:
    """Run a stage forward, leaving no trace in it."""
    given = value if stream.receive is None else stream.receive(value)
    try:
        with unchanged([runner.module]), torch.set_grad_enabled(learning):
            if learning:
                return runner.forward(microbatch, given, {}, None)  # type: ignore[arg-type]  # no stage but the last needs a loss
            return runner.evaluate(microbatch, given, {}, None)
    except EngineError:
        raise
    except Exception as error:
        number = part.microbatches[microbatch]
        where = (part.ranks[place], runner.index, number, stream.runs_on)
        raise stage_error(error, f"{runner.index}F{number}", *where) from error
