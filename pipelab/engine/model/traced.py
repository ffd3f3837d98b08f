"""Stages that PyTorch's tracer cuts from a model that is not an `nn.Sequential`.

A value that skips stages passes through them. What the tracer would lose silently is refused.
"""

from __future__ import annotations

import inspect
import time
import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import chain, pairwise
from statistics import median
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from pipelab.engine.stage.errors import in_short, layer_of
from pipelab.engine.stage.inputs import unmarked
from pipelab.engine.stage.pytree import Spec, described, map_tensors, opened, rebuild, take_apart, tensors_of
from pipelab.engine.stage.snapshot import AttributeSnapshot, RandomSnapshot, unchanged
from pipelab.engine.stage.split_backward import custom_functions, holds_checkpoint
from pipelab.engine.stage.streams import name_draw
from pipelab.errors import BatchError, SplitError

NamedLayer = tuple[str, nn.Module]

TRACED = "traced."
"""What comes before the model's own names in a traced stage."""


@dataclass(slots=True)
class Route:
    """The values that one traced stage receives, needs, makes and sends, by name."""

    receives: list[str] = field(default_factory=list)  # the model's arguments, or what the stage before sends
    arguments: list[str] = field(default_factory=list)  # the arguments of the traced stage
    makes: list[str] = field(default_factory=list)  # its results; of the last stage, the model's
    sends: list[str] = field(default_factory=list)  # what later stages need; nothing on the last stage


def cut_graph(
    whole: fx.GraphModule, layers: Sequence[str], starts: Sequence[str], model: nn.Module
) -> list[tuple[fx.GraphModule, Route]]:
    """Cut a model's graph where some layers start; a value is computed once, by the first stage that needs it."""
    _name_draws(whole.graph, model)
    stage_of = _stages_of(whole.graph, layers, starts)
    found = [_cut_out(whole, stage, stage_of) for stage in range(len(starts) + 1)]
    arriving = [node.name for node in whole.graph.nodes if node.op == "placeholder"]
    for stage, (_, route) in enumerate(found):
        later = {name for _, each in found[stage + 1 :] for name in each.arguments}
        route.receives = arriving
        arriving = route.sends = [name for name in (*arriving, *route.makes) if name in later]
    return found


def _name_draws(graph: fx.Graph, model: nn.Module) -> None:
    """Let the graph say, before every operation that draws random numbers, for which layer, and its number."""
    first = {each: name for name, each in model.named_modules()}
    drawn = Counter[str]()
    for node in list(graph.nodes):
        within = node.meta.get("nn_module_stack")
        if within and _draws(node):
            layer = first[model.get_submodule([*within.values()][-1][0])]
            with graph.inserting_before(node):
                named = graph.call_function(name_draw, (layer, drawn[layer]))
            named.meta = node.meta
            drawn[layer] += 1


