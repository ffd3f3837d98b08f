"""Split backward: the gradient of a stage's input now (`I`), the gradients of its weights later (`W`).

The *trunk* is the part of the graph between the stage's outputs and its input; *branches* end at weights. A node of the
trunk from which a branch leaves is a *fork*, such as a linear layer.

        outputs
           │   gradients
         fork ──── weight, bias        I runs down the trunk, and stores the gradient at every fork.
           │                           W runs every fork again, its branch alone, from that gradient.
         ReLU
           │
         fork ──── weight, bias
           │
         input

Autograd asks a node only for the gradients that it needs, so a linear layer computes its input's gradient in `I` and
its weight's in `W`. An operation that always computes all its gradients together (an LSTM, some attention kernels) does
so in `I` and again in `W`: the numbers are the same, and each is added once, but it takes longer.

Some weights get their gradient in `I` nevertheless, and `W` only adds it to `.grad`:

- the weights of a fork whose backward is Python code of the user's (a custom function), or that unpacks saved tensors
  by a hook (a checkpoint would run its forward again for each fork);
- weights that several forks share: one use may lie behind the other, and running the upper fork for the weight alone
  would walk down the trunk again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.checkpoint import checkpoint

from pipelab.engine.stage.autograd import End, captured_gradients, run_backward, unpacked


@dataclass(slots=True)
class Branch:
    """What `I` leaves for `W`."""

    ends: Sequence[End]  # where to start
    gradients: Sequence[torch.Tensor | None] = ()  # the gradients there, or `None`; empty until they are known
    leaves: Sequence[GradientEdge] = ()  # the leaves whose `.grad` to add to; empty for all that can be reached


def input_gradients(
    outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor | None], list[Branch]]:
    """Run a stage's backward as far as its inputs need it."""
    graph = _Graph(outputs)
    entries = [graph.leaves.get(id(each)) for each in inputs]
    trunk = graph.above_all([entry for entry in entries if entry is not None])
    if not trunk:
        return [None] * len(inputs), [Branch(outputs, gradients)]
    late, early = _branches(graph, trunk, gradients)
    if graph.runs_as_a_whole or any(_tensor_of(leaf.node)._backward_hooks for leaf in early):  # noqa: SLF001
        run_backward(outputs, gradients)
        return [each.grad for each in inputs], []
    forks = [branch for branch in late if not branch.gradients]
    wanted = [GradientEdge(entry, 0) for entry in entries if entry is not None] + early
    for fork in forks:
        wanted.extend(fork.ends)  # type: ignore[arg-type]  # a fork's ends are edges
    found = iter(captured_gradients(outputs, gradients, wanted, keep_graph=bool(forks)))
    arrived = [None if entry is None else next(found) for entry in entries]
    added = Branch(early, [next(found) for _ in early], early)
    for fork in forks:
        fork.gradients = [next(found) for _ in fork.ends]
    return arrived, [added, *late]


def weight_gradients(branches: list[Branch]) -> None:
    """Run what `input_gradients` left, and release it branch by branch."""
    while branches:
        branch = branches.pop()
        pairs = zip(branch.ends, branch.gradients, strict=True)
        there = [(end, gradient) for end, gradient in pairs if gradient is not None]
        if there:
            run_backward([end for end, _ in there], [gradient for _, gradient in there], branch.leaves)


def leaves_of(outputs: Sequence[torch.Tensor]) -> set[int]:
    """Return the identities of all leaves that the history of these tensors ends at."""
    return set(_Graph(outputs).leaves)


def holds_checkpoint(outputs: Sequence[torch.Tensor]) -> bool:
    """Tell whether a part of the history of these tensors is under one of PyTorch's activation checkpoints."""
    graph = _Graph(outputs)
    return graph.runs_as_a_whole or any(
        getattr(hook, "__module__", "") == checkpoint.__module__ for node in graph.above for hook in _unpack_hooks(node)
    )


def custom_functions(outputs: Sequence[torch.Tensor]) -> Counter[str]:
    """Return the autograd functions that PyTorch did not make, by name, in the history of tensors that have one."""
    nodes: Iterable[Any] = _Graph(outputs).above
    own = (type(node).__name__ for node in nodes if isinstance(node, BackwardCFunction))
    return Counter(name.removesuffix("Backward") for name in own)


