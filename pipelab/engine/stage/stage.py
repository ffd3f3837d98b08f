"""One stage of the model: its forward on a detached input, its backward from the gradient that comes back.

    F   input --detach--> leaf --module--> output --> to the next stage, which detaches it
    B   gradient of the output --autograd--> leaf.grad --> to the stage before
    I   likewise, as far as leaf.grad needs it; W does what is left

The autograd graph of a micro-batch lives from its forward to its backward, within one stage.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipelab.engine.stage.autograd import run_backward
from pipelab.engine.stage.errors import layer_of, raised_by_the_call
from pipelab.engine.stage.loss import Loss
from pipelab.engine.stage.pytree import hides_learning_tensors, map_tensors, rebuild, take_apart, tensors_of
from pipelab.engine.stage.split_backward import Branch, input_gradients, weight_gradients
from pipelab.errors import EngineError

__all__ = ["Stage"]

_NOTHING_TO_TAKE = (type(None), bool, int, float, complex, str, bytes)
"""What no next stage can go on with."""


class Stage:
    """A stage's module, and how to run it forward and backward one micro-batch at a time.

    What a forward keeps for its backward goes into the caller's `kept`, so that an abandoned step leaves nothing here.
    """

    __slots__ = ("clones_input", "index", "is_first", "is_last", "module")

    def __init__(self, index: int, module: nn.Module, stages: int) -> None:
        """Wrap a module as stage `index` of `stages`."""
        self.index = index
        self.module = module
        self.is_first = index == 0
        self.is_last = index == stages - 1
        # A module that writes into its input would write into a leaf, which autograd forbids: give it a copy.
        self.clones_input = any(getattr(part, "inplace", False) for part in module.modules())

    def forward(self, microbatch: int, given: Any, kept: dict[int, Any], loss: Loss) -> Any:
        """Run one micro-batch forward; return the output. Whoever takes it must detach it; the model's own is detached.

        What the caller keeps of a step has no history: it would hold the last stage's inputs until the step's end.
        """
        leaves: list[torch.Tensor | None] = []
        entry = given
        if not self.is_first:
            entry, leaves = _leaves(given)
        if self.clones_input:
            entry = map_tensors(torch.clone, entry)
        output = self._call(entry)
        if self.is_last:
            kept[microbatch] = (leaves, loss.of(microbatch, output))
            return map_tensors(torch.Tensor.detach, output)
        if not isinstance(output, torch.Tensor):
            self._require_visible(output)
        kept[microbatch] = (leaves, output)
        return output

    def backward(self, microbatch: int, gradients: Any, kept: dict[int, Any], loss: Loss) -> Any:
        """Run one micro-batch backward (`B`); return the gradient of the stage's input.

        Args:
            microbatch: which one.
            gradients: those of the stage's floating-point outputs, in order; nothing on the last stage.
            kept: what `forward` kept.
            loss: the step's loss.
        """
        leaves, output = kept.pop(microbatch)
        outputs, starts = self._starts(microbatch, output, gradients, loss)
        if outputs:
            run_backward(outputs, starts)
        return _handed_back([None if leaf is None else leaf.grad for leaf in leaves])

    def backward_input(self, microbatch: int, gradients: Any, kept: dict[int, Any], loss: Loss) -> Any:
        """Run one micro-batch backward as far as the gradient of the stage's input (`I`), and return that."""
        leaves, output = kept.pop(microbatch)
        outputs, starts = self._starts(microbatch, output, gradients, loss)
        inputs = [leaf for leaf in leaves if leaf is not None]
        if not outputs or not inputs:
            found: list[torch.Tensor | None] = [None] * len(inputs)
            kept[microbatch] = [Branch(outputs, starts)]
        else:
            found, kept[microbatch] = input_gradients(outputs, starts, inputs)
        each = iter(found)
        return _handed_back([None if leaf is None else next(each) for leaf in leaves])

    def backward_weight(self, microbatch: int, _gradients: None, kept: dict[int, Any], _loss: Loss) -> None:
        """Run what `backward_input` left of one micro-batch (`W`): the gradients of the stage's weights."""
        weight_gradients(kept.pop(microbatch))

    def evaluate(self, microbatch: int, given: Any, kept: dict[int, Any], _loss: Loss | None) -> Any:
        """Run one micro-batch forward, without gradients; keep nothing but what an output's memory looked like.

        Raises:
            EngineError: if the stage writes into an output that it has given for an earlier micro-batch.
        """
        earlier = [each for handed in kept.values() for each in handed if each.tensor() is not None]
        in_use = [each.tensor() for each in earlier]  # it stays so until the stage has run
        made = self._call(map_tensors(torch.clone, given) if self.clones_input else given)
        # Only a strided tensor lies in one place, which can be asked for: a sparse one has no storage of its own.
        outputs = [each for each in tensors_of(made) if each.layout is torch.strided and not each.is_inference()]
        places = {tensor.data_ptr() for tensor in outputs}
        for each, tensor in zip(earlier, in_use, strict=True):
            if tensor is not None and tensor._version != each.version and tensor.data_ptr() in places:  # noqa: SLF001 - there is no public way
                raise EngineError(
                    "the stage wrote into an output that it had given for an earlier micro-batch, which may still be "
                    "read\n  try: clone what the stage keeps and goes on writing into, before it returns it"
                )
        kept[microbatch] = [_Handed(weakref.ref(tensor), tensor._version) for tensor in outputs]  # noqa: SLF001
        return made

    def _call(self, entry: Any) -> Any:
        """Run the module; an error says in which of its layers it was raised.

        Raises:
            EngineError: if it returns nothing for the next stage.
        """
        try:
            output = self.module(entry)
        except Exception as error:
            if layer := layer_of(error, self.module):
                error.add_note(f"in layer {layer}")
            if isinstance(error, TypeError) and isinstance(entry, tuple) and raised_by_the_call(error):
                error.add_note(f"a stage is called with one argument, which is a tuple of {len(entry)} here")
            raise
        if not self.is_last and isinstance(output, _NOTHING_TO_TAKE):
            raise EngineError(
                f"stage {self.index} returned {output!r:.40}, not a tensor: does the forward of its last layer end in "
                "a return?"
            )
        return output

    def _require_visible(self, output: Any) -> None:
        """Refuse objects whose tensors are not seen.

        Raises:
            EngineError: saying what to return instead.
        """
        parts, _ = take_apart(output)
        hiding = next((part for part in parts if hides_learning_tensors(part)), None)
        if hiding is not None:
            name = type(hiding).__name__
            raise EngineError(
                f"stage {self.index} returned an object of class {name}, whose tensors are not seen: the stages before "
                "would not learn from their gradients\n  try: return a tensor, or tensors in tuples, lists and dicts; "
                f"if {name} is a dataclass, torch.export.register_dataclass({name}) lets them be seen"
            )

    def _starts(
        self, microbatch: int, output: Any, gradients: Any, loss: Loss
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Return where a backward starts: the loss, or the outputs that have a history and got a gradient."""
        if self.is_last:
            return (output,), (loss.gradient(microbatch, output),)
        if isinstance(output, torch.Tensor):
            return ((output,), (gradients,)) if gradients is not None and output.requires_grad else ((), ())
        outputs = tensors_of(output)
        grads = gradients if isinstance(gradients, list) else [gradients]
        pairs = [
            (tensor, grad)
            for tensor, grad in zip(outputs, grads, strict=True)
            if grad is not None and tensor.requires_grad
        ]
        return [tensor for tensor, _ in pairs], [grad for _, grad in pairs]


@dataclass(frozen=True, slots=True)
class _Handed:
    """An output that others may still read, and how often its memory had been written into when it was given."""

    tensor: weakref.ref[torch.Tensor]
    version: int


def _handed_back(gradients: list[torch.Tensor | None]) -> Any:
    """Return the gradients of a stage's inputs as the stage before takes them: one as it is, several as a list."""
    return gradients[0] if len(gradients) == 1 else gradients


def _leaves(given: Any) -> tuple[Any, list[torch.Tensor | None]]:
    """Return the input with what learns as new leaves, and those leaves.

    There is a leaf, or `None`, for each tensor: integers never learn, nor does what only frozen stages have made, so
    that a loss which depends on nothing else is found to have no history.
    """
    if isinstance(given, torch.Tensor):
        leaf = given.detach().requires_grad_(given.requires_grad)
        return leaf, [leaf if leaf.requires_grad else None]
    parts, spec = take_apart(given)
    entry = [
        part.detach().requires_grad_(part.requires_grad) if isinstance(part, torch.Tensor) else part for part in parts
    ]
    leaves = [part if part.requires_grad else None for part in entry if isinstance(part, torch.Tensor)]
    return rebuild(entry, spec), leaves
