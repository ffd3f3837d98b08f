"""Memory, measured: what each stage takes for one micro-batch, and what every rank holds in a step.

Hooks on saved tensors see what autograd saves. They pack each tensor into a `Saved`, which lives as long as autograd
keeps the tensor: so what is alive after an action is what the rank holds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from threading import get_ident
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import nn

from pipelab.engine.stage.autograd import Saved, saving_hooks, unpack
from pipelab.engine.stage.batch import row_counts, rows_of, split_batch, weights_of
from pipelab.engine.stage.loss import Loss
from pipelab.engine.stage.pytree import map_tensors, tensors_of
from pipelab.engine.stage.stage import Stage, kept_tensors
from pipelab.engine.step import RankState, Step
from pipelab.engine.verify.verify import restored
from pipelab.errors import UsageError
from pipelab.plan.actions import Action
from pipelab.simulation.memory import Held, Memory, MemoryUse

if TYPE_CHECKING:
    from pipelab.engine.pipeline import Pipeline

__all__ = ["stage_memory", "step_memory"]


def stage_memory(pipe: Pipeline, x: Any, y: Any, optimizer: torch.optim.Optimizer | None) -> Memory:
    """Return the bytes of every stage, from the first micro-batch of a batch."""
    _require_whole(pipe)
    counts = row_counts(rows_of(x, "x"), pipe.plan.microbatches)
    targets = split_batch(y, counts)
    modules, devices = pipe.stages.modules, pipe.engine.stage_devices
    stages = [Stage(index, module, len(modules)) for index, module in enumerate(modules)]
    watches = [_Watch([x, y], optimizer) for _ in stages]
    kept: list[dict[int, Any]] = [{} for _ in stages]
    alone = list(zip(stages, watches, kept, devices, strict=True))
    activations, left = [], []
    with restored(pipe, x, y):
        loss = Loss(pipe.loss_fn, [_moved(targets[0], devices[-1])], weights_of(pipe.reduction, counts, targets)[:1])
        value = split_batch(x, counts)[0]
        for stage, watch, own, device in alone:
            with watch.hooks():
                value = stage.forward(0, _moved(value, device), own, loss)
            if stage.is_last:
                watch.returned(value)
            activations.append(watch.held([stage.module], [own]).activations)
        value = None
        with pipe.caller().autocast_off():
            for stage, watch, own, device in reversed(alone):
                value = stage.backward_input(0, _moved(value, device), own, loss)
                left.append(watch.held([stage.module], [own]).activations)
                stage.backward_weight(0, None, own, loss)
        static = [watch.held([module], []) for watch, module in zip(watches, modules, strict=True)]
    return Memory(
        weights=[each.weights for each in static],
        gradients=[each.gradients for each in static],
        optimizer=[each.optimizer for each in static],
        activations=activations,
        for_weight_grad=left[::-1],
        outputs=static[-1].outputs,
    )


def step_memory(pipe: Pipeline, x: Any, y: Any, optimizer: torch.optim.Optimizer | None) -> MemoryUse:
    """Return what every rank held after each action of one step."""
    _require_whole(pipe)
    watch = _Watch([x, y], optimizer)
    gpus = {each.device for each in pipe.devices if each.device.type == "cuda"}

    def modules(rank: int) -> list[nn.Module]:
        return [runner.module for (_, on), runner in pipe.engine.runners.of.items() if on == rank]

    def after(rank: RankState, stage: Stage, action: Action, made: Any) -> None:
        if action.kind == "F" and stage.is_last:
            watch.returned(made)
        found[rank.rank].append(watch.held(modules(rank.rank), rank.kept.values(), action))

    with restored(pipe, x, y):
        found = [[watch.held(modules(rank), [])] for rank in range(pipe.plan.ranks)]
        for gpu in gpus:
            torch.cuda.synchronize(gpu)
            torch.cuda.reset_peak_memory_stats(gpu)
        with watch.hooks():
            state, loss = pipe.run(x, y, watch=after)
        trace = Step(loss.total(), state, pipe.plan, tuple(pipe.engine.labels)).trace
        allocated = {str(gpu): torch.cuda.max_memory_allocated(gpu) for gpu in gpus}
    curves = [
        tuple(replace(held, time=time) for held, time in zip(each, [trace.start, *ends], strict=True))
        for each, ends in zip(found, trace.ends, strict=True)
    ]
    return MemoryUse(trace, tuple(curves), "measured", allocated)


class _Watch:
    """What autograd saves in each thread, while it does, and what a thread's rank holds.

    Args:
        batch: its memory is the caller's, and does not count.
        optimizer: whose state counts.
    """

    def __init__(self, batch: Any, optimizer: torch.optim.Optimizer | None) -> None:
        self._apart = _pieces(tensors_of(batch))
        self._state: Mapping[Any, Mapping[str, Any]] = {} if optimizer is None else optimizer.state
        self._saved: defaultdict[int, WeakSet[Saved]] = defaultdict(WeakSet)
        self._outputs: defaultdict[int, list[torch.Tensor]] = defaultdict(list)

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return a context in which forwards are watched."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, unpack)

    def _pack(self, tensor: torch.Tensor) -> Saved:
        saved = Saved(tensor)
        self._saved[get_ident()].add(saved)
        return saved

    def returned(self, output: Any) -> None:
        """Add an output of the model, which is kept."""
        self._outputs[get_ident()] += tensors_of(output)

    def held(
        self, modules: Iterable[nn.Module], kept: Iterable[Mapping[int, Any]], action: Action | None = None
    ) -> Held:
        """Return what this thread's rank holds now: stages with these modules, and what their actions keep."""
        modules = list(modules)
        parameters = {id(each): each for module in modules for each in module.parameters()}.values()
        own = _pieces([*parameters, *(each for module in modules for each in module.buffers())])
        gradients = _pieces(each.grad for each in parameters if each.grad is not None)
        state = _pieces(tensors_of([list(self._state.get(each, {}).values()) for each in parameters]))
        outputs = _pieces(self._outputs[get_ident()])
        keeps = [each for stage in kept for each in kept_tensors(stage)]
        activations = _pieces([*(each.tensor for each in self._saved[get_ident()]), *keeps])
        for piece in (self._apart | own | outputs).keys() & activations.keys():
            del activations[piece]
        sizes = [sum(each.values()) for each in (own, gradients, state, activations, outputs)]
        return Held(0.0, action, *sizes)


def _pieces(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the memory of some tensors: by address, how many bytes it has. Tensors that share it count once."""
    memory = [each.untyped_storage() for each in tensors if each.layout is torch.strided]
    return {each.data_ptr(): each.nbytes() for each in memory if each.nbytes()}


def _moved(value: Any, device: torch.device) -> Any:
    return map_tensors(lambda tensor: tensor.to(device), value)


def _require_whole(pipe: Pipeline) -> None:
    """Refuse to measure a part of the stages, or under hooks that pack tensors themselves."""
    if len(pipe.engine.local_stages) < pipe.plan.stages:
        raise UsageError(
            f"memory is measured where all stages are, and this process has {len(pipe.engine.local_stages)} of "
            f"{pipe.plan.stages}\n  try: Pipeline(..., engine='threads') in one process"
        )
    if saving_hooks() is not None:
        raise UsageError(
            "memory is measured by hooks on saved tensors, and other hooks are around this call\n"
            "  try: call it outside of saved_tensors_hooks or save_on_cpu"
        )
