"""What schedules with one stage per rank share: micro-batches go down the ranks once."""

from __future__ import annotations

from typing import ClassVar

from pipelab.errors import SizeError, require_size
from pipelab.schedule import Schedule

__all__ = ["Straight"]


class Straight(Schedule):
    """A schedule whose micro-batches go down the ranks once: rank `r` holds stage `r`, and no other.

    Args:
        ranks: how many workers the pipeline has.
        microbatches: how many slices the batch is cut into.
        stages_per_rank: one.

    Raises:
        SizeError: if a number is not a positive whole number, or if `stages_per_rank` is not the class's.
    """

    looping: ClassVar[str] = "looped-bfs"
    """What to take instead for several stages per rank."""

    def __init__(self, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> None:
        """Keep the sizes."""
        ours = type(self).stages_per_rank  # a student's class that adds stages says how many it has
        if stages_per_rank is not None and require_size("stages_per_rank", stages_per_rank) != ours:
            raise SizeError(
                f"stages_per_rank={stages_per_rank!r}: {type(self).__name__} has exactly {ours} on every rank: leave "
                f"it out, or take {self.looping}, which takes any number"
            )
        super().__init__(ranks, microbatches, stages_per_rank)
