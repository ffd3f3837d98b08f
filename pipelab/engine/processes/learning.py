"""Learn the forms of what travels between stages, by running one micro-batch forward through all processes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from pipelab.engine.explaining import stage_error
from pipelab.engine.keeping import unchanged
from pipelab.engine.lanes import Lane
from pipelab.engine.processes.forms import Form, form_of
from pipelab.engine.processes.packing import pack, unpack
from pipelab.engine.processes.parts import Part
from pipelab.engine.stage import Stage
from pipelab.engine.trees import take_apart, tensors_of
from pipelab.errors import EngineError

__all__ = ["learn_forms"]


def learn_forms(
    part: Part,
    place: int,
    runners: Sequence[Stage],
    lane: Lane,
    group: dist.ProcessGroup,
    inputs: Sequence[Any],
    counts: Sequence[int],
    *,
    learning: bool,
) -> dict[int, list[Form]]:
    """Return, by number of rows, the form of what each stage gives; all processes of a pipeline must call it.

    For each number of rows that micro-batches have, the first such micro-batch runs forward, stage by stage: a process
    sends what its stage made, form and all, to the next stage's process. Buffers and random state are as before
    afterwards; hooks on the modules see it.

    Args:
        part: the pipeline.
        place: this process's rank in it.
        runners: the stages.
        lane: what this process runs on.
        group: the pipeline's processes.
        inputs: the micro-batches.
        counts: how many rows each has.
        learning: whether gradients will come back.

    Raises:
        StageError: if a stage raises.
        EngineError: if a stage gives anything but tensors.
    """
    plan = part.plan
    ranks = [plan.replicas[stage][0] for stage in range(plan.stages)]
    found: dict[int, list[Form]] = {}
    for count in sorted(set(counts)):
        microbatch = list(counts).index(count)
        forms: list[Form] = [Form(None, ())] * (plan.stages - 1)
        value: Any = inputs[microbatch]
        for stage, (here, there) in enumerate(pairwise(ranks)):
            if place == here:
                value = _try(part, place, runners[stage], microbatch, value, lane, learning=learning)
                forms[stage] = form_of(value, f"stage {stage}")
                if there != here:
                    sent = (forms[stage].parts, pack(value))
                    dist.send_object_list([sent], group=group, group_dst=there)
            elif place == there:
                box: list[Any] = [None]
                dist.recv_object_list(box, group=group, group_src=here)
                parts, packed = box[0]
                value = unpack(packed)
                forms[stage] = Form(take_apart(value)[1], parts)
                value = forms[stage].value(tensors_of(value))
        found[count] = forms
    return found


def _try(part: Part, place: int, runner: Stage, microbatch: int, value: Any, lane: Lane, *, learning: bool) -> Any:
    """Run a stage forward, leaving no trace in it."""
    given = value if lane.takes is None else lane.takes(value)
    try:
        with unchanged([runner.module]), torch.set_grad_enabled(learning):
            if learning:
                return runner.forward(microbatch, given, {}, None)  # type: ignore[arg-type]  # no stage but the last needs a loss
            return runner.evaluate(microbatch, given, {}, None)
    except EngineError:
        raise
    except Exception as error:
        number = part.microbatches[microbatch]
        where = (part.ranks[place], runner.index, number, lane.runs_on)
        raise stage_error(error, f"{runner.index}F{number}", *where, partial=False) from error
