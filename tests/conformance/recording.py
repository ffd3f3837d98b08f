"""The order that PyTorch's own schedules execute, recorded without a process group.

PyTorch's order tables may differ from what its schedules execute: `Schedule1F1B`'s is wrong on the last rank. So a
native schedule gets stages that compute nothing, runs its own loop over the micro-batches, and every stage records its
calls:

    schedule's loop --forward_one_chunk(0)--> stage 0: 0F0
                    --forward_one_chunk(1)--> stage 0: 0F1
                    --backward_one_chunk(0)-> stage 0: 0B0    …

The record shows a pair of overlapped actions as the stages see it: a forward, then a backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import schedules as native

from pipelab.plan.actions import Action, B, F, I, Item, W
from pipelab.plan.plan import Plan


class NativeRefusalError(Exception):
    """PyTorch's own schedule refuses this size."""


NATIVE = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved-1f1b": "ScheduleInterleaved1F1B",
    "looped-bfs": "ScheduleLoopedBFS",
    "interleaved-zb": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
"""PyTorch's class for each schedule that both have."""

RUNTIME = "_PipelineScheduleRuntime"
"""PyTorch's class that runs any plan which has each stage on one rank."""

Record = list[Action]
Held = Sequence[Sequence[int]]
"""Each rank's stages."""


class RecordingStage:
    """A stage for native schedules that computes nothing and writes its calls to a record that a rank's stages share.

    Its methods have the names and the parameters of PyTorch's `PipelineStage`.
    """

    def __init__(self, index: int, stages: int, rank: int, ranks: int, record: Record) -> None:
        self.stage_index = index
        self.num_stages = stages
        self.group_rank = rank
        self.group_size = ranks
        self.is_first = index == 0
        self.is_last = index == stages - 1
        self.has_backward = True
        self.submod = nn.Identity()
        self.output_chunks: list[Any] = []
        self.stage_index_to_group_rank: dict[int, int] = {}
        self._record = record

    def forward_one_chunk(self, fwd_chunk_id: int, *_: Any, **__: Any) -> None:
        self._record.append(F(fwd_chunk_id, self.stage_index))

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: Any = True, *_: Any, **__: Any
    ) -> None:
        self._record.append((B if full_backward else I)(bwd_chunk_id, self.stage_index))

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *_: Any, **__: Any) -> None:
        self._record.append(W(bwd_chunk_id, self.stage_index))

    def _no_transfers(self, *_: Any) -> list[Any]:
        return []

    def _nothing(self, *_: Any, **__: Any) -> None: ...

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _no_transfers
    set_local_fwd_input = set_local_bwd_input = get_local_bwd_output = _nothing
    scale_grads = perform_reduce_grad = release_fwd_send_outputs = clear_runtime_states = _nothing


def watch(stage: Any, record: Record) -> None:
    """Make a real `PipelineStage` record its calls too."""
    recorder = RecordingStage(stage.stage_index, stage.num_stages, stage.group_rank, stage.group_size, record)

    def both(note: Callable[..., None], run: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **named: Any) -> Any:
            note(*arguments, **named)
            return run(*arguments, **named)

        return noted

    for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
        setattr(stage, name, both(getattr(recorder, name), getattr(stage, name)))


def native_place(kind: str, ranks: int, stage: int) -> int:
    """Return the rank on which a native schedule places a stage.

    Example:
        >>> [native_place("ScheduleInterleaved1F1B", 2, stage) for stage in range(4)]
        [0, 1, 0, 1]
        >>> [native_place("ScheduleZBVZeroBubble", 2, stage) for stage in range(4)]
        [0, 1, 1, 0]
    """
    v_shaped = kind in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
    return 2 * ranks - 1 - stage if v_shaped and stage >= ranks else stage % ranks


def held_by(kind: str, ranks: int, stages_per_rank: int) -> Held:
    """Return which stages each rank of a native schedule holds."""
    stages = range(ranks * stages_per_rank)
    return [[stage for stage in stages if native_place(kind, ranks, stage) == rank] for rank in range(ranks)]


def held_in(plan: Plan) -> Held:
    """Return which stages each rank of a plan holds, for PyTorch's runtime."""
    for stage, holders in plan.replicas.items():
        if len(holders) > 1:
            where = ", ".join(map(str, holders))
            raise NativeRefusalError(
                f"stage {stage} is on ranks {where}: PyTorch's runtime holds each stage on one rank"
            )
    return [[stage for stage, (holder,) in plan.replicas.items() if holder == rank] for rank in range(plan.ranks)]


def on_recorders(
    kind: str, held: Held, rank: int, microbatches: int, record: Record, rows: Iterable[Iterable[Item]] | None = None
) -> Any:
    """Return a rank's native schedule on recording stages; `rows` is for the runtime, which has no order."""
    cls = getattr(native, kind)
    stages = [RecordingStage(index, sum(map(len, held)), rank, len(held), record) for index in held[rank]]
    try:
        # Without a loss function, it does not run backwards.
        schedule = cls(one_or_all(cls, stages), microbatches, loss_fn=lambda *_: None)
        if rows is not None:
            lower(schedule, rows)
    except (ValueError, AssertionError) as error:
        words = " ".join(str(error).partition("\n\n")[0].split())  # without the whole schedule, which may follow
        raise NativeRefusalError(f"{kind} of torch {torch.__version__}: {words}") from error
    return schedule


