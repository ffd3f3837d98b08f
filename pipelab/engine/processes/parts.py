"""The pipelines of a plan: one, or several replicas that share the batch."""

from __future__ import annotations

from dataclasses import dataclass

from pipelab.errors import EngineError
from pipelab.plan.actions import Action
from pipelab.plan.plan import Plan

__all__ = ["Part", "parts_of"]


@dataclass(frozen=True, slots=True)
class Part:
    """One pipeline of a plan.

    Attributes:
        plan: the pipeline by itself, its ranks and micro-batches numbered from 0.
        ranks: which ranks of the whole plan they are.
        microbatches: which micro-batches of the whole plan they are.
    """

    plan: Plan
    ranks: tuple[int, ...]
    microbatches: tuple[int, ...]


def parts_of(plan: Plan) -> list[Part]:
    """Return the pipelines of a legal plan: each has ranks and micro-batches of its own.

        replicate(OneFOneB(2, 4), 2)          rank 0 | F0 F2    B0    B2 R  ┐ part 0: ranks 0, 1; micro-batches 0, 2
                                              rank 1 |    F0 B0 F2 B2 R     ┘
                                              rank 2 | F1 F3    B1    B3 R  ┐ part 1: ranks 2, 3; micro-batches 1, 3
                                              rank 3 |    F1 B1 F3 B3 R     ┘

    Example:
        >>> import pipelab
        >>> [(part.ranks, part.microbatches) for part in parts_of(pipelab.replicate(pipelab.GPipe(2, 2), 2).plan())]
        [((0, 1), (0, 2)), ((2, 3), (1, 3))]

    Raises:
        EngineError: if a rank runs one stage for some micro-batches and another rank for others, as in a bidirectional
            pipeline, or has nothing to do; or if the replicas are not alike.
    """
    program = plan.program
    for rank, row in enumerate(program.rows):
        if not row:
            raise EngineError(
                f"rank {rank} of {plan.ranks} has nothing to do: PyTorch's runtime needs an action on every rank; "
                "use fewer ranks, or engine='threads'"
            )
    routes: dict[tuple[int, ...], list[int]] = {}
    for microbatch in range(plan.microbatches):
        route = tuple(program.placed[microbatch * plan.stages : (microbatch + 1) * plan.stages])
        routes.setdefault(route, []).append(microbatch)
    if len(routes) == 1:
        return [Part(plan, tuple(range(plan.ranks)), tuple(range(plan.microbatches)))]
    _require_apart(routes)
    groups = [tuple(sorted(set(route))) for route in routes]
    columns = {tuple(group.index(rank) for rank in route) for group, route in zip(groups, routes, strict=True)}
    if len(columns) > 1:
        raise EngineError(
            f"the {len(routes)} pipelines of {plan.name} place their stages differently, so they make no mesh of "
            "replicas: use pipelab.replicate, or engine='threads'"
        )
    return [
        Part(_alone(plan, group, turns), group, tuple(turns))
        for group, turns in zip(groups, routes.values(), strict=True)
    ]


def _require_apart(routes: dict[tuple[int, ...], list[int]]) -> None:
    """Refuse pipelines that share a rank.

    Raises:
        EngineError: naming it.
    """
    owner: dict[int, tuple[int, ...]] = {}
    for route in routes:
        for stage, rank in enumerate(route):
            other = owner.setdefault(rank, route)
            if other is not route:
                ranks = sorted({each[stage] for each in routes})
                raise EngineError(
                    f"stage {stage} is on ranks {', '.join(map(str, ranks))} of one pipeline: rank {rank} is on the "
                    f"way of micro-batch {routes[other][0]} and of micro-batch {routes[route][0]}, which take "
                    "different ways; PyTorch's runtime has every stage of a pipeline on one rank\n"
                    "  try: engine='threads', or a schedule that places it so"
                )


def _alone(plan: Plan, ranks: tuple[int, ...], microbatches: list[int]) -> Plan:
    """Return one pipeline of a plan, numbered by itself."""
    action = plan.program.numbering.action
    number = {microbatch: index for index, microbatch in enumerate(microbatches)}
    rows = [
        [
            each if each.microbatch is None else Action(each.kind, number[each.microbatch], each.stage)
            for each in map(action, plan.program.rows[rank])
        ]
        for rank in ranks
    ]
    placed = plan.program.placed
    first = microbatches[0] * plan.stages
    home = [ranks.index(rank) for rank in placed[first : first + plan.stages]]
    return Plan(rows, plan.stages, len(microbatches), lambda _, stage: home[stage], name=plan.name)
