"""The course: what its students run, measure and hand in. pipelab itself knows nothing of it.

Its commands, `pipelab lab`, `pipelab tutorial` and `pipelab grade`, are entry points of the group `pipelab.commands`.

- `commands`: `pipelab lab`
- `tutorial`: tutorials in the terminal and as notebooks, which wait for predictions
- `practical9`: three ways to run a split model, and true 1F1B
- `hw1`: data parallelism: speed-up, efficiency, Amdahl's law, three experiments
- `ddp`: the processes that `hw1` times, and the law that it fits
- `hw3`: a stack of linear layers over several devices
- `hybrid`: pipelines times replicas beside the same work on one device: time, figures, and both for real
- `compressed`: pipelines times replicas that train, their gradients around a ring, in several codecs
- `report`: a report on hybrids, each claim with its readings, the right value and the verdict
- `figures`: the memory of a process, and measured figures beside predicted ones
- `ring`: the ring all-reduce, and codecs for its messages
- `grading`: submissions, run and graded by what they ran
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelab.errors import NO_TORCH
from pipelab.plan.fault import OWN

if TYPE_CHECKING:
    from pipelab_course.ring.ring import codec_hook, ring_all_reduce

__all__ = ["codec_hook", "ring_all_reduce"]
OWN.append(Path(__file__).parent)


def __getattr__(name: str) -> Any:
    """Load what needs PyTorch when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module 'pipelab_course' has no attribute {name!r}")
    try:
        return getattr(import_module("pipelab_course.ring.ring"), name)
    except ModuleNotFoundError as error:
        if error.name == "torch":
            raise ModuleNotFoundError(f"pipelab_course.{name}: {NO_TORCH}", name="torch") from None
        raise