def one_or_all(cls: Any, stages: Sequence[Any]) -> Any:
    """Return the stages as a native class takes them: alone, or in a list."""
    return stages[0] if issubclass(cls, native.PipelineScheduleSingle) else list(stages)


def run_on_recorders(schedule: Any, microbatches: int) -> None:
    """Run a schedule's own loop over its micro-batches, on stages that need no initialisation and compute nothing."""
    setup: Callable[..., tuple[bool, bool]] = lambda *_, **__: (True, True)  # noqa: E731 - it stands for a method
    schedule._initialize_stage = schedule._initialize_stages = setup  # it would ask a process group
    schedule._step_microbatches(target_mbs=[None] * microbatches, losses=[])  # `step` wants tensors


def executed(kind: str, ranks: int, microbatches: int, stages_per_rank: int = 1) -> Plan:
    """Return the plan that a native schedule executes: each rank's actions in the order in which its loop runs them.

    Example:
        >>> executed("Schedule1F1B", ranks=2, microbatches=3).rows
        ((0F0, 0F1, 0B0, 0F2, 0B1, 0B2), (1F0, 1B0, 1F1, 1B1, 1F2, 1B2))
    """
    return _executed(kind, held_by(kind, ranks, stages_per_rank), microbatches)


def executed_by_runtime(plan: Plan) -> Plan:
    """Return what PyTorch's runtime executes for a plan, in which it inserts transfers."""
    return _executed(RUNTIME, held_in(plan), plan.microbatches, plan.rows)


def _executed(kind: str, held: Held, microbatches: int, rows: Iterable[Iterable[Item]] | None = None) -> Plan:
    records: list[Record] = [[] for _ in held]
    for rank, record in enumerate(records):
        run_on_recorders(on_recorders(kind, held, rank, microbatches, record, rows), microbatches)
    return Plan(records, sum(map(len, held)), microbatches)


def order_table(kind: str, ranks: int, microbatches: int, stages_per_rank: int = 1) -> tuple[tuple[str, ...], ...]:
    """Return each rank's row in a native schedule's own table, without idle slots and gradient reductions.

    Example:
        >>> order_table("Schedule1F1B", ranks=2, microbatches=3)[1]
        ('1F1', '1B0', '1F2', '1B1', '1F3', '1B2')
    """
    table = on_recorders(kind, held_by(kind, ranks, stages_per_rank), 0, microbatches, []).pipeline_order
    return tuple(
        tuple(str(action) for action in table[rank] if action is not None and action.is_compute_op)
        for rank in sorted(table)
    )


def lower(schedule: Any, rows: Iterable[Iterable[Item]]) -> None:
    """Give every rank's actions, bound to stages, to PyTorch's runtime, which inserts the transfers."""
    schedule._prepare_schedule_with_comms(_read(rows))


def lowered_rows(schedule: Any) -> list[list[str]]:
    """Return every rank's row as PyTorch's runtime lowered it: actions, transfers, and the words for FSDP."""
    return _in_words(schedule.pipeline_order_with_comms)


def add_send_recv(rows: Iterable[Iterable[Item]], ranks_of_stages: Sequence[int]) -> list[list[str]]:
    """Return every rank's row with the transfers where PyTorch's `_add_send_recv` puts them."""
    return _in_words(native._add_send_recv(_read(rows), ranks_of_stages.__getitem__, len(ranks_of_stages)))


def lowered_by_pytorch(kind: str, plan: Plan) -> tuple[list[list[str]], list[list[str]]]:
    """Return a plan's rows with transfers, as `_add_send_recv` places them and as PyTorch's runtime runs them.

    The second are the class's own if it has any; GPipe and 1F1B have their own loops, so they are the runtime's.

    Example:
        >>> import pipelab
        >>> rows, _ = lowered_by_pytorch("ScheduleGPipe", pipelab.GPipe(ranks=2, microbatches=1).plan())
        >>> rows[0]
        ['0F0', '0SEND_F0', '0RECV_B0', '0B0']
    """
    own = kind != RUNTIME and not issubclass(getattr(native, kind), native.PipelineScheduleSingle)
    kind, rows = (kind, None) if own else (RUNTIME, plan.rows)
    schedule = on_recorders(kind, held_in(plan), 0, plan.microbatches, [], rows)
    return add_send_recv(plan.rows, [rank for (rank,) in plan.replicas.values()]), lowered_rows(schedule)


def _read(rows: Iterable[Iterable[Item]]) -> dict[int, list[Any]]:
    return {rank: [native._Action.from_str(str(item)) for item in row] for rank, row in enumerate(rows)}


def _in_words(rows: dict[int, Sequence[Any]]) -> list[list[str]]:
    return [[str(action) for action in rows[rank]] for rank in sorted(rows)]
