"""All private names of PyTorch's autograd that pipelab uses: its engine, and the hooks on saved tensors.

`torch.autograd.backward` checks and converts in Python before it enters the engine, holding the interpreter lock that
every rank needs: with it, a GPipe step of 16 small backwards took 4.35 ms instead of 3.70. There is no public way to
get the hooks of `torch.autograd.graph.saved_tensors_hooks` in a thread, or the nodes that a backward will run. A test
checks each name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

SavingHooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""The function that packs a tensor that autograd saves, and the one that unpacks it."""

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
    """Return this thread's hooks on saved tensors: the innermost pair, which is the one that autograd applies."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)  # noqa: SLF001, FBT003 - see above


def unpacked(tensor: torch.Tensor) -> torch.Tensor:
    """Unpack a tensor that was packed as it is: `split_backward` knows this hook, and may call it more than once."""
    return tensor


def will_run(node: Node) -> bool:
    """Return, inside a backward, whether it will run a node that is not a leaf."""
    return torch._C._will_engine_execute_node(node)  # noqa: SLF001 - see above


def captured_gradients(
    outputs: Sequence[End], gradients: Sequence[torch.Tensor], wanted: Sequence[GradientEdge], *, keep_graph: bool
) -> list[torch.Tensor | None]:
    """Return the gradients at places in the graph, `None` where there is none, as `torch.autograd.grad` does."""
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
