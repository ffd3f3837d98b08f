"""Plain training, without the engine: the gradients that a pipeline's are compared with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from pipelab.engine.model.arguments import call
from pipelab.engine.stage.batch import Reduction, join, rows_of, split_batch, weights_of
from pipelab.engine.stage.caller import CallerContext
from pipelab.engine.stage.loss import Loss
from pipelab.engine.stage.pytree import full_tensor, map_tensors, tensors_of
from pipelab.engine.stage.snapshot import BatchSnapshot, BufferSnapshot, RandomSnapshot, overwrite
from pipelab.errors import LossError

if TYPE_CHECKING:
    from pipelab.engine.pipeline import Pipeline

LossFunction = Callable[[Any, Any], torch.Tensor]


def learning(pipe: Pipeline) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that learn, under the model's own names, as in `"0.weight (stage 0)"`."""
    names = {id(parameter): name for name, parameter in pipe.stages.named.named_parameters()}
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for stage, module in enumerate(pipe.stages.modules):
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:  # of several stages, the first names it
                found.setdefault(id(parameter), (f"{names.get(id(parameter), name)} (stage {stage})", parameter))
    return list(found.values())


def gradients_of(pipe: Pipeline) -> dict[str, torch.Tensor]:
    """Return copies of the gradients as they are now, zeros where there is none."""
    return {name: gradient_of(parameter) for name, parameter in learning(pipe)}


def gradient_of(parameter: nn.Parameter) -> torch.Tensor:
    """Return a copy of a parameter's gradient, zeros if there is none."""
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
    found: torch.Tensor = full_tensor(gradient)
    return found.to_dense() if found.is_sparse else found.clone()


def sequential(pipe: Pipeline, x: Any, y: Any, only: int | None = None) -> dict[str, torch.Tensor]:
    """Run one micro-batch after another, forward and backward, or one alone; return copies of the gradients."""
    values, targets = pipe.cut.rows(x, "x"), pipe.cut.rows(y, "y")
    weights = weights_of(pipe.reduction, [rows_of(each, "x") for each in values], targets)
    through = _through_model if pipe.stages.is_traced else _through_stages
    with _ties_apart(pipe):
        for microbatch, value in enumerate(values):
            if only in (None, microbatch):
                _backward(pipe, through(pipe, value), targets[microbatch], weights[microbatch])
    return gradients_of(pipe)


def full_batch(pipe: Pipeline, x: Any, y: Any) -> Any:
    """Run the whole batch through the model, forward and backward; return the output."""
    with _ties_apart(pipe):
        output = _through_model(pipe, x)
        _backward(pipe, output, y, 1.0)
    return output


def _ties_apart(pipe: Pipeline) -> AbstractContextManager[None]:
    """Return a context in which a parameter of stages on several devices is on each of them."""
    runners = pipe.engine.runners
    apart = runners.ties and len(set(pipe.engine.stage_devices)) > 1
    return runners.running(pipe.stages.modules, learning=True) if apart else nullcontext()


def _through_model(pipe: Pipeline, value: Any) -> Any:
    """Return what comes out of the user's own model.

    Where there is none (stages given as a list), or none that runs on one device, it is what comes out of the stages.
    """
    model, devices = pipe.stages.model, set(pipe.engine.stage_devices)
    if len(devices) > 1 or isinstance(model, nn.ModuleList):
        return _through_stages(pipe, value)
    value = _cloned(pipe, 0, _moved(value, *devices))
    return call(model, value) if pipe.stages.is_traced else model(value)


def _through_stages(pipe: Pipeline, value: Any) -> Any:
    for stage, (module, device) in enumerate(zip(pipe.stages.modules, pipe.engine.stage_devices, strict=True)):
        value = module(_cloned(pipe, stage, _moved(value, device)))
    return value


def _cloned(pipe: Pipeline, stage: int, value: Any) -> Any:
    """Return a clone of a stage's input where the engine makes one, and only there: strides may change last bits."""
    clones = any(runner.clones_input for (index, _), runner in pipe.engine.runners.of.items() if index == stage)
    return map_tensors(torch.clone, value) if clones else value


def _backward(pipe: Pipeline, output: Any, target: Any, weight: float) -> None:
    """Run loss and backward, the latter outside of the caller's autocast, as the workers do."""
    loss = Loss(pipe.loss_fn, [_moved(target, pipe.engine.stage_devices[-1])], [weight])
    value = loss.of(0, output)
    with pipe.caller().autocast_off():
        value.backward(loss.gradient(0, value))


