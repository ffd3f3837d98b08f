"""Values and gradients as messages between processes, which gradients are present, and the groups by which they travel.

A process needs a buffer for a value before the value arrives, so it must know the shapes. It learns them on real rows:
before the first step with micro-batches of a new size, one micro-batch runs forward through all stages, process by
process; buffers, attributes and random state are restored afterwards.

If a stage does not use a part of its input, that part has no gradient. The receiver waits for one all the same. So it
gets a certain number everywhere, and takes it for `None`: an optimizer with weight decay treats `None` and zeros
differently. If gradients travel between GPUs, a message between CPUs says which are present, so that no process waits
for a GPU to read them.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from pipelab.engine.device import RankStream
from pipelab.engine.stage.errors import stage_error
from pipelab.engine.stage.pytree import Spec, described, map_tensors, rebuild, take_apart, tensors_of
from pipelab.engine.stage.snapshot import overwrite, unchanged
from pipelab.engine.stage.stage import Stage
from pipelab.errors import EngineError
from pipelab.plan.actions import F
from pipelab.plan.plan import Plan


def to_bytes(value: Any) -> bytes:
    """Return a value in PyTorch's own format: its tensors on the CPU, without history or gaps.

    Pickle could not read back tensors of newer types.
    """
    buffer = io.BytesIO()
    torch.save(map_tensors(lambda tensor: tensor.detach().cpu().clone(), value), buffer)
    return buffer.getvalue()


def from_bytes(data: bytes) -> Any:
    """Return the value of `to_bytes`."""
    return torch.load(io.BytesIO(data), weights_only=False)


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """A tensor's shape, type, whether its gradient is wanted, and the strides of its messages."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    learns: bool
    strides: tuple[int, ...] = field(compare=False)

    def empty_buffer(self, device: torch.device) -> torch.Tensor:
        """Return an empty tensor for a message, without gaps."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)

    def contiguous(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a tensor with the strides of the buffer, on which the order of later sums depends."""
        tensor = tensor.detach().resolve_conj().resolve_neg()
        if tensor.stride() == self.strides and tensor.device == device:
            return tensor
        return self.empty_buffer(device).copy_(tensor)

    def __str__(self) -> str:
        """Return shape and type, such as `[4, 6] float32`."""
        return described(self) + ("" if self.learns else " without gradient")


