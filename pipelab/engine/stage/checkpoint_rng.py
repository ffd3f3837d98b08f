"""Random numbers under an activation checkpoint, where several ranks draw from one generator.

A checkpoint runs its part of a stage twice, and resets the random generator for the second run. A generator belongs to
a device, not to a thread: while other ranks use it, the second run drops other numbers than the first, and the
gradients belong to no forward. So if the history of a step's first micro-batch has a checkpoint, its backward runs
under a mode that refuses random draws: an ordinary backward draws nothing. The search for a checkpoint is slow, so it
runs in the first step, and again when a layer's training mode has changed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipelab.engine.stage.loss import Loss
from pipelab.engine.stage.pytree import tensors_of
from pipelab.engine.stage.split_backward import holds_checkpoint
from pipelab.engine.stage.stage import Stage
from pipelab.errors import EngineError

__all__ = ["WatchedStage", "watched"]

_one_at_a_time = threading.Lock()
"""Held by the stage that runs under the mode: PyTorch stores for the whole process whether any thread does, and two
threads that enter and leave in turn would leave it set for ever."""


def watched(
    runners: Mapping[tuple[int, int], Stage], devices: Sequence[torch.device]
) -> dict[tuple[int, int], WatchedStage]:
    """Return, by stage and rank, what runs a step's first micro-batch where ranks share a random generator."""
    shared = [_shared(devices, rank) for rank in range(len(devices))]
    return {place: WatchedStage(runner, shared[place[1]]) for place, runner in runners.items() if shared[place[1]]}


def _shared(devices: Sequence[torch.device], rank: int) -> set[torch.device]:
    """Return the devices whose generators a rank shares with others: the processor, and perhaps its own."""
    shared = {torch.device("cpu")} if len(devices) > 1 else set()
    return shared | {devices[rank]} if devices.count(devices[rank]) > 1 else shared


class WatchedStage:
    """Runs the first micro-batch of each step as a stage does, and refuses random numbers under a checkpoint."""

    __slots__ = ("_holds_checkpoint", "_layers", "_modes", "_module", "_shared", "_stage", "forward")

    def __init__(self, stage: Stage, shared: set[torch.device]) -> None:
        """Watch a stage; `shared` are the devices whose random generators other ranks use too."""
        self.forward = stage.forward
        self._stage = stage
        self._shared = shared
        self._module: object = None
        self._modes: list[bool] = []
        self._holds_checkpoint = False

    def backward(self, microbatch: int, gradients: Any, kept: dict[int, Any], loss: Loss) -> Any:
        """Run one micro-batch backward (`B`)."""
        self._look(kept[microbatch])
        return self._run(self._stage.backward, microbatch, gradients, kept, loss)

    def backward_input(self, microbatch: int, gradients: Any, kept: dict[int, Any], loss: Loss) -> Any:
        """Run the input gradient (`I`)."""
        self._look(kept[microbatch])
        return self._run(self._stage.backward_input, microbatch, gradients, kept, loss)

    def backward_weight(self, microbatch: int, gradients: None, kept: dict[int, Any], loss: Loss) -> None:
        """Run the weight gradients (`W`)."""
        self._run(self._stage.backward_weight, microbatch, gradients, kept, loss)

    def _look(self, forward: tuple[Any, Any]) -> None:
        """Look for a checkpoint in the history of what a forward kept, unless that has been done in these modes."""
        if self._module is not self._stage.module:
            self._module, self._layers, self._modes = self._stage.module, list(self._stage.module.modules()), []
        modes = [layer.training for layer in self._layers]
        if modes != self._modes:
            _, output = forward
            self._modes = modes
            self._holds_checkpoint = holds_checkpoint([each for each in tensors_of(output) if each.requires_grad])

    def _run(self, act: Callable[..., Any], *given: Any) -> Any:
        if not self._holds_checkpoint:
            return act(*given)
        with _one_at_a_time, _RefusesDraws(self._stage.index, self._shared):
            return act(*given)


class _RefusesDraws(TorchDispatchMode):
    """Refuses operations of this thread that draw from the generators of some devices."""

    supports_higher_order_operators = True  # flex attention is one, and draws nothing

    def __init__(self, stage: int, devices: set[torch.device]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch's has no annotations
        self._stage = stage
        self._devices = devices

    def __torch_dispatch__(
        self, operation: Any, _types: Any, args: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        made = operation(*args, **(named or {}))
        if _draws(operation, args, named or {}) and any(each.device in self._devices for each in tensors_of(made)):
            raise EngineError(
                f"stage {self._stage} draws random numbers under an activation checkpoint ({operation}), from a "
                "generator that it shares with the other ranks: the checkpoint's second forward would draw other "
                "numbers than the first, and the gradients would be wrong\n"
                "  try: model.eval() or p=0 for the dropout; no checkpoint around it; a GPU for each rank; or "
                "engine='torch', where each rank is a process with its own generator"
            )
        return made


def _draws(operation: Any, args: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Return whether an operation draws from the generator of its device.

    PyTorch tags all operations that may: also a dropout or an attention that drops nothing, and an attention's
    backward, which repeats its forward's numbers from their seed.
    """
    if torch.Tag.nondeterministic_seeded not in getattr(operation, "tags", ()) or "backward" in str(operation):
        return False
    arguments = operation._schema.arguments  # noqa: SLF001 - there is no public way to learn their names
    given = {each.name: each.default_value for each in arguments if each.has_default_value()}
    given |= zip((each.name for each in arguments), args, strict=False)
    given |= named
    at_rest = any(given.get(name) == 0 for name in ("dropout_p", "dropout", "train", "training"))
    return not at_rest and given.get("generator") is None
