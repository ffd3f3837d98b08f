"""Random numbers in a forward that runs again: in a `C`, or a checkpoint where ranks draw from one generator.

A checkpoint runs its part of a stage twice, and resets the random generator for the second run. A generator belongs to
a device, not to a thread: while other ranks use it, the second run drops other numbers than the first, and the
gradients belong to no forward. So a step's first micro-batch is watched:

    step         note the state of the generators
    3B0 … 0B0    if one has moved since, and the stage's history holds a checkpoint, refuse what draws

A `C` resets no generator. So it is refused wherever it draws, once anything has drawn.

An ordinary backward draws nothing: what draws there is a checkpoint's second run. The mode is slow, and so is a walk
through the history. A step without a draw costs two looks at the generator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from ctypes import string_at
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipelab.engine.stage.pytree import tensors_of
from pipelab.engine.stage.split_backward import holds_checkpoint
from pipelab.engine.stage.stage import Stage
from pipelab.errors import EngineError


def _shared(devices: Sequence[torch.device], rank: int) -> set[torch.device]:
    """Return the devices whose generators a rank shares with others: the processor, and perhaps its own."""
    shared = {torch.device("cpu")} if len(devices) > 1 else set()
    return shared | {devices[rank]} if devices.count(devices[rank]) > 1 else shared


class Generators:
    """The random generators that ranks share, or that a `C` would draw from.

    `watched` has, by stage and rank, what runs each `C`, and a step's first backwards where a generator is shared.
    """

    def __init__(self, runners: Mapping[tuple[int, int], Stage], devices: Sequence[torch.device]) -> None:
        """Find out which they are; `devices` are what each rank runs on."""
        self.watched: dict[tuple[int, int], _WatchedStage] = {}
        for (stage, rank), runner in runners.items():
            refused = {torch.device("cpu"), devices[rank]} if runner.recomputed else _shared(devices, rank)
            if refused:
                self.watched[stage, rank] = _WatchedStage(runner, refused, self)
        self._devices = set[torch.device]().union(*(each.refused for each in self.watched.values()))
        self._before: list[bytes] = []
        self._moved = False
        # PyTorch notes for the process whether a thread runs under a mode: for ever, if two came and went crosswise.
        self.one_at_a_time = threading.Lock()

    def begin(self) -> None:
        """Note their state: a step begins."""
        self._before = self._states()

    def moved(self) -> bool:
        """Return whether any stage has drawn, in this step or an earlier one; to be asked again when a step has ended.

        In the middle of a step a state may look untouched: while another rank's checkpoint runs again, it is reset.
        """
        self._moved = self._moved or self._states() != self._before
        return self._moved

    def _states(self) -> list[bytes]:
        # As bytes: `torch.equal` would let go of the interpreter, for which all ranks wait, and is slower.
        states = [
            torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
            for device in self._devices
        ]
        return [string_at(state.data_ptr(), state.nbytes) for state in states]


_UNDER_A_CHECKPOINT = (
    "under an activation checkpoint ({}), from a generator that it shares with the other ranks: the checkpoint's "
    "second forward would draw other numbers than the first, and the gradients would be wrong\n"
    "  try: model.eval() or p=0 for the dropout; no checkpoint around it; a GPU for each rank; or engine='torch', "
    "where each rank is a process with its own generator"
)
_IN_C = (
    "in a forward that runs again ({}): C would draw other numbers than F, and the gradients would be wrong\n"
    "  try: model.eval() or p=0 for the dropout; or a plan that does not run this stage again"
)


class _WatchedStage:
    """Runs each `C`, and a step's first micro-batch, and refuses random numbers there or under a checkpoint."""

    __slots__ = ("_generators", "_refuses", "_stage", "refused")

    def __init__(self, stage: Stage, refused: set[torch.device], generators: Generators) -> None:
        self._stage = stage
        self.refused = refused
        self._generators = generators
        self._refuses = False

    def __getattr__(self, name: str) -> Any:
        """Return a method that draws no number in a backward, such as `forward`, from the stage."""
        return getattr(self._stage, name)

    def backward(self, *given: Any) -> Any:
        """Run one micro-batch backward (`B`)."""
        return self._backward(self._stage.backward, *given)

    def backward_input(self, *given: Any) -> Any:
        """Run the input gradient (`I`)."""
        return self._backward(self._stage.backward_input, *given)

    def backward_weight(self, *given: Any) -> None:
        """Run the weight gradients (`W`)."""
        self._run(self._stage.backward_weight, *given)

    def recompute(self, *given: Any) -> None:
        """Run one micro-batch forward again (`C`)."""
        self._refuses = self._generators.moved()
        self._run(self._stage.recompute, *given, where=_IN_C)

    def _backward(
        self, act: Callable[..., Any], microbatch: int, gradients: Any, kept: dict[int, Any], *rest: Any
    ) -> Any:
        """Look for a checkpoint in the history of what a forward kept, if any stage drew."""
        _, output = kept[microbatch]
        self._refuses = self._generators.moved() and holds_checkpoint(
            [tensor for tensor in tensors_of(output) if tensor.requires_grad]
        )
        return self._run(act, microbatch, gradients, kept, *rest)

    def _run(self, act: Callable[..., Any], *given: Any, where: str = _UNDER_A_CHECKPOINT) -> Any:
        if not self._refuses:
            return act(*given)
        with self._generators.one_at_a_time, _RefusesDraws(self._stage.index, self.refused, where):
            return act(*given)


class _RefusesDraws(TorchDispatchMode):
    """Refuses operations of this thread that draw from the generators of some devices."""

    supports_higher_order_operators = True  # flex attention is one, and draws nothing

    def __init__(self, stage: int, devices: set[torch.device], where: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch's has no annotations
        self._stage = stage
        self._devices = devices
        self._where = where

    def __torch_dispatch__(
        self, operation: Any, _types: Any, args: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        made = operation(*args, **(named or {}))
        if _draws(operation, args, named or {}) and any(each.device in self._devices for each in tensors_of(made)):
            raise EngineError(f"stage {self._stage} draws random numbers {self._where.format(operation)}")
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
