"""A model of which this process trains some stages: the others are behind until their state is gathered.

`torch.save(model.state_dict())` would save a model of which a part has learnt, and nobody would notice.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn

from pipelab.engine.splitting import Stages

__all__ = ["Behind", "first_behind"]


class Behind:
    """Warns whoever saves a model that is behind. A later pipeline of the same model takes over.

    Args:
        stages: the model, split.
        held: the stages that this process trains.
    """

    def __init__(self, stages: Stages, held: Sequence[int]) -> None:
        """Begin to look after the model, or after the stages that others train, where it was given as a list."""
        self._alone = len(held) == len(stages)
        self._trained = f"{len(held)} of {len(stages)} stages"
        self._parameters = [parameter for stage in held for parameter in stages.modules[stage].parameters()]
        self.catch_up()
        if isinstance(stages.model, nn.ModuleList):
            looked_after = [module for stage, module in enumerate(stages.modules) if stage not in held]
        else:
            looked_after = [stages.model]
        for module in looked_after:
            if module in _known:
                self._take_over(_known[module])
            module.register_state_dict_pre_hook(self._warn)
            module.register_load_state_dict_post_hook(self._loaded)
            _known[module] = self

    @property
    def is_behind(self) -> bool:
        """Whether other processes' stages have learnt since their state was last here, as far as this one can tell."""
        learn = any(parameter.requires_grad for parameter in self._parameters)
        return self._stepped and not self._alone and not (learn and self._versions == _versions(self._parameters))

    def step(self) -> None:
        """Note that a step has made gradients."""
        self._stepped = True

    def catch_up(self) -> None:
        """Note that all stages are here as they are now."""
        self._stepped, self._versions = False, _versions(self._parameters)

    def holds(self, module: nn.Module) -> bool:
        """Tell whether this process trains all of a module's parameters."""
        return {id(each) for each in module.parameters()} <= {id(each) for each in self._parameters}

    def _take_over(self, earlier: Behind) -> None:
        """Be behind where an earlier one is, which need not warn any more."""
        if earlier.is_behind:
            self._stepped, self._versions = True, []
        earlier.catch_up()

    def _warn(self, _module: nn.Module, _prefix: str, keep_vars: bool) -> None:
        if self.is_behind and not keep_vars:  # with keep_vars, PyTorch's tracer asks what parameters there are
            warnings.warn(
                f"model.state_dict(): this process has trained {self._trained}, and the others are here as they were "
                "before\n  try: pipe.state_dict(), in every process: it brings the model up to date as well",
                stacklevel=3,
            )

    def _loaded(self, _module: nn.Module, keys: Any) -> None:
        if not keys.missing_keys:
            self.catch_up()


_known: weakref.WeakKeyDictionary[nn.Module, Behind] = weakref.WeakKeyDictionary()
"""Who looks after which module."""


def first_behind(stages: Stages, held: Sequence[int]) -> int | None:
    """Return the first stage that another process has trained in an earlier pipeline, and that is behind here.

    Args:
        stages: the model, split.
        held: the stages that this process would train.
    """
    for stage in held:
        module = stages.modules[stage]
        earlier = _known.get(stages.model) or _known.get(module)
        if earlier is not None and earlier.is_behind and not earlier.holds(module):
            return stage
    return None


def _versions(parameters: Sequence[nn.Parameter]) -> list[int]:
    """Return how often each was written into, as an optimizer does."""
    return [parameter._version for parameter in parameters]  # noqa: SLF001 - there is no public way
