"""A stage on several ranks: the model's own module on the lowest of them, copies of it on the others.

    rank 0 │ the model's own stage ── weight ─┐ one storage, where the device is one,
    rank 2 │ a copy of it ─────────── weight ─┘ and a .grad for each: two ranks never add to one

The first run makes a copy. Every run begins with an update of it: its parameters, buffers, hooks and plain attributes,
such as the training mode, become the model's.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import BuiltinFunctionType, FunctionType
from typing import Any, Literal

import torch
from torch import nn

from pipelab.engine.stage.errors import PARTIAL
from pipelab.engine.stage.loss import Loss
from pipelab.engine.stage.pytree import tensors_of
from pipelab.engine.stage.snapshot import BufferSnapshot
from pipelab.engine.stage.split_backward import leaves_of
from pipelab.engine.stage.stage import Stage
from pipelab.errors import EngineError

__all__ = [
    "Buffers",
    "Runners",
    "copied",
    "refuse_lost_hooks",
    "require_replicable",
    "versions",
    "written",
    "written_error",
]

Buffers = Literal["refuse", "lowest"]
"""The policy for buffers that replicated stages write into."""

_SHARED = (type(None), bool, int, float, complex, str, type, FunctionType, BuiltinFunctionType, torch.Tensor)
"""Attributes that a copy shares with the module; it has copies of other objects."""


class Runners:
    """The runners of all stages on all their ranks.

    Attributes:
        of: by stage and rank, the runner.

    Raises:
        EngineError: if a stage cannot be replicated.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        replicas: Mapping[int, Sequence[int]],
        devices: Sequence[torch.device],
        buffers: Buffers,
    ) -> None:
        self._own = modules
        self._devices = list(devices)
        self._buffers = buffers
        self.of: dict[tuple[int, int], Stage] = {}
        self._copies: dict[tuple[int, int], _Replica] = {}
        self._replicated = {stage: ranks for stage, ranks in replicas.items() if len(ranks) > 1}
        for stage, (lowest, *others) in replicas.items():
            if others:
                require_replicable(stage, modules[stage], replicas[stage], buffers)
            self.of[stage, lowest] = Stage(stage, modules[stage], len(modules))
            for rank in others:
                self._copies[stage, rank] = _Replica(stage, modules[stage], len(modules), rank)
        self.of.update(self._copies)

    def running(self, modules: Sequence[nn.Module], *, learning: bool) -> AbstractContextManager[None]:
        """Return a context that runs these modules, one per stage; all ranks but a stage's lowest run copies of them.

        Raises:
            EngineError: if a copy would lose a hook, or wrote into a buffer although the policy refuses it.
        """
        if not self._copies and modules is self._own:
            return nullcontext()
        return self._running(modules, learning=learning)

    @contextmanager
    def _running(self, modules: Sequence[nn.Module], *, learning: bool) -> Iterator[None]:
        for stage, ranks in self._replicated.items():
            refuse_lost_hooks(stage, modules[stage], ranks)
            require_replicable(stage, modules[stage], ranks, self._buffers)  # it may have been in eval() at first
        for (stage, _), runner in self.of.items():
            runner.module = modules[stage]
        for (stage, rank), replica in self._copies.items():
            replica.follow(modules[stage], self._devices[rank])
        before = {key: versions(replica.module) for key, replica in self._copies.items()}
        guarded = self._replicated if self._buffers == "refuse" else ()
        kept = BufferSnapshot(modules[stage] for stage in guarded)
        try:
            yield
            for (stage, rank), replica in self._copies.items():
                name = written(before[stage, rank], versions(replica.module))
                if name is not None and self._buffers == "refuse":
                    kept.restore()
                    zero = f"\n  {PARTIAL}" if learning else ""
                    rest = f"\n  the model's buffers are restored{zero}"
                    raise written_error(stage, rank, name, rest)
        finally:
            for (stage, _), runner in self.of.items():
                runner.module = self._own[stage]


class _Replica(Stage):
    """Runs a copy of a stage."""

    __slots__ = ("_copy", "_is_apart", "_original", "_rank")

    def __init__(self, index: int, module: nn.Module, stages: int, rank: int) -> None:
        super().__init__(index, module, stages)
        self._rank = rank
        self._original: nn.Module | None = None
        self._copy = module
        self._is_apart = False

    def follow(self, own: nn.Module, device: torch.device) -> None:
        """Run a copy of a module; make a new copy only if it is another module, or has other layers."""
        if self._original is not own or _layers(own) != _layers(self._copy):
            try:
                self._copy = copied(own, device)
            except Exception as error:
                raise EngineError(
                    f"stage {self.index} cannot be copied for rank {self._rank}: {type(error).__name__}: {error}\n"
                    "  try: create the object that cannot be copied in forward, or run the stage on one rank"
                ) from error
            self._original, self._is_apart = own, False
        _update(self._copy, own, device)
        self.module = self._copy

    def forward(self, microbatch: int, given: Any, kept: dict[int, Any], loss: Loss) -> Any:
        """Run one micro-batch forward; after the first one, check that it used the copy's own parameters."""
        made = super().forward(microbatch, given, kept, loss)
        if not self._is_apart and self._original is not None:
            _, output = kept[microbatch]
            used = leaves_of([tensor for tensor in tensors_of(output) if tensor.requires_grad])
            for name, parameter in self._original.named_parameters():
                if id(parameter) in used:
                    raise EngineError(
                        f"the copy of stage {self.index} on rank {self._rank} uses the model's own {name}, and two "
                        "ranks must not add to one .grad: an object that is not copied refers to the module, such as a "
                        "lambda or a compiled function\n"
                        "  try: refer to all modules through self, or run the stage on one rank"
                    )
            self._is_apart = True
        return made