def _draws(node: fx.Node) -> bool:
    """Return whether an operation draws random numbers: not a dropout or an attention that drops nothing."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    arguments = node.target._schema.arguments  # type: ignore[union-attr]  # noqa: SLF001 - an operation has one
    given = {each.name: each.default_value for each in arguments if each.has_default_value()}
    given |= {each.name: value for each, value in zip(arguments, node.args, strict=False)} | node.kwargs
    drops = ("dropout_p", "dropout", "train", "training", *["p"] * ("train" in given))
    return all(given.get(name, True) for name in drops)


def _stages_of(graph: fx.Graph, layers: Sequence[str], starts: Sequence[str]) -> dict[fx.Node, int]:
    """Return the stage of every operation: operations between two layers go with the one before."""
    at = {name: index for index, name in enumerate(layers)}
    first, reached, found = [at[name] for name in starts], -1, dict[fx.Node, int]()
    for node in graph.nodes:
        within = [name for name, _ in (node.meta.get("nn_module_stack") or {}).values()]
        reached = max([reached, *(at[name] for name in within if name in at)])
        if node.op.startswith("call"):
            found[node] = bisect_right(first, reached)
    found[graph.output_node()] = len(starts)
    return found


def _cut_out(whole: fx.GraphModule, stage: int, stage_of: Mapping[fx.Node, int]) -> tuple[fx.GraphModule, Route]:
    """Return a stage's graph: what it does not make itself is an argument."""
    *part, last = (node for node, its in stage_of.items() if its == stage)
    graph, route, copies = fx.Graph(), Route(), dict[fx.Node, fx.Node]()
    needed = dict.fromkeys(chain.from_iterable(node.all_input_nodes for node in (*part, last)))
    for node in needed:
        if node.op == "placeholder" or stage_of.get(node, stage) < stage:
            route.arguments.append(node.name)
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = node.meta
    inside = [node for node in needed if node.op == "get_attr"] + part + [last] * (last.op != "output")
    for node in inside:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    results = [node for node in inside if any(stage_of.get(user, stage) > stage for user in node.users)]
    route.makes = [node.name for node in results]
    graph.output(map_aggregate(last.args[0] if last.op == "output" else tuple(results), partial(_copied, copies)))
    return fx.GraphModule(whole, graph), route


def _copied(copies: dict[fx.Node, fx.Node], each: Any) -> Any:
    return copies[each] if isinstance(each, fx.Node) else each


def move(stage: nn.Module, device: torch.device, model: nn.Module) -> None:
    """Move a traced stage and the devices in its graphs; new buffers replace the model's, parameters stay the same."""

    def on_device(argument: Any) -> Any:
        return device if isinstance(argument, torch.device) else argument

    before = {id(tensor): (part, name) for part, name, tensor in _tensors(stage)}
    stage.to(device)
    for part, name, tensor in list(_tensors(model)):
        if id(tensor) in before:
            stages_part, stages_name = before[id(tensor)]
            setattr(part, name, getattr(stages_part, stages_name))
    for graph_module in _graph_modules(stage):
        for node in graph_module.graph.nodes:
            node.args = map_aggregate(node.args, on_device)
            node.kwargs = map_aggregate(node.kwargs, on_device)
        graph_module.recompile()


def _graph_modules(stage: nn.Module) -> list[fx.GraphModule]:
    return [part for part in stage.modules() if isinstance(part, fx.GraphModule)]


