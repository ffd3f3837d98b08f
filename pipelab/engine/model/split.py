"""Cut a model into stages, and refuse what a cut would change: shared parameters, and hooks that nobody would call."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from pipelab.engine.model.balance import count_parameters, cut, layer_times, short
from pipelab.engine.model.traced import TRACED, TracedStages, move
from pipelab.errors import SplitError, require_size
from pipelab.plan.fault import shorten

__all__ = ["BACKWARD_HOOKS", "Stages", "refuse_hooks", "refuse_shared", "split"]


def refuse_shared(modules: Sequence[nn.Module], model: nn.Module, prefix: str | None = None) -> None:
    """Refuse a parameter or a buffer that two stages use, with its name and both stages.

    PyTorch's tracer copies what two stages use, so only the names show it: the model's own, behind `prefix`.
    """
    own = dict(_state(model))
    names = {id(tensor): name for name, tensor in reversed(_state(model))}
    owner: dict[int, int] = {}
    for stage, module in enumerate(modules):
        for name, used in _state(module):
            tensor = used if prefix is None else own.get(name.removeprefix(prefix), used)
            first = owner.setdefault(id(tensor), stage)
            if first != stage:
                what = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                raise SplitError(
                    f"{what} {names.get(id(tensor), name)!r} is used by stage {first} and stage {stage}, but a {what} "
                    "lives on one stage\n"
                    f"  try: cut the model elsewhere, or give each of the two layers a {what} of its own"
                )


BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", *BACKWARD_HOOKS)


def refuse_hooks(what: str, module: nn.Module, reason: str, kinds: Sequence[str] = _HOOKS) -> None:
    """Refuse a module that carries hooks of these kinds, other than pipelab's own."""
    for kind in kinds:
        hooks = getattr(module, kind).values()
        count = sum(not str(getattr(hook, "__module__", "")).startswith("pipelab.") for hook in hooks)
        if count:
            words = kind.strip("_").removesuffix("_hooks").replace("_", "-")
            raise SplitError(
                f"{what} has {count} {words} hook{'s' if count > 1 else ''} that a pipeline would not call, because "
                f"{reason}, or take it off with handle.remove()"
            )


