"""Data parallelism over pipelines: a schedule of schedules."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

from pipelab.checking.checker import as_plan, require_legal
from pipelab.errors import require_size
from pipelab.plan.actions import Action, Pair
from pipelab.plan.plan import Plan
from pipelab.schedule import Schedule

__all__ = ["Replicated", "replicate"]


class Replicated(Schedule):
    """Several copies of one pipeline that share the batch. Made by `replicate`."""

    source = "Narayanan et al. 2021, Megatron-LM (arXiv:2104.04473), section 3: pipeline and data parallelism combined"

    def __init__(self, schedule: Schedule | Plan, replicas: int) -> None:
        """Keep the pipeline that is copied, and take its sizes."""
        replicas = require_size("replicas", replicas)
        if not isinstance(schedule, Plan) and not hasattr(schedule, "microbatches"):
            schedule = as_plan(schedule)  # says what is wrong with whatever has no sizes
        per_rank = getattr(schedule, "stages_per_rank", -(-schedule.stages // schedule.ranks))
        super().__init__(schedule.ranks * replicas, schedule.microbatches * replicas, per_rank)
        self.schedule = schedule
        self.replicas = replicas

    @property
    def stages(self) -> int:
        """How many stages the model is split into: each is on one rank of every replica."""
        return self.schedule.stages

    def place(self, microbatch: int, stage: int) -> int:
        """Return the rank that runs a stage: micro-batches are dealt to the replicas in turn."""
        turn, replica = divmod(microbatch, self.replicas)
        return replica * self._copied.ranks + self._copied.program.placed[turn * self.stages + stage]

    def actions(self, rank: int) -> Iterator[Any]:
        """Yield what the pipeline's own rank does, with the micro-batches of this replica."""
        replica, inner = divmod(rank, self._copied.ranks)
        for item in self._copied.written[inner]:
            yield self._dealt(item, replica)

    def draft(self) -> Plan:
        """Return the plan of all replicas.

        Raises:
            ScheduleError: if the pipeline that is copied has faults: its own, in the words that it was written in.
        """
        require_legal(self._copied)  # raised in `actions`, its faults would be told as a slip of that method
        return super().draft()

    @cached_property
    def _copied(self) -> Plan:
        """The plan of one replica."""
        plan = as_plan(self.schedule)
        require_legal(plan)
        return plan

    def _dealt(self, item: Any, replica: int) -> Any:
        """Return an item with its micro-batch's number among those of all replicas."""
        if isinstance(item, Pair):
            return Pair(self._dealt(item.forward, replica), self._dealt(item.backward, replica))
        assert isinstance(item, Action)
        if item.microbatch is None:
            return item
        return Action(item.kind, item.microbatch * self.replicas + replica, item.stage)

    def __repr__(self) -> str:
        """Return the call that made it."""
        name = self.schedule.name if isinstance(self.schedule, Plan) else repr(self.schedule)
        return f"replicate({name}, {self.replicas})"


def replicate(schedule: Schedule | Plan, replicas: int) -> Replicated:
    """Return a schedule of `replicas` copies of a pipeline, which share the batch: data parallelism over pipelines.

    Replica `d` of `D` has the ranks `d * P` to `d * P + P - 1` and the micro-batches `d`, `d + D`, `d + 2 * D` and so
    on. Every stage is on one rank of each replica, so those ranks all-reduce its gradients, after the last of them
    unless the pipeline lists `R` itself:

        rank 0 | F0 F2    B0    B2 R
        rank 1 |    F0 B0 F2 B2 R
        rank 2 | F1 F3    B1    B3 R
        rank 3 |    F1 B1 F3 B3 R

    Args:
        schedule: the pipeline to copy: a schedule, or a plan.
        replicas: how many copies.

    Example:
        >>> import pipelab
        >>> both = pipelab.replicate(pipelab.OneFOneB(ranks=2, microbatches=8), 2)
        >>> both.ranks, both.microbatches, both.stages
        (4, 16, 2)
        >>> both.plan().replicas
        {0: (0, 2), 1: (1, 3)}
        >>> pipelab.simulate(both, pipelab.Cost(all_reduce=5)).makespan
        32.0

    Raises:
        SizeError: if `replicas` is not a positive whole number.
        TypeError: if the first argument is neither a schedule nor a plan.
    """
    return Replicated(schedule, replicas)
