"""One stage of the model: its forward on a detached input, its backward from the gradient of its output.

    F   input --detach--> leaf --module--> output --> to the next stage, which detaches it
    B   gradient of the output --autograd--> leaf.grad --> to the stage before
    C   if there is one, F keeps its input only, without history; C does what F does otherwise, but hands nothing on
    I   likewise, as far as leaf.grad needs it; W does the rest

The autograd graph of a micro-batch lives from its forward to its backward, within one stage.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from ctypes import string_at
from typing import Any
from zlib import crc32

import torch
from torch import nn
from torch.nn.utils.stateless import _reparametrize_module

from pipelab.engine.stage.autograd import run_backward
from pipelab.engine.stage.errors import layer_of
from pipelab.engine.stage.loss import Loss
from pipelab.engine.stage.pytree import map_tensors, rebuild, take_apart, tensors_of
from pipelab.engine.stage.slices import backward_of, forward_of
from pipelab.engine.stage.split_backward import Branch, input_gradients, weight_gradients
from pipelab.errors import EngineError

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
"""What an output may hold besides tensors."""

_RETURNED = -1
"""The key in `kept` of the memory of all outputs of a stage in this step; other keys are micro-batches."""

_HANDED_ON = -2
"""The key in `kept` of the checksums of what the stage has handed on, by micro-batch."""

RETURN_A_CLONE = "return a clone of any tensor that the stage writes into again"

_NEVER: tuple[Callable[[], Any], int] = (lambda: None, 0)


class Stage:
    """A stage's module, and how to run it forward and backward one micro-batch at a time.

    What a forward stores for its backward goes into the caller's `kept`, so that a failed step leaves nothing here.
    `names` has the whole model's names for the module's own, for messages. `steps` counts the steps that have begun.
    `earlier` has, by micro-batch, the earlier slices of its sequence, if sequences are cut into slices. `recomputed`
    has the micro-batches whose forward runs again (`C`). `keywords` has what the module takes by name, by micro-batch.
    """

    def __init__(self, index: int, module: nn.Module, stages: int) -> None:
        self.index = index
        self.module = module
        self.names: Mapping[str, str] = {}
        self.steps = 0
        self.earlier: Sequence[Sequence[int]] = ()
        self.recomputed: Collection[int] = ()
        self.keywords: list[dict[str, Any]] = []
        self.is_first = index == 0
        self.is_last = index == stages - 1
        # A module that writes into its input would write into a leaf, which autograd forbids: it gets a copy.
        self.clones_input = any(getattr(part, "inplace", False) for part in module.modules())

    def forward(self, microbatch: int, given: Any, kept: dict[int, Any], loss: Loss) -> Any:
        """Run one micro-batch forward; return the output, which the next stage must detach."""
        again = microbatch in self.recomputed
        output = (self._run_without_history if again else self._run)(microbatch, given, kept, loss)
        if _RETURNED not in kept and loss is not None:  # without one, the torch engine learns shapes
            self.steps += 1
        _require_unwritten(output, kept.setdefault(_RETURNED, {}))
        if self.is_last:
            return map_tensors(torch.Tensor.detach, output)
        if self.steps == 1 and not again:  # only in the first step, and in `verify`: it waits for a GPU
            kept.setdefault(_HANDED_ON, {})[microbatch] = _checksums(output)
        return output

    def recompute(self, microbatch: int, _given: None, kept: dict[int, Any], loss: Loss) -> None:
        """Run one micro-batch forward again (`C`) from its kept input, for `B`; what it writes into buffers is lost."""
        (given,) = kept.pop(microbatch)
        buffers = {name: each.clone() for name, each in self.module.named_buffers()}
        with _reparametrize_module(self.module, buffers, tie_weights=True):
            self._run(microbatch, given, kept, loss)

    def backward(self, microbatch: int, gradients: Any, kept: dict[int, Any], loss: Loss) -> Any:
        """Run one micro-batch backward (`B`); return the gradient of the stage's input."""
        leaves, output = self._take(microbatch, kept)
        outputs, starts = self._starts(microbatch, output, gradients, loss)
        with backward_of(kept, microbatch) if self.earlier else nullcontext():
            if outputs:
                run_backward(outputs, starts)
        return _as_sent([None if leaf is None else leaf.grad for leaf in leaves])

    def backward_input(self, microbatch: int, gradients: Any, kept: dict[int, Any], loss: Loss) -> Any:
        """Run one micro-batch backward as far as the gradient of the stage's input (`I`), and return that."""
        leaves, output = self._take(microbatch, kept)
        outputs, starts = self._starts(microbatch, output, gradients, loss)
        inputs = [leaf for leaf in leaves if leaf is not None]
        found: list[torch.Tensor | None] = [None] * len(inputs)
        with backward_of(kept, microbatch) if self.earlier else nullcontext():
            if outputs and inputs:
                found, kept[microbatch] = input_gradients(outputs, starts, inputs)
            elif outputs and self.earlier:  # earlier slices wait for their part of it, which is no work for later
                run_backward(outputs, starts)
                kept[microbatch] = []
            else:
                kept[microbatch] = [Branch(outputs, starts)]
        each = iter(found)
        return _as_sent([None if leaf is None else next(each) for leaf in leaves])

    def backward_weight(self, microbatch: int, _gradients: None, kept: dict[int, Any], _loss: Loss) -> None:
        """Run the rest of one micro-batch's backward (`W`): the gradients of the stage's weights."""
        weight_gradients(kept.pop(microbatch))

    def update(self, _microbatch: int, _given: None, _kept: dict[int, Any], _loss: Loss) -> Any:
        """Leave the weights as they are (`U`): without an optimizer, a step only adds up gradients."""

    def evaluate(self, microbatch: int, given: Any, kept: dict[int, Any], loss: Loss | None) -> Any:
        """Run one micro-batch forward, without gradients; compute its loss, if one is asked for."""
        made = self._call(microbatch, given, kept)
        _require_unwritten(made, kept.setdefault(_RETURNED, {}))
        if self.is_last and loss is not None:
            loss.of(microbatch, made)
        return made

    def _run(self, microbatch: int, given: Any, kept: dict[int, Any], loss: Loss | None = None) -> Any:
        """Return the output for one micro-batch; keep the leaves of its input, and the output, or its loss."""
        leaves: list[torch.Tensor | None] = []
        if not self.is_first:
            given, leaves = _leaves(given)
        output = self._call(microbatch, given, kept)
        kept[microbatch] = (leaves, output if loss is None or not self.is_last else loss.of(microbatch, output))
        return output

    def _run_without_history(self, microbatch: int, given: Any, kept: dict[int, Any], _loss: Loss) -> Any:
        """Return the output for one micro-batch, and keep the input for `C`."""
        before = versions_of(given)
        with torch.no_grad():
            output = self._run(microbatch, given, kept)
        if versions_of(given) != before:
            raise EngineError(
                "the stage wrote into its input in a forward that runs again (C): C would begin from other numbers "
                "than F, and the gradients would be wrong\n  try: let the stage write into a clone of its input, "
                "or use a plan that does not run this stage again"
            )
        kept[microbatch] = (given,)
        learns = any(each.requires_grad for each in (*self.module.parameters(), *tensors_of(given)))
        return map_tensors(asking, output) if learns else output

    def receive_keywords(self, microbatch: int, receive: Callable[[Any], Any] | None) -> None:
        """Move a micro-batch's keywords to the rank's device."""
        if receive is not None and self.keywords:
            self.keywords[microbatch] = receive(self.keywords[microbatch])

    def _call(self, microbatch: int, entry: Any, kept: dict[int, Any]) -> Any:
        if self.clones_input:
            entry = map_tensors(torch.clone, entry)
        try:
            with forward_of(kept, microbatch, self.earlier[microbatch]) if self.earlier else nullcontext():
                output = self.module(entry, **(self.keywords[microbatch] if self.keywords else {}))
        except Exception as error:
            if layer := layer_of(error, self.module, self.names):
                error.add_note(f"in layer {layer}")
            raise
        if not self.is_last and not isinstance(output, torch.Tensor):
            self._require_tensors(output)
        return output

    def _require_tensors(self, output: Any) -> None:
        """Refuse an output that holds other objects than tensors in tuples, lists and dicts, and plain values."""
        if isinstance(output, _PLAIN):
            raise EngineError(
                f"stage {self.index} returned {output!r:.40}, not a tensor: does the forward of its last layer end in "
                "a return?"
            )
        parts, _ = take_apart(output)
        strange = next((part for part in parts if not isinstance(part, (torch.Tensor, *_PLAIN))), None)
        if strange is not None:
            name = type(strange).__name__
            raise EngineError(
                f"stage {self.index} returned an object of class {name}, and tensors inside it would get no gradients\n"
                "  try: return a tensor, or tensors in tuples, lists and dicts; if it is a dataclass, call "
                f"torch.export.register_dataclass({name}) once"
            )

    def _take(self, microbatch: int, kept: dict[int, Any]) -> Any:
        """Return what a forward kept; refuse an output that has other contents than when it was handed on."""
        leaves, output = kept.pop(microbatch)
        sums = kept.get(_HANDED_ON, {}).pop(microbatch, None)
        if sums is not None and sums != _checksums(output):
            raise EngineError(
                "the stage's output was written into after the stage had returned it, so another stage may have read "
                f"other numbers\n  try: {RETURN_A_CLONE}; or, if the next stage writes into its input, let it write "
                "into a clone"
            )
        return leaves, output

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


