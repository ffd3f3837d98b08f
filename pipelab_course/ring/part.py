"""One rank's part in a ring all-reduce: its messages, step by step, and their way between processes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from pipelab.errors import UsageError
from pipelab_course.ring.codecs import Codec, Message


class Part:
    """One rank's part in a ring all-reduce.

    In step 0, 1, 2 … rank `r` sends chunk `r`, `r - 1`, `r - 2` …, counted around the ring, first to add up, and from
    step D - 1 on finished. So it receives chunk `r - 1`, `r - 2` …

    Attributes:
        ranks: how many there are.
        whole: `[n]`, the rank's numbers; after the last step, the mean.
        kept: `[n]`, what the rank has still to send; `None` without feedback.
    """

    def __init__(
        self, rank: int, ranks: int, tensor: torch.Tensor, feedback: torch.Tensor | None, codec: Codec
    ) -> None:
        """Take part with a tensor of any shape, and what is still to be sent from the all-reduce before."""
        self.ranks = ranks
        self.whole = tensor.detach().reshape(-1).clone()
        if feedback is not None:
            self.whole += feedback.detach().reshape(-1)
        self.kept = torch.zeros_like(self.whole) if codec.feedback else None
        self._rank = rank
        self._codec = codec
        self._chunks = self.whole.tensor_split(ranks)  # views: what is written into them is written into the whole
        self._finished: Message = ()

    def message(self, step: int) -> Message:
        """Return what the rank sends in a step."""
        number = (self._rank - step) % self.ranks
        chunk = self._chunks[number]
        if step < self.ranks - 1:
            return self._sent(chunk, number)
        if step == self.ranks - 1:
            chunk /= self.ranks
            self._finished = self._sent(chunk, number, share=self.ranks)
            chunk.copy_(self._decoded(self._finished))  # the owner keeps what it sends: all have the same bits
        return self._finished

    def take(self, step: int, message: Message) -> None:
        """Receive what the rank before sent in a step."""
        chunk = self._chunks[(self._rank - 1 - step) % self.ranks]
        if step < self.ranks - 1:
            chunk += self._decoded(message)
        else:
            chunk.copy_(self._decoded(message))
            self._finished = message  # passed on as it arrived

    def buffers(self, step: int) -> Message:
        """Return empty tensors for what the rank receives in a step."""
        chunk = self._chunks[(self._rank - 1 - step) % self.ranks]
        return tuple(map(torch.empty_like, _encoded(torch.zeros_like(chunk), self._codec)))

    def sizes(self) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
        """Return by chunk how many numbers are in it, and the bytes of its messages."""
        messages = [_encoded(torch.zeros_like(chunk), self._codec) for chunk in self._chunks]
        nbytes = [[each.nbytes for each in message] for message in messages]
        return tuple(chunk.numel() for chunk in self._chunks), tuple((sum(each[:1]), sum(each[1:])) for each in nbytes)

    def _sent(self, chunk: torch.Tensor, number: int, share: int = 1) -> Message:
        """Return a chunk's message; keep what the codec lost, `share` times: the mean is that part of a sum."""
        message = _encoded(chunk, self._codec)
        if self.kept is not None:
            lost = (chunk - self._decoded(message)) * share
            # NaN and infinity were sent as such. To send them again in every later step would not help.
            self.kept.tensor_split(self.ranks)[number].copy_(lost.nan_to_num(0.0, 0.0, 0.0))
        return message

    def _decoded(self, message: Message) -> torch.Tensor:
        return self._codec.decode(message, self.whole.dtype) if message else self.whole[:0]


def exchange(part: Part, group: dist.ProcessGroup) -> None:
    """Send and receive all steps of this process's part. All processes must have compared their sizes before."""
    rank = dist.get_rank(group)
    onward, before = (rank + 1) % part.ranks, (rank - 1) % part.ranks
    device = torch.device("cpu") if dist.get_backend(group) == "gloo" else part.whole.device
    for step in range(2 * (part.ranks - 1)):
        message = [each.to(device) for each in part.message(step)]
        buffers = [each.to(device) for each in part.buffers(step)]
        # Both at the same time: if all ranks first sent and then received, all would wait for a receiver. And as
        # bytes, because no backend knows all types.
        ops = [dist.P2POp(dist.isend, _bytes(each.contiguous()), group=group, group_peer=onward) for each in message]
        ops += [dist.P2POp(dist.irecv, _bytes(each), group=group, group_peer=before) for each in buffers]
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()
        part.take(step, tuple(each.to(part.whole.device) for each in buffers))


def agree(group: dist.ProcessGroup, misfit: str, description: str) -> None:
    """Compare what all processes of a group are about to reduce: messages of other sizes would abort a process."""
    said: list[tuple[str, str]] = [("", "")] * dist.get_world_size(group)
    dist.all_gather_object(said, (misfit, description), group=group)
    require_alike([each[0] for each in said], [each[1] for each in said], "rank {}")


def described(tensor: torch.Tensor) -> str:
    """Return a tensor's type and shape.

    Example:
        >>> described(torch.zeros(2, 3))
        'float32 [2, 3]'
    """
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def misfit_of(tensor: torch.Tensor) -> str:
    """Return why a tensor has no mean here; nothing if it has."""
    if not tensor.is_floating_point() or torch.finfo(tensor.dtype).bits < 16:
        return f"a tensor of {described(tensor)}: expected a floating-point type of 16 bits or more"
    return "" if tensor.layout == torch.strided else f"a sparse tensor of {described(tensor)}: use tensor.to_dense()"


def require_alike(misfits: Sequence[str], descriptions: Sequence[str], name: str) -> None:
    """Refuse what cannot be reduced."""
    for index, misfit in enumerate(misfits):
        if misfit:
            raise UsageError(f"{name.format(index)} is {misfit}")
    for index, description in enumerate(descriptions):
        if description != descriptions[0]:
            raise UsageError(
                f"{name.format(0)} is {descriptions[0]}, {name.format(index)} is {description}: all must be alike"
            )


def _encoded(chunk: torch.Tensor, codec: Codec) -> Message:
    """Return the message for a chunk; an empty chunk is not sent, and has no scale."""
    return codec.encode(chunk) if chunk.numel() else ()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.unsqueeze(-1).view(torch.uint8)  # [n, bytes]: a lone number may have any stride
