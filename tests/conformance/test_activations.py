"""PyTorch 2.15 counts how many activations each rank holds at most: as many as pipelab does."""

from __future__ import annotations

import pytest
from strategies import ONE_COPY
from torch.distributed.pipelining import schedules as native

import pipelab
from pipelab.plan.fault import ScheduleError

from .recording import NATIVE, RUNTIME, NativeRefusalError, held_in, on_recorders
from .report import Grid

analyze = getattr(native, "analyze_pipeline_activation_liveness", None)
pytestmark = pytest.mark.skipif(analyze is None, reason="torch has no analyze_pipeline_activation_liveness before 2.15")

SINGLE = {"gpipe", "1f1b"}
"""The schedules whose class has no rows: PyTorch's runtime has them lowered instead."""


def slots(plan, name):
    """Return how many activation slots PyTorch gives each rank of a schedule, in its own order if it has one."""
    held = held_in(plan)
    own = name in NATIVE and name not in SINGLE
    kind, rows = (NATIVE[name], None) if own else (RUNTIME, plan.rows)
    schedule = on_recorders(kind, held, 0, plan.microbatches, [], rows)
    options = {"granularity": "stage_microbatch"}
    return tuple(
        analyze(schedule, pp_rank=rank, stage_indices=stages, **options).num_slots for rank, stages in enumerate(held)
    )


@pytest.mark.parametrize("name", ONE_COPY)
def test_pytorch_counts_as_many_activations_on_every_rank(name):
    compared = 0
    for schedule in Grid(stages_per_rank=(1, 2, 3)).of(name):
        try:
            plan = schedule.plan()
            theirs = slots(plan, name)
        except (NativeRefusalError, ScheduleError):
            continue
        assert pipelab.simulate(plan).peak_activations == theirs, plan.name
        compared += 1
    assert compared >= 22
