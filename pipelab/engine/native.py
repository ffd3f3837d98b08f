"""The door to PyTorch's own pipelining: every private name that pipelab uses of it stands here, and only here.

`torch.distributed.pipelining` has no public way to run an order of one's own. A contract test holds what is expected of
these names; where a torch has moved one, `load` says which.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch

from pipelab.actions import Item
from pipelab.errors import EngineError

__all__ = [
    "Native",
    "default_store",
    "load",
    "local_stage",
    "lower",
    "order_runner",
    "order_table",
    "run_on_recorders",
    "schedule_class",
]


@dataclass(frozen=True, slots=True)
class Native:
    """What pipelab needs of PyTorch's pipelining.

    Attributes:
        action: reads an action, `action.from_str("0F0")`.
        runtime: the schedule class that runs any order.
        schedules: the module, whose public `Schedule...` classes are PyTorch's native schedules.
        stage: a stage of a pipeline.
        stage_backward_input: the input gradient of a stage alone (`I`).
        stage_backward_weight: its weight gradients, from what the former kept (`W`).
    """

    action: Any
    runtime: Any
    schedules: Any
    stage: Any
    stage_backward_input: Any
    stage_backward_weight: Any


_NAMES = {
    "action": ("schedules", "_Action"),
    "runtime": ("schedules", "_PipelineScheduleRuntime"),
    "stage": ("stage", "PipelineStage"),
    "stage_backward_input": ("_backward", "stage_backward_input"),
    "stage_backward_weight": ("_backward", "stage_backward_weight"),
}

_METHODS = {
    "PipelineScheduleSingle": ("_initialize_stage", "_step_microbatches"),
    "PipelineScheduleMulti": ("_initialize_stages",),
    "_PipelineScheduleRuntime": ("_prepare_schedule_with_comms", "_step_microbatches"),
}
"""What pipelab calls, or replaces, of the classes in `schedules`."""


@cache
def load() -> Native:
    """Return PyTorch's pipelining.

    Raises:
        EngineError: naming what this torch lacks.
    """
    found: dict[str, Any] = {}
    for attribute, (module, name) in _NAMES.items():
        where = f"torch.distributed.pipelining.{module}"
        try:
            found[attribute] = getattr(import_module(where), name)
        except (ImportError, AttributeError):
            raise _missing(f"{where}.{name}") from None
    native = Native(schedules=import_module("torch.distributed.pipelining.schedules"), **found)
    for kind, methods in _METHODS.items():
        for method in methods:
            if not hasattr(getattr(native.schedules, kind, None), method):
                raise _missing(f"{native.schedules.__name__}.{kind}.{method}")
    return native


def _missing(name: str) -> EngineError:
    return EngineError(
        f"torch {torch.__version__} has no {name}, which pipelab runs plans with: "
        "use torch 2.10 to 2.13, or engine='threads'"
    )


def schedule_class(name: str) -> Any:
    """Return one of PyTorch's schedule classes, such as `ScheduleGPipe`.

    Raises:
        EngineError: if this torch has no such class.
    """
    schedules = load().schedules
    try:
        return getattr(schedules, name)
    except AttributeError:
        raise _missing(f"{schedules.__name__}.{name}") from None


def lower(runtime: Any, rows: Iterable[Iterable[Item]]) -> None:
    """Hand an order to PyTorch's runtime, which adds the transfers to it.

    Args:
        runtime: a `Native.runtime`.
        rows: every rank's actions, bound to stages.
    """
    read = load().action.from_str
    runtime._prepare_schedule_with_comms(  # noqa: SLF001 - there is no public way
        {rank: [read(str(item)) for item in row] for rank, row in enumerate(rows)}
    )


def run_on_recorders(schedule: Any, microbatches: int) -> None:
    """Run a schedule's own loop over its micro-batches, on stages that need no setting up and compute nothing.

    Args:
        schedule: made with a loss function, so that it runs backwards.
        microbatches: how many.
    """
    setup: Callable[..., tuple[bool, bool]] = lambda *_, **__: (True, True)  # noqa: E731 - it stands for a method
    schedule._initialize_stage = schedule._initialize_stages = setup  # noqa: SLF001 - it would ask a process group
    schedule._step_microbatches(target_mbs=[None] * microbatches, losses=[])  # noqa: SLF001 - `step` wants tensors


def order_table(schedule: Any) -> tuple[tuple[str, ...], ...]:
    """Return what a schedule's own table says of every rank, idle slots and gradient reductions left out.

    It is made beside the loop that runs, and is not what is executed: `Schedule1F1B`'s last rank is wrong in it.
    """
    table: dict[int, Sequence[Any]] = schedule.pipeline_order
    return tuple(
        tuple(str(action) for action in table[rank] if action is not None and action.is_compute_op)
        for rank in sorted(table)
    )


def local_stage(module: torch.nn.Module, index: int, count: int, device: torch.device | str = "cpu") -> Any:
    """Return one of a pipeline's stages, for PyTorch's own schedules, in a process that also holds its neighbours."""
    stage = load().stage(module, index, count, torch.device(device))
    stage._get_init_p2p_neighbors_ops = list  # noqa: SLF001 - up to torch 2.11 it would greet itself, and wait
    return stage


def default_store() -> Any:
    """Return the store of the process group that is there already."""
    return torch.distributed.distributed_c10d._get_default_store()  # noqa: SLF001 - there is no public way


def order_runner(
    stages: Sequence[Any],
    microbatches: int,
    rows: Mapping[int, Sequence[str]],
    reduces: Mapping[int, Sequence[int]],
    receiving: Callable[[int, int, Callable[[], None]], None],
) -> Callable[[list[tuple[Any, ...]] | None], None]:
    """Lower an order onto PyTorch's runtime; return what runs this process's part of it, given the batch.

    Args:
        stages: this process's stages, ready to run: the runtime sets nothing up.
        microbatches: how many there are.
        rows: every rank's computing actions, as PyTorch writes them.
        reduces: for this rank, the stages whose gradients are reduced before its so-many-th action.
        receiving: called with a stage, a micro-batch, and what waits for its value from another rank.
    """
    found = load()
    found.schedules.logger.addFilter(_quiet)
    runtime = found.runtime(list(stages), microbatches, loss_fn=None, scale_grads=False)
    runtime._initialize_stages = lambda *_, **__: None  # noqa: SLF001 - it would run stages to learn shapes
    runtime._has_backward = True  # noqa: SLF001 - the stages know the loss, the runtime does not
    runtime._prepare_schedule_with_comms(  # noqa: SLF001 - there is no public way to give an order
        {rank: [found.action.from_str(word) for word in row] for rank, row in rows.items()}
    )
    orders, kinds = runtime.pipeline_order_with_comms, found.schedules._ComputationType  # noqa: SLF001 - see above
    order: list[Any] = []
    done = 0
    for action in orders[runtime.rank]:
        if action.is_compute_op:
            order += [found.action(stage, kinds.REDUCE_GRAD, None) for stage in reduces.get(done, ())]
            done += 1
        if action.computation_type.name not in _NOT_ASKED_FOR:
            order.append(action)
    orders[runtime.rank] = order + [found.action(stage, kinds.REDUCE_GRAD, None) for stage in reduces.get(done, ())]
    runtime.fwd_recv_ops, runtime.bwd_recv_ops = _Receives(receiving), _Receives(receiving)

    def run(inputs: list[tuple[Any, ...]] | None) -> None:
        runtime._step_microbatches(inputs)  # noqa: SLF001 - `step` cuts the batch evenly, or not at all

    return run


def _quiet(record: logging.LogRecord) -> bool:
    """Drop the log of an error in one of pipelab's threads: every rank's whole order, line by line."""
    return not (record.threadName or "").startswith("pipelab-")


_NOT_ASKED_FOR = {"UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD"}
"""What PyTorch's runtime adds by itself for models that are sharded, which these are not."""


class _Receives(dict[tuple[int, int], list[Any]]):
    """Receives under way. The runtime takes them out to wait for them; here they are waited for before."""

    def __init__(self, receiving: Callable[[int, int, Callable[[], None]], None]) -> None:
        super().__init__()
        self._receiving = receiving

    def pop(self, key: tuple[int, int], *_: Any) -> list[Any]:
        works = super().pop(key)

        def wait() -> None:
            for work in works:
                work.wait()

        if works:
            self._receiving(*key, wait)
        return []
