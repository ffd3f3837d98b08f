"""The rows that PyTorch's runtime runs, with every word and under every option, beside ours: word for word the same."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.pipelining import schedules as native

from pipelab import UsageError, lower, schedules

from . import recording
from .recording import NATIVE, RUNTIME, NativeRefusalError, RecordingStage, executed, held_in, lowered_rows

SIZES = [(2, 2), (2, 4), (3, 6), (4, 8)]
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
OPTIONS: list[dict[str, object]] = [{}]
if VERSION >= (2, 15):
    OPTIONS += [
        {"unshard_lookahead": "auto"},
        {"unshard_lookahead": 1, "max_outstanding_sends": 4},
        {"max_outstanding_sends": 2},
        {"max_outstanding_sends": 1},
    ]


def with_runtimes(name: str) -> list[str]:
    """Return the classes that lower this schedule: its own, and the runtime for any plan."""
    own = [] if issubclass(getattr(native, NATIVE[name]), native.PipelineScheduleSingle) else [NATIVE[name]]
    return [*own, RUNTIME]


def theirs(kind, plan, **options):
    recorders = [RecordingStage(stage, plan.stages, 0, plan.ranks, []) for stage in held_in(plan)[0]]
    made = getattr(native, kind)(recorders, plan.microbatches, loss_fn=lambda *_: None, **options)
    if kind == RUNTIME:
        recording.lower(made, plan.rows)
    return tuple(map(tuple, lowered_rows(made)))


@pytest.mark.sweep
@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("order", ["pytorch", "deferred"] if VERSION >= (2, 13) else ["pytorch"])
def test_every_row_is_pytorchs(name, options, order):
    compared = 0
    for size in SIZES:
        plan = schedules[name](*size).plan()
        try:
            executed(NATIVE[name], *size, plan.stages // plan.ranks)
        except NativeRefusalError:
            continue
        given = dict(options)
        if isinstance(options.get("unshard_lookahead"), int):
            given["unshard_lookahead"] = (options["unshard_lookahead"],) * plan.ranks
        for kind in with_runtimes(name):
            theirs_too = {**given, "defer_pp_recv": True} if order == "deferred" else given
            try:
                rows = theirs(kind, plan, **theirs_too)
            except ValueError:  # no order of waits keeps to the number of sends
                with pytest.raises(UsageError):
                    lower(plan, order=order).for_runtime(**given)
                continue
            assert lower(plan, order=order).for_runtime(**given) == rows, f"{kind}: {plan.name}, {theirs_too}"
            compared += 1
    assert compared or options.get("max_outstanding_sends") == 1
