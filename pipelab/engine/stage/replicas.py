"""A stage on several ranks, and a parameter of several stages: each rank adds to a `.grad` of its own.

    rank 0 │ the model's own stage ── weight ─┐ one storage, where the device is one,
    rank 2 │ a copy of it ─────────── weight ─┘ and a .grad for each: two ranks never add to one

    stage 0 │ embedding ─ alias ─┐ likewise, for a weight that both stages use;
    stage 3 │ head ────── alias ─┘ each .grad is added to the parameter's own once, at the end of the step

A copy lives for one run. So it begins with what the model is by then: its parameters, buffers, hooks, attributes and
training mode. What it writes into its buffers ends with it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any, Literal

import torch
from torch import nn

from pipelab.engine.stage.errors import PARTIAL
from pipelab.engine.stage.inputs import taken
from pipelab.engine.stage.loss import Loss
from pipelab.engine.stage.pytree import tensors_of
from pipelab.engine.stage.snapshot import BufferSnapshot
from pipelab.engine.stage.split_backward import leaves_of
from pipelab.engine.stage.stage import Stage
from pipelab.errors import EngineError

Buffers = Literal["refuse", "lowest"]
"""The policy for buffers that replicated stages write into."""

_CONTAINERS = (dict, OrderedDict, list, tuple, set)


class Runners:
    """The runners of all stages on all their ranks, by stage and rank, and the parameters that several stages use."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        replicas: Mapping[int, Sequence[int]],
        devices: Sequence[torch.device],
        buffers: Buffers,
        here: Mapping[int, torch.device] | None = None,
    ) -> None:
        self._own = modules
        self.ties = ties_of(modules)
        self._here = {stage: devices[ranks[0]] for stage, ranks in replicas.items()} if here is None else here
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

    @property
    def modules(self) -> dict[tuple[int, int], nn.Module]:
        """The modules that run now, by stage and rank."""
        return {key: runner.module for key, runner in self.of.items()}

    def running(self, modules: Sequence[nn.Module], *, learning: bool) -> AbstractContextManager[None]:
        """Return a context that runs these modules, one per stage; all ranks but a stage's lowest run copies of them.

        At its end, the gradients of a parameter that several stages use are added up.
        """
        if not self._copies and not self.ties and modules is self._own:
            return nullcontext()
        return self._running(modules, learning=learning)

    @contextmanager
    def called_with(self, keywords: Sequence[Mapping[str, Any]]) -> Iterator[None]:
        """Return a context in which each module gets those of the keywords, by micro-batch, that it takes."""
        for runner in self.of.values():
            runner.keywords = [taken(runner.module, each) for each in keywords]
        try:
            yield
        finally:
            for runner in self.of.values():
                runner.keywords = []

    @contextmanager
    def _running(self, modules: Sequence[nn.Module], *, learning: bool) -> Iterator[None]:
        ties = self.ties = ties_of(modules)  # anew: for another shape the tracer adds modules to a stage
        for stage, ranks in self._replicated.items():
            refuse_lost_hooks(stage, modules[stage], ranks)
            require_replicable(stage, modules[stage], ranks, self._buffers)  # it may have been in eval() at first
        try:
            for tied in ties:
                tied.part(self._here)
            for (stage, rank), runner in self.of.items():
                module, device = modules[stage], self._devices[rank]
                runner.module = copied(module, device) if (stage, rank) in self._copies else module
            guarded = self._copies if self._buffers == "refuse" else {}
            before = {key: versions(replica.module) for key, replica in guarded.items()}
            kept = BufferSnapshot({modules[stage] for stage, _ in guarded})
            yield
            for tied in ties:
                if (gradient := tied.gradient(tied.stages)) is not None:
                    accumulate(tied.parameter, gradient)
            for (stage, rank), replica in guarded.items():
                if name := written(before[stage, rank], versions(replica.module)):
                    kept.restore()
                    zero = f"\n  {PARTIAL}" if learning else ""
                    raise written_error(stage, rank, name, f"\n  the model's buffers are restored{zero}")
        finally:
            for tied in ties:
                tied.join()
            for (stage, _), runner in self.of.items():
                runner.module = self._own[stage]


class _Replica(Stage):
    """Runs a copy of a stage."""

    def __init__(self, index: int, module: nn.Module, stages: int, rank: int) -> None:
        super().__init__(index, module, stages)
        self._own = module
        self._rank = rank
        self._is_apart = False

    def _run(self, microbatch: int, given: Any, kept: dict[int, Any], loss: Loss | None = None) -> Any:
        """Run one micro-batch forward; after the first one, check that it used the copy's own parameters."""
        made = super()._run(microbatch, given, kept, loss)
        if not self._is_apart and torch.is_grad_enabled():
            used = leaves_of([tensor for tensor in tensors_of(made) if tensor.requires_grad])
            for name, parameter in self._own.named_parameters():
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
    """Return a module that computes what this one does now, for another thread.

    Its parameters share storage where the device is the same; its buffers are copies. Any other attribute is shared,
    but for what refers to one of its parts.
    """
    copies: dict[int, Any] = {}
    parts = list(module.modules())
    for part in parts:
        copies[id(part)] = object.__new__(type(part))
        for parameter in part._parameters.values():  # noqa: SLF001 - every step waits for this: parameters() is slow
            if parameter is not None and id(parameter) not in copies:
                copies[id(parameter)] = alias(parameter, parameter.detach().to(device))
        for buffer in part._buffers.values():  # noqa: SLF001
            if buffer is not None and id(buffer) not in copies:
                copies[id(buffer)] = buffer.detach().to(device, copy=True)
    for part in parts:
        attributes = vars(copies[id(part)])
        attributes.update(vars(part))
        for name, value in vars(part).items():
            if type(value) in _CONTAINERS or type(value) is MethodType or id(value) in copies:
                attributes[name] = _copied(value, copies)
        for name in ("_parameters", "_buffers", "_modules"):  # a part may put others there, for itself
            attributes[name] = dict(attributes[name])
    copy: nn.Module = copies[id(module)]
    return copy


