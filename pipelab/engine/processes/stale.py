"""A model of which this process trains some stages: the others are stale until their state is gathered.

`torch.save(model.state_dict())` would save a model of which only a part has learnt, `model(x)` would measure one, and
nobody would notice.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from pipelab.engine.splitting import Stages

__all__ = ["clear_stale", "is_stale", "mark_stale", "warn_of_stale"]


@dataclass(frozen=True, slots=True, eq=False)
class _Stale:
    """What is known of a module that is stale.

    Attributes:
        trained: what this process trains of it, in words.
        own: that, and how often it had been written into when it became stale.
        hooks: what warns.
    """

    trained: str
    own: list[tuple[weakref.ref[nn.Parameter], int]]
    hooks: list[RemovableHandle]

    def has_learnt(self) -> bool:
        """Tell whether an optimizer has stepped here, as far as one can see: fused ones leave no trace."""
        return any(own is not None and _version(own) != version for own, version in self._alive())

    def trains(self, module: nn.Module) -> bool:
        """Tell whether this process trains all of another module's parameters."""
        own = {id(each) for each, _ in self._alive()}
        return all(id(parameter) in own for parameter in module.parameters())

    def _alive(self) -> list[tuple[nn.Parameter | None, int]]:
        return [(own(), version) for own, version in self.own]


_stale: weakref.WeakKeyDictionary[nn.Module, _Stale] = weakref.WeakKeyDictionary()


def mark_stale(stages: Stages, held: Sequence[int]) -> None:
    """Note that a step has run: other processes' stages are about to learn there, and not here.

    Args:
        stages: the model, split.
        held: the stages that this process trains.
    """
    others = [module for stage, module in enumerate(stages.modules) if stage not in held]
    for module in _looked_after(stages, [module for module in others if _changes(module)]):
        if module not in _stale:
            own = [parameter for stage in held for parameter in stages.modules[stage].parameters()]
            _stale[module] = _Stale(
                f"{len(held)} of {len(stages)} stages",
                [(weakref.ref(parameter), _version(parameter)) for parameter in own],
                [
                    module.register_state_dict_pre_hook(_warn),
                    module.register_forward_pre_hook(_warn_of_call),
                    module.register_load_state_dict_post_hook(_loaded),
                ],
            )


def clear_stale(stages: Stages, held: Sequence[int]) -> None:
    """Note that all stages are here as they are now."""
    for module in _looked_after(stages, [each for stage, each in enumerate(stages.modules) if stage not in held]):
        _forget(module)


def is_stale(stages: Stages, stage: int) -> bool:
    """Tell whether another process trains a stage, as far as is known here."""
    module = stages.modules[stage]
    known = _stale.get(stages.model) or _stale.get(module)
    return known is not None and not known.trains(module)


def warn_of_stale(stages: Stages, held: Sequence[int]) -> None:
    """Warn if this process is about to train what another one has trained in an earlier pipeline.

    Args:
        stages: the model, split.
        held: the stages that this process is about to train.
    """
    for stage in held:
        known = _stale.get(stages.model) or _stale.get(stages.modules[stage])
        if known is not None and known.has_learnt() and is_stale(stages, stage):
            warnings.warn(
                f"stage {stage} is here as it was before an earlier pipeline, in which another process trained it: it "
                "begins anew from there\n"
                "  try: pipe.state_dict() of the earlier pipeline, in every process, before that is closed",
                stacklevel=5,
            )
            return


def _looked_after(stages: Stages, others: list[nn.Module]) -> list[nn.Module]:
    """Return the model, if other processes train some of its stages; of stages that were given as a list, those."""
    if not others:
        return []
    modules = others if isinstance(stages.model, nn.ModuleList) else [stages.model]
    return [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]  # these take no hooks


def _changes(module: nn.Module) -> bool:
    """Tell whether training changes a module: it has a parameter that learns, or a buffer."""
    return any(each.requires_grad for each in module.parameters()) or next(module.buffers(), None) is not None


def _forget(module: nn.Module) -> None:
    known = _stale.pop(module, None)
    for hook in () if known is None else known.hooks:
        hook.remove()


def _warn(module: nn.Module, _prefix: str, keep_vars: bool) -> None:
    known = _stale.get(module)
    if known is not None and not keep_vars:  # with keep_vars, PyTorch's tracer asks what parameters there are
        warnings.warn(
            f"model.state_dict(): this process has trained {known.trained}, and the others are here as they were "
            "before\n  try: pipe.state_dict(), in every process, before the pipeline is closed: it brings the model up "
            "to date as well",
            stacklevel=3,
        )


def _warn_of_call(module: nn.Module, _given: Any) -> None:
    known = _stale.get(module)
    if known is None:  # a copy of a module that was stale
        for number in [number for number, hook in module._forward_pre_hooks.items() if hook is _warn_of_call]:  # noqa: SLF001 - it is where hooks are
            del module._forward_pre_hooks[number]  # noqa: SLF001 - see above
        return
    if torch.compiler.is_compiling():  # that is also so while PyTorch traces or exports a model
        return
    frame, level = sys._getframe(1), 2  # noqa: SLF001 - inspect.stack would read every file
    while frame.f_back is not None and _module_of(frame).startswith("torch."):
        frame, level = frame.f_back, level + 1
    if not _module_of(frame).startswith("pipelab."):  # which asks for shapes
        warnings.warn(
            f"model(x): this process has trained {known.trained}, and the others are here as they were before\n"
            "  try: pipe.forward(x), in every process; or first pipe.state_dict(), which brings the model up to date",
            stacklevel=level,
        )


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def _loaded(module: nn.Module, keys: Any) -> None:
    if not keys.missing_keys:
        _forget(module)


def _version(parameter: nn.Parameter) -> int:
    """Return how often a parameter was written into."""
    return 0 if parameter.is_inference() else parameter._version  # noqa: SLF001 - there is no public way
