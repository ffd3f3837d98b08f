"""All private names of PyTorch's autograd that pipelab uses, and the settings of a thread for it.

`torch.autograd.backward` checks and converts in Python before it enters the engine, holding the interpreter lock that
every rank needs: with it, a GPipe step of 16 small backwards took 4.35 ms instead of 3.70. There is no public way to
get the hooks of `torch.autograd.graph.saved_tensors_hooks` in a thread, or the nodes that a backward will run. A test
checks each name.

As in plain training, forwards and losses run under the caller's autocast and backwards do not: a backward computes in
the types of its forward. Hooks on saved tensors, such as `torch.autograd.graph.save_on_cpu`, pack in the forward and
unpack in the backward; several workers may call them at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
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


@dataclass(frozen=True, slots=True)
class CallerContext:
    """The caller's autocast, one for each kind of device, and its hooks on saved tensors."""

    autocast: tuple[partial[torch.autocast], ...] = ()
    saving: SavingHooks | None = None

    @classmethod
    def capture(cls, kinds: Iterable[str]) -> CallerContext:
        """Return the settings of this thread, for these kinds of device."""
        cache = torch.is_autocast_cache_enabled()
        return cls(
            tuple(
                partial(torch.autocast, kind, dtype=torch.get_autocast_dtype(kind), cache_enabled=cache)
                for kind in sorted(set(kinds))
                if torch.is_autocast_enabled(kind)
            ),
            saving_hooks(),
        )

    @property
    def types(self) -> set[torch.dtype]:
        """What autocast casts to."""
        return {each.keywords["dtype"] for each in self.autocast}

    def enter(self, stack: ExitStack) -> None:
        """Apply the settings in this thread until the stack closes."""
        for context in self.autocast:
            stack.enter_context(context())
        if self.saving is not None:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self.saving))

    @contextmanager
    def autocast_off(self) -> Iterator[None]:
        """Return a context without autocast, which does not clear autocast's cache of weights."""
        with ExitStack() as stack:
            for context in self.autocast:
                stack.enter_context(context(enabled=False))
            yield