def _moved(value: Any, device: torch.device) -> Any:
    return map_tensors(lambda tensor: tensor.to(device), value)


def microbatch_gradients(
    model: nn.Module,
    forward: Callable[[Any], Any],
    x: Any,
    y: Any,
    loss_fn: LossFunction,
    counts: list[int],
    reduction: Reduction | None,
) -> tuple[dict[str, list[torch.Tensor]], list[float]]:
    """Return what each micro-batch adds to the gradient of each parameter, and its weight in the batch's loss."""
    learning = {name: each for name, each in model.named_parameters() if each.requires_grad}
    caller, device = caller_of(model), next(iter(learning.values())).device
    targets, outputs = split_batch(y, counts), list[Any]()
    found: dict[str, list[torch.Tensor]] = {name: [] for name in learning}
    for target, rows in zip(targets, split_batch(x, counts), strict=True):
        with torch.enable_grad():
            output = forward(_moved(rows, device))
            loss = _loss(loss_fn, output, target)
        with caller.autocast_off():
            loss.backward()
        outputs.append(map_tensors(torch.Tensor.detach, output))
        for name, parameter in learning.items():
            found[name].append(gradient_of(parameter).cpu())
            parameter.grad = None
    shares = _shares(loss_fn, outputs, targets, y) if reduction is None else weights_of(reduction, counts, targets)
    for each in found.values():
        each[:] = [one * share if share else torch.zeros_like(one) for one, share in zip(each, shares, strict=True)]
    return found, shares


def _loss(loss_fn: LossFunction, output: Any, target: Any) -> torch.Tensor:
    places = [each.device for each in tensors_of(output)]
    return Loss(loss_fn, [_moved(target, places[0]) if places else target], [1.0]).of(0, output)


def _slopes(loss_fn: LossFunction, output: Any, target: Any) -> list[torch.Tensor]:
    """Return the gradient of a loss by each tensor of an output."""

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone().requires_grad_(tensor.is_floating_point() or tensor.is_complex())

    with torch.enable_grad():
        output = map_tensors(leaf, output)
        along = [each for each in tensors_of(output) if each.requires_grad]
        return list(torch.autograd.grad(_loss(loss_fn, output, target), along, materialize_grads=True))