def _copied(value: Any, copies: dict[int, Any]) -> Any:
    """Return a value with copies in place of what was copied; the value itself, if it holds nothing such."""
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, MethodType) and id(value.__self__) in copies:
        return MethodType(value.__func__, copies[id(value.__self__)])
    if type(value) not in _CONTAINERS or not value:
        return value
    copies[id(value)] = value  # should it hold itself
    if isinstance(value, dict):
        filled = type(value)((key, _copied(each, copies)) for key, each in value.items())
        same = all(one is other for one, other in zip(value.values(), filled.values(), strict=True))
    else:
        filled = type(value)(_copied(each, copies) for each in value)
        same = all(one is other for one, other in zip(value, filled, strict=True))
    copies[id(value)] = value if same else filled
    return copies[id(value)]


def refuse_lost_hooks(stage: int, module: nn.Module, ranks: Sequence[int] = ()) -> None:
    """Refuse hooks that need the whole gradient of a parameter: a rank's copy, or a version, has a part of it."""
    where = f"is on ranks {', '.join(map(str, ranks))}" if ranks else "has updates (U)"
    for name, parameter in module.named_parameters():
        _refuse_whole_hooks(parameter, f"stage {stage} {where}, and its {name} has")


def _refuse_whole_hooks(parameter: nn.Parameter, fact: str) -> None:
    if parameter._post_accumulate_grad_hooks:  # noqa: SLF001 - there is no public way to ask for hooks
        raise EngineError(
            f"{fact} a post-accumulate-grad hook, which would see a part of its gradient only\n"
            "  try: parameter.register_hook, which runs on every part"
        )


def versions(module: nn.Module) -> dict[str, tuple[torch.Tensor, int]]:
    """Return each buffer, and how often it was written into."""
    return {name: (buffer, buffer._version) for name, buffer in module.named_buffers()}  # noqa: SLF001


def written(before: dict[str, tuple[torch.Tensor, int]], after: dict[str, tuple[torch.Tensor, int]]) -> str:
    """Return the name of a buffer that was written into or replaced between two looks at `versions`; "" if none was."""
    for name, (buffer, version) in after.items():
        was, once = before.get(name, (None, 0))
        if was is not buffer or once != version:
            return name
    return ""


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


# ── Parameters that several stages use ──────────────────────────────────────────────────────────────────────────────


class Tied:
    """A parameter of the model that several stages use."""

    def __init__(self, parameter: nn.Parameter, places: Mapping[int, Sequence[tuple[nn.Module, str]]]) -> None:
        self.parameter = parameter
        self.stages = tuple(places)
        self.fact = f"stages {', '.join(map(str, places))} use one parameter, {next(iter(places.values()))[0][1]!r}"
        self._places = places
        self._aliases: dict[int, nn.Parameter] = {}

    def part(self, devices: Mapping[int, torch.device]) -> None:
        """Give each of these stages an alias on its device."""
        _refuse_whole_hooks(self.parameter, f"{self.fact}, with")
        for stage in self.stages:
            if stage in devices:
                self._aliases[stage] = alias(self.parameter, self.parameter.detach().to(devices[stage]))
                self._bind(stage, self._aliases[stage])

    def join(self) -> None:
        """Give all stages the model's own parameter again, and forget gradients that were not added to it."""
        for stage in self._aliases:
            self._bind(stage, self.parameter)
        self._aliases = {}

    def gradient(self, stages: Iterable[int]) -> torch.Tensor | None:
        """Return the sum of these stages' gradients, on the parameter's device; forget the gradients of all."""
        taken = {stage: each.grad for stage, each in self._aliases.items()}
        for each in self._aliases.values():
            each.grad = None
        total = nn.Parameter(self.parameter.detach(), requires_grad=False)
        for gradient in (taken.get(stage) for stage in sorted(stages)):
            if gradient is not None:
                accumulate(total, gradient.to(self.parameter.device))
        return total.grad

    def _bind(self, stage: int, parameter: nn.Parameter) -> None:
        for part, name in self._places[stage]:
            part._parameters[name] = parameter  # noqa: SLF001 - setattr would run a model's own code


def ties_of(modules: Sequence[nn.Module]) -> list[Tied]:
    """Return the parameters that more than one of these stages uses."""
    places: dict[int, dict[int, list[tuple[nn.Module, str]]]] = {}
    for stage, module in enumerate(modules):
        for part in module.modules():
            for name, parameter in part._parameters.items():  # noqa: SLF001 - named_parameters() leaves out doubles
                if parameter is not None:
                    places.setdefault(id(parameter), {}).setdefault(stage, []).append((part, name))
    several = [each for each in places.values() if len(each) > 1]
    return [Tied(getattr(*next(iter(each.values()))[0]), each) for each in several]


def accumulate(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    """Add to a parameter's `.grad`, which may be sparse, or missing."""
    if parameter.grad is None:
        parameter.grad = gradient
    elif parameter.grad.is_sparse:
        parameter.grad = gradient + parameter.grad
    else:
        parameter.grad.add_(gradient)


def alias(own: nn.Parameter, values: torch.Tensor) -> nn.Parameter:
    """Return a parameter with these values, the same attributes and hooks, and no gradient."""
    parameter = nn.Parameter(values, own.requires_grad)
    vars(parameter).update(vars(own))
    for hook in (own._backward_hooks or {}).values():  # noqa: SLF001 - there is no public way to ask for hooks
        parameter.register_hook(hook)
    return parameter
