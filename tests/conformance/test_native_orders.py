"""The orders that PyTorch's own schedules execute, beside ours: action for action the same."""

from __future__ import annotations

import oracle
import pytest
from strategies import SIZES

import pipelab
from pipelab import Pair, schedules
from pipelab.catalogue.bases import Looped
from pipelab.conformance.recording import NATIVE, NativeRefusalError, executed


def uneven_rounds(ranks, microbatches):
    return microbatches % max(1, microbatches // ranks) != 0


# What PyTorch refuses, as (ranks, micro-batches). It holds for any number of stages per rank.
REFUSED_BY_PYTORCH = {
    "gpipe": lambda *_: False,
    "1f1b": lambda ranks, microbatches: microbatches < ranks,
    "interleaved-1f1b": uneven_rounds,
    "looped-bfs": lambda *_: False,
    "interleaved-zb": uneven_rounds,
    "zbv": lambda *_: False,
    "dualpipev": lambda ranks, microbatches: microbatches < 2 * ranks,
}

CASES = [
    (name, stages_per_rank)
    for name, kind in schedules.items()
    for stages_per_rank in ((1, 2, 3) if issubclass(kind, Looped) else [kind(1, 1).stages_per_rank])
    if name in NATIVE
]

every_case = pytest.mark.parametrize(("name", "stages_per_rank"), CASES)


def flattened(rows):
    """Return the rows with every pair as a forward, then a backward."""
    return tuple(tuple(half for item in row for half in oracle.halves(item)) for row in rows)


@every_case
def test_our_order_is_the_one_that_pytorch_executes_wherever_pytorch_has_one(name, stages_per_rank):
    for size in SIZES:
        ours = schedules[name](*size, stages_per_rank=stages_per_rank).plan()
        if REFUSED_BY_PYTORCH[name](*size):
            with pytest.raises(NativeRefusalError):
                executed(NATIVE[name], *size, stages_per_rank)
        else:
            theirs = executed(NATIVE[name], *size, stages_per_rank)
            assert flattened(ours.rows) == theirs.rows, f"{ours.name} and {theirs.name}"


def test_only_dualpipev_has_pairs_for_the_record_to_flatten():
    paired = {
        name
        for name in NATIVE
        if any(isinstance(item, Pair) for row in schedules[name](4, 8).plan().rows for item in row)
    }
    assert paired == {"dualpipev"}


def test_zb_h1_is_pytorchs_interleaved_zero_bubble_with_one_stage_per_rank():
    for size in SIZES:
        if not uneven_rounds(*size):
            assert pipelab.ZBH1(*size).plan().rows == executed("ScheduleInterleavedZeroBubble", *size).rows


def test_pytorch_runs_backwards_ascending_in_gpipe_and_descending_in_looped_bfs():
    def backwards(name):
        return [action.microbatch for action in executed(name, 2, 4).rows[0] if action.kind == "B"]

    assert backwards("ScheduleGPipe") == [0, 1, 2, 3]
    assert backwards("ScheduleLoopedBFS") == [3, 2, 1, 0]
