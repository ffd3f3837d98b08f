"""What helps where a device's memory ran out."""

from __future__ import annotations

import traceback
from contextlib import suppress

import torch
from torch import nn

from pipelab.engine.device.devices import RankDevice
from pipelab.errors import PipelabError, StageError
from pipelab.plan.fault import students_line

__all__ = ["PARTIAL", "layer_of", "raised_by_the_call", "relieve", "stage_error"]


def relieve(error: BaseException) -> str:
    """Return what to try next, if a device's memory ran out; nothing otherwise.

    A traceback holds the local variables of every function in it, and with them activations of the step that failed.
    They are let go, so that the next step has the memory even while the error is being looked at; the lines stay.
    """
    if not isinstance(error, torch.OutOfMemoryError):
        return ""
    traceback.clear_frames(error.__traceback__)
    return (
        "\n  try: more micro-batches of fewer rows each, a schedule that holds fewer of them at once (1F1B holds fewer "
        "than GPipe; pipelab.compare shows the peaks), or more ranks"
    )


PARTIAL = "gradients are partial now: zero_grad() before the next step"


def stage_error(
    error: BaseException,
    action: str,
    rank: int,
    stage: int,
    microbatch: int | None,
    runs_on: RankDevice,
    *,
    partial: bool,
) -> StageError:
    """Return the error with its place; the original one is its cause.

    Args:
        error: what was raised.
        action: what was running, such as `"1F0"`.
        rank: on which rank.
        stage: in which stage.
        microbatch: for which micro-batch; `None` for an all-reduce.
        runs_on: what the rank runs on.
        partial: whether some gradients of this step have been added already.
    """
    told = str(error)
    where = ""
    if not isinstance(error, PipelabError):
        told = f"{type(error).__name__}: {error}"
        where = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
        where += f"\n  at {students_line(error)}"
        if "leaf Variable that requires grad" in told:
            where += "\n  try: clone the stage's input before writing into it: a stage's input is its own leaf"
        if "modified by an inplace operation" in told:
            where += (
                "\n  try: write into a copy: what an earlier micro-batch's backward needs, the forward of a later one "
                "may have overwritten, in a buffer say"
            )
        where += relieve(error)
    zero = f"\n  {PARTIAL}" if partial else ""
    of_microbatch = "" if microbatch is None else f", micro-batch {microbatch}"
    explained = StageError(
        f"{action} on rank {rank} failed: {told}\n  stage {stage}{of_microbatch}, on {runs_on}{where}{zero}",
        rank,
        stage,
        action,
    )
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


def raised_by_the_call(error: TypeError) -> bool:
    """Tell whether a module's forward could not even be called, with the arguments that it was given."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_code.co_name == "_call_impl"
