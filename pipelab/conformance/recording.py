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

from pipelab.conformance import native
from pipelab.engine.torchrun import runtime
from pipelab.errors import EngineError
from pipelab.plan.actions import Action, B, F, I, Item, W
from pipelab.plan.plan import Plan


class NativeRefusalError(EngineError):
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

_RUNTIME = "_PipelineScheduleRuntime"
_V_SHAPED = {"ScheduleZBVZeroBubble", "ScheduleDualPipeV"}
"""The classes whose second stage on a rank is the mirror image of the first."""

Record = list[Action]


class RecordingStage:
    """A stage for native schedules that computes nothing and records its calls.

    Its methods have the names and the parameters of PyTorch's `PipelineStage`.
    """

    def __init__(self, index: int, stages: int, rank: int, ranks: int, record: Record) -> None:
        """Stand for stage `index` of `stages` on a rank, and write to a record that the rank's stages share."""
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
        """Record a forward."""
        self._record.append(F(fwd_chunk_id, self.stage_index))

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,  # noqa: ARG002 - it comes before the parameter that matters
        full_backward: Any = True,
        *_: Any,
        **__: Any,
    ) -> None:
        """Record a full backward, or only the input gradient."""
        self._record.append((B if full_backward else I)(bwd_chunk_id, self.stage_index))

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *_: Any, **__: Any) -> None:
        """Record a weight gradient."""
        self._record.append(W(bwd_chunk_id, self.stage_index))

    def _no_transfers(self, *_: Any) -> list[Any]:
        return []

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _no_transfers
    set_local_fwd_input = set_local_bwd_input = get_local_bwd_output = _nothing
    scale_grads = perform_reduce_grad = release_fwd_send_outputs = clear_runtime_states = _nothing


def executed(kind: str, ranks: int, microbatches: int, stages_per_rank: int = 1) -> Plan:
    """Return the plan that a native schedule executes: each rank's actions in the order in which its loop runs them.

    Example:
        >>> executed("Schedule1F1B", ranks=2, microbatches=3).rows
        ((0F0, 0F1, 0B0, 0F2, 0B1, 0B2), (1F0, 1B0, 1F1, 1B1, 1F2, 1B2))

    Raises:
        NativeRefusalError: if PyTorch refuses the size.
        EngineError: if this torch has no such class, or calls a method that the recorder does not have.
    """
    stages_of_rank = _stages_of_rank(kind, ranks, stages_per_rank)
    rows = [_row(kind, stages_of_rank, rank, microbatches) for rank in range(ranks)]
    more = f", stages_per_rank={stages_per_rank}" if stages_per_rank > 1 else ""
    name = f"{kind}(ranks={ranks}, microbatches={microbatches}{more}) as torch {torch.__version__} executes it"
    return Plan(rows, ranks * stages_per_rank, microbatches, name=name)


def order_table(kind: str, ranks: int, microbatches: int, stages_per_rank: int = 1) -> tuple[tuple[str, ...], ...]:
    """Return each rank's row in a native schedule's own table, which may differ from what it executes.

    Example:
        >>> order_table("Schedule1F1B", ranks=2, microbatches=3)[1]
        ('1F1', '1B0', '1F2', '1B1', '1F3', '1B2')

    Raises:
        NativeRefusalError: if PyTorch refuses the size.
    """
    return native.order_table(_schedule(kind, _stages_of_rank(kind, ranks, stages_per_rank), 0, microbatches, []))


def executed_by_runtime(plan: Plan) -> Plan:
    """Return what PyTorch's runtime executes for a plan, in which it inserts transfers.

    Example:
        >>> import pipelab
        >>> plan = pipelab.Naive(ranks=2, microbatches=2).plan()
        >>> executed_by_runtime(plan).rows == plan.rows
        True

    Raises:
        NativeRefusalError: if PyTorch's runtime refuses the plan.
    """
    for stage, holders in plan.replicas.items():
        if len(holders) > 1:
            where = ", ".join(map(str, holders))
            raise NativeRefusalError(
                f"stage {stage} is on ranks {where}: PyTorch's runtime holds each stage on one rank"
            )
    kind, ranks = _RUNTIME, range(plan.ranks)
    stages_of_rank = [[stage for stage, holders in plan.replicas.items() if rank in holders] for rank in ranks]
    rows = [_row(kind, stages_of_rank, rank, plan.microbatches, plan.rows) for rank in ranks]
    name = f"{plan.name} as the runtime of torch {torch.__version__} executes it"
    return Plan(rows, plan.stages, plan.microbatches, name=name)


