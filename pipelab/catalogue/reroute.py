"""ReCycle: the micro-batches of a failed rank go to the ranks that hold the same stage."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pipelab.catalogue.greedy import Greedy
from pipelab.checking.checker import as_plan, require_legal
from pipelab.errors import UsageError
from pipelab.plan.binding import After
from pipelab.plan.plan import Plan
from pipelab.schedule import Schedule


class Rerouted(Greedy):
    """A schedule that goes on without some ranks; `reroute` makes it."""

    source = "Gandhi et al. 2024, ReCycle (SOSP '24), section 4: adaptive pipelining; the order is list scheduling's"

    def __init__(self, plan: Plan, failed: Collection[int], **greedy: Any) -> None:
        """Deal the failed ranks' micro-batches to those that are left."""
        self.original, self.failed = plan, sorted(set(failed))
        per_rank = -(-plan.stages // plan.ranks)
        super().__init__(plan.ranks, plan.microbatches, per_rank, **greedy)
        self._left = {
            stage: [rank for rank in ranks if rank not in self.failed] for stage, ranks in plan.replicas.items()
        }
        for rank in self.failed:
            if not 0 <= rank < plan.ranks:
                raise UsageError(f"failed={self.failed}: there is no rank {rank}, but {plan.ranks} ranks from 0 on")
        lost = next((stage for stage, ranks in self._left.items() if not ranks), None)
        if lost is not None:
            raise UsageError(
                f"failed={self.failed}: no other rank holds stage {lost}, so no rank can run it\n  try: a plan with "
                "replicas, pipelab.replicate(schedule, 2)"
            )

    @property
    def stages(self) -> int:
        """How many stages the model is split into."""
        return self.original.stages

    @property
    def _after(self) -> After | None:
        return self.original.after

    def place(self, microbatch: int, stage: int) -> int:
        """Return the original rank, or in turn one of those that hold the same stage."""
        rank = self.original.bound.route(microbatch)[stage]
        if rank not in self.failed:
            return rank
        left = self._left[stage]
        return left[microbatch // len(self.original.replicas[stage]) % len(left)]


def reroute(plan: Schedule | Plan, failed: int | Collection[int], **greedy: Any) -> Rerouted:
    """Return a schedule that goes on after some ranks failed: their replicas run their micro-batches too.

    Nothing is copied and no stage moves: a rank that holds the same stage gets the failed rank's micro-batches, and
    list scheduling gives the order. With split backwards (`split=True`), much of the added work fits into idle time.

    Args:
        plan: a schedule or a plan in which several ranks hold each stage, as `replicate` makes it.
        failed: the rank, or the ranks, that are gone.
        **greedy: what [`Greedy`][pipelab.Greedy] takes: `split`, `priority`, `memory_cap`, `cost`.

    Example:
        Two pipelines of four ranks, 16 micro-batches; rank 1 fails.

        >>> import pipelab
        >>> both = pipelab.replicate(pipelab.OneFOneB(ranks=4, microbatches=8), 2)
        >>> for split in (False, True):
        ...     times = [pipelab.simulate(pipelab.reroute(both, failed, split=split)).makespan for failed in ([], [1])]
        ...     print(split, times)
        False [33.0, 56.0]
        True [27.0, 49.0]

    Raises:
        ScheduleError: if the plan has faults.
        UsageError: if there is no such rank, or if no other rank holds one of its stages.
    """
    checked = as_plan(plan)
    require_legal(checked)
    return Rerouted(checked, [failed] if isinstance(failed, int) else failed, **greedy)
