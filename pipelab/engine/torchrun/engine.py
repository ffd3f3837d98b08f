"""The torch engine: this process's part of a plan, on PyTorch's pipelining runtime; and the full model, gathered.

Each process trains its own stages. Of the others it has the numbers with which they began, or only names and shapes, on
PyTorch's meta device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from pipelab.engine.device import RankDevice, begin, finish, rank_streams
from pipelab.engine.engine import Engine, RankState, Settings, StepState, describe
from pipelab.engine.model.split import Stages
from pipelab.engine.model.unmade import room_for
from pipelab.engine.stage.autograd import CallerContext
from pipelab.engine.stage.batch import Part
from pipelab.engine.stage.errors import warn_of_what_is_left
from pipelab.engine.stage.loss import Loss
from pipelab.engine.stage.pytree import full_tensor, local_part, tensors_of
from pipelab.engine.stage.replicas import Runners, Tied, accumulate, refuse_lost_hooks, versions, written_error
from pipelab.engine.stage.snapshot import overwrite
from pipelab.engine.stage.streams import Streams, peek
from pipelab.engine.torchrun.exchange import SharedClock, agree, describe_batch, gathered, set_clocks, share
from pipelab.engine.torchrun.messages import (
    Connections,
    Shapes,
    ValueMeta,
    copy_from,
    from_bytes,
    learn_metas,
    to_bytes,
)
from pipelab.engine.torchrun.runtime import lowered, routes_of
from pipelab.engine.torchrun.stage import ProcessStage, ProcessStep, Reducer
from pipelab.engine.torchrun.supervisor import Status, Supervisor
from pipelab.plan.plan import Plan

_CLOCKS_SECONDS = 10.0
"""How long a comparison of clocks is valid: two machines may drift by microseconds per second."""


class TorchEngine(Engine):
    """Runs one rank of a plan in this process; the other ranks run in others.

    `one_clock` says that all of them read the clock of one machine.
    """

    one_clock = False

    def __init__(
        self,
        plan: Plan,
        stages: Stages,
        rank: int,
        devices: Sequence[torch.device],
        connections: Connections,
        supervisor: Supervisor,
        settings: Settings,
    ) -> None:
        self.plan, self.forwards, self.stages, self.rank = plan, plan.forwards(), stages, rank
        self.group = connections.everyone
        self.devices = [RankDevice(device) for device in devices]
        self.local_stages = [stage for stage, ranks in plan.replicas.items() if rank in ranks]
        self.stage_devices = [devices[rank]] * plan.stages
        self.intra_op_threads = settings.intra_op_threads or torch.get_num_threads()
        firsts = {stage: ranks[:1] for stage, ranks in plan.replicas.items()}  # the other ranks are other processes
        here = dict.fromkeys(self.local_stages, devices[rank])
        self.runners = Runners(stages.modules, firsts, devices, settings.replicated_buffers, here)
        self._runners = [self.runners.of[stage, first] for stage, (first,) in sorted(firsts.items())]
        (self._stream,) = rank_streams([self.devices[rank]])
        self._connections = connections
        self._supervisor = supervisor
        self._policy = settings.replicated_buffers
        self._reducers = {
            stage: Reducer(stages.modules[stage], connections.shared[ranks], connections.transport_device)
            for stage, ranks in plan.replicas.items()
            if rank in ranks and len(ranks) > 1
        }
        self._stages = {
            first + stage: ProcessStage(
                self._runners[stage], first + stage, plan, rank, connections, self._reducers.get(stage)
            )
            for route, first in routes_of(plan).items()
            for stage, home in enumerate(route)
            if home == rank
        }
        held = [*self._stages.values()]
        self._runtimes = [lowered(each, rank, held) for each in (plan, self.forwards)]
        self._metas: dict[str, dict[Shapes, list[ValueMeta]]] = {}
        self._clock = SharedClock()
        self.random = Streams(stages.named, [devices[rank]])
        self._seed = 0  # of the random numbers of the next step
        self._parts: dict[str, Part] = {}  # of the last batch, those that this process was not given
        self._keywords: dict[str, tuple[str, list[tuple[str, ...]]]] = {}  # by this process's, those of all
        self._named: list[tuple[str, ...]] = []  # of the present step, by micro-batch
        self._shapes = ""
        self._step: ProcessStep | None = None
        self._call = "begin"
        self._status = Status(self._describe, self._progress, self._peer, lambda: self._computing)

    def agree(self, call: str, parts: Sequence[Part], caller: CallerContext, named: Part, *, learning: bool) -> None:
        """Compare this process's call and batch with the others'; set the clocks again after a while."""
        for part in parts:
            if part.here:
                part.words = _words(part)
            elif known := self._parts.get(part.name):
                part.take(known)
        own = _describe_keywords(named)
        named.words = agreed = self._keywords[own][0] if own in self._keywords else own
        about = self._about(caller, learning=learning)
        age_ns = time.perf_counter_ns() - self._clock.set_at
        old = not self.one_clock and age_ns > _CLOCKS_SECONDS * 1e9

        def work() -> None:
            reset, self._seed = agree(self.group, call, about, [*parts, named], (int(old), peek()))
            if reset:
                self._clock = set_clocks(self.group)

        self.attend(work, call)
        self._parts.update({part.name: part for part in parts if not part.here})
        if named.words != agreed or own not in self._keywords:
            self._keywords[own] = named.words, [*zip(*named.named.values(), strict=True)]
        self._named = self._keywords[own][1]
        self._shapes = "; ".join(filter(None, (about, parts[0].words, named.words)))

    def run(
        self, inputs: list[Any], loss: Loss | None, caller: CallerContext, *, learning: bool, watch_nan: bool
    ) -> StepState:
        """Run this process's part of all micro-batches; return the step of all processes."""
        for stage in self._reducers if learning else ():
            refuse_lost_hooks(stage, self._runners[stage].module, self.plan.replicas[stage])
        plan = self.plan if learning else self.forwards
        row = [plan.bound.codes.action(code) for code in plan.bound.computing[self.rank]]
        mine = RankState(self.rank, row, self._stream, {})
        shapes = [tuple(tensor.shape for tensor in tensors_of(piece)) for piece in inputs]
        keys = [*zip(shapes, self._named or [()] * len(shapes), strict=True)]
        clocks, waited = begin([self._stream]), [0] * len(row)
        step = ProcessStep(plan, inputs, loss, watch_nan, caller, [mine], clocks=clocks, shapes=keys, waited=waited)
        made: tuple[StepState, bool] = self.attend(partial(copy_context().run, self._run, step), self._call)
        state, drew = made
        self.random.end(drew=drew)
        finish([self._stream], [state.outputs, [] if loss is None else loss.values])
        return state

    def share_batch(self, x: Any, y: Any, keywords: dict[str, Any]) -> Sequence[Any]:
        """Return inputs, targets and keywords, from other processes where this one was given none."""

        def share(value: Any) -> Any:
            here = gathered(torch.tensor(value is not None), self.group).tolist()
            box = [to_bytes(value)]
            if any(here) and not all(here):
                dist.broadcast_object_list(box, group=self.group, group_src=here.index(True))
            return from_bytes(box[0]) if value is None else value

        def work() -> list[Any]:
            agree(self.group, "verify(x, y)", "shares the batch")
            boxes: list[Any] = [None] * self.plan.ranks
            dist.all_gather_object(boxes, to_bytes(keywords), group=self.group)
            found = {name: value for box in boxes[::-1] for name, value in from_bytes(box).items()}
            return [share(x), share(y), found | keywords]

        found: list[Any] = self.attend(work, "verify(x, y)")
        return found

    def attend(self, work: Callable[[], Any], call: str) -> Any:
        """Run work that communicates, supervised; return its result."""
        self._call = call
        return self._supervisor.run(work, self._status)

    def close(self, error: BaseException | None = None) -> None:
        """Leave the pipeline; if the caller's own code failed, report its error to the other processes."""
        clean = error is None and not self._supervisor.over
        self._supervisor.close(error)
        if clean:  # after a failure a group may be in use for ever
            self._connections.close()
            # The threads of a group end with the last reference to it. At the end of the process they might release
            # tensors while Python shuts down, which aborts the process.
            self._reducers.clear()
            self._stages.clear()
            del self._connections, self._runtimes, self.group

    def _run(self, step: ProcessStep) -> tuple[StepState, bool]:
        """Run one step, in the worker thread, on the rank's stream; return it, and whether a process drew."""
        learning = not step.plan.forwards_only
        with ExitStack() as stack:
            self._stream.enter(stack)
            step.caller.enter(stack)
            # [1] which values will be sent?
            if self._shapes not in self._metas:
                here = (self.plan, self.rank, self._runners, self._stream, self._connections.values)
                self._metas[self._shapes] = learn_metas(*here, step.inputs, step.shapes, learning=learning)
            step.metas = self._metas[self._shapes]
            # [2] PyTorch's runtime runs this rank's order
            self._step = step
            step.streams = self.random.begin(self.stages.modules, lambda: self.runners.modules, seed=self._seed)
            self._go(step)
            # [3] all processes exchange times and losses
            made = share(self.group, step, self._clock)
        self._step = None
        return made

    def _go(self, step: ProcessStep) -> None:
        with ExitStack() as stack:
            for stage in self._stages.values():
                stage.begin(step)
                stack.callback(stage.end)
            if step.plan.forwards_only:
                stack.enter_context(torch.no_grad())
            else:
                for reducer in self._reducers.values():
                    reducer.begin()
                    stack.callback(reducer.end)
            before = {stage: versions(self._runners[stage].module) for stage in self._reducers}
            self._runtimes[step.plan.forwards_only]([(piece,) for piece in step.inputs])
            step.look(wait=True)
            for stage in self._stages.values():
                if stage.presence:
                    stage.presence.finish()
                stage.refuse_overwritten()
            for number, reducer in self._reducers.items():
                module = self._runners[number].module
                if name := reducer.settle_buffers(module, self._policy, before[number]):
                    raise written_error(number, self.rank, name)
            for number in self.local_stages if self.plan.stages - 1 not in self.local_stages else ():
                if self._runners[number].steps == 1 and not step.plan.forwards_only:
                    warn_of_what_is_left(number, self._runners[number].module)
        for tied in () if step.plan.forwards_only else self.runners.ties:
            self._add_up(tied)

    def _add_up(self, tied: Tied) -> None:
        """Add up the gradients of a parameter that stages of several processes use."""
        holders = holders_of(tied, self.plan)
        if self.rank not in holders:
            return
        # A replicated stage has the same gradients on all its ranks: they count once.
        found = tied.gradient(stage for stage in tied.stages if self._holder(stage) == self.rank)
        if len(holders) > 1 and tied.parameter.requires_grad:
            total = torch.zeros_like(tied.parameter) if found is None else found.to_dense()
            sent = total.to(self._connections.transport_device).contiguous()
            dist.all_reduce(sent, group=self._connections.shared[holders])
            found = sent.to(total.device)
        if found is not None:
            accumulate(tied.parameter, found)

    def _about(self, caller: CallerContext, *, learning: bool) -> str:
        """Return all on which, with the inputs, the metas of the values depend."""
        modules = [self.stages.model] if self.stages.is_traced else self.stages.modules
        words = [f"modes {' '.join(map(_mode, modules))}", "to learn" if learning else "to evaluate"]
        if learning:
            frozen = filter(None, map(_frozen, range(self.plan.stages), self.stages.modules))
            words.append(f"frozen {', '.join(frozen) or 'nothing'}")
        words += [f"autocast {cast.args[0]} {cast.keywords['dtype']}" for cast in caller.autocast]
        return "; ".join(words)

    @property
    def _computing(self) -> bool:
        return self._step is not None and self._step.mine.computing

    def _describe(self) -> str:
        """Return what this process is doing, as in "rank 0 waits …"."""
        step = self._step
        if step is None:
            return f"waits for all processes in {self._call}"
        if step.mine.position >= len(step.mine.actions):
            return f"is done with its part of {self._call}, and waits for all processes"
        return describe(self.plan, step.mine, self._supervisor.line() if self._computing else "")

    def _progress(self) -> object:
        step = self._step
        return None if step is None else (id(step), step.mine.position, step.mine.computing)

    def _peer(self) -> int | None:
        peer = None if self._step is None else self._step.peer_of(self.plan)
        return None if peer is None else self._connections.members[peer]

    # --- the full model, of which other processes train some stages

    @contextmanager
    def full_model(self) -> Iterator[None]:
        """Return a context in which this process has the present state of all stages, on its device."""
        with self.full_state("verify(x, y)"):
            devices = {
                stage: next((tensor.device for tensor in [*module.parameters(), *module.buffers()]), None)
                for stage, module in enumerate(self.stages.modules)
                if stage not in self.local_stages
            }
            elsewhere = {stage: device for stage, device in devices.items() if device != self.stage_devices[stage]}
            try:
                for stage in elsewhere:
                    self.stages.place_stage(stage, self.stage_devices[stage])
                yield
            finally:
                for stage, device in elsewhere.items():
                    if device is not None:
                        self.stages.place_stage(stage, device)

    @contextmanager
    def full_state(self, call: str = "state_dict()") -> Iterator[None]:
        """Return a context in which this process has every stage's parameters and buffers."""
        with room_for(self.stages.modules):
            self._gather(_gather_state, call)
            yield

    def gather_gradients(self) -> None:
        """Gather every stage's gradients from the process that holds it."""
        self._gather(_gather_gradients, "verify(x, y)")

    def first_message(self, message: str) -> str:
        """Return, on all processes, the message of the lowest rank that has one; "" if none has."""

        def ask() -> str:
            agree(self.group, "verify(x, y)", "exchanges its result")
            messages = [""] * dist.get_world_size(self.group)
            dist.all_gather_object(messages, message, group=self.group)
            return next(filter(None, messages), "")

        found: str = self.attend(ask, "verify(x, y)")
        return found

    def clip_grad_norm_(self, parameters: list[nn.Parameter], max_norm: float, norm_type: float) -> torch.Tensor:
        """Scale this process's gradients so that all processes' together have a norm of at most `max_norm`."""
        kind, most = float(norm_type), float(max_norm)
        self._settle()
        total: torch.Tensor = self.attend(lambda: self._norm(most, kind), "clip_grad_norm_()")
        # PyTorch's functions of many tensors refuse DTensors beside others.
        spread = any(hasattr(parameter, "to_local") for parameter in parameters)
        nn.utils.clip_grads_with_norm_(parameters, max_norm, total, foreach=False if spread else None)
        return total

    def share_overflow(self, parameters: list[nn.Parameter], scale: float) -> None:
        """Make the gradients of this process infinite if one of another process is not finite."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        held = [grad.coalesce().values() if grad.is_sparse else local_part(grad) for grad in gradients]
        overflow = not all(bool(numbers.isfinite().all()) for numbers in held)

        def ask() -> torch.Tensor:
            agree(self.group, "step(x, y, scaler)", f"scale {scale:g}")
            return gathered(torch.tensor([overflow]), self.group)

        if self.attend(ask, "step(x, y, scaler)").any() and not overflow:
            for gradient in gradients:
                gradient.mul_(torch.inf)  # infinite, or NaN where it was 0

    def _holder(self, stage: int) -> int:
        return self.plan.replicas[stage][0]

    def _norm(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """Return the norm of all processes' gradients, from each gradient's own, as PyTorch does for one process."""
        group = self.group
        agree(group, "clip_grad_norm_()", f"max_norm {max_norm!r}; norm_type {norm_type!r}")
        every = [(stage, held) for stage, module in enumerate(self.stages.modules) for held in module.parameters()]
        # A replicated stage has the same gradients on all its ranks, and a parameter may be of several stages: each
        # counts once.
        firsts = {id(parameter): index for index, (_, parameter) in reversed(list(enumerate(every)))}
        ours = [
            index
            for index, (stage, parameter) in enumerate(every)
            if self._holder(stage) == self.rank and parameter.grad is not None and firsts[id(parameter)] == index
        ]
        own = torch.zeros(2, len(every), dtype=torch.float64)  # each gradient's norm, and whether there is one
        if ours:
            norms = [full_tensor(torch.linalg.vector_norm(every[index][1].grad, norm_type)).double() for index in ours]
            own[0, ours], own[1, ours] = torch.stack(norms).cpu(), 1.0
        found, there = gathered(own, group).sum(0)
        if not there.any():
            return torch.zeros((), device=self.stage_devices[0])
        types = [parameter.dtype.to_real() for (_, parameter), has in zip(every, there, strict=True) if has]
        widest = reduce(torch.promote_types, types)
        total: torch.Tensor = torch.linalg.vector_norm(found[there.bool()].to(widest), norm_type)
        return total.to(self.stage_devices[0])

    def _settle(self) -> None:
        """Wait for the caller's kernels on this process's device: another thread will read their results."""
        for device in {device for device in self.stage_devices if device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()

    def _gather(self, gather: Callable[[nn.Module, dist.ProcessGroup, int, bool], None], call: str) -> None:
        sizes = [sum(parameter.numel() for parameter in module.parameters()) for module in self.stages.modules]

        def work() -> None:
            agree(self.group, call, f"{sizes} numbers in the stages' parameters")
            with torch.no_grad():
                for stage, module in enumerate(self.stages.modules):
                    gather(module, self.group, self._holder(stage), stage not in self.local_stages)
            gathered(torch.zeros(1), self.group)  # all wait until the last message has arrived

        self._settle()
        self.attend(work, call)


def holders_of(tied: Tied, plan: Plan) -> tuple[int, ...]:
    """Return the ranks that hold a parameter of several stages, in order."""
    return tuple(sorted({rank for stage in tied.stages for rank in plan.replicas[stage]}))


def _describe_keywords(part: Part) -> str:
    """Note the description of each keyword, by micro-batch; return all in words, or "" if there are none."""
    part.named = {
        name: [describe_batch([piece[name]]) for piece in part.pieces] for name in sorted([*part.pieces, {}][0])
    }
    return f"keywords {part.named}" if part.named else ""


def _words(part: Part) -> str:
    """Return all of a part of the batch that must be the same on every process."""
    words = [f"{part.name} {describe_batch(part.pieces)}"]
    if any(tensor.requires_grad for piece in part.pieces for tensor in tensors_of(piece)):
        words.append(f"{part.name} wants a gradient")
    if part.weights:
        words.append(f"weights {' '.join(map(repr, part.weights))}")
    return "; ".join(words)


def _mode(module: nn.Module) -> str:
    """Return the mode of a stage's layers: `"train"`, `"eval"`, or how many of them train."""
    layers = [part.training for part in _parts(module) if not part._modules]  # noqa: SLF001 - without a copy
    if all(layers):
        return "train"
    return f"{sum(layers)} of {len(layers)} train" if any(layers) else "eval"


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and all in it, as PyTorch's `modules` does in ten times as long: every step asks."""
    stack = [module]
    while stack:
        part = stack.pop()
        yield part
        stack += [each for each in part._modules.values() if each is not None]  # noqa: SLF001 - without a copy


