"""A stage that updates its weights within a step, and keeps the versions that backwards still need.

    0F0 0F1   use version 0, a leaf for each weight, which shares the weight's memory
    0B0 0U0   0B1 still needs version 0: the weights move to new memory, and the optimizer steps there
    0F2       uses version 1
    0B1       adds to the gradients of version 0: no backward knows of later versions

This is PipeDream's weight stashing (Narayanan et al. 2019, SOSP '19, section 3.3).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.utils.stateless import _reparametrize_module

from pipelab.engine.stage.loss import Loss
from pipelab.engine.stage.replicas import Runners, accumulate, alias, refuse_lost_hooks, ties_of
from pipelab.engine.stage.stage import Stage
from pipelab.errors import EngineError, UsageError, counted
from pipelab.plan.bound import BoundPlan

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Makes the optimizer of one stage from its parameters, such as `partial(torch.optim.SGD, lr=0.1)`."""

_UPDATES = -4
"""The key in `kept` of a step's versions and gradients; other keys are in `stage.py` and `slices.py`."""


@dataclass(slots=True)
class _Versions:
    """What a step keeps of a stage's weights: the newest version, each micro-batch's, and each update's gradients.

    A version has, by name, the leaves that stand for the parameters that learn.
    """

    newest: dict[str, nn.Parameter] = field(default_factory=dict)
    of: dict[int, dict[str, nn.Parameter]] = field(default_factory=dict)
    gradients: dict[int, dict[nn.Parameter, torch.Tensor]] = field(default_factory=dict)


def add_optimizers(runners: Runners, modules: Sequence[nn.Module], bound: BoundPlan, make: MakeOptimizer) -> None:
    """Give each stage that a plan updates an optimizer, if it learns; refuse weights that another stage uses too."""
    updates = [bound.listed("U", stage) for stage in range(len(modules))]
    for tied in ties_of(modules):
        if tied.parameter.requires_grad and (updated := [stage for stage in tied.stages if updates[stage]]):
            raise EngineError(
                f"{tied.fact}, and stage {updated[0]} updates it by its own gradients alone ({updated[0]}U"
                f"{updates[updated[0]][0]})\n  try: one for each stage, or a plan without updates"
            )
    for (stage, rank), runner in runners.of.items():
        if updates[stage] and any(each.requires_grad for each in modules[stage].parameters()):
            runners.of[stage, rank] = UpdatingStage(runner, len(modules), make, updates[stage])


def _versioned(act: Callable[..., Any]) -> Callable[..., Any]:
    """Return an action of a stage whose module has its micro-batch's version, also for a checkpoint's backward."""

    def run(self: UpdatingStage, microbatch: int, given: Any, kept: dict[int, Any], loss: Loss) -> Any:
        if not loss.updates:
            return act(self, microbatch, given, kept, loss)
        versions: _Versions = kept.setdefault(_UPDATES, _Versions())
        if microbatch not in versions.of:  # its forward, which uses the newest
            versions.of[microbatch] = versions.newest = versions.newest or self.version()
        with _reparametrize_module(self.module, dict[str, Any](versions.of[microbatch]), tie_weights=True):
            made = act(self, microbatch, given, kept, loss)
        self.collect(microbatch, versions)
        if microbatch not in kept:  # it was the last of its actions
            del versions.of[microbatch]
        return made

    return run


class UpdatingStage(Stage):
    """A stage with an optimizer, which `update` runs. In a step of `verify` it is like any other."""

    def __init__(self, stage: Stage, stages: int, make: MakeOptimizer, updates: Sequence[int]) -> None:
        """Take the place of a stage; `updates` are the micro-batches after which it updates."""
        super().__init__(stage.index, stage.module, stages)
        learning = [each for each in stage.module.parameters() if each.requires_grad]
        if not isinstance(made := make(learning), torch.optim.Optimizer):
            raise UsageError(f"optimizer= made {made!r} for stage {stage.index}: expected a torch.optim.Optimizer")
        self._optimizer = made
        self._own = {each for group in self._optimizer.param_groups for each in group["params"]}
        if others := len(self._own.difference(learning)):
            raise UsageError(
                f"optimizer= for stage {stage.index} steps {counted(others, 'parameter')} of other modules\n"
                "  try: one that has only the parameters it is given, such as partial(torch.optim.SGD, lr=0.1)"
            )
        self._updates = updates

    forward = _versioned(Stage.forward)
    recompute = _versioned(Stage.recompute)
    backward = _versioned(Stage.backward)
    backward_input = _versioned(Stage.backward_input)
    backward_weight = _versioned(Stage.backward_weight)

    def update(self, microbatch: int, _given: None, kept: dict[int, Any], loss: Loss) -> Any:
        """Step the optimizer (`U`) with the gradients of its micro-batches, and no others; return the weights."""
        if not loss.updates:
            return None
        versions: _Versions = kept[_UPDATES]
        in_use = any(each is versions.newest for each in versions.of.values())
        gradients = versions.gradients.pop(microbatch, {})
        others = {each: each.grad for each in self._own}
        try:
            for each in self._own:
                if in_use:
                    each.data = each.data.clone()
                each.grad = gradients.get(each)
            self._optimizer.step()
        finally:
            for each, gradient in others.items():
                each.grad = gradient
        versions.newest = {}
        return [*self._own]

    def version(self) -> dict[str, nn.Parameter]:
        """Return leaves with the parameters' memory, whose history does not see what an update writes there."""
        refuse_lost_hooks(self.index, self.module)
        return {name: alias(own, own.data) for name, own in self.module.named_parameters() if own.requires_grad}

    def collect(self, microbatch: int, versions: _Versions) -> None:
        """Add a micro-batch's gradients to those of the next update; if none takes them, to the model's own."""
        at = bisect_left(self._updates, microbatch)
        found = versions.gradients.setdefault(self._updates[at], {}) if at < len(self._updates) else None
        own = dict(self.module.named_parameters())
        for name, leaf in versions.of[microbatch].items():
            gradient, leaf.grad = leaf.grad, None
            if gradient is None:
                continue
            if found is None or own[name] not in self._own:
                accumulate(own[name], gradient)
            else:
                found[own[name]] = found[own[name]] + gradient if own[name] in found else gradient
