"""An optimizer's state under the model's own names, in the form that PyTorch uses for pipelines.

    state.layers.0.weight.exp_avg      one key for each tensor of a parameter's state
    param_groups.layers.0.weight.lr    and for each setting of the group that it is in

It is what `torch.distributed.checkpoint.state_dict` makes with `flatten_optimizer_state_dict=True`. The keys do not say
which rank or which group a parameter was in, so that other ranks can go on.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from pipelab.engine.stage.pytree import rebuild, take_apart
from pipelab.errors import UsageError, counted

_NUMBERS = (torch.Tensor, int, float)


def optimizer_state(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], here: Collection[nn.Parameter]
) -> dict[str, Any]:
    """Return the state of the parameters that learn in this process, under their names.

    A parameter that has never been stepped has a state of zeros: PyTorch loads checkpoints into tensors that are there.
    """
    found: dict[str, Any] = {}
    for index, parameter in _parameters(optimizer, names):
        if parameter not in here:
            continue
        group = optimizer.param_groups[index]
        state = optimizer.state.get(parameter, {})
        if not state and parameter.requires_grad:
            state = _zeros(optimizer, group, parameter)
        settings = {key: value for key, value in group.items() if key != "params"}
        for kind, values in (("state", state), ("param_groups", settings)):
            found |= {f"{kind}.{names[parameter]}.{key}": value for key, value in values.items()}
    return found


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    names: Mapping[nn.Parameter, str],
    here: Collection[nn.Parameter],
    saved: Mapping[str, Any],
) -> None:
    """Give the parameters that learn in this process their saved state, and their groups the saved settings."""
    kinds: dict[str, dict[str, dict[str, Any]]] = {"state": defaultdict(dict), "param_groups": defaultdict(dict)}
    for full, value in saved.items():
        kind, _, rest = full.partition(".")
        name, _, key = rest.rpartition(".")
        if name and kind in kinds:
            kinds[kind][name][key] = value
    own = optimizer.state_dict()
    numbered = (number for group in own["param_groups"] for number in group["params"])
    settled: dict[int, str] = {}  # by group, the parameter whose settings it has
    for number, (index, parameter) in zip(numbered, _parameters(optimizer, names), strict=True):
        if parameter not in here:
            continue
        name = names[parameter]
        if name not in kinds["param_groups"]:
            raise UsageError(
                f"the saved optimizer state has no {name!r}, only {counted(len(kinds['param_groups']), 'parameter')}\n"
                "  try: what pipe.optimizer_state_dict(optimizer) returned for this model; if its stages are a list, "
                "Pipeline(…, whole_model=model) gives parameters the model's own names"
            )
        settings = kinds["param_groups"][name]
        first = settled.setdefault(index, name)
        for key, value in settings.items():
            if value != kinds["param_groups"][first].get(key):
                raise UsageError(
                    f"group {index} of the optimizer has {first!r}, saved with {key} = "
                    f"{kinds['param_groups'][first].get(key)}, and {name!r}, saved with {key} = {value}\n"
                    "  try: the groups with which the state was saved"
                )
        own["param_groups"][index].update(settings)
        state = kinds["state"].get(name, {})
        if any(bool(torch.as_tensor(each).any()) for each in take_apart(state)[0] if isinstance(each, _NUMBERS)):
            own["state"][number] = state
        else:  # never stepped
            own["state"].pop(number, None)
    optimizer.load_state_dict(own)


def _parameters(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]
) -> Iterator[tuple[int, nn.Parameter]]:
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in names:
                raise UsageError(
                    f"group {index} of the optimizer has a parameter of shape {list(parameter.shape)} that is not the "
                    "model's\n  try: a separate optimizer for it, saved with optimizer.state_dict()"
                )
            yield index, parameter


def _zeros(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    """Return the state that a first step makes for a parameter, in zeros; neither of them changes."""
    other = nn.Parameter(torch.zeros_like(parameter))
    other.grad = torch.zeros_like(parameter)
    trial = copy.copy(optimizer)  # without hooks, and without a scheduler's own `step`
    vars(trial).update({key: value for key, value in vars(optimizer).items() if key not in {*vars(trial), "step"}})
    trial.param_groups = [{**copy.deepcopy({**group, "params": []}), "params": [other]}]
    trial.state = defaultdict(dict)
    trial.step()
    leaves, spec = take_apart(trial.state[other])
    zeros: dict[str, Any] = rebuild([each * 0 if isinstance(each, _NUMBERS) else each for each in leaves], spec)
    return zeros
