"""Cut a model into stages; refuse shared layers, and hooks that a pipeline would never call."""

from __future__ import annotations

import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import accumulate, pairwise
from operator import is_, itemgetter
from statistics import median
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pipelab.engine.model.traced import TRACED, NamedLayer, TracedStages, in_order, move, require_like, shapes_of
from pipelab.engine.model.unmade import Layer, UnmadeLayers, make, unmade
from pipelab.engine.stage.pytree import map_tensors, opened, tensors_of
from pipelab.engine.stage.snapshot import AttributeSnapshot, unchanged
from pipelab.errors import SplitError, counted, require_size
from pipelab.plan.fault import OWN, shorten


def _refuse_shared(modules: Sequence[nn.Module], model: nn.Module, prefix: str | None) -> None:
    """Refuse a buffer that two stages use, and a layer with parameters that is in two.

    PyTorch's tracer copies a tensor that two stages use, so only its name shows it: the model's own, after `prefix`.
    """
    own = dict(model.named_buffers(remove_duplicate=False))
    owner: dict[int, int] = {}
    for stage, module in enumerate(modules):
        shared: list[tuple[str, str, object]] = [
            ("buffer", name, used if prefix is None else own.get(name.removeprefix(prefix), used))
            for name, used in module.named_buffers(remove_duplicate=False)
        ]
        layers = module.named_modules() if prefix is None else ()
        shared += [("layer", name, layer) for name, layer in layers if layer._parameters]  # noqa: SLF001
        for what, name, part in shared:
            first = owner.setdefault(id(part), stage)
            if first != stage:
                every = (*model.named_modules(), *model.named_buffers())
                known = next((full for full, other in every if other is part), name)
                sharing = ", and share its weight: second.weight = first.weight" if what == "layer" else ""
                raise SplitError(
                    f"{what} {known!r} is used by stage {first} and stage {stage}, but it can belong to one stage "
                    f"only\n  try: cut the model elsewhere, or make a second {what}{sharing}"
                )


_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", *_BACKWARD_HOOKS)


def _refuse_hooks(what: str, module: nn.Module, reason: str, kinds: Sequence[str] = _HOOKS) -> None:
    """Refuse a module that carries hooks of these kinds, other than pipelab's own."""
    for kind in [kind for kind in kinds if getattr(module, kind)]:  # a small step waits for this
        packages = [str(getattr(hook, "__module__", "")).partition(".")[0] for hook in getattr(module, kind).values()]
        if count := sum(package not in (folder.name for folder in OWN) for package in packages):
            words = kind.strip("_").removesuffix("_hooks").replace("_", "-")
            raise SplitError(
                f"{what} has {counted(count, f'{words} hook')} that a pipeline would not call, because "
                f"{reason}, or remove the hook with handle.remove()"
            )


Balance = Literal["layers", "parameters", "time"]


