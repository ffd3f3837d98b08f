"""All private names of PyTorch's pipelining that pipelab uses.

`torch.distributed.pipelining` has no public way to run an arbitrary order. The names are in one table, and a contract
test checks them; if a version of PyTorch lacks one, `load` names it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import torch

from pipelab._version import __version__
from pipelab.errors import EngineError
from pipelab.plan.actions import Action
from pipelab.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Native:
    """The parts of PyTorch's pipelining that pipelab uses.

    Attributes:
        action: parses an action, `action.from_str("0F0")`.
        runtime: the schedule class that runs any order.
        schedules: the module, whose public `Schedule...` classes are PyTorch's native schedules.
    """

    action: Any
    runtime: Any
    schedules: Any


SCHEDULES = "torch.distributed.pipelining.schedules"

TESTED = ("2.12", "2.15")
"""The oldest and the newest torch that pipelab is tested with."""

_NAMES: dict[str, tuple[str, ...]] = {
    "torch.distributed.distributed_c10d": ("_get_default_store",),
    SCHEDULES: (
        "_Action.from_str",
        "_Action.computation_type",
        "_Action.is_compute_op",
        "_ComputationType.REDUCE_GRAD",
        "_PipelineScheduleRuntime._initialize_stages",
        "_PipelineScheduleRuntime._prepare_schedule_with_comms",
        "_PipelineScheduleRuntime._step_microbatches",
        "_PipelineScheduleRuntime.register_custom_function",
        "logger",
    ),
}
"""By module, the names that the torch engine calls, reads or replaces."""

_OF_A_RUNTIME: tuple[str, ...] = ("bwd_recv_ops", "fwd_recv_ops", "pipeline_order_with_comms")
"""Attributes of a runtime that has an order."""


@cache
def load() -> Native:
    """Return PyTorch's pipelining; check every name that the torch engine uses.

    Raises:
        EngineError: naming what this torch lacks.
    """
    for module, names in _NAMES.items():
        for name in names:
            try:
                resolve_name(f"{module}:{name}")
            except (ImportError, AttributeError):
                raise missing(f"{module}.{name}") from None
    schedules = import_module(SCHEDULES)
    found = Native(schedules._Action, schedules._PipelineScheduleRuntime, schedules)  # noqa: SLF001 - no public way
    made = _smallest_runtime(found)
    for name in _OF_A_RUNTIME:
        if not hasattr(made, name):
            raise missing(f"{SCHEDULES}._PipelineScheduleRuntime().{name}")
    return found


def _smallest_runtime(found: Native) -> Any:
    """Return a runtime with an order for one stage, which never runs."""
    stage = SimpleNamespace(stage_index=0, num_stages=1, group_rank=0, group_size=1)
    try:
        return _runtime(found, [stage], 1, {0: ["0F0", "0B0"]})
    except Exception as error:
        raise unexpected("does not accept pipelab's orders", error) from error


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


def _runtime(found: Native, stages: Sequence[Any], microbatches: int, rows: Mapping[int, Sequence[str]]) -> Any:
    runtime = found.runtime(list(stages), microbatches, loss_fn=None, scale_grads=False)
    runtime._prepare_schedule_with_comms(  # noqa: SLF001 - there is no public way to give an order
        {rank: [found.action.from_str(word) for word in row] for rank, row in rows.items()}
    )
    return runtime


def _quiet(record: logging.LogRecord) -> bool:
    """Drop the log of an error in one of pipelab's threads: every rank's whole order, line by line."""
    return not (record.threadName or "").startswith("pipelab-")


_ADDED_BY_PYTORCH = {"UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD"}
"""Actions that PyTorch's runtime adds for sharded models, which these are not."""


class _Receives(dict[tuple[int, int], list[Any]]):
    """Receives by stage and micro-batch. The runtime removes them to wait for them; here `receiving` waits first."""

    def __init__(self, receiving: Callable[[int, int, list[Any]], None]) -> None:
        super().__init__()
        self._receiving = receiving

    def pop(self, key: tuple[int, int], *_: Any) -> list[Any]:
        try:
            self._receiving(*key, super().pop(key))
        except Exception as error:
            raise HaltError(error) from error
        return []


def lowered(
    plan: Plan, rank: int, stages: Sequence[Any], receiving: Callable[[int, int, list[Any]], None]
) -> Callable[[list[tuple[Any, ...]] | None], None]:
    """Lower a plan; return what runs one rank's part of it on PyTorch's runtime, given the first stage's inputs.

    An overlapped pair runs as its forward, then its backward, as in the threads engine: PyTorch's runtime would wait
    for the inputs of both before it starts either, perhaps for ever.

    Args:
        plan: the plan of one pipeline: every stage is on one rank, and every rank has an action.
        rank: which rank.
        stages: the rank's stages, with the methods that PyTorch's runtime calls; it sets nothing up.
        receiving: called with a stage, a micro-batch, and its receives from another rank, to wait for them.
    """
    found = load()
    found.schedules.logger.addFilter(_quiet)
    rows = [[plan.bound.codes.action(code) for code in row] for row in plan.bound.rows]
    computing = {each: [str(action) for action in row if not action.traits.collective] for each, row in enumerate(rows)}
    runtime = _runtime(found, stages, plan.microbatches, computing)
    runtime._initialize_stages = lambda *_, **__: None  # noqa: SLF001 - it would run stages to learn shapes
    reduce = found.schedules._ComputationType.REDUCE_GRAD  # noqa: SLF001
    order, reduces = [], _reduces(rows[rank])
    done = 0
    for action in runtime.pipeline_order_with_comms[rank]:
        if action.is_compute_op:
            order += [found.action(stage, reduce, None) for stage in reduces.get(done, ())]
            done += 1
        if action.computation_type.name not in _ADDED_BY_PYTORCH:
            order.append(action)
    order += [found.action(stage, reduce, None) for stage in reduces.get(done, ())]
    runtime.pipeline_order_with_comms[rank] = order
    held = {stage.stage_index: stage for stage in stages}
    runtime.register_custom_function(reduce, lambda action, _: held[action.stage_index].perform_reduce_grad())
    runtime.fwd_recv_ops, runtime.bwd_recv_ops = _Receives(receiving), _Receives(receiving)
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


def _reduces(row: Sequence[Action]) -> dict[int, list[int]]:
    """Return the stages of the all-reduces in a row, by the number of other actions before them."""
    found: dict[int, list[int]] = {}
    before = 0
    for action in row:
        if not action.traits.collective:
            before += 1
        elif action.stage is not None:
            found.setdefault(before, []).append(action.stage)
    return found
