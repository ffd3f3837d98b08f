"""What an error in a stage says: the action, rank, stage, layer and line, and what to try."""

from __future__ import annotations

import traceback
from contextlib import suppress

import torch
from torch import nn

from pipelab.engine.device.devices import RankDevice
from pipelab.errors import PipelabError, StageError
from pipelab.plan.fault import students_line

__all__ = ["PARTIAL", "layer_of", "out_of_memory_hint", "stage_error"]

PARTIAL = "gradients are partial now: zero_grad() before the next step"

_TRY = {
    "leaf Variable that requires grad": "clone the stage's input before writing into it: a stage's input is its own "
    "leaf",
    "modified by an inplace operation": "write into a copy: what an earlier micro-batch's backward needs, the forward "
    "of a later one may have overwritten, in a buffer say",
}
"""What helps, by the words of PyTorch's error."""


def out_of_memory_hint(error: BaseException) -> str:
    """Return what to try if a device's memory ran out; nothing otherwise.

    A traceback holds the local variables of every function in it, and with them activations of the step that failed.
    They are released, so that the next step has the memory even while the error is being looked at; the lines stay.
    """
    if not isinstance(error, torch.OutOfMemoryError):
        return ""
    traceback.clear_frames(error.__traceback__)
    return (
        "\n  try: more micro-batches of fewer rows each, a schedule that holds fewer of them at once (1F1B holds fewer "
        "than GPipe; pipelab.compare shows the peaks), or more ranks"
    )


def stage_error(
    error: BaseException,
    action: str,
    rank: int,
    stage: int,
    microbatch: int | None,
    runs_on: RankDevice,
    *,
    remark: str = "",
) -> StageError:
    """Return an error with its place; the original one is its cause.

    Args:
        error: what was raised.
        action: what was running, such as `"1F0"`.
        rank: on which rank.
        stage: in which stage.
        microbatch: for which micro-batch; `None` for an all-reduce.
        runs_on: what the rank runs on.
        remark: what the caller should know besides, such as that gradients are partial.
    """
    fact, more = str(error), ""
    if not isinstance(error, PipelabError):
        fact = f"{type(error).__name__}: {error}"
        more = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
        more += f"\n  at {students_line(error)}"
        more += "".join(f"\n  try: {advice}" for words, advice in _TRY.items() if words in fact)
        more += out_of_memory_hint(error)
    if remark:
        more += f"\n  {remark}"
    of_microbatch = "" if microbatch is None else f", micro-batch {microbatch}"
    message = f"{action} on rank {rank} failed: {fact}\n  stage {stage}{of_microbatch}, on {runs_on}{more}"
    explained = StageError(message, rank, stage, action)
    explained.__cause__ = error
    return explained


def layer_of(error: BaseException, module: nn.Module) -> str:
    """Return which layer of a module an error comes from: `"2.1, Linear(…)"`; nothing if it is the module's own.

    A layer that stands there several times has all its names; one that PyTorch's tracer has made has its name alone.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "forward"]
    running = [frame.f_locals.get("self") for frame in reversed(frames)]
    every = [(name, layer) for name, layer in module.named_modules(remove_duplicate=False) if name]
    layer = next((each for each in running if any(each is other for _, other in every)), None)
    if not isinstance(layer, nn.Module):
        return ""
    names = " or ".join(name.removeprefix("traced.") for name, other in every if other is layer)
    if type(layer).__module__.startswith(("torch.export", "torch.fx")):
        return names
    kind = type(layer).__name__
    if not any(layer.children()):
        with suppress(Exception):  # a student's extra_repr may raise, and must not hide the error
            kind = " ".join(str(layer).split())
    return f"{names}, {kind}"
