"""Stages that PyTorch's tracer cuts from a model that is no sequence.

A value that skips stages is carried through them. What the tracer would lose without a word is refused.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from statistics import median
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from pipelab.engine.stage.batch import rows_of
from pipelab.engine.stage.errors import layer_of
from pipelab.engine.stage.pytree import Spec, map_tensors, rebuild, take_apart, tensors_of
from pipelab.engine.stage.snapshot import RandomSnapshot, unchanged
from pipelab.engine.stage.split_backward import holds_checkpoint
from pipelab.errors import SplitError

__all__ = ["TRACED", "Route", "TracedStages", "move", "routes_of"]

TRACED = "traced."
"""What stands before the model's own names in a traced stage."""

_OF_EVERY_MODULE = vars(nn.Module()).keys()


@dataclass(slots=True)
class Route:
    """How one traced stage is fed.

    Attributes:
        receives: the values that arrive, in order: the model's arguments, or what the stage before sends.
        arguments: those that the traced stage is called with.
        makes: the values it makes, and their places in its result; `None` where the result is the value.
        sends: the values that later stages need; none on the last stage, which returns its result.
    """

    receives: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    makes: dict[str, int | None] = field(default_factory=dict)
    sends: list[str] = field(default_factory=list)


def routes_of(graph: fx.Graph) -> list[Route]:
    """Return the route of every stage, from the graph that calls one stage after the other."""
    arriving = [node.name for node in graph.nodes if node.op == "placeholder"]
    stages: dict[str, Route] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            stages[node.name] = Route(arguments=[each.name for each in node.args], makes={node.name: None})
        elif node.op == "call_function":  # one part of a stage's result
            result, place = node.args
            stages[result.name].makes[node.name] = place
        elif node.op == "output":
            last = list(stages.values())[-1]
            outside = [each.name for each in node.all_input_nodes if each.name not in last.makes]
            if outside:
                raise SplitError(
                    f"the model returns {', '.join(outside)}, which an earlier stage than the last makes: return what "
                    "the last layers make, or give a list of stage modules"
                )
    routes = list(stages.values())
    for index, route in enumerate(routes):
        later = {name for each in routes[index + 1 :] for name in each.arguments}
        route.receives = arriving
        arriving = route.sends = [name for name in (*arriving, *route.makes) if name in later]
    return routes


def move(stage: nn.Module, device: torch.device, model: nn.Module) -> None:
    """Move a traced stage to a device: its tensors, and the devices in its graphs.

    Parameters stay the same objects. Buffers become other ones, which are given to the model as well.
    """
    before = {id(tensor): (part, name) for part, name, tensor in _tensors(stage)}
    stage.to(device)
    for part, name, tensor in list(_tensors(model)):
        if id(tensor) in before:
            stages_part, stages_name = before[id(tensor)]
            setattr(part, name, getattr(stages_part, stages_name))
    for part in stage.modules():
        graph = getattr(part, "graph", None)
        if isinstance(graph, torch.fx.Graph):
            _on(device, graph)
        for compiled in (part, getattr(part, "graph_module", None)):
            if isinstance(compiled, torch.fx.GraphModule):
                compiled.recompile()


