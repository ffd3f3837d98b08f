"""The ring all-reduce: the mean of every replica's tensor, chunk by chunk, each rank sending to the next one only.

    3 ranks, 3 chunks: what a rank holds of each chunk, as the ranks that are added up in it

                 start     step 1     step 2   │ step 3     step 4
    rank 0       0 0 0     0 0 20     0 120 20 │ 012 …      all three chunks
    rank 1       1 1 1     01 1 1     01 1 201 │
    rank 2       2 2 2     2 12 2     012 12 2 │
                 reduce-scatter                │ all-gather

Reduce-scatter: in D - 1 steps every chunk goes once around the ring, and each rank adds its own numbers. Each rank then
owns one whole chunk, and divides it by D. All-gather: in D - 1 more steps the finished chunks go around once.
Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).

`codec_hook` is the same ring in PyTorch's DistributedDataParallel. DDP collects gradients in buckets, and calls its
hook with each bucket that is full, in the same order on all processes:

    backward   │ layer 3 │ layer 2 │            layer 1 │
    hook                           │ bucket 0 around the ring │ …
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from pipelab.errors import UsageError
from pipelab_course.ring import drawing
from pipelab_course.ring.codecs import Codec, codec_of, name_of
from pipelab_course.ring.part import Part, agree, described, exchange, misfit_of, require_alike

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Send:
    """One message of a ring all-reduce.

    Attributes:
        phase: `"reduce-scatter"` or `"all-gather"`.
        sender: the rank that sends it.
        receiver: the rank that receives it.
        chunk: the number of the chunk in it.
        holds: the ranks whose numbers are added up in it, in that order; in the all-gather, all: it is the mean.
        payload_bytes: bytes of its numbers.
        scale_bytes: bytes of its scales.
    """

    phase: Literal["reduce-scatter", "all-gather"]
    sender: int
    receiver: int
    chunk: int
    holds: tuple[int, ...]
    payload_bytes: int
    scale_bytes: int


@dataclass(frozen=True, eq=False, repr=False)
class RingResult:
    """The result of a ring all-reduce; `print` shows its steps.

    Attributes:
        tensors: the mean, one tensor for each that was given; all are equal bit for bit.
        chunks: the numbers in each chunk.
        message_bytes: by chunk, the bytes of its messages: of the numbers, and of the scales.
        feedback: of a codec with feedback, what each rank has still to send; `None` otherwise.
    """

    tensors: list[torch.Tensor]
    chunks: tuple[int, ...]
    message_bytes: tuple[tuple[int, int], ...]
    feedback: list[torch.Tensor] | None = None

    @cached_property
    def steps(self) -> tuple[tuple[Send, ...], ...]:
        """By step, the messages that are on their way at the same time, one from each rank in order."""
        return tuple(
            tuple(self._send(step, sender) for sender in range(len(self.chunks)))
            for step in range(2 * (len(self.chunks) - 1))
        )

    def _send(self, step: int, sender: int) -> Send:
        ranks = len(self.chunks)
        chunk = (sender - step) % ranks
        return Send(
            "reduce-scatter" if step < ranks - 1 else "all-gather",
            sender,
            (sender + 1) % ranks,
            chunk,
            tuple((chunk + turn) % ranks for turn in range(min(step + 1, ranks))),
            *self.message_bytes[chunk],
        )

    @property
    def payload_bytes(self) -> int:
        """Bytes of all messages of all ranks, without scales: 2 * (ranks - 1) times one replica's numbers as sent."""
        return 2 * (len(self.chunks) - 1) * sum(payload for payload, _ in self.message_bytes)

    @property
    def scale_bytes(self) -> int:
        """Bytes of all scales of all messages."""
        return 2 * (len(self.chunks) - 1) * sum(scales for _, scales in self.message_bytes)

    @property
    def bytes_per_rank(self) -> tuple[int, ...]:
        """Bytes that each rank sends, with scales: about 2 * (ranks - 1) / ranks times its numbers as sent."""
        sent = [0] * len(self.chunks)
        for send in chain.from_iterable(self.steps):
            sent[send.sender] += send.payload_bytes + send.scale_bytes
        return tuple(sent)

    def plot(self) -> Figure:
        """Draw what every rank holds after each step; return the figure.

        Raises:
            UsageError: if there are more ranks than a figure has room for.
        """
        return drawing.plot(self.steps, self.chunks)

    def __repr__(self) -> str:
        return f"<ring all-reduce, ranks={len(self.chunks)}: {self.payload_bytes} bytes + {self.scale_bytes} of scales>"

    def __str__(self) -> str:
        """Return the steps as a table: who sends which chunk to whom, and the ranks that are added up in it."""
        return drawing.text(self.steps, self.chunks)


