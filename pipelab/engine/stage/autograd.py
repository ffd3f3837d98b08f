"""Private names of PyTorch's autograd, which stand here alone: its engine, and the hooks on saved tensors.

`torch.autograd.backward` checks and converts in Python before it enters the engine, holding the interpreter lock that
every rank needs: with it, a GPipe step of 16 small backwards took 4.35 ms instead of 3.70. There is no public way to
ask for the hooks of `torch.autograd.graph.saved_tensors_hooks` that hold in a thread, or for the nodes that a backward
will run. A test checks what is expected of each name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

__all__ = ["End", "SavingHooks", "captured_gradients", "run_backward", "saving_hooks", "will_run"]

SavingHooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""What packs a tensor that autograd saves, and what unpacks it."""

End = torch.Tensor | GradientEdge
"""Where a backward starts: a tensor that has a history, or a place in the graph."""

_enter_engine = torch.autograd.Variable._execution_engine.run_backward  # noqa: SLF001 - see above


def run_backward(
    outputs: Sequence[End], gradients: Sequence[torch.Tensor], leaves: Sequence[GradientEdge] = ()
) -> None:
    """Add to `.grad` of leaves, by default of all, as `torch.autograd.backward(outputs, gradients, leaves)` does."""
    _enter_engine(
        tuple(outputs),
        tuple(gradients),
        False,  # noqa: FBT003 - retain_graph
        False,  # noqa: FBT003 - create_graph
        tuple(leaves),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def saving_hooks() -> SavingHooks | None:
    """Return the hooks on saved tensors that hold in this thread: the innermost pair, as autograd itself applies it."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)  # noqa: SLF001, FBT003 - see above


def will_run(node: Node) -> bool:
    """Tell, inside a backward, whether it will run a node that is no leaf."""
    return torch._C._will_engine_execute_node(node)  # noqa: SLF001 - see above


def captured_gradients(
    outputs: Sequence[End], gradients: Sequence[torch.Tensor], wanted: Sequence[GradientEdge], *, keep_graph: bool
) -> list[torch.Tensor | None]:
    """Return the gradients that arrive at places in the graph, `None` where none does, as `torch.autograd.grad` does.

    Args:
        outputs: where to start.
        gradients: one for each, of the same shape.
        wanted: the places: input `output_nr` of the node `node`. What arrives at a node that must run to reach another
            place is what arrives before the node's hooks see it.
        keep_graph: whether the graph can be run through again.
    """
    return list(
        _enter_engine(
            tuple(outputs),
            tuple(gradients),
            keep_graph,
            False,  # noqa: FBT003 - create_graph
            tuple(wanted),
            allow_unreachable=True,
            accumulate_grad=False,
        )
    )