def _tensors(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Yield every parameter and buffer at each of its places: the module, and the name there."""
    for part in model.modules():
        for name, tensor in (
            *part.named_parameters(recurse=False, remove_duplicate=False),
            *part.named_buffers(recurse=False, remove_duplicate=False),
        ):
            yield part, name, tensor


def _on(device: torch.device, graph: torch.fx.Graph) -> None:
    """Replace every device in a graph: all of a stage lives on one."""

    def here(argument: Any) -> Any:
        return device if isinstance(argument, torch.device) else argument

    for node in graph.nodes:
        node.args = map_aggregate(node.args, here)
        node.kwargs = map_aggregate(node.kwargs, here)


class _Carrying(nn.Module):
    """A traced stage: receives the values that it or a later stage needs, and sends those that later stages need."""

    def __init__(self, traced: nn.Module, route: Route, result: Spec) -> None:
        super().__init__()
        self.traced = traced
        self.route = route
        self.result = result
        graphs = [getattr(part, "graph", None) for part in traced.modules()]
        self.inplace = any(  # as `nn.ReLU(inplace=True)` is: it writes into its input
            node.op == "call_function" and node.target.__name__.partition(".")[0].endswith("_")
            for graph in graphs
            if isinstance(graph, torch.fx.Graph)
            for node in graph.nodes
        )

    def forward(self, given: Any) -> Any:
        route = self.route
        values = dict(zip(route.receives, _arguments(given), strict=True))
        made = self.traced(*(values[name] for name in route.arguments))
        if not route.sends:  # the last stage: the tracer has taken the model's result apart
            return rebuild(list(_arguments(made)), self.result)
        for name, index in route.makes.items():
            values[name] = made if index is None else made[index]
        return values[route.sends[0]] if len(route.sends) == 1 else tuple(values[name] for name in route.sends)


class TracedStages:
    """A model that PyTorch's tracer cuts, again for every mode and row count that is wanted.

    Attributes:
        rows: the example's row count.
        units: the model's layers in the order in which they run, each with its name: the model's children, those of
            lists and sequences one by one.
    """

    def __init__(self, model: nn.Module, example: Any) -> None:
        self._model = model
        self._example = example
        self.rows = rows_of(example, "example")
        self.units = self._layers_in_order()
        self._names: list[str] = []
        self._refuse_what_the_tracer_loses()

    def cut_at(self, names: Sequence[str]) -> None:
        """Begin a new stage at each of these layers."""
        self._names = list(names)

    def modules(self, example: Any = None) -> list[nn.Module]:
        """Return one module per stage, in the model's present training mode, for the row count of `example`."""
        from torch.distributed.pipelining import SplitPoint, pipeline

        example = self._example if example is None else example
        homes = {tensor.device for tensor in chain(self._model.parameters(), self._model.buffers())}
        if len(homes) > 1:
            raise SplitError(
                f"the model must be traced for {rows_of(example, 'example')} rows in "
                f"{'training' if self._model.training else 'evaluation'} mode, but it lies on several devices "
                f"({', '.join(sorted(map(str, homes)))}), where PyTorch's tracer cannot follow it\n  try: the rows and "
                "the mode of the example; all ranks on one device; or a list of stage modules"
            )
        for device in homes:
            example = map_tensors(partial(torch.Tensor.to, device=device), example)
        # The tracer draws random numbers (dropout) and warns about its own internals; neither is the caller's business.
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), _quiet(), self._unmarked():
            warnings.simplefilter("ignore")
            try:
                pipe = pipeline(
                    self._model,
                    mb_args=_arguments(example),
                    split_spec=dict.fromkeys(self._names, SplitPoint.BEGINNING),
                )
            except Exception as error:
                raise SplitError(
                    f"PyTorch's tracer cannot follow {type(self._model).__name__}: {type(error).__name__}: "
                    f"{str(error).strip().splitlines()[0]}; give a list of stage modules instead"
                ) from error
        count = len(self._names) + 1
        if pipe.num_stages != count:
            raise SplitError(
                f"the tracer made {pipe.num_stages} stages where {count} were asked for, cut at "
                f"{', '.join(self._names)}: give a list of stage modules instead"
            )
        routes = routes_of(pipe.split_gm.graph)
        return [_Carrying(pipe.get_stage_module(stage), route, self._result) for stage, route in enumerate(routes)]

    @contextmanager
    def _unmarked(self) -> Iterator[None]:
        """Restore the layers that begin a stage: the tracer replaces their `forward`."""
        layers = [self._model.get_submodule(name) for name in self._names]
        before = [dict(vars(layer)) for layer in layers]
        try:
            yield
        finally:
            for layer, attributes in zip(layers, before, strict=True):
                vars(layer).clear()
                vars(layer).update(attributes)

    def unit_times(self, repeats: int = 5) -> list[float]:
        """Return the median seconds between the starts of the layers, forward; backward is taken to be proportional."""
        starts: list[float] = []
        hooks = [
            module.register_forward_pre_hook(lambda *_: starts.append(time.perf_counter())) for _, module in self.units
        ]
        measured: list[list[float]] = []
        try:
            for _ in range(repeats + 1):
                starts.clear()
                self._run()
                ends = [*starts[1:], time.perf_counter()]
                measured.append([end - start for start, end in zip(starts, ends, strict=True)])
        finally:
            for hook in hooks:
                hook.remove()
        return [median(each) for each in zip(*measured[1:], strict=True)]

    def _layers_in_order(self) -> list[tuple[str, nn.Module]]:
        """Return the layers that one forward runs, in order, each once."""
        order: list[tuple[str, nn.Module]] = []
        hooks = []
        for layer in _layers(self._model):
            note = partial(lambda layer, *_: order.append(layer), layer)
            hooks.append(layer[1].register_forward_pre_hook(note))
        try:
            self._run()
        finally:
            for hook in hooks:
                hook.remove()
        names = [name for name, _ in order]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise SplitError(
                f"layer {twice!r} runs {names.count(twice)} times in one forward, so the model cannot be cut between "
                "its layers: give a list of stage modules"
            )
        return order

    def _refuse_what_the_tracer_loses(self) -> None:
        """Refuse checkpoints, and attributes that change from call to call; what the first call made may stay."""
        name, before = type(self._model).__name__, _attributes(self._model)
        output = self._run()
        if holds_checkpoint([tensor for tensor in tensors_of(output) if tensor.requires_grad]):
            raise SplitError(
                f"{name} runs a part of itself under an activation checkpoint (torch.utils.checkpoint), which "
                "PyTorch's tracer drops: the stages would keep all activations\n"
                "  try: a list of stage modules, which keep their checkpoints; or split the model without checkpoints"
            )
        changed = [each for each, value in _attributes(self._model).items() if before.get(each) != value]
        if changed:
            raise SplitError(
                f"{name} changes {', '.join(changed)} from call to call, and a traced stage keeps what it was when it "
                "was traced\n  try: a list of stage modules, which run your own code; or a buffer (register_buffer)"
            )

    def require_same_outputs(self, modules: Sequence[nn.Module]) -> None:
        """Refuse traced stages that compute something else than the model, if that draws no random numbers."""
        output = map_tensors(torch.Tensor.detach, self._run())
        if self._draws:
            return
        made = map_tensors(torch.clone, self._example)
        with torch.no_grad(), unchanged(modules):
            for module in modules:
                made = module(made)
        if any(map(_differ, tensors_of(made), tensors_of(output))):
            raise SplitError(
                f"the traced stages give other outputs than {type(self._model).__name__} on one example: something in "
                "it changes from call to call, such as a counter or Python's own random numbers, and a traced stage "
                "keeps what it was when it was traced\n  try: a list of stage modules, which run your own code"
            )

    def _run(self) -> Any:
        """Run the model once on the example and return its output; random state and buffers stay as they were."""
        with torch.enable_grad(), unchanged([self._model]):
            before = RandomSnapshot()
            try:
                output = self._model(*_arguments(map_tensors(torch.clone, self._example)))
            except Exception as error:
                layer = layer_of(error, self._model)
                error.add_note(f"raised by the model, run on the example{f', in layer {layer}' if layer else ''}")
                raise
            self._draws = RandomSnapshot() != before
            _, self._result = take_apart(output)
            return output