def _tensors(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Yield every parameter and buffer with its module and its name there, also where it appears again."""
    for part in model.modules():
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):  # noqa: SLF001 - with doubles
            if tensor is not None:
                yield part, name, tensor


class _RoutedStage(nn.Module):
    """A traced stage: receives the values that it or a later stage needs, and sends those that later stages need."""

    def __init__(self, traced: fx.GraphModule, route: Route, result: Spec, names: Sequence[str]) -> None:
        super().__init__()
        self.traced = traced
        self.others = nn.ModuleDict()
        self.route = route
        self.result = result
        self.names = names
        self.inplace = any(  # as `nn.ReLU(inplace=True)` is: it writes into its input
            node.op == "call_function" and node.target.__name__.partition(".")[0].endswith("_")
            for part in _graph_modules(traced)
            for node in part.graph.nodes
        )

    def forward(self, given: Any) -> Any:
        route = self.route
        arriving = [given[name] for name in self.names] if isinstance(given, dict) else received(given)
        values = dict(zip(route.receives, take_apart(arriving)[0], strict=True))
        arguments = [values[name] for name in route.arguments]
        fits = self.others and (key := _key(arguments)) in self.others
        made = (self.others[key] if fits else self.traced)(*arguments)
        if not route.sends:  # the last stage: the tracer has flattened the model's result
            return rebuild(list(received(made)), self.result)
        values.update(zip(route.makes, made, strict=True))
        return values[route.sends[0]] if len(route.sends) == 1 else tuple(values[name] for name in route.sends)

    def add(self, other: _RoutedStage) -> bool:
        """Run what another trace made where it fits; return whether the shapes of its arguments tell the two apart."""
        own, its = (
            _key([node.meta.get("val") for node in graph.nodes if node.op == "placeholder"])
            for graph in (self.traced.graph, other.traced.graph)
        )
        self.others[its] = other.traced
        return own != its and other.route == self.route


def _key(values: Sequence[Any]) -> str:
    """Return the shapes of values, in words that name a module."""
    return str([tuple(getattr(each, "shape", ())) for each in values])


class TracedStages:
    """A model that PyTorch's tracer cuts, once for each training mode and shape of a micro-batch.

    Its `units` are those of the `layers` that run once, with their names, in the order in which they run. No stage
    begins at one that is `repeated`.
    """

    def __init__(self, model: nn.Module, layers: Sequence[NamedLayer], example: Any) -> None:
        self._model = model
        self.example = example = in_order(model, unmarked(example))
        self.shapes = shapes_of(example)
        self.units = self._in_order(layers)
        self.starts: list[str] = []  # the layers at which stages begin, but for the first

    def modules(self, example: Any = None) -> list[_RoutedStage]:
        """Return one module per stage, in the model's present training mode, for the row count of `example`."""
        example = self._placed(example)
        # The tracer draws random numbers (dropout) and warns about its own internals.
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                exported = torch.export.export(self._model, *arguments_of(self._model, example), strict=False)
                whole = exported.module(check_guards=False)
                parts = cut_graph(whole, [name for name, _ in self.units], self.starts, self._model)
            except Exception as error:
                shapes, known = (" and ".join(map(described, tensors_of(each))) for each in (example, self.example))
                others = f"\n  the example has {known}: pipelab.whole(...) marks what all micro-batches need all of"
                raise SplitError(
                    f"PyTorch's tracer cannot trace {type(self._model).__name__} with {shapes}: {in_short(error)}"
                    f"{others * (' and ' in shapes != known)}\n{_RECIPES}"
                ) from error
        own = set(map(id, self._model.parameters()))
        for stage, (part, _) in enumerate(parts):
            copied = next((name for name, each in part.named_parameters() if id(each) not in own), None)
            if copied is not None:
                raise SplitError(
                    f"PyTorch's tracer made a copy of a parameter for stage {stage}, {copied!r}, which would learn "
                    "without the model\n  try: a list of stage modules"
                )
        names = tuple(example) if isinstance(example, dict) else ()
        return [_RoutedStage(part, route, self._result, names) for part, route in parts]

    def unit_times(self, repeats: int = 5) -> list[float]:
        """Return the median seconds between the starts of the layers, forward; backward is assumed proportional."""
        starts, measured = list[float](), list[list[float]]()
        with _noting(self.units, lambda _: starts.append(time.perf_counter())):
            for _ in range(repeats + 1):
                starts.clear()
                self._run()
                measured.append([later - start for start, later in pairwise([*starts, time.perf_counter()])])
        return [median(each) for each in zip(*measured[1:], strict=True)]

    def _in_order(self, layers: Sequence[NamedLayer]) -> list[NamedLayer]:
        """Return the layers that one forward runs once, in order; refuse what the tracer would lose."""
        order: list[NamedLayer] = []
        with _noting(layers, order.append):
            output = self._run()
        self.repeated = {name: count for name, count in Counter(name for name, _ in order).items() if count > 1}
        if holds_checkpoint([tensor for tensor in tensors_of(output) if tensor.requires_grad]):
            raise SplitError(
                f"{type(self._model).__name__} has an activation checkpoint (torch.utils.checkpoint), which PyTorch's "
                "tracer drops: the stages would keep all activations\n"
                "  try: a list of stage modules, which keep their checkpoints; or no checkpoint"
            )
        return [layer for layer in order if layer[0] not in self.repeated]

    def require_same(self, modules: Sequence[nn.Module], example: Any = None) -> None:
        """Refuse traced stages with other outputs or gradients than the model on an example.

        The outputs of a model that draws random numbers are compared if the stages draw them in the same order.
        """
        name, example, before = type(self._model).__name__, self._placed(example), AttributeSnapshot(self._model)
        self._run(example)  # a counter may have, in the next call, the value that the tracer recorded
        changed = before.changed(AttributeSnapshot(self._model))
        outputs, gradients, functions = self._learned(partial(call, self._model), modules, example)
        try:
            ours = self._learned(partial(reduce, lambda made, module: module(made), modules), modules, example)
        except Exception as error:
            raise SplitError(
                f"the stages that PyTorch's tracer made of {name} do not run: {in_short(error)}\n"
                "  try: a list of stage modules"
            ) from error
        instead = "  try: a list of stage modules, which run your own code"
        if lost := functions - ours[2]:
            raise SplitError(
                f"{name} runs {next(iter(lost))}, an autograd function that is not PyTorch's own: the tracer drops its "
                f"backward, so gradients would follow from its forward alone\n{instead}"
            )
        if any(map(_differ, ours[0], outputs)):
            if self._draws:
                return
            why = f"as its {changed} does" if changed else "for instance by Python's own random numbers"
            raise SplitError(
                f"the traced stages have other outputs than {name} on the same example: its forward changes from call "
                f"to call, {why}, and the tracer records one call\n{instead}"
            )
        least = 1e-2 * max((_norm(each) for each in gradients.values()), default=0.0)  # below it is rounding, perhaps
        wrong = next((each for each in gradients if _differ(ours[1][each], gradients[each], least)), None)
        if wrong is not None:
            raise SplitError(
                f"the traced stages give {wrong} another gradient than {name} on the same example: PyTorch's tracer "
                f"drops what a forward does to gradients, such as a hook on a tensor\n{instead}"
            )

    def _learned(
        self, forward: Callable[[Any], Any], modules: Sequence[nn.Module], example: Any
    ) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], Counter[str]]:
        """Return outputs, gradients of their sum with fixed weights, and autograd functions that are not PyTorch's own.

        Random state and buffers are restored, and no `.grad` is touched.
        """
        with torch.inference_mode(mode=False), torch.enable_grad(), unchanged([self._model, *modules]):
            outputs = tensors_of(forward(map_tensors(torch.clone, example)))
            ends = [each for each in outputs if each.requires_grad]
            generator = torch.Generator().manual_seed(0)
            weights = [torch.randn(each.shape, generator=generator).to(each) for each in ends]
            learning = {name: each for name, each in self._model.named_parameters() if each.requires_grad}
            functions, gradients = custom_functions(ends), dict[str, torch.Tensor]()
            if ends and learning:
                found = torch.autograd.grad(ends, [*learning.values()], weights, materialize_grads=True)
                gradients = {name: each.to_dense() for name, each in zip(learning, found, strict=True)}
        return [each.detach() for each in outputs], gradients, functions

    def _placed(self, example: Any) -> Any:
        """Return an example on the model's device, by default the one given at first."""
        example = self.example if example is None else in_order(self._model, example)
        devices = {tensor.device for tensor in chain(self._model.parameters(), self._model.buffers())}
        return map_tensors(partial(torch.Tensor.to, device=devices.pop()), example) if len(devices) == 1 else example

    def _run(self, example: Any = None) -> Any:
        example = self._placed(example)
        with torch.enable_grad(), unchanged([self._model]):
            before = RandomSnapshot()
            try:
                output = call(self._model, map_tensors(torch.clone, example))
            except Exception as error:
                layer = layer_of(error, self._model)
                error.add_note(f"raised when the model ran on the example{f', in layer {layer}' if layer else ''}")
                raise
            self._draws = RandomSnapshot() != before
            leaves, self._result = take_apart(output)
            odd = next((each for each in leaves if not isinstance(each, _TRACED_RESULTS)), None)
            if odd is not None:
                raise SplitError(
                    f"{type(self._model).__name__} returns a {type(odd).__name__}, which PyTorch's tracer cannot follow"
                    "\n  try: make it return tensors only (of Hugging Face: model.config.use_cache = False), or a list "
                    "of stage modules"
                )
            return output


