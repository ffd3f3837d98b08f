"""What cannot be cut into stages: what two of them would share, and hooks that nobody would call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from pipelab.errors import SplitError

__all__ = ["BACKWARD_HOOKS", "refuse_hooks", "refuse_shared"]


def refuse_shared(modules: Sequence[nn.Module], model: nn.Module) -> None:
    """Refuse a parameter or a buffer that two stages use.

    Raises:
        SplitError: with its name and both stages.
    """
    names = {id(tensor): name for name, tensor in reversed(_state(model))}
    owner: dict[int, int] = {}
    for stage, module in enumerate(modules):
        for name, tensor in _state(module):
            first = owner.setdefault(id(tensor), stage)
            if first != stage:
                what = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                raise SplitError(
                    f"{what} {names.get(id(tensor), name)!r} is used by stage {first} and stage {stage}: a {what} "
                    "lives on one stage; cut the model elsewhere, or give each stage its own"
                )


BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", *BACKWARD_HOOKS)


def refuse_hooks(what: str, module: nn.Module, reason: str, kinds: Sequence[str] = _HOOKS) -> None:
    """Refuse a module that carries hooks of these kinds.

    Raises:
        SplitError: naming the kind, and why it would be lost.
    """
    for kind in kinds:
        count = sum(not _is_our_own(hook) for hook in getattr(module, kind).values())
        if count:
            words = kind.strip("_").removesuffix("_hooks").replace("_", "-")
            raise SplitError(
                f"{what} has {count} {words} hook{'s' if count > 1 else ''} that a pipeline would not call, because "
                f"{reason}, or take it off with handle.remove()"
            )


def _is_our_own(hook: Callable[..., object]) -> bool:
    """Tell whether pipelab has put a hook: see `processes.stale`."""
    return str(getattr(hook, "__module__", "")).startswith("pipelab.")


def _state(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the module's parameters and buffers, each under every name that it has."""
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