def _differ(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Tell whether two outputs differ by more than other kernels could explain."""
    if not (ours.is_floating_point() or ours.is_complex()):
        return not torch.equal(ours, theirs)
    return bool((ours - theirs).abs().float().norm() > 1e-3 * theirs.abs().float().norm())


def _attributes(model: nn.Module) -> dict[str, list[tuple[Any, int]]]:
    """Return, by name, what shows whether the modules' own attributes have changed."""
    return {
        f"{path}.{name}".lstrip("."): [_fingerprint(leaf) for leaf in take_apart(value)[0]]
        for path, part in model.named_modules()
        for name, value in vars(part).items()
        if name not in _OF_EVERY_MODULE
    }


def _fingerprint(leaf: Any) -> tuple[Any, int]:
    if isinstance(leaf, (bool, int, float, complex, str, bytes)):
        return leaf, 0
    return id(leaf), leaf._version if isinstance(leaf, torch.Tensor) and not leaf.is_inference() else 0  # noqa: SLF001


def _arguments(example: Any) -> tuple[Any, ...]:
    return tuple(example) if isinstance(example, (tuple, list)) else (example,)


def _layers(model: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """Return the model's children with their names, those of lists and sequences one by one."""
    found: list[tuple[str, nn.Module]] = []
    for name, child in model.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            found.extend(_layers(child, f"{prefix}{name}."))
        else:
            found.append((f"{prefix}{name}", child))
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the tracer's log for a while."""
    loggers = [logging.getLogger(name) for name in ("torch.distributed.pipelining", "torch.export", "torch._dynamo")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
