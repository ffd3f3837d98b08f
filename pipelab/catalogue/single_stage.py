"""What schedules with one stage per rank share: micro-batches go down the ranks once."""

from __future__ import annotations

from typing import ClassVar

from pipelab.errors import SizeError
from pipelab.schedule import Schedule

__all__ = ["SingleStage"]


class SingleStage(Schedule):
    """A schedule whose micro-batches go down the ranks once: rank `r` holds stage `r`, and no other.

    Args:
        ranks: how many workers the pipeline has.
        microbatches: how many slices the batch is cut into.
        stages_per_rank: one.

    Raises:
        SizeError: if a number is not a positive whole number, or if `stages_per_rank` is not 1.
    """

    looping: ClassVar[str] = "looped-bfs"
    """What is like it, for several stages per rank."""

    def __init__(self, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> None:
        """Keep the sizes."""
        super().__init__(ranks, microbatches, stages_per_rank)
        ours = type(self).actions.__module__.startswith("pipelab.")  # a student's may be for any number of stages
        if ours and self.stages_per_rank != 1:
            raise SizeError(
                f"stages_per_rank={self.stages_per_rank}: {type(self).__name__} has exactly 1 on every rank: leave it "
                f"out, or take a schedule for several, such as {self.looping}"
            )
