"""The rows that PyTorch's runtime runs, with every word and under every option, beside ours: word for word the same."""

from __future__ import annotations

import pytest
import torch

from pipelab import UsageError, lower, schedules
from pipelab.conformance import native
from pipelab.conformance.recording import NATIVE, NativeRefusalError, RecordingStage, executed
from pipelab.engine.torchrun import runtime

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
    single = runtime.load().schedules.PipelineScheduleSingle
    own = [] if issubclass(native.schedule_class(NATIVE[name]), single) else [NATIVE[name]]
    return [*own, "_PipelineScheduleRuntime"]


def theirs(kind, plan, **options):
    ranks_of_stages = [ranks[0] for ranks in plan.replicas.values()]
    mine = [stage for stage, rank in enumerate(ranks_of_stages) if rank == 0]
    recorders = [RecordingStage(stage, plan.stages, 0, plan.ranks, []) for stage in mine]
    made = native.schedule_class(kind)(recorders, plan.microbatches, loss_fn=lambda *_: None, **options)
    if kind == "_PipelineScheduleRuntime":
        native.lower(made, plan.rows)
    return tuple(map(tuple, native.lowered_rows(made)))


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
