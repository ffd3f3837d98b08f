"""The order that PyTorch's own schedules execute, recorded without a process group.

Their order tables are not what they do: `Schedule1F1B`'s is wrong on the last rank. So a native schedule object is
handed stages that compute nothing and write down what they are asked for, and runs its own loop over the micro-batches:

    schedule._step_microbatches() -> stage.forward_one_chunk(0), stage.backward_one_chunk(0), … -> [0F0, 0B0, …]

A pair of overlapped actions reaches the stages as a forward, then a backward: the record shows pairs flattened.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from pipelab import Action
from pipelab.engine import native

__all__ = ["NATIVE", "V_SHAPED", "NativeRefusalError", "executed"]

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

V_SHAPED = {"zbv", "dualpipev"}
"""Schedules whose second stage on a rank goes back the way the first one came."""


class NativeRefusalError(Exception):
    """PyTorch's schedule does not exist at this size."""


@dataclass
class RecordingStage:
    """What a native schedule takes for a stage; it writes down what it is asked to do."""

    stage_index: int
    num_stages: int
    group_rank: int
    group_size: int
    record: list[Action]
    has_backward: bool = True
    submod: torch.nn.Module = field(default_factory=torch.nn.Identity)
    output_chunks: list[Any] = field(default_factory=list)
    stage_index_to_group_rank: dict[int, int] = field(default_factory=dict)

    @property
    def is_first(self) -> bool:
        """Whether the batch enters here."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.stage_index == self.num_stages - 1

    def forward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        """Write down a forward."""
        self.record.append(Action("F", microbatch, self.stage_index))

    def backward_one_chunk(self, microbatch: int, *_: Any, full_backward: bool = True, **__: Any) -> None:
        """Write down a full backward, or the input gradient alone."""
        self.record.append(Action("B" if full_backward else "I", microbatch, self.stage_index))

    def backward_weight_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        """Write down a weight gradient."""
        self.record.append(Action("W", microbatch, self.stage_index))

    def _no_transfers(self, *_: Any) -> list[Any]:
        """Send and receive nothing."""
        return []

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _no_transfers
    set_local_fwd_input = set_local_bwd_input = get_local_bwd_output = _nothing
    scale_grads = perform_reduce_grad = clear_runtime_states = _nothing


def executed(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> tuple[tuple[Action, ...], ...]:
    """Return what each rank does, in the order in which PyTorch's schedule does it.

    Raises:
        NativeRefusalError: if PyTorch refuses the size.
    """
    kind = getattr(native.load().schedules, NATIVE[name])
    stages = ranks * stages_per_rank
    rows: list[tuple[Action, ...]] = []
    for rank in range(ranks):
        held = [rank, stages - 1 - rank] if name in V_SHAPED else [rank + ranks * i for i in range(stages_per_rank)]
        record: list[Action] = []
        recorders = [RecordingStage(stage, stages, rank, ranks, record) for stage in held]
        single = issubclass(kind, native.load().schedules.PipelineScheduleSingle)
        try:
            schedule = kind(recorders[0] if single else recorders, microbatches)
        except (ValueError, AssertionError) as error:
            raise NativeRefusalError(f"{NATIVE[name]}: {error}") from error
        schedule._initialize_stage = schedule._initialize_stages = lambda *_: (False, False)
        schedule._step_microbatches()
        rows.append(tuple(record))
    return tuple(rows)