class Stages:
    """A model cut into stages: the result of `split`, and an argument of `Pipeline`.

    Attributes:
        model: the model that was split, or an `nn.ModuleList` of the list of stages.
        modules: one module per stage, in order. They share their parameters with the model.
        sizes: how many layers each stage holds.
        named: the model whose names count: `model`, or `name_after`'s.
        names: for each stage, its names of layers and parameters, with `named`'s where they differ.
        is_traced: whether PyTorch's tracer made the stages.
    """

    is_traced = False

    def __init__(self, model: nn.Module, modules: Sequence[nn.Module], sizes: Sequence[int]) -> None:
        self.model = model
        self.modules = modules
        self.sizes = tuple(sizes)
        self.named = model
        self.names: list[dict[str, str]] = [{} for _ in modules]
        _refuse_shared(self.modules, model, TRACED if self.is_traced else None)
        self.require_no_lost_hooks()
        self._parts = list(self._parts_of_its_own())
        self._note_parts()

    def make(self, stage: int, seed: int) -> None:
        """Make the layers of one stage that are not made yet."""
        if unmade([self.modules[stage]]):
            make(self.modules[stage], self.model, self.named, seed)
            self._note_parts()

    def name_after(self, named: nn.Module) -> None:
        """Use the names of the model of whose layers and parameters the stages are made; refuse one of others."""
        _require_all_of(named, self.modules)
        self.named = named
        full = {id(each): name for name, each in (*named.named_parameters(), *named.named_modules()) if name}
        for stage, module in enumerate(self.modules):
            local = (*module.named_parameters(), *module.named_modules(remove_duplicate=False))
            self.names[stage] = {name: full[id(each)] for name, each in local if id(each) in full}
        self.require_no_lost_hooks()
        self._parts += _parts_of(named)
        self._note_parts()

    def place(self, devices: Sequence[torch.device]) -> None:
        """Make and move every stage; parameters stay the same objects. One of several stages is on the first's."""
        for stage, device in reversed(list(enumerate(devices))):
            self.make(stage, torch.initial_seed())
            self.place_stage(stage, device)

    def place_stage(self, stage: int, device: torch.device) -> None:
        """Move one stage to a device; parameters stay the same objects."""
        self.modules[stage].to(device)

    def ready(self, inputs: Sequence[Any], counts: Sequence[int]) -> Sequence[nn.Module]:  # noqa: ARG002
        """Return the stages for these micro-batches in the model's present training mode; here, always the same."""
        return self.modules

    def require_no_lost_hooks(self) -> None:
        """Refuse hooks that a pipeline would never call."""
        for model in (self.model, self.named):
            _refuse_hooks("the whole model", model, "it is never run as a whole: register the hook on a layer")

    def require_same_parts(self) -> None:
        """Refuse a model of which a part was replaced: the stages would run and train the earlier one."""
        for (what, prefix, now), before in zip(self._parts, self._before, strict=True):  # every step waits for this
            if len(now) != len(before) or not all(map(is_, now.values(), before.values())):
                name = next(each for each in (*before, *now) if now.get(each) is not before.get(each))
                did = "removed" if now.get(name) is None else "added" if before.get(name) is None else "replaced"
                raise SplitError(
                    f"{what} {prefix + name!r} was {did} after the model had been split: the stages would run and "
                    "train the model as it was before\n"
                    "  try: make the pipeline anew, after splitting the model again if you called split; and the "
                    "optimizer, which has the earlier parameters too"
                )

    def _note_parts(self) -> None:
        self._before = [dict(now) for _, _, now in self._parts]

    def _parts_of_its_own(self) -> Iterable[tuple[str, str, Mapping[str, object]]]:
        """Yield what the model has beside the stages: its list of layers. The layers themselves are the stages' too."""
        yield "layer", "", self.model._modules  # noqa: SLF001 - a step waits for this: named_children() is slow

    def state_dict(self, stages: Iterable[int] | None = None) -> dict[str, torch.Tensor]:
        """Return the model's state, under its own names; with `stages`, only the state of these."""
        state: dict[str, torch.Tensor] = self.named.state_dict()
        if stages is None:
            return state
        held = [self.modules[stage] for stage in stages]
        own = {id(each) for module in held for each in (*module.modules(), *module.parameters(), *module.buffers())}
        for name, each in self.named.state_dict(keep_vars=True).items():
            owner = self.named.get_submodule(name.rpartition(".")[0])  # of extra state, which is no tensor
            if id(each) not in own and id(owner) not in own:
                del state[name]
        return state

    def __len__(self) -> int:
        return len(self.modules)

    def __repr__(self) -> str:
        numbers = [*map(count_parameters, self.modules)]
        ratio = max(numbers) * len(numbers) / (sum(numbers) or 1)
        uneven = f", the largest {ratio:.2g} times the mean" if ratio > _UNEVEN else ""
        return f"Stages({', '.join(map(str, self.sizes))} layers; {', '.join(map(short, numbers))} parameters{uneven})"


