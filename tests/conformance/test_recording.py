"""The recorder of PyTorch's executed orders is right itself: against orders written by hand, and its own mistakes."""

from __future__ import annotations

import pytest

from pipelab import Plan, check, simulate

from .recording import NATIVE, NativeRefusalError, executed, executed_by_runtime, native_place, order_table
from .report import flat

# Derived by hand from the papers' figures and from reading the loops, not from a run.
BY_HAND = {
    ("ScheduleGPipe", 2, 3, 1): ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"],
    ("Schedule1F1B", 2, 4, 1): ["0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"],
    ("Schedule1F1B", 3, 3, 1): ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1B0 1F2 1B1 1B2", "2F0 2B0 2F1 2B1 2F2 2B2"],
    ("ScheduleLoopedBFS", 2, 2, 2): ["0F0 0F1 2F0 2F1 2B1 2B0 0B1 0B0", "1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0"],
    # Narayanan et al. 2021: 2 (P - 1 - r) + (v - 1) P forwards of warm-up: all 4 of them on rank 0, 2 on rank 1.
    ("ScheduleInterleaved1F1B", 2, 2, 2): ["0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"],
    # A V of one rank: the second half of the model is at hand as soon as the first is done.
    ("ScheduleZBVZeroBubble", 1, 2, 2): ["0F0 1F0 1I0 1W0 0F1 0I0 0W0 1F1 1I1 1W1 0I1 0W1"],
}


@pytest.mark.parametrize(("size", "rows"), BY_HAND.items(), ids=lambda value: value[0] if len(value) == 4 else "")
def test_the_recorded_order_is_the_one_written_by_hand(size: tuple[str, int, int, int], rows: list[str]):
    assert executed(*size) == Plan.parse(rows)


@pytest.mark.parametrize("kind", NATIVE.values())
def test_what_pytorch_executes_is_a_legal_plan_of_the_size_that_was_asked_for(kind: str):
    plan = executed(kind, 3, 6, 1 if kind in ("ScheduleGPipe", "Schedule1F1B") else 2)
    assert check(plan) == []
    assert (plan.ranks, plan.microbatches) == (3, 6)
    assert plan.replicas == {stage: (native_place(kind, 3, stage),) for stage in range(plan.stages)}
    assert simulate(plan).makespan > 0


def test_the_input_gradient_and_the_weight_gradient_are_told_from_the_full_backward():
    for kind, kinds in {"ScheduleGPipe": "BF", "ScheduleZBVZeroBubble": "FIW", "ScheduleDualPipeV": "BFIW"}.items():
        plan = executed(kind, 2, 4, 1 if kind == "ScheduleGPipe" else 2)
        assert "".join(sorted({action.kind for row in plan.rows for action in row})) == kinds


@pytest.mark.parametrize("kind", sorted(set(NATIVE.values()) - {"Schedule1F1B"}))
def test_the_order_tables_of_the_others_are_what_they_execute(kind: str):
    size = (3, 6, 1 if kind == "ScheduleGPipe" else 2)
    table = Plan.parse(" ".join(row) for row in order_table(kind, *size))
    assert flat(table) == flat(executed(kind, *size))


def test_a_size_that_pytorch_refuses_is_refused_in_its_words():
    with pytest.raises(NativeRefusalError, match=r"Schedule1F1B of torch .*Number of microbatches \(2\) must be"):
        executed("Schedule1F1B", 3, 2)


def test_the_runtime_refuses_a_plan_that_leaves_a_microbatch_out():
    with pytest.raises(NativeRefusalError, match="_PipelineScheduleRuntime"):
        executed_by_runtime(Plan.parse(["0F0 0F1 0B0 0B1", "1F0 1B0"]))
