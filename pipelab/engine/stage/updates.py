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

from pipelab.engine.stage.loss import Loss
from pipelab.engine.stage.replicas import accumulate
from pipelab.engine.stage.stage import Stage, State

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Makes the optimizer of one stage from its parameters, such as `partial(torch.optim.SGD, lr=0.1)`."""

_UPDATES = -3
"""The key in `kept` of a step's versions and gradients; other keys are in `stage.py`."""


@dataclass(slots=True)
class _Versions:
    """What a step keeps of a stage's weights: the newest version, each micro-batch's, and each update's gradients."""

    newest: State = field(default_factory=dict)
    of: dict[int, State] = field(default_factory=dict)
    gradients: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)


class UpdatingStage(Stage):
    """A stage with an optimizer, which `update` runs. While `frozen`, as in `verify`, it is like any other."""

    __slots__ = ("_optimizer", "_updates", "frozen")

    def __init__(self, stage: Stage, stages: int, make: MakeOptimizer, updates: Sequence[int]) -> None:
        """Take the place of a stage; `updates` are the micro-batches after which it updates."""
        super().__init__(stage.index, stage.module, stages)
        self._optimizer = make([each for each in stage.module.parameters() if each.requires_grad])
        self._updates = updates
        self.frozen = False

    def forward(self, microbatch: int, given: Any, kept: dict[int, Any], loss: Loss) -> Any:
        """Run one micro-batch forward with the newest version."""
        if not self.frozen:
            versions = kept.setdefault(_UPDATES, _Versions())
            if not versions.newest:
                for name, each in self.module.named_parameters():
                    versions.newest[name] = each.data.requires_grad_(each.requires_grad)
            versions.of[microbatch] = versions.newest
        return super().forward(microbatch, given, kept, loss)

    def backward(self, microbatch: int, gradients: Any, kept: dict[int, Any], loss: Loss) -> Any:
        """Run one micro-batch backward (`B`), with the version of its forward."""
        made = super().backward(microbatch, gradients, kept, loss)
        self._collect(microbatch, kept)
        return made

    def backward_weight(self, microbatch: int, given: None, kept: dict[int, Any], loss: Loss) -> None:
        """Run the rest of one micro-batch's backward (`W`), likewise."""
        super().backward_weight(microbatch, given, kept, loss)
        self._collect(microbatch, kept)

    def update(self, microbatch: int, _given: None, kept: dict[int, Any], _loss: Loss) -> None:
        """Step the optimizer (`U`) with the gradients of the micro-batches since the update before."""
        if self.frozen:
            return
        versions: _Versions = kept[_UPDATES]
        in_use = any(each is versions.newest for each in versions.of.values())
        gradients = versions.gradients.pop(microbatch, {})
        for name, each in self.module.named_parameters():
            if in_use:
                each.data = each.data.clone()
            each.grad = gradients.get(name)
        self._optimizer.step()
        self._optimizer.zero_grad()
        versions.newest = {}

    def _run(self, microbatch: int, given: Any, kept: dict[int, Any], state: State | None = None) -> Any:
        own = {} if self.frozen else kept[_UPDATES].of[microbatch]
        return super()._run(microbatch, given, kept, own | (state or {}))

    def _collect(self, microbatch: int, kept: dict[int, Any]) -> None:
        """Add a micro-batch's gradients to those of the next update; after the last one, to the model's own."""
        if self.frozen:
            return
        versions: _Versions = kept[_UPDATES]
        at = bisect_left(self._updates, microbatch)
        found = versions.gradients.setdefault(self._updates[at], {}) if at < len(self._updates) else None
        own = dict(self.module.named_parameters())
        for name, leaf in versions.of.pop(microbatch).items():
            gradient, leaf.grad = leaf.grad, None
            if gradient is None:
                continue
            if found is None:
                accumulate(own[name], gradient)
            else:
                found[name] = gradient if name not in found else found[name] + gradient