def _frozen(stage: int, module: nn.Module) -> str:
    """Return which of a stage's parameters do not learn: `"stage 0"` if none does, else their names."""
    learns = [each.requires_grad for part in _parts(module) for each in part._parameters.values() if each is not None]  # noqa: SLF001
    if all(learns):
        return ""
    named = list(module.named_parameters())
    names = [name for name, parameter in named if not parameter.requires_grad]
    if not names:
        return ""
    return f"stage {stage}" if len(names) == len(named) else f"{' '.join(names)} of stage {stage}"


# ── The state of one stage: the rank `source` holds it, and the others `receive` it ───────────────────────────────────

_CPU = torch.device("cpu")


def _gather_state(module: nn.Module, group: dist.ProcessGroup, source: int, receive: bool) -> None:
    """Gather parameters, buffers and extra state; the stage may have new or larger buffers than in this process."""
    for parameter in module.parameters():
        _copy(parameter, group, source, receive)
    box = [to_bytes(_others_of(module)) if dist.get_rank(group) == source else b""]
    dist.broadcast_object_list(box, group=group, group_src=source)
    if not receive:
        return
    buffers, extra = from_bytes(box[0])
    own = dict(module.named_buffers())
    for name, (found, persistent) in buffers.items():
        _set_buffer(module, name, own.pop(name, None), found, persistent)
    for owner, leaf in (_owner(module, name) for name in own):
        setattr(owner, leaf, None)
    for name, state in extra.items():
        _owner(module, name)[0].set_extra_state(state)


