"""Random numbers under an activation checkpoint, where several ranks draw from one generator.

A checkpoint runs its part of a stage twice, and for the second time puts the random generator back to where the first
began. A generator belongs to a device, not to a thread: while other ranks use it, the second run drops otherwise than
the first, and the gradients are those of no forward. So such a stage is refused, in a step's first micro-batch:

    0F0 … 3F0   has a generator moved from before the first stage to after the last?
    3B0 … 0B0   if so, and if the stage's history holds a checkpoint, run under a mode that refuses what draws

An ordinary backward draws nothing: what draws there is a checkpoint's second run. The mode is slow, and so is a walk
through the history; a step in which nobody draws pays for two looks at the generator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import string_at
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipelab.engine.stage.loss import Loss
from pipelab.engine.stage.pytree import tensors_of
from pipelab.engine.stage.split_backward import holds_checkpoint
from pipelab.engine.stage.stage import Stage
from pipelab.errors import EngineError

__all__ = ["WatchedStage", "watched"]


def watched(
    runners: Mapping[tuple[int, int], Stage], devices: Sequence[torch.device]
) -> dict[tuple[int, int], WatchedStage]:
    """Return, for stages that share a random generator with other threads, what runs a step's first micro-batch.

    Args:
        runners: by stage and rank, what runs the stage there.
        devices: what each rank runs on.
    """
    shared = [_shared(devices, rank) for rank in range(len(devices))]
    lookout = _Lookout(set().union(*shared))
    return {
        (stage, rank): WatchedStage(runner, shared[rank], lookout)
        for (stage, rank), runner in runners.items()
        if shared[rank]
    }


def _shared(devices: Sequence[torch.device], rank: int) -> set[torch.device]:
    """Return the devices whose generators a rank's thread shares with others: the processor, and perhaps its own."""
    shared = {torch.device("cpu")} if len(devices) > 1 else set()
    return shared | {devices[rank]} if devices.count(devices[rank]) > 1 else shared


class _Lookout:
    """Tells whether anybody has drawn while a step's first micro-batch went forward.

    Attributes:
        drawn: whether anybody has.
        one_at_a_time: held by the one stage that is looked at closely: PyTorch notes for the whole process whether a
            thread is under a mode, and would note it for ever if two came and went crosswise.
    """

    __slots__ = ("_before", "_devices", "drawn", "one_at_a_time")

    def __init__(self, devices: Iterable[torch.device]) -> None:
        """Look at the random generators of these devices."""
        self._devices = list(devices)
        self._before: list[bytes] = []
        self.drawn = False
        self.one_at_a_time = threading.Lock()

    def begin(self) -> None:
        """Note what the generators are at."""
        self._before = self._states()

    def end(self) -> None:
        """Tell whether one has moved."""
        self.drawn = self._states() != self._before

    def _states(self) -> list[bytes]:
        # As bytes: `torch.equal` would let go of the interpreter, for which all ranks wait, and is slower.
        states = [
            torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
            for device in self._devices
        ]
        return [string_at(state.data_ptr(), state.nbytes) for state in states]


class WatchedStage:
    """Runs the first micro-batch of each step as a stage does, and refuses random numbers under a checkpoint."""

    __slots__ = ("_gives_cause", "_lookout", "_shared", "_stage")

    def __init__(self, stage: Stage, shared: set[torch.device], lookout: _Lookout) -> None:
        """Watch a stage; `shared` are the devices whose generators it shares with other threads."""
        self._stage = stage
        self._shared = shared
        self._lookout = lookout
        self._gives_cause = False

    def forward(self, microbatch: int, given: Any, kept: dict[int, Any], loss: Loss) -> Any:
        """Run one micro-batch forward."""
        if self._stage.is_first:
            self._lookout.begin()
        made = self._stage.forward(microbatch, given, kept, loss)
        if self._stage.is_last:
            self._lookout.end()
        return made

    def backward(self, microbatch: int, gradients: Any, kept: dict[int, Any], loss: Loss) -> Any:
        """Run one micro-batch backward (`B`)."""
        self._consider(kept[microbatch])
        return self._run(self._stage.backward, microbatch, gradients, kept, loss)

    def backward_input(self, microbatch: int, gradients: Any, kept: dict[int, Any], loss: Loss) -> Any:
        """Run one micro-batch backward as far as the gradient of the stage's input (`I`)."""
        self._consider(kept[microbatch])
        return self._run(self._stage.backward_input, microbatch, gradients, kept, loss)

    def backward_weight(self, microbatch: int, gradients: None, kept: dict[int, Any], loss: Loss) -> None:
        """Run what `backward_input` left (`W`)."""
        self._run(self._stage.backward_weight, microbatch, gradients, kept, loss)

    def _consider(self, forward: tuple[Any, Any]) -> None:
        """See whether there is cause to look closely, from what a forward kept."""
        _, output = forward
        self._gives_cause = self._lookout.drawn and holds_checkpoint(
            [tensor for tensor in tensors_of(output) if tensor.requires_grad]
        )

    def _run(self, act: Callable[..., Any], *given: Any) -> Any:
        if not self._gives_cause:
            return act(*given)
        with self._lookout.one_at_a_time, _RefusesDraws(self._stage.index, self._shared):
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
                "generator that it shares with the other ranks: the checkpoint's second forward would draw others "
                "than the first, and the gradients would be those of no forward\n"
                "  try: model.eval() or p=0 for the dropout; no checkpoint around what draws; a GPU for each rank; or "
                "engine='torch', where each rank has a process with a generator of its own"
            )
        return made


def _draws(operation: Any, args: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Tell whether an operation draws from the generator of its device.

    PyTorch tags what may: also a dropout or an attention that is told to drop nothing, and an attention's backward,
    which makes its forward's numbers again from their seed.
    """
    if torch.Tag.nondeterministic_seeded not in getattr(operation, "tags", ()) or "backward" in str(operation):
        return False
    arguments = operation._schema.arguments  # noqa: SLF001 - there is no public way to learn their names
    given = {each.name: each.default_value for each in arguments if each.has_default_value()}
    given |= zip((each.name for each in arguments), args, strict=False)
    given |= named
    at_rest = any(given.get(name) == 0 for name in ("dropout_p", "dropout", "train", "training"))
    return not at_rest and given.get("generator") is None
