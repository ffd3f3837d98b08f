"""The message of an error in a stage: action, rank, stage, layer and line."""

from __future__ import annotations

import linecache
import traceback
import warnings
from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import fx, nn

from pipelab.engine.device import RankDevice
from pipelab.errors import PipelabError, StageError
from pipelab.plan.actions import Action
from pipelab.plan.fault import students_line

PARTIAL = "gradients are partial now: zero_grad() before the next step"
_USED = (
    "another backward has been through this stage's graph: a tensor with a history that the stage left on a module, "
    "such as self.aux, was read by the loss, by another stage, or in another micro-batch"
)
_RETURN_IT = (
    "  try: return it beside the output, as in (h, aux), so that it passes from stage to stage to loss_fn; or leave "
    "aux.detach() there"
)
_OUT_OF_MEMORY = (
    "\n  try: more micro-batches of fewer rows each, a schedule with a lower peak of activations (1F1B has a lower one "
    "than GPipe; pipelab.compare shows the peaks), or more ranks"
)


def stage_error(error: BaseException, action: Action, rank: int, runs_on: RankDevice, remark: str = "") -> StageError:
    """Return an error with its place, and what the caller should know besides; the original one is its cause."""
    if isinstance(error, StageError):  # it names its place itself
        if remark:
            error.add_note(remark)
        return error
    fact, more = str(error), ""
    if not isinstance(error, PipelabError):
        fact = f"{type(error).__name__}: {error}"
        more = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
        more += f"\n  at {students_line(error)}"
    if "backward through the graph a second time" in fact:  # PyTorch's words would send readers to retain_graph
        fact, more = _USED, f"\n{_RETURN_IT}"
    if isinstance(error, torch.OutOfMemoryError):
        # A traceback holds the local variables of every function in it, and with them activations of this step.
        traceback.clear_frames(error.__traceback__)
        more += _OUT_OF_MEMORY
    if remark:
        more += f"\n  {remark}"
    stage, microbatch = action.stage, action.microbatch
    assert stage is not None
    of_microbatch = "" if microbatch is None else f", micro-batch {microbatch}"
    message = f"{action} on rank {rank} failed: {fact}\n  stage {stage}{of_microbatch}, on {runs_on}{more}"
    explained = StageError(message, rank, stage, str(action))
    explained.__cause__ = error
    return explained


def left_on(module: nn.Module) -> list[str]:
    """Return which attributes hold a tensor with a history, except weights that a hook computes."""
    return [
        f"{name}.{key}".removeprefix(".")
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if isinstance(value, torch.Tensor) and value.grad_fn is not None
        if not any(weight.startswith(f"{key}_") for weight, _ in part.named_parameters(recurse=False))
    ]


def warn_of_what_is_left(stage: int, module: nn.Module) -> None:
    """Warn of a tensor with a history that a stage left on a module, which the loss in another process cannot see."""
    for name in left_on(module)[:1]:
        fact = f"stage {stage} left {name}, a tensor with a history, on a module: loss_fn, if it reads that in "
        warnings.warn(f"{fact}its process, finds another value, and no gradients come back\n{_RETURN_IT}", stacklevel=2)


def in_short(error: BaseException) -> str:
    """Return an error's class and the first line of its message."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else repr(error)


def layer_of(error: BaseException, module: nn.Module, full: Mapping[str, str] | None = None) -> str:
    """Return the layer of a module that raised an error, by all its names: `"2.1, Linear(…)"`; "" if none did."""
    frames = [each for each in traceback.walk_tb(error.__traceback__) if each[0].f_code.co_name == "forward"]
    running = [frame.f_locals.get("self") for frame, _ in reversed(frames)]
    every = [(name, layer) for name, layer in module.named_modules(remove_duplicate=False) if name]
    layer = next((each for each in running if any(each is other for _, other in every)), None)
    if not isinstance(layer, nn.Module):
        return ""
    if isinstance(layer, fx.GraphModule):
        frame, line = next(each for each in frames if each[0].f_locals.get("self") is layer)
        return _traced_layer(layer, linecache.getline(frame.f_code.co_filename, line))
    found = dict.fromkeys((full or {}).get(name, name) for name, other in every if other is layer)
    names = " or ".join(found)
    kind = type(layer).__name__
    if not any(layer.children()):
        with suppress(Exception):  # a student's extra_repr may raise, and must not hide the error
            kind = " ".join(str(layer).split())
    return f"{names}, {kind}"


def _traced_layer(stage: fx.GraphModule, line: str) -> str:
    """Return the layer of a line of a traced forward, which begins with the operation's name."""
    operation = line.strip().partition(" ")[0]
    stacks = [node.meta.get("nn_module_stack") for node in stage.graph.nodes if node.name == operation]
    return [*stacks[0].values()][-1][0] if stacks and stacks[0] else ""