def _others_of(module: nn.Module) -> tuple[dict[str, tuple[torch.Tensor, bool]], dict[str, Any]]:
    """Return each buffer, and whether it is persistent; and the extra state of the module's parts."""
    state = module.state_dict(keep_vars=True)
    buffers = {name: (buffer, name in state) for name, buffer in module.named_buffers()}
    return buffers, {name: value for name, value in state.items() if name.endswith(_EXTRA_STATE_KEY_SUFFIX)}


def _set_buffer(
    module: nn.Module, name: str, buffer: torch.Tensor | None, found: torch.Tensor, persistent: bool
) -> None:
    if buffer is not None and (buffer.shape, buffer.dtype) == (found.shape, found.dtype):
        overwrite(buffer, found)
        return
    owner, leaf = _owner(module, name)
    device = next((tensor.device for tensor in module.parameters()), _CPU)
    owner.register_buffer(leaf, found.to(device), persistent)


def _gather_gradients(module: nn.Module, group: dist.ProcessGroup, source: int, receive: bool) -> None:
    parameters = list(module.parameters())
    there = torch.tensor([parameter.grad is not None for parameter in parameters])
    copy_from(source, there, group, _CPU)
    for parameter, known in zip(parameters, there.tolist(), strict=True):
        if not known:
            parameter.grad = None
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
        _copy(parameter.grad, group, source, receive)


def _copy(tensor: torch.Tensor, group: dist.ProcessGroup, source: int, receive: bool) -> None:
    """Copy the source's numbers into this process's tensor; of a DTensor, into its part: all have like parts of it."""
    part = local_part(tensor)
    copy_from(source, part if receive or dist.get_rank(group) == source else torch.empty_like(part), group, _CPU)


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf
