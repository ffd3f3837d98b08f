"""The door to what PyTorch's autograd keeps private: its engine, and the hooks on saved tensors.

`torch.autograd.backward` checks and converts in Python before it enters the engine, holding the interpreter lock that
every rank needs: with it, a GPipe step of 16 small backwards took 4.35 ms instead of 3.70. It ends in the call below;
that is a private name, so it stands here alone, and a test holds what is expected of it. The hooks of
`torch.autograd.graph.saved_tensors_hooks` are per thread, and there is no public way to ask which ones hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["SavingHooks", "run_backward", "saving_hooks"]

SavingHooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""What packs a tensor that autograd saves, and what unpacks it."""

_enter_engine = torch.autograd.Variable._execution_engine.run_backward  # noqa: SLF001 - see above


def run_backward(outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """Add to `.grad` of all leaves, as `torch.autograd.backward(outputs, gradients)` does.

    Args:
        outputs: tensors that have a history.
        gradients: one for each, of the same shape.
    """
    _enter_engine(
        tuple(outputs),
        tuple(gradients),
        False,  # noqa: FBT003 - retain_graph
        False,  # noqa: FBT003 - create_graph
        (),  # no chosen inputs: all leaves
        allow_unreachable=True,
        accumulate_grad=True,
    )


def saving_hooks() -> SavingHooks | None:
    """Return the hooks on saved tensors that hold in this thread: the innermost pair, as autograd itself applies it."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)  # noqa: SLF001, FBT003 - see above
