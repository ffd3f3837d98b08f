"""PyTorch's own schedules, as conformance runs them: classes and orders."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pipelab.engine.torchrun.runtime import SCHEDULES, load, missing
from pipelab.plan.actions import Item


def _named(name: str) -> Any:
    try:
        return getattr(load().schedules, name)
    except AttributeError:
        raise missing(f"{SCHEDULES}.{name}") from None


def schedule_class(name: str) -> Any:
    """Return one of PyTorch's schedule classes, such as `ScheduleGPipe`."""
    found = _named(name)
    taken = inspect.signature(found._step_microbatches).parameters  # noqa: SLF001 - there is no public way
    takes_any = any(each.kind is each.VAR_KEYWORD for each in taken.values())
    for parameter in ("target_mbs", "losses"):
        if parameter not in taken and not takes_any:
            raise missing(f"{SCHEDULES}.{name}._step_microbatches({parameter}=...)")
    return found


def lower(runtime: Any, rows: Iterable[Iterable[Item]]) -> None:
    """Give every rank's actions, bound to stages, to PyTorch's runtime, which inserts the transfers."""
    read = load().action.from_str
    order = {rank: [read(str(item)) for item in row] for rank, row in enumerate(rows)}
    runtime._prepare_schedule_with_comms(order)  # noqa: SLF001 - there is no public way


def lowered_rows(schedule: Any) -> list[list[str]]:
    """Return every rank's row as PyTorch's runtime lowered it: actions, transfers, and the words for FSDP."""
    rows: dict[int, Sequence[Any]] = schedule.pipeline_order_with_comms
    return [[str(action) for action in rows[rank]] for rank in sorted(rows)]


def add_send_recv(rows: Sequence[Iterable[Item]], ranks_of_stages: Sequence[int]) -> list[list[str]]:
    """Return every rank's row with the transfers where PyTorch's `_add_send_recv` puts them."""
    read = load().action.from_str
    order = {rank: [read(str(item)) for item in row] for rank, row in enumerate(rows)}
    add = _named("_add_send_recv")
    found: dict[int, Sequence[Any]] = add(order, ranks_of_stages.__getitem__, len(ranks_of_stages))
    return [[str(action) for action in found[rank]] for rank in sorted(found)]


def run_on_recorders(schedule: Any, microbatches: int) -> None:
    """Run a schedule's own loop over its micro-batches, on stages that need no initialisation and compute nothing.

    The schedule must have a loss function: without one, it does not run backwards.
    """
    setup: Callable[..., tuple[bool, bool]] = lambda *_, **__: (True, True)  # noqa: E731 - it stands for a method
    schedule._initialize_stage = schedule._initialize_stages = setup  # noqa: SLF001 - it would ask a process group
    schedule._step_microbatches(target_mbs=[None] * microbatches, losses=[])  # noqa: SLF001 - `step` wants tensors


def order_table(schedule: Any) -> tuple[tuple[str, ...], ...]:
    """Return every rank's row in a schedule's own table, without idle slots and gradient reductions.

    PyTorch makes the table separately from the loop that it runs, so they may differ: in `Schedule1F1B`'s table, the
    last rank is wrong.
    """
    try:
        table: dict[int, Sequence[Any]] = schedule.pipeline_order
    except AttributeError:
        raise missing(f"{SCHEDULES}.{type(schedule).__name__}().pipeline_order") from None
    return tuple(
        tuple(str(action) for action in table[rank] if action is not None and action.is_compute_op)
        for rank in sorted(table)
    )
