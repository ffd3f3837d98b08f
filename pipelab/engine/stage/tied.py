"""Parameters that several stages use, such as an embedding that is the head too: one weight, one gradient.

    stage 0 │ embedding ─ alias ─┐ one storage, where the device is one; a .grad for each stage,
    stage 3 │ head ────── alias ─┘ added to the parameter's own once, at the end of the step

Without aliases, two ranks would add to one `.grad` in an order that differs from run to run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from pipelab.errors import EngineError


class Tied:
    """A parameter of the model that several stages use."""

    def __init__(self, parameter: nn.Parameter, places: Mapping[int, Sequence[tuple[nn.Module, str]]]) -> None:
        self.parameter = parameter
        self.stages = tuple(places)
        self._places = places
        self._aliases: dict[int, nn.Parameter] = {}

    def part(self, devices: Mapping[int, torch.device]) -> None:
        """Give each of these stages an alias on its device."""
        if self.parameter._post_accumulate_grad_hooks:  # noqa: SLF001 - there is no public way to ask for hooks
            where = ", ".join(map(str, self.stages))
            raise EngineError(
                f"stages {where} use one parameter, {self._places[self.stages[0]][0][1]!r}, with a "
                "post-accumulate-grad hook, which would see the gradient of one stage only\n"
                "  try: parameter.register_hook, which runs on every stage"
            )
        for stage in self.stages:
            if stage in devices:
                self._aliases[stage] = alias(self.parameter, devices[stage])
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


def alias(own: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Return a parameter with the same values, attributes and hooks, and no gradient."""
    parameter = nn.Parameter(own.detach().to(device), own.requires_grad)
    vars(parameter).update(vars(own))
    for hook in (own._backward_hooks or {}).values():  # noqa: SLF001 - there is no public way to ask for hooks
        parameter.register_hook(hook)
    return parameter
