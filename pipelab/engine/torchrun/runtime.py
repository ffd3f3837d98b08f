"""All private names of PyTorch's pipelining that pipelab uses.

`torch.distributed.pipelining` has no public way to run an arbitrary order. The names are in one table, and a contract
test checks them; if a version of PyTorch lacks one, `load` names it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pkgutil import resolve_name
from typing import Any

import torch

from pipelab._version import __version__
from pipelab.errors import EngineError
from pipelab.plan.plan import Plan
from pipelab.plan.transfers import ACTIVE_STAGES, Runtime
from pipelab.plan.transfers import lowered as lowering


@dataclass(frozen=True, slots=True)
class Native:
    """The parts of PyTorch's pipelining that pipelab uses."""

    action: Any  # parses an action, `action.from_str("0F0")`
    runtime: Any  # the schedule class that runs any order
    schedules: Any  # the module, whose public `Schedule...` classes are PyTorch's native schedules


SCHEDULES = "torch.distributed.pipelining.schedules"

TESTED = ("2.12", "2.15")
"""The oldest and the newest torch that pipelab is tested with."""

_NAMES: dict[str, tuple[str, ...]] = {
    "torch.distributed.distributed_c10d": ("_get_default_store",),
    SCHEDULES: (
        "_Action.from_str",
        "_Action.computation_type",
        "_Action.microbatch_index",
        "_Action.stage_index",
        "_ComputationType.REDUCE_GRAD",
        "_ComputationType.RESHARD",
        "_ComputationType.UNSHARD",
        "_PipelineScheduleRuntime._initialize_stages",
        "_PipelineScheduleRuntime._step_microbatches",
        "_PipelineScheduleRuntime.register_custom_function",
        "_batch_p2p",
        "logger",
    ),
}
"""By module, the names that the torch engine calls, reads or replaces."""


@cache
def load() -> Native:
    """Return PyTorch's pipelining; check every name that the torch engine uses."""
    for module, names in _NAMES.items():
        for name in names:
            try:
                resolve_name(f"{module}:{name}")
            except (ImportError, AttributeError):
                raise missing(f"{module}.{name}") from None
    schedules = import_module(SCHEDULES)
    return Native(schedules._Action, schedules._PipelineScheduleRuntime, schedules)  # noqa: SLF001 - no public way


_TRY = (
    f"\n  try: a newer pipelab (pip install -U pipelab-schedules; this is {__version__}, tested with torch "
    f"{' to '.join(TESTED)}); torch {TESTED[1]}; or engine='threads'"
)


def missing(name: str) -> EngineError:
    """Return the error of a torch that lacks a name."""
    return EngineError(f"torch {torch.__version__} has no {name}, which pipelab needs to run plans{_TRY}")


def unexpected(fact: str, error: Exception) -> EngineError:
    """Return the error of a torch that does what no tested one does."""
    return EngineError(f"torch {torch.__version__} {fact} ({type(error).__name__}: {error}){_TRY}")


class HaltError(BaseException):
    """An error on its way out of PyTorch's runtime.

    From torch 2.15 on, the runtime answers an `Exception` by waiting for all its sends, which may never be received.
    """


def default_store() -> Any:
    """Return the store of the present process group."""
    load()
    return torch.distributed.distributed_c10d._get_default_store()  # noqa: SLF001 - there is no public way


def _quiet(record: logging.LogRecord) -> bool:
    """Drop the log of an error in one of pipelab's threads: every rank's whole order, line by line."""
    return not (record.threadName or "").startswith("pipelab-")


def batch_p2p(operations: Sequence[Any]) -> list[Any]:
    """Begin to send or receive, as PyTorch's runtime does."""
    works: list[Any] = load().schedules._batch_p2p(operations)  # noqa: SLF001 - NCCL needs the same for both ends
    return works


def routes_of(plan: Plan) -> dict[tuple[int, ...], int]:
    """Return the ways that micro-batches take: by the ranks of the stages, the number of PyTorch's id for stage 0.

    PyTorch's runtime has one rank for each stage. A stage on several ranks so has an id for each way. Between the last
    stage of one way and the first of the next, an id is left out: they do not follow each other.
    """
    routes = dict.fromkeys(tuple(plan.bound.route(microbatch)) for microbatch in range(plan.microbatches))
    return {route: number * (plan.stages + 1) for number, route in enumerate(routes)}


def lowered(plan: Plan, rank: int, stages: Sequence[Any]) -> Callable[[list[tuple[Any, ...]] | None], None]:
    """Lower a plan; return what runs one rank's part of it on PyTorch's runtime, given the first stage's inputs.

    Sends and receives are where PyTorch's own lowering puts them, which has one rank for each stage. An overlapped pair
    runs as its forward, then its backward, as in the threads engine: PyTorch's runtime would wait for the inputs of
    both before it starts either, perhaps for ever.
    """
    found = load()
    found.schedules.logger.addFilter(_quiet)
    kinds = found.schedules._ComputationType  # noqa: SLF001
    routes = routes_of(plan)
    held = {stage.stage_index: stage for stage in stages}
    runtime = found.runtime(list(stages), plan.microbatches, loss_fn=None, scale_grads=False)
    for stage in stages:
        stage.stage_index_to_group_rank = {
            first + at: home for route, first in routes.items() for at, home in enumerate(route)
        }
    runtime.pipeline_order_with_comms = {rank: _order(plan, rank, found, routes)}
    runtime._initialize_stages = lambda *_, **__: None  # noqa: SLF001 - it would run stages to learn shapes
    runtime.register_custom_function(kinds.REDUCE_GRAD, lambda word, _: held[word.stage_index].perform_reduce_grad())
    runtime.register_custom_function(kinds.UNSHARD, lambda word, _: held[word.stage_index].unshard())
    runtime.register_custom_function(kinds.RESHARD, lambda word, _: held[word.stage_index].reshard())
    halted: list[Exception] = []

    def run(inputs: list[tuple[Any, ...]] | None) -> None:
        try:
            runtime._step_microbatches(inputs)  # noqa: SLF001 - `step` cuts the batch evenly, or not at all
        except HaltError as halt:
            halted.append(halt.args[0])
        except RuntimeError:  # a send's connection was lost
            raise
        except Exception as error:
            raise unexpected("does not run pipelab's orders", error) from error
        if halted:
            raise halted.pop()

    return run


def _order(plan: Plan, rank: int, found: Native, routes: dict[tuple[int, ...], int]) -> list[Any]:
    """Return one rank's order, with its sends and receives, as PyTorch's actions."""
    first_ids = [routes[tuple(plan.bound.route(microbatch))] for microbatch in range(plan.microbatches)]
    waits = hasattr(found.schedules._ComputationType, "WAIT_SEND_F")  # noqa: SLF001 - from torch 2.15 on
    low = lowering(replace(plan.bound, pairs=set()), "pytorch", runtime=Runtime(waits, [ACTIVE_STAGES] * plan.ranks))
    order, words = [], ("run", "SEND", "RECV", "WAIT_SEND", *(("UNSHARD", "RESHARD", "R") if plan.bound.moves else ()))
    for step in low.rows[rank]:
        if step[0] not in words:
            continue  # a word that PyTorch inserts for sharded models, which gather themselves here
        word = found.action.from_str(low.word(("REDUCE_GRAD", step[1]) if step[0] == "R" else step))
        stage, microbatch = word.stage_index, word.microbatch_index
        if microbatch is None:
            number = next(first + stage for route, first in routes.items() if route[stage] == rank)
        else:
            number = first_ids[microbatch] + stage
        order.append(found.action(number, word.computation_type, microbatch))
    return order
