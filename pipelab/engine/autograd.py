"""The door to PyTorch's autograd engine.

`torch.autograd.backward` spends some 20 microseconds of Python on checks and conversions before it enters the engine,
all of it holding the interpreter lock that every rank needs. It ends in the call below; that is a private name, so it
stands here alone, and a test holds what is expected of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["run_backward"]

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
