"""Ring all-reduces over processes, beside the same in one process and PyTorch's own all-reduce; and what is refused."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from facts import attempt, say

from pipelab_course import ring_all_reduce
from pipelab_course.ring.codecs import CODECS

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank, ranks = dist.get_rank(), dist.get_world_size()
generator = torch.Generator().manual_seed(0)

for codec in CODECS:
    for dtype in (torch.float32, torch.bfloat16):
        for size in (0, 1, ranks + 1, 1000):
            tensors = [torch.randn(size, generator=generator).to(dtype) for _ in range(ranks)]
            here = ring_all_reduce(tensors, codec)
            feedback = None if here.feedback is None else here.feedback[rank : rank + 1]
            across = ring_all_reduce(tensors[rank], codec)
            again = ring_all_reduce(tensors[rank], codec, feedback=feedback)
            twice = ring_all_reduce(tensors, codec, feedback=here.feedback)
            summed = tensors[rank].clone()
            dist.all_reduce(summed)
            say(
                case=f"{codec} {dtype} {size}",
                equal=torch.equal(across.tensors[0], here.tensors[rank]),
                fed_back=torch.equal(again.tensors[0], twice.tensors[rank]),
                alike=(across.steps, across.payload_bytes) == (here.steps, here.payload_bytes),
                error=float((across.tensors[0] - summed / ranks).abs().max()) if size else 0.0,
            )


class EvenAndOdd:
    """A codec whose messages are apart in memory."""

    feedback = False

    def encode(self, values):
        return values[::2], values[1::2]

    def decode(self, message, dtype):
        return torch.stack(message, 1).flatten().to(dtype)


def compare(tensors, codec):
    across = ring_all_reduce(tensors[rank], codec).tensors[0]
    torch.testing.assert_close(across, ring_all_reduce(tensors, codec).tensors[rank], rtol=0, atol=0)


columns = [torch.full((1, 8), float(each))[:, each] for each in range(ranks)]  # one number, eight apart from the next
rows = [torch.randn(6 * ranks, generator=generator) for _ in range(ranks)]
attempt("a column", lambda: compare(columns, "none"))
attempt("even and odd", lambda: compare(rows, EvenAndOdd()))
attempt("even and odd, one of each", lambda: compare([each[: 2 * ranks] for each in rows], EvenAndOdd()))

pair = dist.new_group([0, 2])  # its ranks are not the processes' own
of_group = ring_all_reduce(torch.tensor([float(rank)]), group=pair).tensors[0].item() if rank != 1 else 1.0
say(case="group", mean=of_group)
if rank == 1:
    attempt("stranger", lambda: ring_all_reduce(torch.zeros(1), group=pair))
attempt("shapes", lambda: ring_all_reduce(torch.zeros(3 if rank == 1 else 2)))
attempt("codecs", lambda: ring_all_reduce(torch.zeros(3), "int8" if rank else "fp16"))
attempt("type", lambda: ring_all_reduce(torch.zeros(3, dtype=torch.int64 if rank == 2 else torch.float32)))
attempt("feedback", lambda: ring_all_reduce(torch.zeros(3), "int8-ef", feedback=[torch.zeros(3 + (rank == 2))]))
say(case="afterwards", mean=ring_all_reduce(torch.tensor([rank + 1.0])).tensors[0].item())
if rank:  # a rank that is gone ends the others' wait at once
    attempt("gone", lambda: ring_all_reduce(torch.zeros(3)))
os._exit(0)  # gloo would report the broken connections