def lowered_by_pytorch(kind: str, plan: Plan) -> tuple[list[list[str]], list[list[str]]]:
    """Return a plan's rows with transfers, as `_add_send_recv` places them and as PyTorch's runtime runs them.

    The second are the class's own if it has any; GPipe and 1F1B have their own loops, so they are the runtime's.

    Example:
        >>> import pipelab
        >>> rows, _ = lowered_by_pytorch("ScheduleGPipe", pipelab.GPipe(ranks=2, microbatches=1).plan())
        >>> rows[0]
        ['0F0', '0SEND_F0', '0RECV_B0', '0B0']
    """
    ranks_of_stages = [ranks[0] for ranks in plan.replicas.values()]
    stages_of_rank = [[s for s, r in enumerate(ranks_of_stages) if r == rank] for rank in range(plan.ranks)]
    schedules = runtime.load().schedules
    own = kind != _RUNTIME and not issubclass(native.schedule_class(kind), schedules.PipelineScheduleSingle)
    rows = None if own else plan.rows
    schedule = _schedule(kind if own else _RUNTIME, stages_of_rank, 0, plan.microbatches, [], rows)
    return native.add_send_recv(plan.rows, ranks_of_stages), native.lowered_rows(schedule)


def native_place(kind: str, ranks: int, stage: int) -> int:
    """Return the rank on which a native schedule places a stage.

    Example:
        >>> [native_place("ScheduleInterleaved1F1B", 2, stage) for stage in range(4)]
        [0, 1, 0, 1]
        >>> [native_place("ScheduleZBVZeroBubble", 2, stage) for stage in range(4)]
        [0, 1, 1, 0]
    """
    if kind in _V_SHAPED and stage >= ranks:
        return 2 * ranks - 1 - stage
    return stage % ranks


def watch(stage: Any, record: Record) -> None:
    """Make a real `PipelineStage` record its calls too, as a `RecordingStage` does."""
    recorder = RecordingStage(stage.stage_index, stage.num_stages, stage.group_rank, stage.group_size, record)
    for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
        setattr(stage, name, _recorded(getattr(recorder, name), getattr(stage, name)))


def _recorded(record: Callable[..., None], run: Callable[..., Any]) -> Callable[..., Any]:
    def recorded(*arguments: Any, **named: Any) -> Any:
        record(*arguments, **named)
        return run(*arguments, **named)

    return recorded


def _stages_of_rank(kind: str, ranks: int, stages_per_rank: int) -> list[list[int]]:
    stages = range(ranks * stages_per_rank)
    return [[stage for stage in stages if native_place(kind, ranks, stage) == rank] for rank in range(ranks)]


def _row(
    kind: str,
    stages_of_rank: Sequence[Sequence[int]],
    rank: int,
    microbatches: int,
    rows: Iterable[Iterable[Item]] | None = None,
) -> Record:
    """Return what one rank executes; `rows` is for the runtime, which has no order."""
    record: Record = []
    try:
        native.run_on_recorders(_schedule(kind, stages_of_rank, rank, microbatches, record, rows), microbatches)
    except AttributeError as error:
        if not isinstance(error.obj, RecordingStage):
            raise
        raise runtime.unexpected(f"asks more of a stage in {kind} than pipelab's recorder has", error) from error
    return record


def _schedule(
    kind: str,
    stages_of_rank: Sequence[Sequence[int]],
    rank: int,
    microbatches: int,
    record: Record,
    rows: Iterable[Iterable[Item]] | None = None,
) -> Any:
    """Return a rank's native schedule on recording stages; refuse what PyTorch refuses, with its own words."""
    cls = native.schedule_class(kind)
    single = issubclass(cls, runtime.load().schedules.PipelineScheduleSingle)
    stages = sum(map(len, stages_of_rank))
    recorders = [RecordingStage(index, stages, rank, len(stages_of_rank), record) for index in stages_of_rank[rank]]
    try:
        schedule = cls(recorders[0] if single else recorders, microbatches, loss_fn=lambda *_: None)
        if rows is not None:
            native.lower(schedule, rows)
    except (ValueError, AssertionError) as error:
        words = " ".join(str(error).partition("\n\n")[0].split())  # without the whole schedule, which may follow
        raise NativeRefusalError(f"{kind} of torch {torch.__version__}: {words}") from error
    return schedule