def _require_unwritten(output: Any, returned: dict[int, tuple[Callable[[], Any], int]]) -> None:
    """Refuse memory that the stage returned for an earlier micro-batch, wrote into, and returns again.

    `returned` has, by address, the memory of this step's outputs so far, and how often each had been written into.
    """
    now: dict[int, tuple[Callable[[], Any], int]] = {}
    for tensor in (output,) if isinstance(output, torch.Tensor) else tensors_of(output):
        if type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_inference():
            place, version = tensor.data_ptr(), tensor._version  # noqa: SLF001 - there is no public way
            memory, before = returned.get(place, _NEVER)
            if before != version and place and memory() is not None:  # still the same memory: it has not been freed
                raise EngineError(
                    "the stage wrote into its output for an earlier micro-batch, which another stage may not have read "
                    f"yet\n  try: {RETURN_A_CLONE}"
                )
            now[place] = (weakref.ref(tensor.untyped_storage()), version)
    returned.update(now)


def versions_of(given: Any) -> list[int]:
    """Return how often each tensor has been written into; an inference tensor has no count."""
    return [each._version for each in tensors_of(given) if not each.is_inference()]  # noqa: SLF001 - as above


def _checksums(output: Any) -> list[int]:
    """Return a checksum of each tensor's bytes. `torch.hash_tensor` would not do: it gives 0 for [1, 1] and [0, 0]."""
    known = (each for each in tensors_of(output) if type(each) is torch.Tensor and each.layout is torch.strided)
    lines = (each.detach().cpu().contiguous() for each in known)
    return [crc32(string_at(each.data_ptr(), each.nbytes)) for each in lines]


def asking(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without history, which asks for a gradient if there is one of its type."""
    return tensor.detach().requires_grad_(tensor.is_floating_point() or tensor.is_complex())


def _as_sent(gradients: list[torch.Tensor | None]) -> Any:
    """Return the gradients of a stage's inputs as the previous stage expects them: one alone, several as a list."""
    return gradients[0] if len(gradients) == 1 else gradients


def _leaves(given: Any) -> tuple[Any, list[torch.Tensor | None]]:
    """Return the input with new leaves for its tensors, and those leaves; `None` for a tensor without gradient."""
    if isinstance(given, torch.Tensor):
        leaf = given.detach().requires_grad_(given.requires_grad)
        return leaf, [leaf if leaf.requires_grad else None]
    parts, spec = take_apart(given)
    entry = [
        part.detach().requires_grad_(part.requires_grad) if isinstance(part, torch.Tensor) else part for part in parts
    ]
    leaves = [part if part.requires_grad else None for part in entry if isinstance(part, torch.Tensor)]
    return rebuild(entry, spec), leaves
