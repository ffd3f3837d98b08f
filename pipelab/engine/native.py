"""The door to PyTorch's own pipelining: every private name that pipelab uses of it stands here, and only here.

`torch.distributed.pipelining` has no public way to run an order of one's own. A contract test holds what is expected of
these names; where a torch has moved one, `load` says which.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch

from pipelab.errors import EngineError

__all__ = ["Native", "default_store", "load", "order_runner"]


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
            raise EngineError(
                f"torch {torch.__version__} has no {where}.{name}, which pipelab runs plans with: "
                "use torch 2.10 to 2.13, or engine='threads'"
            ) from None
    return Native(schedules=import_module("torch.distributed.pipelining.schedules"), **found)


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