class _Graph:
    """The autograd graph of one micro-batch in one stage, which the outputs enter at `ends`.

    Gradients arrive at a node's inputs with the numbers `slots`, from the nodes `above`, and go to those `below`.
    `leaves` has each leaf's node by the identity of its tensor.
    """

    __slots__ = ("above", "below", "ends", "leaves", "slots")

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        """Visit every node once."""
        self.ends = [get_gradient_edge(output) for output in outputs]
        slots: dict[Node, set[int]] = {}
        above: dict[Node, list[Node]] = {}
        below: dict[Node, list[Node]] = {}
        for node, slot, *_ in self.ends:
            slots.setdefault(node, set()).add(slot)
            above[node] = []
        todo = list(above)
        while todo:
            user = todo.pop()
            handed = below[user] = []
            for each, slot in user.next_functions:
                if each is None:
                    continue
                handed.append(each)
                if each in above:
                    slots[each].add(slot)
                    above[each].append(user)
                else:
                    slots[each], above[each] = {slot}, [user]
                    todo.append(each)
        self.slots, self.above, self.below = slots, above, below
        self.leaves = {
            id(_tensor_of(node)): node for node, handed in below.items() if not handed and hasattr(node, "variable")
        }

    def above_all(self, nodes: list[Node]) -> dict[Node, None]:
        """Return these nodes and all from which one of them can be reached, in order."""
        found: dict[Node, None] = {}
        while nodes:
            node = nodes.pop()
            if node not in found:
                found[node] = None
                nodes.extend(self.above[node])
        return found

    @property
    def runs_as_a_whole(self) -> bool:
        """Whether the graph holds a reentrant checkpoint, which adds to `.grad` itself, whatever is asked for."""
        return any(type(node).__name__ == "CheckpointFunctionBackward" for node in self.above)


def _branches(
    graph: _Graph, trunk: dict[Node, None], gradients: Sequence[torch.Tensor]
) -> tuple[list[Branch], list[GradientEdge]]:
    """Return the branches that `W` runs, and the leaves of the others, which get their gradient in `I`."""
    branches: list[Branch] = []
    heads: list[list[Node]] = []  # the first nodes of each
    early: set[int] = set()  # the numbers of those that run in I
    for node in trunk:
        first = [each for each in graph.below[node] if each not in trunk]
        if first:
            if _runs_once(node):
                early.add(len(branches))
            branches.append(Branch([GradientEdge(node, slot) for slot in sorted(graph.slots[node])]))
            heads.append(first)
    for edge, gradient in zip(graph.ends, gradients, strict=True):
        if edge.node not in trunk:  # an output that does not depend on the input
            branches.append(Branch([edge], [gradient]))
            heads.append([edge.node])
    early |= _find_leaves(graph, branches, heads)
    late = [branch for number, branch in enumerate(branches) if branch.leaves and number not in early]
    return late, [leaf for number in sorted(early) for leaf in branches[number].leaves]


def _find_leaves(graph: _Graph, branches: list[Branch], heads: list[list[Node]]) -> set[int]:
    """Find the leaves of each branch below its first nodes; return the numbers of branches that share nodes."""
    leaf_nodes, shared, owner = set(graph.leaves.values()), set[int](), dict[Node, int]()
    for number, (branch, todo) in enumerate(zip(branches, heads, strict=True)):
        leaves: list[GradientEdge] = []
        while todo:
            node = todo.pop()
            if node not in owner:
                owner[node] = number
                todo.extend(graph.below[node])
                if node in leaf_nodes:
                    leaves.append(GradientEdge(node, 0))
            elif owner[node] != number:
                shared |= {number, owner[node]}
        branch.leaves = leaves
    return shared


def _tensor_of(leaf: Any) -> torch.Tensor:
    return leaf.variable  # type: ignore[no-any-return]


@cache
def _names_of_saved(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _unpack_hooks(node: Any) -> Iterator[Any]:
    """Yield the hooks by which a node unpacks what it saved: one that saved nothing, or no tensor, has none there."""
    for name in _names_of_saved(type(node)):  # type: ignore[arg-type]  # a class is hashable
        saved = getattr(node, name)
        for each in saved if isinstance(saved, (list, tuple)) else (saved,):
            hook = getattr(each, "unpack_hook", None)
            if hook is not None:
                yield hook


def _runs_once(node: Any) -> bool:
    return isinstance(node, BackwardCFunction) or any(hook is not unpacked for hook in _unpack_hooks(node))