def _shares(loss_fn: LossFunction, outputs: list[Any], targets: list[Any], y: Any) -> list[float]:
    """Return each micro-batch's weight in the loss of the whole batch.

    The slope of the batch's loss along a micro-batch's output is its own loss's slope, times this weight.
    """
    each_alone = [_slopes(loss_fn, output, target) for output, target in zip(outputs, targets, strict=True)]
    try:
        at_once = _slopes(loss_fn, join(outputs), y)
    except Exception as error:
        raise LossError(
            f"the loss of all micro-batches' outputs, joined, raised {type(error).__name__}: {error}\n"
            "  try: reduction='mean', 'sum' or a function from a target to the weight of its micro-batch"
        ) from error
    lengths = [[len(each) if each.dim() else 1 for each in pieces] for pieces in zip(*each_alone, strict=True)]
    cut = zip(*(whole.split(counts) for whole, counts in zip(at_once, lengths, strict=True)), strict=True)
    shares, rest, eps = list[float](), 0.0, max(float(torch.finfo(each.dtype).eps) for each in at_once)
    for pieces, parts in zip(each_alone, cut, strict=True):
        alone, whole = flat(pieces).double(), flat(parts).double()
        shares.append(float(whole @ alone / (alone @ alone)) if whole.any() else 0.0)
        rest += float((whole - shares[-1] * alone).norm()) if shares[-1] else 0.0
    if rest > max(_TOLERANCE_OF_A_LOSS, 8 * eps) * float(flat(at_once).norm()):
        raise LossError(
            "the loss of the whole batch is no weighted sum of the losses of its micro-batches, so no training on "
            "micro-batches has its gradients\n  try: reduction='mean', to compare with the mean of their losses by rows"
        )
    return shares


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return all numbers of some tensors in one row."""
    real = (torch.view_as_real(each) if each.is_complex() else each for each in tensors)
    return torch.cat([each.detach().cpu().flatten() for each in real])


def caller_of(model: nn.Module) -> CallerContext:
    """Return the settings of this thread for the devices of a model."""
    return CallerContext.capture({each.device.type for each in model.parameters()})


@contextmanager
def restored(modules: Iterable[nn.Module], batch: Any) -> Iterator[Callable[[], None]]:
    """Restore gradients, buffers, modes, random state and batch at the end; yield what restores all but gradients."""
    modules = list(modules)
    modes = [(layer, layer.training) for module in modules for layer in module.modules()]
    gradients = [(parameter, parameter.grad) for module in modules for parameter in module.parameters()]
    buffers, random_state, numbers = BufferSnapshot(modules), RandomSnapshot(), BatchSnapshot(batch)

    def rewind() -> None:
        for parameter, _ in gradients:
            parameter.grad = None
        for layer, training in modes:
            layer.training = training
        buffers.restore()
        random_state.restore()
        numbers.restore()

    rewind()
    try:
        yield rewind
    finally:
        rewind()
        for parameter, gradient in gradients:
            parameter.grad = gradient


@dataclass(frozen=True)
class Seen:
    """What layers do: the types of their outputs, what ran, and the layers that ran after their weights had changed.

    What ran is a layer's name, whether it was in training, and how many numbers it gave; `back` has the layers whose
    outputs got a gradient, once for each time. A call that is repeated within
    a backward, as activation checkpoints do, is left out.
    """

    types: set[torch.dtype] = field(default_factory=set)
    ran: list[tuple[str, bool, int]] = field(default_factory=list)
    back: list[str] = field(default_factory=list)
    changed: set[str] = field(default_factory=set)

    def times(self, other: Seen) -> dict[str, float]:
        """Return how many times as many numbers as there each layer gave that ran here and there."""
        ours, theirs = Counter[str](), Counter[str]()
        for amounts, seen in ((ours, self), (theirs, other)):
            for name, _, many in seen.ran:
                amounts[name] += many
        return {name: many / theirs[name] for name, many in ours.items() if theirs[name]}

    @property
    def backwards(self) -> dict[str, float]:
        """How many backwards followed each forward, by layer."""
        forwards, back = Counter(name for name, *_ in self.ran), Counter(self.back)
        return {name: back[name] / many for name, many in forwards.items()}


@contextmanager
def seen(modules: Iterable[nn.Module]) -> Iterator[Seen]:
    """Yield what layers do meanwhile, in whatever thread; their copies too, made meanwhile."""
    found, modules = Seen(), list(modules)
    versions = {id(each): each._version for module in modules for each in module.parameters()}  # noqa: SLF001

    def note(name: str, layer: nn.Module, _: object, output: object) -> None:
        made = [each for each in tensors_of(output) if each.is_floating_point()]
        found.types.update(each.dtype for each in made)
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() < 0:  # noqa: SLF001 - not run again for a backward
            found.ran.append((name, layer.training, sum(each.numel() for each in made)))
            for each in [each for each in made if each.grad_fn is not None][:1]:
                each.register_hook(lambda _: found.back.append(name))
            if any(each._version != versions.get(id(each), each._version) for each in layer.parameters()):  # noqa: SLF001
                found.changed.add(name)

    with ExitStack() as stack:
        named = {layer: name for module in modules[::-1] for name, layer in module.named_modules()}
        for layer, name in named.items():
            if not any(layer.children()):
                stack.callback(layer.register_forward_hook(partial(note, name)).remove)
        yield found


def in_types(types: set[torch.dtype], forward: Callable[[Any], Any], rows: Any) -> Any:
    """Run a forward under autocast to these types, if any; the loss gets float32, as it does under autocast."""
    with ExitStack() as stack:
        for each in types:
            stack.enter_context(torch.autocast(tensors_of(rows)[0].device.type, dtype=each))
        output = forward(rows)
    return map_tensors(lambda each: each.float() if each.dtype in types else each, output)


def unproven_of(model: nn.Module, draws: bool) -> tuple[str, ...]:
    """Return what the comparisons cannot show; `draws` is whether the model draws random numbers."""
    layers = [layer for layer in model.modules() if layer.training]
    reasons: list[str] = []
    if draws:
        drops = any(isinstance(layer, _DropoutNd) and layer.p for layer in layers)
        reasons.append(
            f"{'dropout' if drops else 'the model'} draws from one random stream, in another order than the plain "
            "model: set model.eval()"
        )
    if any(isinstance(layer, _BatchNorm) for layer in layers):
        reasons.append("BatchNorm sees each micro-batch alone: equal to micro-batches, not to the whole batch")
    return tuple(reasons)


@contextmanager
def nearby_weights(modules: Iterable[nn.Module], seed: int, share: float) -> Iterator[None]:
    """Multiply every weight by a random number near 1, the same in every process; restore the weights afterwards.

    A weight changes by at most this share of itself, and by no less than the last bits of its type.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters = {id(each): each for module in modules for each in module.parameters()}.values()
    before = [(each, each.detach().clone()) for each in parameters if each.is_floating_point() or each.is_complex()]
    try:
        for parameter, weights in before:
            draws = torch.rand(weights.shape, generator=generator) * 2 - 1
            least = max(share, 2 * torch.finfo(weights.dtype).eps)
            overwrite(parameter.data, weights * (1 + least * draws).to(weights.device, weights.dtype))
        torch.clear_autocast_cache()  # of copies in a coarser type
        yield
    finally:
        for parameter, weights in before:
            overwrite(parameter.data, weights)
        torch.clear_autocast_cache()