class _Traced(Stages):
    """Stages that PyTorch's tracer made: anew for each training mode, and for each shape of a micro-batch."""

    is_traced = True

    def __init__(self, model: nn.Module, traced: TracedStages, sizes: Sequence[int]) -> None:
        self._traced = traced
        made = traced.modules()
        super().__init__(model, made, sizes)
        traced.require_same(self.modules)
        self._made = {self._present_modes(): made}
        self._known = {(self._present_modes(), traced.shapes)}
        self._attributes = AttributeSnapshot(model)
        self._devices: dict[int, torch.device] = {}

    def place_stage(self, stage: int, device: torch.device) -> None:
        """Move one stage and its graphs to a device; parameters stay the same objects."""
        as_traced = not self._attributes.changed(AttributeSnapshot(self.model))
        self._devices[stage] = device
        for stages in self._made.values():
            move(stages[stage], device, self.model)
        if as_traced:
            self._attributes = AttributeSnapshot(self.model)  # buffers are other objects now

    def require_no_lost_hooks(self) -> None:
        """Refuse backward hooks, which the tracer drops; forward hooks become part of the graph."""
        for name, module in self.model.named_modules():
            what = f"layer {name!r}" if name else "the model"
            _refuse_hooks(what, module, "PyTorch's tracer drops it: pass a list of stage modules", _BACKWARD_HOOKS)

    def ready(self, inputs: Sequence[Any], counts: Sequence[int]) -> Sequence[nn.Module]:
        """Return the stages for these micro-batches and the model's present state, traced if need be."""
        require_like(self._traced.example, in_order(self.model, inputs[0]))
        modes = self._present_modes()
        if self._attributes.changed(AttributeSnapshot(self.model)):
            self._made.clear()
            self._known.clear()
        for rows, value in zip(counts, inputs, strict=True):
            shapes = shapes_of(value)
            if (modes, shapes) in self._known:
                continue
            made = self._traced.modules(value)
            if modes not in self._made:
                self._traced.require_same(made, value)
            stages = self._made.setdefault(modes, made)
            for stage, (one, other) in enumerate(zip(stages, made, strict=True)):
                if one is not other and not one.add(other):
                    raise SplitError(
                        f"traced stage {stage} takes values of the same shapes with {rows} rows as with other numbers "
                        "of rows, so it cannot tell them apart\n"
                        "  try: micro-batches of the example's shape, or a list of modules"
                    )
                if stage in self._devices:
                    move(one, self._devices[stage], self.model)
            self._known.add((modes, shapes))
            self._attributes = AttributeSnapshot(self.model)  # tracing runs the model, which may set some
        self.modules = self._made[modes]
        return self.modules

    def _parts_of_its_own(self) -> Iterable[tuple[str, str, Mapping[str, object]]]:
        return _parts_of(self.model)

    def _present_modes(self) -> tuple[bool | torch.dtype | None, ...]:
        """Return each layer's training mode, and the types of autocast, whose casts the tracer records."""
        types = (torch.get_autocast_dtype(on) if torch.is_autocast_enabled(on) else None for on in ("cpu", "cuda"))
        return (*(module.training for module in self.model.modules()), *types)