def ring_all_reduce(
    tensors: torch.Tensor | Sequence[torch.Tensor],
    codec: str | Codec = "none",
    *,
    group: dist.ProcessGroup | None = None,
    feedback: Sequence[torch.Tensor] | None = None,
) -> RingResult:
    """Return the mean of all replicas' tensors, computed around a ring.

    With a list, all replicas are in this process, each tensor on any device. With one tensor, each process of a
    `torch.distributed` group is a replica: all of them call this, and each gets its own copy of the mean. The tensors
    that are given do not change, and the result has no history for autograd.

    All replicas get the same bits, whatever the codec: a message is passed on as it arrived, and the owner of a chunk
    keeps what it sent, not what it had. Numbers are added up in the tensors' type, and their sum, which may be larger
    than each of them, travels in the codec's type: with `"fp16"`, a sum above 65504 arrives as infinity everywhere. NaN
    arrives as NaN everywhere, with `"int8"` in the whole chunk.

    Args:
        tensors: a list with every replica's tensor, or this process's tensor; of one floating-point type and any shape.
        codec: how numbers travel: `"none"`, `"fp16"`, `"bf16"`, `"int8"`, `"int8-ef"`, or a `Codec`.
        group: the processes; by default, all.
        feedback: with a codec that has feedback, the `feedback` of the previous all-reduce; `None` for the first one.

    Example:
        >>> import pipelab_course, torch
        >>> result = pipelab_course.ring_all_reduce([torch.full((4,), float(value)) for value in (1, 2, 3, 4)])
        >>> result.tensors[0], result.payload_bytes, result.bytes_per_rank
        (tensor([2.5000, 2.5000, 2.5000, 2.5000]), 96, (24, 24, 24, 24))
        >>> print(pipelab_course.ring_all_reduce([torch.zeros(7)] * 3, "int8"))
        3 ranks, chunks of 3 2 2 numbers
        step              rank 0 to 1    rank 1 to 2    rank 2 to 0
        1 reduce-scatter  chunk 0: 0     chunk 1: 1     chunk 2: 2
        2 reduce-scatter  chunk 2: 2+0   chunk 0: 0+1   chunk 1: 1+2
        3 all-gather      chunk 1: mean  chunk 2: mean  chunk 0: mean
        4 all-gather      chunk 0: mean  chunk 1: mean  chunk 2: mean
        bytes             10 + 16        9 + 16         9 + 16

        A number that is too small for `"int8"` is lost every time. With `"int8-ef"`, the next round adds it:

        >>> gradients, feedback, sums = [torch.tensor([1.0, 0.003] * 2)] * 2, None, torch.zeros(4)
        >>> for _ in range(100):
        ...     result = pipelab_course.ring_all_reduce(gradients, "int8-ef", feedback=feedback)
        ...     feedback, sums = result.feedback, sums + result.tensors[0]
        >>> pipelab_course.ring_all_reduce(gradients, "int8").tensors[0], sums / 100
        (tensor([1., 0., 1., 0.]), tensor([1.0000, 0.0030, 1.0000, 0.0030]))

    With several processes, all wait for the last one to make this call, for the group's `timeout` at most.

    Raises:
        UsageError: if there is no tensor, they differ in shape or type, or the type is not a floating-point one of 16
            bits or more; on all processes, if this is the case on one.
        RuntimeError: PyTorch's, if another process is gone, or does not make the call in time.
    """
    chosen = codec_of(codec)
    if isinstance(tensors, torch.Tensor):
        return _across_processes(tensors, chosen, group, feedback)
    if group is not None:
        raise UsageError("group= needs this process's tensor, not a list: a list is reduced in this process")
    listed = list(tensors)
    if not listed:
        raise UsageError("the list of tensors is empty: give one tensor for each replica")
    kept = _checked_feedback(feedback, listed, chosen)
    require_alike([misfit_of(each) for each in listed], [described(each) for each in listed], "tensors[{}]")
    ranks = len(listed)
    parts = [Part(rank, ranks, *each, chosen) for rank, each in enumerate(zip(listed, kept, strict=True))]
    for step in range(2 * (ranks - 1)):
        messages = [part.message(step) for part in parts]
        for rank, part in enumerate(parts):
            part.take(step, tuple(each.to(part.whole.device) for each in messages[rank - 1]))
    return _result(parts, listed)


