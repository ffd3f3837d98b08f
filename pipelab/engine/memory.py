"""Memory, measured: what every rank holds in a step, and what each stage takes for one micro-batch.

Hooks on saved tensors see what autograd saves. They pack each tensor as a new Python object, which lives as long as
autograd keeps the tensor: so what is alive after an action is what the rank holds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from threading import get_ident
from typing import Any
from weakref import WeakValueDictionary

import torch

from pipelab.checking.memory import Memory
from pipelab.engine.engine import Assembly, Step
from pipelab.engine.stage.autograd import saving_hooks, unpacked
from pipelab.engine.stage.batch import split_batch
from pipelab.engine.stage.inputs import microbatches
from pipelab.engine.stage.pytree import tensors_of
from pipelab.engine.stage.snapshot import restored
from pipelab.engine.stage.split_backward import Branch
from pipelab.engine.stage.stage import Stage
from pipelab.engine.threads import ThreadsEngine
from pipelab.errors import UsageError
from pipelab.plan.actions import Action
from pipelab.plan.plan import Plan
from pipelab.simulation.memory import Held, MemoryUse

Tensors = WeakValueDictionary[int, torch.Tensor]
"""Those that are alive, by identity."""


def alone_on_ranks(pipe: Assembly, x: Any, y: Any, keywords: Mapping[str, Any] | None) -> tuple[Plan, tuple[Any, ...]]:
    """Return a plan that runs one micro-batch, each stage on its own rank, and the batch's first micro-batch.

    If the plan runs the last stage again (`C`), its backward may need the second output, beside the first, which the
    step keeps. So that stage runs again here too.
    """
    _require_threads(pipe)
    ready = pipe.cut.ready({"x": x, "y": y, "keywords": dict(keywords or {})})
    rows = [f"{stage}F0 {stage}I0 {stage}W0" for stage in range(pipe.plan.stages)]
    if pipe.plan.bound.listed("C", last := pipe.plan.stages - 1):
        rows[last] = f"{last}F0 {last}C0 {last}I0 {last}W0"
    whole_x, whole_y = (pipe.cut.whole(name, value, ready) for name, value in (("x", x), ("y", y)))
    firsts = (microbatches([part.pieces[0]]) for part in (whole_x, whole_y))
    named = split_batch(dict(keywords or {}), whole_x.counts, pipe.cut.batch_dim)[0]
    return Plan.parse(rows), (*firsts, {name: microbatches([value]) for name, value in named.items()})


def stage_memory(alone: Assembly, batch: Sequence[Any], optimizer: torch.optim.Optimizer | None) -> Memory:
    """Return the bytes of every stage, of a pipeline with the plan of `alone_on_ranks`."""
    sent: dict[int, int] = {}
    x, y, keywords = batch
    curves = step_memory(alone, x, y, keywords, optimizer, sent).curves
    forward, input_grad, weight_grad = zip(*(curve[-3:] for curve in curves), strict=True)
    return Memory(
        weights=[held.weights for held in weight_grad],
        gradients=[held.gradients for held in weight_grad],
        optimizer=[held.optimizer for held in weight_grad],
        activations=[held.activations for held in forward],
        inputs=[sent.get(stage - 1, 0) for stage in range(alone.plan.stages)],
        for_weight_grad=[held.activations for held in input_grad],
        outputs=weight_grad[-1].outputs,
    )


def step_memory(
    pipe: Assembly,
    x: Any,
    y: Any,
    keywords: Mapping[str, Any] | None,
    optimizer: torch.optim.Optimizer | None,
    sent: dict[int, int] | None = None,
) -> MemoryUse:
    """Return what every rank held after each action of one step; in `sent`, by stage, the bytes of its last output."""
    engine = _require_threads(pipe)
    gpus = {each.device for each in engine.devices if each.device.type == "cuda"}
    with restored(pipe.modules, [x, y, keywords]):
        watch = _Watch(engine, [x, y, keywords], optimizer, {} if sent is None else sent)
        for gpu in gpus:
            torch.cuda.synchronize(gpu)
            torch.cuda.reset_peak_memory_stats(gpu)
        with torch.autograd.graph.saved_tensors_hooks(watch.pack, unpacked), engine.watched_by(watch):
            state, loss = pipe.run(x, y, keywords)
        trace = Step(loss.total(), state, engine.labels).trace
        allocated = {str(gpu): torch.cuda.max_memory_allocated(gpu) for gpu in gpus}
    curves = tuple(
        tuple(Held(time, action, *sizes) for time, (action, sizes) in zip([trace.start, *ends], seen, strict=True))
        for ends, seen in zip(trace.ends, watch.seen, strict=True)
    )
    return MemoryUse(trace, measured=curves, allocated=allocated)


class _Watch:
    """Looks at what each rank holds before its first action, and after every action.

    `seen` has, for each rank, the actions, and the bytes in the order of `Held`. The batch's memory does not count.
    """

    def __init__(
        self, engine: ThreadsEngine, batch: Any, optimizer: torch.optim.Optimizer | None, sent: dict[int, int]
    ) -> None:
        ranks = range(engine.plan.ranks)
        self._runners, self._sent = engine.runners.of, sent
        self._batch = _bytes_by_address(tensors_of(batch))
        self._state: Mapping[Any, Any] = {} if optimizer is None else optimizer.state
        self._saved: defaultdict[int, Tensors] = defaultdict(WeakValueDictionary)  # by thread
        self._kept: list[dict[int, dict[int, Any]]] = [{} for _ in ranks]
        self._outputs: list[list[torch.Tensor]] = [[] for _ in ranks]
        self.seen: list[list[tuple[Action | None, tuple[int, ...]]]] = [[(None, self._held(rank))] for rank in ranks]

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what autograd keeps of a tensor."""
        own = tensor.detach()  # with the history of a node's own output, it would keep the node for ever
        self._saved[get_ident()][id(own)] = own
        return own

    def __call__(self, rank: int, stage: Stage, action: Action, kept: dict[int, Any], made: Any) -> None:
        """Look at a rank after an action."""
        self._kept[rank][stage.index] = kept
        if action.traits.forward:
            self._sent[stage.index] = sum(_bytes_by_address(tensors_of(made)).values())
        if action.traits.forward and stage.is_last:
            self._outputs[rank] += tensors_of(made)
        self.seen[rank].append((action, self._held(rank)))

    def _held(self, rank: int) -> tuple[int, ...]:
        modules = [runner.module for (_, on), runner in self._runners.items() if on == rank]
        parameters = [each for module in modules for each in module.parameters()]
        weights = _bytes_by_address([*parameters, *(each for module in modules for each in module.buffers())])
        gradients = _bytes_by_address(each.grad for each in parameters if each.grad is not None)
        state = _bytes_by_address(tensors_of([self._state.get(each) for each in parameters]))
        outputs = _bytes_by_address(self._outputs[rank])
        kept = [part for stage in self._kept[rank].values() for each in stage.values() for part in each]
        kept = [(part.ends, part.gradients) if isinstance(part, Branch) else part for part in kept]
        activations = _bytes_by_address([*self._saved[get_ident()].values(), *tensors_of(kept)])
        for address in (self._batch | weights | outputs).keys() & activations.keys():
            del activations[address]
        return tuple(sum(each.values()) for each in (weights, gradients, state, activations, outputs))


def _bytes_by_address(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the size of each memory that these tensors have: those that share one count once."""
    memory = [each.untyped_storage() for each in tensors if each.layout is torch.strided]
    return {each.data_ptr(): each.nbytes() for each in memory if each.nbytes()}


def _require_threads(pipe: Assembly) -> ThreadsEngine:
    """Refuse an engine that runs a part of the ranks, and hooks of the caller's on saved tensors."""
    if not isinstance(pipe.engine, ThreadsEngine):
        raise UsageError(
            "memory is measured where all ranks run in one process\n  try: Pipeline(..., engine='threads')"
        )
    if saving_hooks() is not None:
        raise UsageError(
            "memory is measured by hooks on saved tensors, and other hooks are around this call\n"
            "  try: call it outside of saved_tensors_hooks or save_on_cpu"
        )
    return pipe.engine
