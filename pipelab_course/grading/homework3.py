"""Homework 3: where a submission's constructor puts each layer, and what a forward moves, on emulated GPUs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import groupby, pairwise
from typing import Any

import torch

from pipelab_course.grading.emulated import Calls, emulated, place_of
from pipelab_course.grading.sized import Data, Sized
from pipelab_course.grading.tasks import Found


def _number(place: torch.device) -> int:
    return -1 if place.index is None else place.index


def _together(tensors: Sequence[torch.Tensor]) -> None:
    """Raise what a GPU raises if tensors are on several devices."""
    places = sorted({str(place_of(each)) for each in tensors})
    if len(places) > 1:
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {' and '.join(places)}")


class Homework3(Sized):
    """A size is a number of GPUs, and of layers."""

    name, parameters = "SpreadStack", ("width", "depth")
    shown = ((2, 20), (3, 20), (5, 20))

    def hidden(self, seed: int) -> list[tuple[int, int]]:
        """Return sizes at which there are other remainders."""
        numbers = random.Random(seed)  # noqa: S311 - hidden from a reader of this file, not from an attacker
        return [(4, numbers.choice((9, 13, 17, 21))), (6, 8), (1, numbers.randint(2, 9))]

    def run(self, found: Data, function: Callable[..., Any], seed: int, *size: Any) -> None:
        """Make the model and run a forward, on emulated GPUs; then run its layers one by one."""
        gpus, depth = size
        torch.manual_seed(seed)
        x = torch.randn(4, 16)
        with torch.no_grad(), emulated(gpus, _together):
            model = function(16, depth)
            found["places"] = [_number(place_of(next(layer.parameters()))) for layer in model.layers]
            with Calls() as calls:
                try:
                    output = model(x)
                finally:
                    found |= {"calls": calls.count, "moves": [[*map(_number, move)] for move in calls.moves]}
        with torch.no_grad(), emulated(gpus):
            for layer in model.layers:  # which may move what it is given
                x = layer(x)
        found["same"] = torch.allclose(output, x, atol=1e-6)

    def check(self, found: Data, seed: int, *size: Any) -> dict[str, Found]:  # noqa: ARG002 - it is the same for all
        """Compare with layers that are spread evenly, neighbours together."""
        gpus, depth = size
        places = [int(each) for each in found.get("places", ())]
        moves = [(int(a), int(b)) for a, b in found.get("moves", ())]
        counts = [places.count(each) for each in range(gpus)]
        at = f"{depth} layers on {gpus} GPU{'s' * (gpus > 1)}"
        empty, error = counts.count(0), found["error"]
        placed = len(places) == depth == sum(counts)
        spans = [place for place, _ in groupby(places)]
        between = sum(source >= 0 for source, _ in moves)
        right = placed and moves == [(-1, spans[0]), *pairwise(spans)] and len(spans) == len({*spans})
        same, even = placed and found.get("same") is True, placed and max(counts) - min(counts) <= 1
        facts: Data = {"at": at, "depth": depth, "gpus": gpus, "counts": " ".join(map(str, counts)), "empty": empty}
        facts |= {"lost": depth - sum(counts), "most": max(counts), "enough": -(-depth // gpus)}
        facts |= {"fewest": len({*spans}) - 1, "first": len(moves) - between, "between": between, "copies": len(moves)}
        facts["said"] = error or "another output"
        facts["does"] = "ends with an error" if error else "computes something else"
        return {
            "layers": Found(placed, facts=facts),
            "all GPUs": Found(not empty, reached=placed, facts=facts),
            "even": Found(even, reached=placed and not empty, facts=facts),
            "crossings": Found(right, reached=placed and not error, facts=facts),
            "forward": Found(same, reached=placed or bool(error), facts=facts),
        }

    def note(self, runs: Sequence[Data]) -> str:
        """Return how many calls of `.to()` copy."""
        pairs = zip(runs, self.shown, strict=True)
        said = (f"{run['calls']} on {gpus} GPUs, of which {len(run['moves'])} copy" for run, (gpus, _) in pairs)
        return f"calls of .to() in a forward: {'; '.join(said)}"


_HOMEWORK = Homework3()
record, judge = _HOMEWORK.record, _HOMEWORK.judge