_RECIPES = "  try: a list of stage modules, as 'Stages by hand' in the documentation has them for six families"
_TRACED_RESULTS = (torch.Tensor, int, float, bool, str, type(None))


def _differ(ours: torch.Tensor, theirs: torch.Tensor, least: float = 0.0) -> bool:
    """Return whether two tensors differ by more than the rounding of other kernels."""
    if not (ours.is_floating_point() or ours.is_complex()):
        return not torch.equal(ours, theirs)
    allowed = max(1e-3, 8 * torch.finfo(ours.dtype).eps)
    return _norm(ours - theirs) > allowed * max(_norm(theirs), least)


def _norm(tensor: torch.Tensor) -> float:
    return float(tensor.abs().float().norm())


@contextmanager
def _noting(layers: Sequence[NamedLayer], note: Callable[[NamedLayer], None]) -> Iterator[None]:
    """Return a context in which each of these layers is noted when it starts."""
    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer[1].register_forward_pre_hook(lambda *_, layer=layer: note(layer)).remove)
        yield


# ── What a whole model is called with: a tuple is several arguments, a dict keyword arguments ───────────────────────


def call(model: nn.Module, given: Any) -> Any:
    """Call a whole model as its traced stages are called: a tuple is several arguments, a dict keyword arguments."""
    args, kwargs = arguments_of(model, given)
    return model(*args, **kwargs)