def _state(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


Balance = Literal["layers", "parameters", "time"]


class Stages:
    """A model cut into stages; made by `split`, taken by `Pipeline`.

    Attributes:
        model: the model that was split, or an `nn.ModuleList` of the stages that were given.
        modules: one module per stage, in order. They share their parameters with the model.
        sizes: how many layers each stage holds.
        is_traced: whether PyTorch's tracer made the stages.
    """

    is_traced = False

    def __init__(self, model: nn.Module, modules: Sequence[nn.Module], sizes: Sequence[int]) -> None:
        self.model = model
        self.modules = list(modules)
        self.sizes = tuple(sizes)
        refuse_shared(self.modules, model, TRACED if self.is_traced else None)
        self.require_no_lost_hooks()

    def place(self, devices: Sequence[torch.device]) -> None:
        """Move every stage to its device; parameters stay the same objects."""
        for stage, device in enumerate(devices):
            self.place_stage(stage, device)

    def place_stage(self, stage: int, device: torch.device) -> None:
        """Move one stage to a device; parameters stay the same objects."""
        self.modules[stage].to(device)

    def require_rows(self, counts: Sequence[int]) -> None:
        """Refuse micro-batches that the stages cannot take; these stages take any."""

    def require_no_lost_hooks(self) -> None:
        """Refuse hooks that a pipeline would never call, and so quietly train something else."""
        refuse_hooks("the whole model", self.model, "it is never run as a whole: register the hook on a layer")

    def for_evaluation(self, inputs: Sequence[Any], counts: Sequence[int]) -> list[nn.Module]:  # noqa: ARG002
        """Return the stages to evaluate with, in the model's present training mode; here, the same."""
        return self.modules

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the model's state, under its own names."""
        return self.model.state_dict()

    def __len__(self) -> int:
        return len(self.modules)

    def __repr__(self) -> str:
        numbers = map(short, map(count_parameters, self.modules))
        return f"Stages({', '.join(map(str, self.sizes))} layers; {', '.join(numbers)} parameters)"


class _Traced(Stages):
    """Stages that PyTorch's tracer made: fixed to the row count and the training mode of the example."""

    is_traced = True

    def __init__(self, model: nn.Module, traced: TracedStages, sizes: Sequence[int]) -> None:
        self._traced = traced
        super().__init__(model, traced.modules(), sizes)
        traced.require_same_outputs(self.modules)
        self._modes = self._present_modes()
        self._again: dict[tuple[int, tuple[bool, ...]], list[nn.Module]] = {}
        self._devices: dict[int, torch.device] = {}

    def place_stage(self, stage: int, device: torch.device) -> None:
        """Move one stage to a device, and with it what was traced; parameters stay the same objects."""
        self._devices[stage] = device
        self._again.clear()
        move(self.modules[stage], device, self.model)

    def require_no_lost_hooks(self) -> None:
        """Refuse backward hooks, which the tracer leaves out; forward hooks become part of what it traces."""
        for name, module in self.model.named_modules():
            what = f"layer {name!r}" if name else "the model"
            refuse_hooks(what, module, "PyTorch's tracer leaves it out: give a list of stage modules", BACKWARD_HOOKS)

    def require_rows(self, counts: Sequence[int]) -> None:
        """Refuse other row counts than the example's, and other training modes."""
        rows, many = self._traced.rows, len(counts)
        if set(counts) != {rows}:
            total, have = sum(counts), " or ".join(map(str, sorted(set(counts))))
            less, more = (many * each for each in (total // many, -(-total // many)))
            others = sorted({less, more} - {many * rows})
            raise SplitError(
                f"{total} rows in {many} micro-batches have {have} rows each, but the model was traced with an example "
                f"of {rows}, and a traced stage takes that many\n  try: batches of {many * rows} rows ({many} "
                f"micro-batches of {rows}); or batches of {' or of '.join(map(str, others))} rows, and split the model "
                f"again with an example of {' or of '.join(str(each // many) for each in others)}"
            )
        modes = self._present_modes()
        if modes != self._modes:
            names = [name for name, _ in self.model.named_modules()]
            at = next(at for at, (now, then) in enumerate(zip(modes, self._modes, strict=True)) if now != then)
            now, then = ("training", "evaluation") if modes[at] else ("evaluation", "training")
            raise SplitError(
                f"{f'layer {names[at]!r}' if names[at] else 'the model'} is in {now} mode, but it was traced in {then} "
                f"mode, which a traced stage keeps\n  try: {'train' if then == 'training' else 'eval'}() before step, "
                "or split the model again"
            )

    def _present_modes(self) -> tuple[bool, ...]:
        return tuple(module.training for module in self.model.modules())

    def for_evaluation(self, inputs: Sequence[Any], counts: Sequence[int]) -> list[nn.Module]:
        """Trace again if modes or rows differ from the example's; what was traced is kept."""
        if len(set(counts)) > 1:
            many, less = len(counts), len(counts) * min(counts)
            raise SplitError(
                f"{sum(counts)} rows in {many} micro-batches have {min(counts)} or {max(counts)} rows each, but a "
                f"traced stage takes one number of rows\n  try: batches of {less} or of {less + many} rows"
            )
        key = counts[0], self._present_modes()
        if key == (self._traced.rows, self._modes):
            return self.modules
        if key not in self._again:
            modules = self._traced.modules(inputs[0])
            for stage, device in self._devices.items():
                move(modules[stage], device, self.model)
            self._again[key] = modules
        return self._again[key]


def split(
    model: nn.Module | Sequence[nn.Module] | Stages,
    into: int,
    by: Balance = "layers",
    example: Any = None,
) -> Stages:
    """Cut a model into contiguous stages.

    A pipeline is as slow as its slowest stage, and equal numbers of layers are not equal work: an activation function
    counts as a layer, and so does a head ten times as wide as the rest. Printed stages show what each of them holds. If
    that is uneven, cut by parameters or, best, by measured time.

    Args:
        model: an `nn.Sequential`, whose layers are dealt out; a list of modules, one per stage; or any other model,
            with an example, which PyTorch's tracer then cuts.
        into: how many stages.
        by: what to make even. `"layers"`: their number; sizes differ by at most one, the first stages taking the
            extra. `"parameters"`: the numbers in them. `"time"`: forward and backward, measured on the example (of a
            model that is traced, forward only).
        example: one micro-batch, `[rows, ...]`, as the model takes it; a tuple stands for several arguments. Needed
            for `by="time"` and for models that are no `nn.Sequential`. A traced stage keeps the example's row count
            and training mode, and the forward hooks of its layers as they are now.

    Example:
        >>> from torch import nn
        >>> split(nn.Sequential(*(nn.Linear(4, 4) for _ in range(20))), into=3)
        Stages(7, 7, 6 layers; 140, 140, 120 parameters)

        Even in layers, uneven in parameters: the last layer is as large as all the others.

        >>> model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)), nn.Linear(16, 100))
        >>> split(model, into=2)
        Stages(4, 3 layers; 1088, 2244 parameters)
        >>> split(model, into=2, by="parameters")
        Stages(6, 1 layers; 1632, 1700 parameters)

    Raises:
        SplitError: if there are fewer layers than stages, if two stages use one parameter (with its name and both
            stages), if an example is needed and missing, or if PyTorch's tracer would lose something: an activation
            checkpoint, or state that changes from call to call.
    """
    into = require_size("into", into)
    if isinstance(model, Stages):
        if len(model) != into:
            raise SplitError(
                f"the model was split into {len(model)} stages, but the plan has {into}: split it into {into}"
            )
        return model
    if by not in ("layers", "parameters", "time"):
        raise SplitError(f"by={by!r}: expected 'layers', 'parameters' or 'time'")
    if not isinstance(model, nn.Module):
        return _given(model, into)
    if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        return _sequential(model, into, by, example)
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise SplitError(
            f"{type(model).__name__} runs the whole model on every device: give what it wraps, model.module\n"
            "  try: pipelab.replicate(schedule, 2) for data parallelism over pipelines"
        )
    if example is None:
        raise SplitError(
            f"{type(model).__name__} is no plain nn.Sequential, so it must be traced to be cut: pass an example of one "
            f"micro-batch, pipelab.split(model, into={into}, example=x), or give a list of {into} stage modules"
        )
    traced = TracedStages(model, example)
    units = traced.units
    _require_enough(len(units), into, type(model).__name__)
    bounds = cut(_weights([unit for _, unit in units], by, traced.unit_times), into)
    traced.cut_at([units[start][0] for start, _ in bounds[1:]])
    return _Traced(model, traced, [stop - start for start, stop in bounds])


def _given(given: object, into: int) -> Stages:
    if isinstance(given, type):
        raise SplitError(f"{given.__name__} is a class: make a model of it, {given.__name__}()")
    if not isinstance(given, Iterable):
        raise SplitError(f"expected a module, or a list of one per stage, got {shorten(given)}")
    modules = list(given)
    for index, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise SplitError(f"stage {index} is {type(module).__name__}, not a module")
    if len(modules) != into:
        raise SplitError(f"{len(modules)} stage modules for {into} stages: give one per stage, or an nn.Sequential")
    return Stages(nn.ModuleList(modules), modules, [1] * into)


def _sequential(model: nn.Sequential, into: int, by: Balance, example: Any) -> Stages:
    named = list(model._modules.items())  # noqa: SLF001 - `named_children` leaves out a layer that stands there twice
    layers = list(model)
    _require_enough(len(layers), into, "nn.Sequential")
    if by == "time" and example is None:
        raise SplitError("by='time' measures the layers on an example: pass example=x, one micro-batch")
    bounds = cut(_weights(layers, by, lambda: layer_times(layers, example)), into)
    if any(hasattr(nn.Sequential, name) for name, _ in named):  # a name that it would not take
        named = [(str(index), layer) for index, layer in enumerate(layers)]
    # A slice would be of the model's own class. Names stay the model's: an error tells one, of a layer.
    modules = [nn.Sequential(OrderedDict(named[start:stop])) for start, stop in bounds]
    return Stages(model, modules, [len(module) for module in modules])


def _require_enough(layers: int, into: int, name: str) -> None:
    if layers < into:
        raise SplitError(f"{name} has {layers} layers, too few for {into} stages: use at most {layers} stages")


def _weights(layers: Sequence[nn.Module], by: Balance, times: Callable[[], list[float]]) -> list[float]:
    if by == "layers":
        return [1.0] * len(layers)
    if by == "parameters":
        return [float(count_parameters(layer)) for layer in layers]
    return times()