@dataclass(frozen=True, slots=True)
class ValueMeta:
    """The tensors and the structure of a value, known before it arrives."""

    spec: Spec
    parts: tuple[TensorMeta | None, ...]  # `None` for a `None` in the value

    @property
    def learns(self) -> list[bool]:
        """For each tensor, whether its gradient is wanted."""
        return [part.learns for part in self._tensors]

    def empty_buffers(self, device: torch.device) -> list[torch.Tensor]:
        """Return empty tensors for a value of this meta."""
        return [part.empty_buffer(device) for part in self._tensors]

    def gradient_buffers(self, device: torch.device) -> list[torch.Tensor]:
        """Return empty tensors for the gradients of a value of this meta; a byte if there is none, for the order."""
        learning = [part.empty_buffer(device) for part in self._tensors if part.learns]
        return learning or [torch.zeros(1, dtype=torch.uint8, device=device)]

    def messages(self, value: Any, device: torch.device) -> list[torch.Tensor]:
        """Return the tensors of a value as messages."""
        return [part.contiguous(tensor, device) for part, tensor in zip(self._tensors, tensors_of(value), strict=True)]

    def value(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the value of these tensors, which require gradients where the sender's do."""
        wanted = iter(self.learns)
        rest = (tensor.detach().requires_grad_(next(wanted)) for tensor in tensors)
        return rebuild([None if part is None else next(rest) for part in self.parts], self.spec)

    def gradients(self, tensors: Sequence[torch.Tensor], there: Sequence[bool] | None = None) -> Any:
        """Return a gradient or `None` for each tensor of the value, from `gradient_messages` and perhaps `present`."""
        there = [not _is_absent(tensor) for tensor in tensors] if there is None else there
        rest = iter([tensor if present else None for tensor, present in zip(tensors, there, strict=False)])
        found = [next(rest) if part.learns else None for part in self._tensors]
        return found[0] if len(found) == 1 else found

    def present(self, gradients: Any) -> list[bool]:
        """Return which of the gradients that the previous stage needs are present."""
        return [gradient is not None for _, gradient in self._wanted(gradients)]

    def gradient_messages(self, gradients: Any, device: torch.device) -> list[torch.Tensor]:
        """Return the gradients that the previous stage needs, as messages."""
        messages = [
            _absent(part.empty_buffer(device)) if gradient is None else part.contiguous(gradient, device)
            for part, gradient in self._wanted(gradients)
        ]
        return messages or self.gradient_buffers(device)

    def misfit(self, value: Any, giver: str) -> str:
        """Return how an output of the stage `giver` differs from this meta; "" if it does not."""
        found = meta_of(value, giver)
        if found == self:
            return ""
        return (
            f"returned {found}, but for an earlier micro-batch of the same shape it returned {self}: "
            "between processes, a stage's outputs must have one structure, shape and type, and the same ones must "
            "require gradients\n"
            "  try: engine='threads', which has no such limit"
        )

    def _wanted(self, gradients: Any) -> list[tuple[TensorMeta, torch.Tensor | None]]:
        found = gradients if isinstance(gradients, list) else [gradients]
        return [(part, gradient) for part, gradient in zip(self._tensors, found, strict=True) if part.learns]

    @property
    def _tensors(self) -> list[TensorMeta]:
        return [part for part in self.parts if part is not None]

    def __str__(self) -> str:
        """Return the tensors, such as `[4, 6] float32`, and the structure of several."""
        structure = "" if len(self.parts) == 1 else f" in {' '.join(str(self.spec).split())}"
        return ", ".join(map(str, self.parts)) + structure


Shapes = tuple[tuple[torch.Size, ...], tuple[str, ...]]
"""Those of the tensors in a micro-batch, and its keywords in words."""


def meta_of(value: Any, giver: str) -> ValueMeta:
    """Return what a receiver must know of a value, the output of the stage `giver`."""
    parts, spec = take_apart(value)
    return ValueMeta(spec, tuple(None if part is None else _meta_of_tensor(part, giver) for part in parts))


def _meta_of_tensor(part: Any, giver: str) -> TensorMeta:
    if not isinstance(part, torch.Tensor):
        found, hint = f"an object of class {type(part).__name__}", "make it a tensor; or engine='threads'"
    elif hasattr(part, "to_local"):
        found, hint = "a DTensor", "end it with RowwiseParallel(), or PrepareModuleOutput(..., use_local_output=True)"
    elif part.layout != torch.strided or part.is_nested or part.is_quantized:
        found = "a sparse, nested or quantized tensor"
        hint = "to_dense(), to_padded_tensor() or dequantize(); or engine='threads'"
    else:
        strides = torch.empty_like(part, device="meta").stride()
        return TensorMeta(tuple(part.shape), part.dtype, part.requires_grad, strides)
    raise EngineError(
        f"{giver} returned {found}: between processes a stage sends plain, dense tensors only, in tuples, lists and "
        f"dicts\n  try: {hint}"
    )


_NONE = 254
"""Each byte of a gradient that is `None`: -1.7e38, of which no gradient consists. (A NaN may be all ones.)"""


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a message's bytes, in the order of its memory: it has no gaps, and no backend sends all types."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _absent(buffer: torch.Tensor) -> torch.Tensor:
    """Make a message of the gradient `None`."""
    bytes_of(buffer).fill_(_NONE)
    return buffer


def _is_absent(message: torch.Tensor) -> bool:
    line = bytes_of(message)
    return set(line[:4].tolist()) <= {_NONE} and bool((line == _NONE).all())  # without numbers, it adds nothing


_TAG = 1
"""Between CPUs, the gradients themselves use the same group, with the tag 0."""


class GradientPresence:
    """Sends and receives which gradients are present, for one stage in one step.

    Every micro-batch has such a message, so that the backwards of frozen stages too wait for their turn in the plan.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._sent: list[dist.Work] = []
        self._received: dict[int, tuple[dist.Work, torch.Tensor, int]] = {}

    def send(self, there: Sequence[bool], peer: int) -> None:
        """Begin to send which gradients of a micro-batch are present."""
        flags = torch.tensor(there or [False], dtype=torch.uint8)
        self._sent.append(self._group.send([flags], peer, _TAG))

    def receive(self, microbatch: int, count: int, peer: int) -> None:
        """Begin to receive which of `count` gradients of a micro-batch are present."""
        flags = torch.empty(count or 1, dtype=torch.uint8)
        self._received[microbatch] = self._group.recv([flags], peer, _TAG), flags, count

    def under_way(self, microbatch: int) -> list[dist.Work]:
        """Return the receive of a micro-batch's message, if there is one, to be waited for before `take`."""
        return [self._received[microbatch][0]] if microbatch in self._received else []

    def take(self, microbatch: int) -> list[bool]:
        """Return which gradients of a micro-batch are present."""
        _, flags, count = self._received.pop(microbatch)
        return list(map(bool, flags.tolist()))[:count]

    def finish(self) -> None:
        """Wait until all messages are sent."""
        for work in self._sent:
            work.wait()

    def clear(self) -> None:
        """Forget the step."""
        self._sent.clear()
        self._received.clear()


def learn_metas(
    plan: Plan,
    rank: int,
    runners: Sequence[Stage],
    stream: RankStream,
    group: dist.ProcessGroup,
    inputs: Sequence[Any],
    shapes: Sequence[Shapes],
    *,
    learning: bool,
) -> dict[Shapes, list[ValueMeta]]:
    """Return, by the shapes of a micro-batch, the meta of each stage's output; all processes must call it.

    For each such shapes and each way through the ranks, the first such micro-batch runs forward, stage by stage:
    each process sends its stage's output and meta to the next stage's process. Buffers, attributes and random state are
    restored; hooks on the modules run. `rank` is this process's, and `shapes` are the micro-batches'.
    """
    found: dict[Shapes, list[ValueMeta]] = {own: [ValueMeta(None, ())] * (plan.stages - 1) for own in shapes}
    ways = {(own, tuple(plan.bound.route(m))): m for m, own in reversed(list(enumerate(shapes)))}
    for (own, ranks), microbatch in sorted(ways.items()):
        metas = found[own]
        value: Any = inputs[microbatch]
        for stage, (here, there) in enumerate(pairwise(ranks)):
            if rank == here:
                value = _try(rank, runners[stage], microbatch, value, stream, learning=learning)
                metas[stage] = meta_of(value, f"stage {stage}")
                if there != here:
                    dist.send_object_list([(metas[stage].parts, to_bytes(value))], group=group, group_dst=there)
            elif rank == there:
                metas[stage], value = _arrived(group, here)
    return found


def _arrived(group: dist.ProcessGroup, source: int) -> tuple[ValueMeta, Any]:
    """Receive another stage's output, which requires gradients where the sender's does."""
    box: list[Any] = [None]
    dist.recv_object_list(box, group=group, group_src=source)
    parts, data = box[0]
    value = from_bytes(data)
    meta = ValueMeta(take_apart(value)[1], parts)
    return meta, meta.value(tensors_of(value))


def _try(rank: int, runner: Stage, microbatch: int, value: Any, stream: RankStream, *, learning: bool) -> Any:
    """Run a stage forward; restore its buffers, its attributes and the random state."""
    given = value if stream.receive is None else stream.receive(value)
    runner.receive_keywords(microbatch, stream.receive)
    run: Any = runner.forward if learning else runner.evaluate  # no stage but the last needs a loss
    try:
        with unchanged([runner.module], attributes=True), torch.set_grad_enabled(learning):
            return run(microbatch, given, {}, None)
    except EngineError:
        raise
    except Exception as error:
        raise stage_error(error, F(microbatch, runner.index), rank, stream.runs_on) from error


# ── The groups by which messages travel ───────────────────────────────────────────────────────────────────────────────


_ABORT_TAG = 1 << 20
"""A tag of no message."""


@dataclass(frozen=True, slots=True)
class Connections:
    """The groups that a process belongs to."""

    everyone: dist.ProcessGroup  # all processes of this plan, connected by gloo: for small messages on the CPU
    values: dist.ProcessGroup  # the same processes: for values between stages
    shared: Mapping[tuple[int, ...], dist.ProcessGroup]  # by ranks, those with the same stage or shared parameter
    transport_device: torch.device  # of the values that are sent
    members: tuple[int, ...]  # for each rank of the plan, its process's rank in PyTorch's default group

    def abort(self) -> None:
        """Close gloo's connections immediately: a thread of this process that waits in one of its groups gets an error.

        Gloo has no call for it, but a receive that times out closes all connections of its group on this process.
        """
        others = (self.values, *self._own_shared) if self.transport_device.type == "cpu" else ()
        for group in dict.fromkeys((self.everyone, *others)):
            for peer in set(range(group.size())) - {group.rank()}:
                with suppress(RuntimeError):
                    group.recv([torch.empty(1)], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """Destroy the groups, their threads and their connections; this process must not be using them."""
        for group in {id(group): group for group in (*self._own_shared, self.values, self.everyone)}.values():
            if group is not dist.group.WORLD and dist.is_initialized():
                dist.destroy_process_group(group)

    @property
    def _own_shared(self) -> list[dist.ProcessGroup]:
        """The groups in `shared` of which this process is a member."""
        return [group for group in self.shared.values() if isinstance(group, dist.ProcessGroup)]


def broadcast(tensor: torch.Tensor, group: dist.ProcessGroup, source: int) -> None:
    """Broadcast a contiguous tensor, also of a type that the backend does not support."""
    dist.broadcast(bytes_of(tensor), group=group, group_src=source)


def copy_from(source: int, tensor: torch.Tensor, group: dist.ProcessGroup, device: torch.device) -> None:
    """Copy the numbers that a group's rank `source` has in a tensor into those of all others, by way of a device."""
    if dist.get_rank(group) == source:
        broadcast(tensor.detach().to(device).contiguous(), group, source)
        return
    found = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    broadcast(found, group, source)
    with torch.no_grad():
        overwrite(tensor, found)