def _saved(module: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Return the parameters and buffers of a module's state, the objects themselves."""
    state = module.state_dict(keep_vars=True)
    return [(name, each) for name, each in state.items() if isinstance(each, torch.Tensor)]


def _require_all_of(named: nn.Module, modules: Sequence[nn.Module]) -> None:
    """Refuse stages with parameters or saved buffers that the whole model lacks, and the other way round."""
    own = {id(each) for _, each in _saved(named)}
    for stage, module in enumerate(modules):
        for name, each in _saved(module):
            if id(each) not in own:
                what = "parameter" if isinstance(each, nn.Parameter) else "buffer"
                raise SplitError(
                    f"{what} {name!r} of stage {stage}, of shape {list(each.shape)}, is not in the whole model, whose "
                    "state would lack it\n  try: stages of the model's own layers, not of copies"
                )
    held = {parameter for module in modules for parameter in module.parameters()}
    lost = next((name for name, parameter in named.named_parameters() if parameter not in held), None)
    if lost is not None:
        raise SplitError(
            f"parameter {lost!r} of the whole model is in no stage, and would not learn\n"
            "  try: put its layer into a stage, or remove it from the model"
        )


def _parts_of(model: nn.Module) -> Iterable[tuple[str, str, Mapping[str, object]]]:
    """Yield the layers and parameters of every module of a model, with the module's name as a prefix."""
    for name, part in model.named_modules():
        prefix = f"{name}." if name else ""
        for what, held in (("layer", part._modules), ("parameter", part._parameters)):  # noqa: SLF001
            if held:
                yield what, prefix, held


def split(
    model: nn.Module | Sequence[Layer] | Stages,
    into: int | None = None,
    by: Balance = "layers",
    example: Any = None,
    *,
    at: Sequence[str] | None = None,
) -> Stages:
    """Cut a model into contiguous stages.

    A pipeline is as slow as its slowest stage, and equal numbers of layers are not equal work: an activation function
    is one layer, and a head ten times as wide as the rest is one layer too. Print the stages to see their sizes. If
    they are uneven, cut by parameters or, best, by measured time.

    Args:
        model: an `nn.Sequential`; a list of modules, one per stage; or any other model, which PyTorch's tracer cuts
            with the help of an example. A list of layers may hold functions without arguments that make a layer.
            pipelab calls them with the device `"meta"` in every process, and once more in the process of their stage.
            So a process makes only its own stages. If layers of an `nn.Sequential` are on `"meta"`, their
            `reset_parameters` fills them. Random numbers depend only on the seed and the layer's name.
        into: how many stages.
        by: what to make even. `"layers"`: their number; sizes differ by at most one, and the first stages are the
            larger ones. `"parameters"`: the numbers in them. `"time"`: the forward and backward time on the example
            (for a traced model, the forward time).
        example: one micro-batch, `[rows, ...]`, as an argument of the model; a tuple stands for several arguments, a
            dict for keyword arguments (`{"input_ids": x}`), if the model has parameters of those names. Needed for
            `by="time"`, for models that are not an `nn.Sequential`, and to cut an `nn.Sequential` inside a layer that
            holds layers and is too large for one stage. The tracer records one shape of micro-batch and
            one training mode, with the present autocast and forward hooks: others are traced when they come.
        at: instead of `into` and `by`: the names of the layers at which stages 1, 2, … begin.

    Example:
        >>> from torch import nn
        >>> split(nn.Sequential(*(nn.Linear(4, 4) for _ in range(20))), into=3)
        Stages(7, 7, 6 layers; 140, 140, 120 parameters)

        Even in layers, uneven in parameters: the last layer is as large as all the others.

        >>> model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)), nn.Linear(16, 100))
        >>> split(model, at=["4"])
        Stages(4, 3 layers; 1088, 2244 parameters, the largest 1.3 times the mean)
        >>> split(model, into=2, by="parameters")
        Stages(6, 1 layers; 1632, 1700 parameters)
        >>> split(model, at=["2", "6"])
        Stages(2, 4, 1 layers; 544, 1088, 1700 parameters, the largest 1.5 times the mean)

        Layers that are made later, in the process that runs them.

        >>> split([lambda: nn.Linear(16, 16)] * 6, into=3)
        Stages(2, 2, 2 layers; 544, 544, 544 parameters)

    Warns:
        UserWarning: if the largest stage has over 1.3 times the parameters that the best cut leaves it.

    Raises:
        SplitError: if there are fewer layers than stages, if no layer has a name of `at`, if a layer is in two stages,
            if an example is needed and missing, or if PyTorch's tracer cannot trace the model or would drop an
            activation checkpoint.
    """
    into = require_size("into", len(at) + 1 if at is not None and into is None else into)
    if at is not None and len(at) != into - 1:
        raise SplitError(f"at= has {counted(len(at), 'name')} for into={into}: give {into - 1}, or leave out into=")
    if by not in ("layers", "parameters", "time"):
        raise SplitError(f"by={by!r}: expected 'layers', 'parameters' or 'time'")
    if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        blocks = _blocks([*model.named_children()], into, at)
        if example is None or not blocks or unmade([model]):
            return _sequential(model, into, by, example, at)
    if isinstance(model, nn.Module):
        return _traced(model, into, by, example, at)
    if not isinstance(model, Stages):
        return _given(model, into, by, at)
    if len(model) != into:
        raise SplitError(f"the model has {counted(len(model), 'stage')}, but the plan has {into}: split it into {into}")
    return model


def _traced(model: nn.Module, into: int, by: Balance, example: Any, at: Sequence[str] | None) -> Stages:
    kind = type(model).__name__
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise SplitError(
            f"{kind} runs the whole model on every device: pass the model that it wraps, model.module\n"
            "  try: pipelab.replicate(schedule, 2) for data parallelism over pipelines"
        )
    if example is None:
        raise SplitError(
            f"{kind} is not a plain nn.Sequential, so PyTorch's tracer must cut it, and needs an example\n"
            f"  try: pipelab.split(model, into={into}, example=x), where x is one micro-batch; or pass a list of "
            f"{counted(into, 'stage module')}"
        )
    if unmade([model]):
        raise SplitError(
            f"{kind} is on the meta device and not a plain nn.Sequential: what PyTorch's tracer makes is compared with "
            "the model, which takes numbers\n"
            f"  try: a function for each layer, or for each of {counted(into, 'stage')}: [make_first, make_second, …]"
        )
    traced = TracedStages(model, _layers_inside(model, into, at), opened(example))
    others = (f"; no stage can begin at {name!r}, which runs {n} times" for name, n in traced.repeated.items())
    bounds = _bounds(dict(traced.units), kind, into, by, at, traced.unit_times, "".join(others))
    if at is None and by == "layers":
        layers = [unit for _, unit in traced.units]
        _warn_if_uneven(kind, [nn.ModuleList(layers[start:stop]) for start, stop in bounds], layers, _BY_SIZE)
    traced.starts = [traced.units[start][0] for start, _ in bounds[1:]]
    return _Traced(model, traced, [stop - start for start, stop in bounds])


def _given(given: object, into: int, by: Balance, at: Sequence[str] | None) -> Stages:
    if isinstance(given, type) or not isinstance(given, Iterable):
        what = f"the class {given.__name__}" if isinstance(given, type) else shorten(given)
        raise SplitError(f"expected a module, or a list of one per stage, got {what}")
    modules = list(given)
    if any(callable(each) and not isinstance(each, nn.Module) for each in modules):
        return _sequential(UnmadeLayers(modules), into, by, None, at)
    if len(modules) != into:
        raise SplitError(f"{counted(len(modules), 'stage module')} for {counted(into, 'stage')}: pass one for each")
    return Stages(nn.ModuleList(modules), modules, [1] * into)


def _sequential(model: nn.Sequential, into: int, by: Balance, example: Any, at: Sequence[str] | None) -> Stages:
    if by == "time" and unmade(model):
        raise SplitError("by='time' measures the layers, which are not made yet\n  try: by='parameters', or at= names")
    if by == "time" and example is None:
        raise SplitError("by='time' measures the layers on an example: pass example=x, one micro-batch")
    layers = model._modules  # noqa: SLF001 - `named_children` leaves out a layer that is there twice
    inside = "" if unmade([model]) else ", ".join(repr(name) for name, _ in _blocks([*layers.items()], into, at))
    hint = f"split(…, example=x) with one micro-batch x, which cuts inside {inside} too" if inside else _BY_SIZE
    others = f"\n  try: {hint}" if inside else ""
    bounds = _bounds(layers, "nn.Sequential", into, by, at, lambda: layer_times([*model], example), others)
    # A slice would be of the model's own class. The layers have the model's names, for errors that name a layer.
    modules = [nn.Sequential(OrderedDict([*layers.items()][start:stop])) for start, stop in bounds]
    if at is None and by != "time":
        finest = [layer for _, layer in _layers_inside(model, into, at)] if inside else [*model]
        _warn_if_uneven("nn.Sequential", modules, finest, hint)
    return Stages(model, modules, [len(module) for module in modules])


def _layers_inside(model: nn.Module, into: int, at: Sequence[str] | None) -> list[NamedLayer]:
    """Return the layers at which a stage may begin: the model's blocks, and what is inside those too large for one."""
    layers = _children(model)
    while blocks := _blocks(layers, into, at):
        layers = [each for layer in layers for each in (_children(layer[1], layer[0]) if layer in blocks else [layer])]
    return layers


def _children(model: nn.Module, prefix: str = "") -> list[NamedLayer]:
    """Return the model's children with their names; lists, sequences, and what holds a list give theirs instead."""
    found: list[NamedLayer] = []
    for name, child in model.named_children():
        full = f"{prefix}.{name}".lstrip(".")
        parts = child.children() if isinstance(model, nn.ModuleList) else child.modules()
        is_list = isinstance(child, (nn.ModuleDict, nn.Sequential))
        is_list = is_list or any(isinstance(each, nn.ModuleList) for each in parts)
        found += _children(child, full) if is_list else [(full, child)]
    return found


def _blocks(layers: Sequence[NamedLayer], into: int, at: Sequence[str] | None) -> list[NamedLayer]:
    """Return the layers that hold a list of layers in which a stage must begin, or ought to.

    They have more parameters than a stage's share, or there are too few layers, or a name of `at` is inside.
    """
    most = _UNEVEN * sum(count_parameters(layer) for _, layer in layers) / into
    return [
        (name, layer)
        for name, layer in layers
        if any(isinstance(part, (nn.ModuleList, nn.Sequential)) and len(part) for part in layer.modules())
        and (
            len(layers) < into
            or count_parameters(layer) > most
            or any(each.startswith(f"{name}.") for each in at or ())
        )
    ]


def _bounds(
    layers: Mapping[str, nn.Module],
    kind: str,
    into: int,
    by: Balance,
    at: Sequence[str] | None,
    times: Callable[[], list[float]],
    others: str = "",
) -> list[tuple[int, int]]:
    """Return the first layer of each stage, and the one past its last."""
    if len(layers) < into:
        raise SplitError(
            f"{kind} has {len(layers)} layers, too few for {into} stages: use at most {len(layers)} stages{others}"
        )
    if at is not None:
        return _bounds_at(at, [*layers])
    if by == "time":
        return cut(times(), into)
    return cut([1.0 if by == "layers" else count_parameters(layer) for layer in layers.values()], into)


def _bounds_at(at: Sequence[str], names: Sequence[str]) -> list[tuple[int, int]]:
    """Return the bounds of the stages that begin at these layers, or at the first layer of what has such a name."""
    starts = [0]
    for name in at:
        found = next((index for index, each in enumerate(names) if f"{each}.".startswith(f"{name}.")), None)
        if found is None or found <= starts[-1]:
            why = "no stage can begin there" if found is None else "it does not come after the stage before"
            near = ", ".join(get_close_matches(name, names, 3) or names[:3])
            raise SplitError(f"at={list(at)!r}: {name!r}: {why}\n  try: names in order, such as {near}")
        starts.append(found)
    return list(pairwise([*starts, len(names)]))


_UNEVEN = 1.3
"""How many times the best cut's largest stage another cut's may be before `split` warns."""

_BY_SIZE = "split(…, by='parameters'), by='time', or at= the names of layers"


def _warn_if_uneven(name: str, parts: Sequence[nn.Module], layers: Sequence[nn.Module], hint: str) -> None:
    """Warn if a cut is less even than the best cut of some layers."""
    counts = [count_parameters(layer) for layer in layers]
    largest = max(map(count_parameters, parts))
    best = max(sum(counts[start:stop]) for start, stop in cut(counts, len(parts)))
    if largest > _UNEVEN * best:
        warnings.warn(
            f"the largest stage of {name} has {short(largest)} parameters, {largest / best:.2g} times the "
            f"{short(best)} that the best cut by parameters leaves it, and a pipeline is as slow as its slowest stage\n"
            f"  try: {hint}",
            stacklevel=4,
        )


# ── Where to cut ──────────────────────────────────────────────────────────────────────────────────────────────────────


def count_parameters(module: nn.Module) -> int:
    """Return how many numbers the module's parameters have; a lazy one counts as zero."""
    return sum(parameter.numel() for parameter in module.parameters() if not is_lazy(parameter))


def short(count: int) -> str:
    """Return a number in few characters, such as `12.3k`."""
    for unit, name in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= max(0.9995 * unit, 10_000):  # three digits of less would be rounded up to four
            return f"{count / unit:.3g}{name}"
    return str(count)


_Parts = tuple[float, float, list[tuple[int, int]]]


def cut(weights: Sequence[float], into: int) -> list[tuple[int, int]]:
    """Return `(first, past the last)` for each of `into` contiguous parts, none empty.

    The heaviest part is as light as possible. Ties go to the more even cut, then to longer first parts.
    """
    count, total = len(weights), [0.0, *accumulate(weights)]
    # best[start]: of layers start... in so many parts, the heaviest part, the sum of squares, and the bounds
    loads = [total[count] - before for before in total[:count]]
    best = {start: (load, load**2, [(start, count)]) for start, load in enumerate(loads)}
    for parts in range(2, into + 1):
        last = count - parts + 1
        best = {
            start: min((_longer(total, start, end, best[end]) for end in range(last, start, -1)), key=itemgetter(0, 1))
            for start in range(last)
        }
    return best[0][2]


def _longer(total: Sequence[float], start: int, end: int, rest: _Parts) -> _Parts:
    load, (heaviest, squares, bounds) = total[end] - total[start], rest
    return max(load, heaviest), load**2 + squares, [(start, end), *bounds]


def layer_times(layers: Sequence[nn.Module], example: Any, repeats: int = 5) -> list[float]:
    """Return each layer's median seconds forward and backward on the example; restore all that it changes."""
    times: list[float] = []
    value = example
    with unchanged(layers):
        for layer in layers:
            measured = []
            for _ in range(repeats + 1):
                began = _now()
                made = _forward_and_backward(layer, value)
                measured.append(_now() - began)
            times.append(median(measured[1:]))  # the first warms up
            value = map_tensors(torch.Tensor.detach, made)
    return times


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _forward_and_backward(layer: nn.Module, value: Any) -> Any:
    """Run a layer forward, and backward without touching any `.grad`."""
    entry = map_tensors(lambda tensor: tensor.detach().requires_grad_(tensor.is_floating_point()), value)
    made = layer(map_tensors(torch.clone, entry))
    wanted = [tensor for tensor in [*tensors_of(entry), *layer.parameters()] if tensor.requires_grad]
    outputs = [tensor for tensor in tensors_of(made) if tensor.requires_grad]
    if wanted and outputs:
        torch.autograd.grad(outputs, wanted, [torch.ones_like(tensor) for tensor in outputs], allow_unused=True)
    return made