def arguments_of(model: nn.Module, given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments that a batch stands for, and the keyword arguments."""
    given = opened(given)
    if isinstance(given, dict):
        try:
            inspect.signature(model.forward).bind(**given)
        except TypeError:  # the model takes the dict itself, or has other names
            return (given,), {}
        return (), given
    return (tuple(given) if isinstance(given, (tuple, list)) else (given,)), {}


def in_order(model: nn.Module, given: Any) -> Any:
    """Return keyword arguments in the order of the model's parameters, which is the tracer's too."""
    kwargs = arguments_of(model, given)[1]
    known = [name for name in inspect.signature(model.forward).parameters if name in kwargs]
    return {name: kwargs[name] for name in (*known, *(each for each in kwargs if each not in known))} or given


def received(given: Any) -> Sequence[Any]:
    """Return the values that arrive as one value."""
    return given if isinstance(given, (tuple, list)) else (given,)


def shapes_of(given: Any) -> tuple[torch.Size, ...]:
    """Return the shapes of the tensors in a value; a dict's in the order of its names."""
    if isinstance(given, dict):
        given = [given[name] for name in sorted(given)]
    return tuple(tensor.shape for tensor in tensors_of(given))


def require_like(example: Any, given: Any) -> None:
    """Refuse another structure than the example's, or another constant: the tracer has recorded those."""
    (ours, spec), (theirs, other) = map(take_apart, (example, given))
    if spec != other or any(map(_other_constant, ours, theirs)):
        raise BatchError(
            f"the model was traced with {_described(example)}, and the batch is {_described(given)}: the tracer "
            "records names, and values that are not tensors\n  try: a batch like the example, or split the model again "
            "with example= one micro-batch of this kind"
        )


def _other_constant(one: Any, other: Any) -> bool:
    tensors = [isinstance(each, torch.Tensor) for each in (one, other)]
    return not all(tensors) if any(tensors) else bool(one != other)


def _described(given: Any) -> str:
    """Return a batch in words, sizes left out: `{'ids': 'tensor', 'cache': False}`."""
    return str(map_tensors(lambda _: "tensor", given))