def copied(module: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of a module, to be updated before it runs.

    Its parameters are new objects with separate gradients; on the same device they share storage. Hooks and tensors
    that are plain attributes are shared, everything else is copied.
    """
    memo: dict[int, Any] = {}
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            memo[id(parameter)] = nn.Parameter(parameter.detach().to(device), parameter.requires_grad)
        for buffer in part.buffers(recurse=False):
            memo[id(buffer)] = buffer.detach().to(device, copy=True)
        shared = (each for name, each in vars(part).items() if "_hooks" in name or isinstance(each, torch.Tensor))
        memo.update((id(each), each) for each in shared)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own, about traced modules
        return copy.deepcopy(module, memo)


def _update(replica: nn.Module, own: nn.Module, device: torch.device) -> None:
    """Update a copy from a module that has the same layers, and clear its gradients."""
    buffers = {id(each): each.detach().to(device, copy=True) for each in own.buffers()}
    for ours, theirs in zip(replica.modules(), own.modules(), strict=True):
        vars(ours).update((name, value) for name, value in vars(theirs).items() if isinstance(value, _SHARED))
        for one, other in zip(ours.parameters(recurse=False), theirs.parameters(recurse=False), strict=True):
            one.grad = None
            one.data = other.detach().to(device)
            one.requires_grad = other.requires_grad
            one._backward_hooks = other._backward_hooks  # noqa: SLF001 - there is no public way to ask for hooks
            vars(one).update(vars(other))
        ours._buffers = {name: buffers.get(id(each)) for name, each in theirs._buffers.items()}  # noqa: SLF001


def _layers(module: nn.Module) -> list[tuple[str, ...]]:
    """Return each layer's class and the names of its tensors: equal for modules that have the same layers."""
    return [
        (type(part).__name__, *(name for name, _ in part.named_parameters(recurse=False)), *part._buffers)  # noqa: SLF001
        for part in module.modules()
    ]


def refuse_lost_hooks(stage: int, module: nn.Module, ranks: Sequence[int]) -> None:
    """Refuse hooks that need the whole gradient of a parameter: a rank's copy has a part of it."""
    for name, parameter in module.named_parameters():
        if parameter._post_accumulate_grad_hooks:  # noqa: SLF001 - as in `_update`
            raise EngineError(
                f"stage {stage} is on ranks {', '.join(map(str, ranks))}, and its {name} has a post-accumulate-grad "
                "hook, which would see one rank's gradients only, before all ranks' are added up\n"
                "  try: parameter.register_hook, which runs on every rank; or run the stage on one rank"
            )


def versions(module: nn.Module) -> dict[str, tuple[torch.Tensor, int]]:
    """Return each buffer, and how often it was written into."""
    return {name: (buffer, buffer._version) for name, buffer in module.named_buffers()}  # noqa: SLF001


def written(before: dict[str, tuple[torch.Tensor, int]], after: dict[str, tuple[torch.Tensor, int]]) -> str | None:
    """Return the name of a buffer that was written into or replaced between two looks at `versions`, if one was."""
    for name, (buffer, version) in after.items():
        was, once = before.get(name, (None, 0))
        if was is not buffer or once != version:
            return name
    return None


def written_error(stage: int, rank: int, name: str, rest: str = "") -> EngineError:
    """Return the error of a stage on several ranks that wrote into a buffer."""
    return EngineError(
        f"stage {stage} writes into its buffer {name!r}, and rank {rank} runs a copy of the stage, "
        f"which then differs from the model\n{_HOW}{rest}"
    )


_HOW = (
    "  try: replicated_buffers='lowest' if the buffers of the lowest rank, which sees a part of the micro-batches, are "
    "good enough; or run the stage on one rank"
)


def require_replicable(stage: int, module: nn.Module, ranks: Sequence[int], buffers: Buffers) -> None:
    """Refuse a stage that tracks running statistics, unless the policy for buffers allows it."""
    for name, part in module.named_modules():
        tracks = getattr(part, "running_mean", None) is not None and getattr(part, "track_running_stats", True)
        if tracks and part.training and buffers == "refuse":
            raise EngineError(
                f"stage {stage} is on ranks {', '.join(map(str, ranks))}, and its {type(part).__name__} {name!r} "
                f"tracks running statistics, which would differ between the ranks\n{_HOW}"
            )