def _across_processes(
    tensor: torch.Tensor, codec: Codec, group: dist.ProcessGroup | None, feedback: Sequence[torch.Tensor] | None
) -> RingResult:
    if not dist.is_initialized():
        raise UsageError(
            "one tensor is reduced over processes, and torch.distributed is not initialized\n"
            "  try: torch.distributed.init_process_group first; or a list with the tensor of each replica"
        )
    group = group or dist.group.WORLD
    assert group is not None
    rank = dist.get_rank(group)
    if rank < 0:
        raise UsageError(f"this process, rank {dist.get_rank()} of all, is not in the group")
    kept: Sequence[torch.Tensor | None] = [None]
    misfit = misfit_of(tensor)
    try:
        kept = _checked_feedback(feedback, [tensor], codec)
    except UsageError as error:
        misfit = misfit or str(error)
    agree(group, misfit, f"{described(tensor)} with codec {name_of(codec)}")
    part = Part(rank, dist.get_world_size(group), tensor, kept[0], codec)
    exchange(part, group)
    return _result([part], [tensor])


def _result(parts: Sequence[Part], tensors: Sequence[torch.Tensor]) -> RingResult:
    shape = tensors[0].shape
    kept = [part.kept.view(shape) for part in parts if part.kept is not None]
    return RingResult([part.whole.view(shape) for part in parts], *parts[0].sizes(), kept or None)


def _checked_feedback(
    feedback: Sequence[torch.Tensor] | None, tensors: Sequence[torch.Tensor], codec: Codec
) -> Sequence[torch.Tensor | None]:
    """Return for each tensor what is still to be sent; `None` if that is nothing."""
    if feedback is None:
        return [None] * len(tensors)
    if not codec.feedback:
        raise UsageError("feedback= is given, and this codec has none: use codec='int8-ef', or leave feedback out")
    if [described(each) for each in feedback] != [described(each) for each in tensors]:
        shapes = ", ".join(map(described, feedback))
        raise UsageError(f"feedback= is {shapes}, which is not as many tensors of the same type and shape")
    return feedback


# ── In PyTorch's DistributedDataParallel ──────────────────────────────────────────────────────────────────────────────


Hook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]
"""Of the state, which is the group, and the `torch.distributed.GradBucket`."""


def codec_hook(codec: str | Codec) -> Hook:
    """Return a communication hook for `DistributedDataParallel`: gradients go around a ring, with a codec.

    Register it with the group of the model's processes, one hook for each model:

        model = DistributedDataParallel(module)
        model.register_comm_hook(model.process_group, pipelab_course.codec_hook("int8-ef"))

    All replicas get the same gradients bit for bit, so their weights stay the same. A codec with feedback keeps what it
    lost for each parameter until the next step. Backends: gloo, and NCCL, on which no test has
    run it yet. On gloo, GPUs' messages pass through the CPU.

    The first time a hook meets a bucket, the processes compare its size, its type and their codecs.

    The hook returns when the bucket is complete, so communication does not overlap with the rest of the backward.
    Measure bytes and errors with it, not speed.

    Source of the idea and of the interface: PyTorch, "DDP communication hooks".

    Args:
        codec: a name, as in `ring_all_reduce`, or a `Codec`.

    Raises:
        UsageError: if no codec has that name. In a backward, on all processes: if the hook was registered without the
            model's group, gradients are sparse, or processes have other codecs or buckets.
    """
    chosen = codec_of(codec)
    losses: dict[torch.Tensor, torch.Tensor] = {}
    compared: set[tuple[int, str]] = set()

    def hook(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        if not isinstance(state, dist.ProcessGroup):
            raise UsageError(
                f"the hook's state is {state!r}, and with another group than the model's the mean would be wrong\n"
                "  try: model.register_comm_hook(model.process_group, pipelab_course.codec_hook(...))"
            )
        flat, parameters = bucket.buffer(), bucket.parameters()
        description = f"bucket {bucket.index()}, {described(flat)} with codec {name_of(chosen)}"
        if (bucket.index(), description) not in compared:  # PyTorch makes other buckets after the first step
            agree(state, misfit_of(flat), description)
            compared.add((bucket.index(), description))
        sizes = [parameter.numel() for parameter in parameters]
        kept = None
        if chosen.feedback:
            kept = torch.cat([losses.get(each, torch.zeros_like(flat[:1]).expand(each.numel())) for each in parameters])
        part = Part(dist.get_rank(state), dist.get_world_size(state), flat, kept, chosen)
        exchange(part, state)
        if part.kept is not None:
            losses.update(zip(parameters, part.kept.split(sizes), strict=True))
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[flat.device] if flat.is_cuda else None
        )
        future.set_result(part.whole)
        return future

    hook.__annotations__.clear()  # DDP compares them with its own classes, and here they are texts
    return hook
