"""The hybrid simulator's homework: a ring all-reduce, compared bit for bit with pipelab's."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from pipelab_course.grading.sized import Data, Sized
from pipelab_course.grading.tasks import Found
from pipelab_course.ring.codecs import codec_of
from pipelab_course.ring.ring import ring_all_reduce


def _gradients(seed: int, replicas: int, count: int, codec: str) -> tuple[list[torch.Tensor], str]:
    """Return a gradient for each replica, and the codec's name; `mean` is of 1, 2, 3 …, without a codec."""
    torch.manual_seed(seed)
    if codec == "mean":
        return [torch.full((count,), 1.0 + replica) for replica in range(replicas)], "none"
    return list(torch.randn(replicas, count) * torch.logspace(-2, 2, count)), codec


def _bits(tensor: torch.Tensor) -> list[int]:
    bits: list[int] = tensor.detach().flatten().to(torch.float32).view(torch.int32).tolist()
    return bits


class Ring(Sized):
    """A size is a number of replicas, of numbers in a gradient, and a codec."""

    name, parameters = "ring_all_reduce", ("gradients", "encode", "decode")
    shown = ((4, 8, "mean"), (3, 120, "none"), (4, 120, "fp16"), (4, 120, "int8"))

    def hidden(self, seed: int) -> list[tuple[int, int, str]]:
        """Return sizes that the number of replicas does not divide, more replicas than numbers, and a single one."""
        numbers = random.Random(seed)  # noqa: S311 - hidden from a reader of this file, not from an attacker
        return [(5, 5 * numbers.randint(9, 20) + 2, "int8"), (6, 4, "fp16"), (3, 7, "none"), (1, 5, "none")]

    def run(self, found: Data, function: Callable[..., Any], seed: int, *size: Any) -> None:
        """Call the function with a codec that counts the messages."""
        gradients, name = _gradients(seed, *size)
        codec, sent = codec_of(name), list[int]()
        found |= {"means": [], "sent": sent, "kept": False}

        def encode(chunk: torch.Tensor) -> Any:
            sent.append(chunk.numel())
            return codec.encode(chunk.clone()) if chunk.numel() else ()

        def decode(message: Any) -> torch.Tensor:
            return codec.decode(message, torch.float32).clone() if message else torch.empty(0)

        given = [each.clone() for each in gradients]
        found["means"] = [_bits(each) for each in function(given, encode, decode)]
        found["kept"] = all(map(torch.equal, given, gradients))

    def check(self, found: Data, seed: int, *size: Any) -> dict[str, Found]:
        """Compare with pipelab's ring: its mean, its bits, its messages."""
        replicas, count, _ = size
        gradients, name = _gradients(seed, *size)
        right, means, sent = _bits(ring_all_reduce(gradients, name).tensors[0]), found["means"], found["sent"]
        at = f"{replicas} replica{'s' * (replicas > 1)} of {count} numbers{f', {name}' * (name != 'none')}"
        whole = [len(mean) for mean in means] == [count] * replicas
        values = torch.tensor([right, *means] if whole else [right] * 2, dtype=torch.int32).view(torch.float32)
        near = whole and bool(((values - values[0]).abs() <= 0.05 * values[0].abs().max()).all())
        alike = whole and all(mean == means[0] for mean in means)
        other = sum(bits != mine for mean in means for bits, mine in zip(right, mean, strict=False))
        ended = found["error"] or f"replica 0 has {[round(each, 3) for each in values[1, :4].tolist()]}"
        each, most = replicas * (replicas - 1), -(-count // replicas)
        ring = each <= len(sent) <= 2 * each + replicas and max(sent, default=0) <= most
        ended = f"{ended} …" if whole else found["error"] or f"{len(means)} tensors of {sorted({*map(len, means)})}"
        facts: Data = {"at": at, "mean": [round(each, 3) for each in values[0, :4].tolist()], "ended": ended}
        facts |= {"other": other, "numbers": replicas * count, "steps": 2 * (replicas - 1), "most": most}
        facts |= {"sent": len(sent), "longest": max(sent, default=0)}
        return {
            "mean": Found(near, facts=facts),
            "same bits": Found(alike, reached=near, facts=facts),
            "bit for bit": Found(alike and not other, reached=near and alike, facts=facts),
            "messages": Found(ring, reached=near, facts=facts),
            "inputs": Found(found["kept"] is True, reached=whole, facts=facts),
        }


_RING = Ring()
record, judge = _RING.record, _RING.judge
