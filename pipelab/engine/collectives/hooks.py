"""The ring and its codecs in PyTorch's DistributedDataParallel, as a communication hook.

DDP collects gradients in buckets, and calls its hook with each bucket that is full, in the same order on all processes:

    backward   │ layer 3 │ layer 2 │            layer 1 │
    hook                           │ bucket 0 around the ring │ …
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from pipelab.engine.collectives.codecs import Codec, codec_of, name_of
from pipelab.engine.collectives.part import Part, agree, described, exchange, misfit_of
from pipelab.errors import UsageError

Hook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]
"""Of the state, which is the group, and the `torch.distributed.GradBucket`."""


def codec_hook(codec: str | Codec) -> Hook:
    """Return a communication hook for `DistributedDataParallel`: gradients go around a ring, with a codec.

    Register it with the group of the model's processes, one hook for each model:

        model = DistributedDataParallel(module)
        model.register_comm_hook(model.process_group, pipelab.codec_hook("int8-ef"))

    All replicas get the same gradients bit for bit, so their weights stay the same. A codec with feedback keeps what it
    lost for each parameter until the next step. Backends: gloo, and NCCL, on which no test has
    run it yet. On gloo, GPUs' messages pass through the CPU.

    The first time a hook meets a bucket, the processes compare its size, its type and their codecs.

    The bucket is complete when the hook returns, so this communication does not overlap with the rest of the backward:
    measure bytes and errors with it, not speed.

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
                "  try: model.register_comm_hook(model.process_group, pipelab.codec_hook(...))"
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