_TOLERANCE = 1e-6
"""Largest difference (2-norm, per parameter, float32) between orders of adding up the same micro-batches' gradients,
relative to the norms of what is added up: the sum may be much smaller, as it is near a minimum of the loss."""

_TOLERANCE_ON_A_GPU = 1e-5
"""Likewise on a GPU: libraries choose other kernels for a part of it than for all of it; some add up in no order."""

_WHOLE_BATCH_TOLERANCE = 1e-4
"""Likewise against the whole batch, relative to the sum itself: generous, because a wrong weight is off by far
more than rounding."""

_TOLERANCE_OF_A_LOSS = 1e-3
"""How far the slopes of a batch's loss may be from multiples of its micro-batches' slopes, relative to all of them."""

_MOVE = 0.05
"""How far `nearby_weights` moves weights: far enough that residuals are no rounding errors, near enough that what is
wrong with the present weights is wrong with those."""

NEARBY = 5
"""With how many other weights to look again. By chance a ReLU's input is near zero in a few per cent of the largest
models that a test would verify: with most of five, it is a fault."""

_SMALLEST_SHARE = 1e-2
"""A gradient below this share of the model's largest is measured against that share: of one that ought to be zero (an
attention's key bias) only rounding is left, and rounding differs from itself by a hundred per cent."""


def differences(
    ours: dict[str, torch.Tensor], plain: dict[str, torch.Tensor], norms: dict[str, float]
) -> dict[str, float]:
    """Return each gradient's difference, in the 2-norm, relative to these norms."""
    return relative({name: _norm(gradient - plain[name]) for name, gradient in ours.items()}, norms)


def relative(differences: dict[str, float], norms: dict[str, float]) -> dict[str, float]:
    """Return the norms of differences relative to the gradients' norms; see `_SMALLEST_SHARE`."""
    least = _least(norms)
    return {name: each / (max(norms[name], least) or 1.0) for name, each in differences.items()}


def norms_of(gradients: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return each gradient's 2-norm."""
    return {name: _norm(gradient) for name, gradient in gradients.items()}


def matters(name: str, gradients: dict[str, torch.Tensor]) -> bool:
    """Tell whether a gradient is large enough, among these, to be measured against itself."""
    norms = norms_of(gradients)
    return norms[name] > _least(norms)


def tolerance(pipe: Pipeline, gradient: torch.Tensor) -> float:
    """Return how far a gradient may be from the same micro-batches', added up in another order."""
    own = 8 * float(torch.finfo(gradient.dtype).eps)
    if all(each.device.type == "cpu" for each in pipe.devices):
        return max(_TOLERANCE, own)
    casts = (8 * float(torch.finfo(each).eps) for each in pipe.caller().types)
    return max(_TOLERANCE_ON_A_GPU, own, *casts)


def whole_batch_tolerance(pipe: Pipeline) -> float:
    """Return the tolerance for the coarsest type that gradients are made in."""
    types = {parameter.dtype for _, parameter in learning(pipe)}
    types |= pipe.caller().types
    return max(_WHOLE_BATCH_TOLERANCE, *(8 * float(torch.finfo(each).eps) for each in types))


def far(pipe: Pipeline) -> float:
    """Return by what share to move weights: types that round more coarsely must move further."""
    return max(_MOVE, 4 * whole_batch_tolerance(pipe))


def _least(norms: dict[str, float]) -> float:
    return _SMALLEST_SHARE * max(norms.values(), default=0.0)


def _norm(gradient: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(gradient.abs().double()))
