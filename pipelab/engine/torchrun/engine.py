"""The torch engine: this process's part of a plan, on PyTorch's pipelining runtime; and the full model, gathered.

Each process trains its own stages. Of the others it has the numbers with which they began, or only names and shapes, on
PyTorch's meta device.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from pipelab.engine.device.clocks import HOST, HostClock
from pipelab.engine.device.devices import RankDevice
from pipelab.engine.device.streams import begin, finish, rank_streams
from pipelab.engine.engine import Engine, Settings
from pipelab.engine.model.split import Stages
from pipelab.engine.model.unmade import room_for
from pipelab.engine.stage.batch import Part
from pipelab.engine.stage.caller import CallerContext
from pipelab.engine.stage.loss import Loss
from pipelab.engine.stage.pytree import full_tensor, local_part, map_tensors, tensors_of
from pipelab.engine.stage.replicas import Runners, refuse_lost_hooks
from pipelab.engine.stage.snapshot import overwrite
from pipelab.engine.stage.tied import accumulate
from pipelab.engine.step import RankState, StepState, describe
from pipelab.engine.torchrun.agreement import agree, describe_batch, gathered
from pipelab.engine.torchrun.groups import Connections, broadcast, holders_of
from pipelab.engine.torchrun.messages import ValueMeta, from_bytes, learn_metas, to_bytes
from pipelab.engine.torchrun.replicas import Reducer, ReplicatedBuffers
from pipelab.engine.torchrun.runtime import lowered, routes_of
from pipelab.engine.torchrun.stage import ProcessStage, ProcessStep
from pipelab.engine.torchrun.supervisor import Status, Supervisor
from pipelab.plan.plan import Plan
from pipelab.trace.waits import travelled

_CLOCKS_SECONDS = 10.0
"""How long a comparison of clocks is valid: two machines may drift by microseconds per second."""


class TorchEngine(Engine):
    """Runs one rank of a plan in this process; the other ranks run in others."""

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
        self.plan, self.stages, self.rank = plan, stages, rank
        self.group = connections.everyone
        self.devices = [RankDevice(each) for each in devices]
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
        self._reducers: dict[int, Reducer] = {}
        self._buffers: ReplicatedBuffers | None = None
        device = connections.transport_device
        groups = {
            stage: connections.shared[ranks] for stage in self.local_stages if len(ranks := plan.replicas[stage]) > 1
        }
        if groups:
            own = {stage: self._runners[stage] for stage in groups}
            self._reducers = {stage: Reducer(own[stage].module, group, device) for stage, group in groups.items()}
            self._buffers = ReplicatedBuffers(rank, own, groups, device, settings.replicated_buffers)
        self._stages = [
            ProcessStage(self._runners[stage], first + stage, plan, rank, connections, self._reducers.get(stage))
            for route, first in routes_of(plan).items()
            for stage, home in enumerate(route)
            if home == rank
        ]
        self._presence = {stage.stage_index: stage.presence for stage in self._stages}
        self._row = [plan.bound.codes.action(code) for code in plan.bound.rows[rank]]
        self._runtime = lowered(plan, rank, self._stages, self._receive)
        self._metas: dict[str, dict[int, list[ValueMeta]]] = {}
        self._clock = Clock()
        self._parts: dict[str, Part] = {}  # of the last batch, those that this process was not given
        self._shapes = ""
        self._step: ProcessStep | None = None
        self._call = "begin"
        self._status = Status(self._describe, self._progress, self._peer, lambda: self._computing)

    def agree(self, call: str, parts: Sequence[Part], caller: CallerContext) -> None:
        """Compare this process's call and batch with the others'; set the clocks again after a while."""
        for part in parts:
            if part.here:
                wants = any(each.requires_grad for piece in part.pieces for each in tensors_of(piece))
                words = [f"{part.name} {describe_batch(part.pieces)}"] + [f"{part.name} wants a gradient"] * wants
                part.words = "; ".join(words + [f"weights {' '.join(map(repr, part.weights))}"] * bool(part.weights))
            elif known := self._parts.get(part.name):
                part.words, part.pieces, part.weights = known.words, known.pieces, known.weights
        about = self._about(caller, learning=len(parts) > 1)
        old = time.perf_counter_ns() - self._clock.set_at > _CLOCKS_SECONDS * 1e9

        def work() -> None:
            if agree(self.group, call, about, parts, int(old))[0]:
                self._clock = set_clocks(self.group)

        self.attend(work, call)
        self._parts.update({part.name: part for part in parts if not part.here})
        self._shapes = f"{about}; {parts[0].words}"

    def run(self, inputs: list[Any], loss: Loss | None, caller: CallerContext, *, watch_nan: bool = False) -> StepState:
        """Run this process's part of all micro-batches; return the step of all processes."""
        for stage in () if loss is None else self._reducers:
            refuse_lost_hooks(stage, self._runners[stage].module, self.plan.replicas[stage])
        clocks = begin([self._stream])
        step = ProcessStep(inputs, loss, watch_nan, caller, clocks=clocks)
        call = "forward(x)" if loss is None else "step(x, y)"
        state: StepState = self.attend(partial(copy_context().run, self._run, step), call)
        finish([self._stream], [state.outputs, [] if loss is None else loss.values])
        return state

    def share_batch(self, x: Any, y: Any) -> Sequence[Any]:
        """Return inputs and targets, from other processes where this one was given none."""

        def share(value: Any) -> Any:
            here = gathered(torch.tensor(value is not None), self.group).tolist()
            box = [to_bytes(value)]
            if any(here) and not all(here):
                dist.broadcast_object_list(box, group=self.group, group_src=here.index(True))
            return from_bytes(box[0]) if value is None else value

        def work() -> list[Any]:
            agree(self.group, "verify(x, y)", "shares the batch")
            return [share(x), share(y)]

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
            self._presence.clear()
            del self._connections, self._buffers, self._runtime, self.group

    def _run(self, whole: ProcessStep) -> StepState:
        """Run one step, in the worker thread, on the rank's stream."""
        inputs, loss, learning = whole.inputs, whole.loss, whole.loss is not None
        with ExitStack() as stack:
            self._stream.enter(stack)
            whole.caller.enter(stack)
            # [1] which values will be sent?
            counts = [len(tensors_of(each)[0]) for each in inputs]
            if self._shapes not in self._metas:
                here = (self.plan, self.rank, self._runners, self._stream, self._connections.values)
                self._metas[self._shapes] = learn_metas(*here, inputs, counts, learning=learning)
            # [2] PyTorch's runtime runs this rank's order
            row = [action for action in self._row if learning or action.traits.forward]
            step = ProcessStep(
                inputs,
                loss,
                whole.watch_nan,
                whole.caller,
                [RankState(self.rank, row, self._stream, {})],
                clocks=whole.clocks,
                counts=counts,
                metas=self._metas[self._shapes],
                waited=[0] * len(row),
            )
            self._go(step)
            # [3] all processes exchange times and losses
            state = share(self.group, self.plan, step, loss, self._clock)
        self._step = None
        return state

    def _go(self, step: ProcessStep) -> None:
        self._step = step
        with ExitStack() as stack:
            for stage in self._stages:
                stage.begin(step)
                stack.callback(stage.end)
            if step.loss is None:
                stack.enter_context(torch.no_grad())
            else:
                for reducer in self._reducers.values():
                    reducer.begin()
                    stack.callback(reducer.end)
            if self._buffers is not None:
                self._buffers.begin()
            self._runtime([(each,) for each in step.inputs])
            step.look(wait=True)
            for stage in self._stages:
                stage.presence.finish()
                stage.refuse_overwritten()
            if self._buffers is not None:
                self._buffers.end()
        if step.loss is not None:
            self._add_up_ties()

    def _add_up_ties(self) -> None:
        """Add up the gradients of parameters that stages of several processes use."""
        for tied in self.runners.ties:
            holders = holders_of(tied, self.plan)
            if self.rank not in holders:
                continue
            # A replicated stage has the same gradients on all its ranks: they count once.
            found = tied.gradient(stage for stage in tied.stages if self.plan.replicas[stage][0] == self.rank)
            if len(holders) > 1 and tied.parameter.requires_grad:
                total = torch.zeros_like(tied.parameter) if found is None else found.to_dense()
                sent = total.to(self._connections.transport_device).contiguous()
                dist.all_reduce(sent, group=self._connections.shared[holders])
                found = sent.to(total.device)
            if found is not None:
                accumulate(tied.parameter, found)

    def _receive(self, stage: int, microbatch: int, works: list[Any]) -> None:
        """Wait for an action's values from another rank; an evaluation's backwards have none."""
        assert self._step is not None
        flags = self._presence[stage].under_way(microbatch)
        if works or flags:
            self._step.wait(works, flags)

    def _about(self, caller: CallerContext, *, learning: bool) -> str:
        """Return all on which, with the inputs, the metas of the values depend."""
        modules = [self.stages.model] if self.stages.is_traced else self.stages.modules
        words = [f"modes {' '.join(map(_mode, modules))}", "to learn" if learning else "to evaluate"]
        if learning:
            frozen = [_frozen(stage, module) for stage, module in enumerate(self.stages.modules)]
            words += [f"frozen {', '.join(filter(None, frozen)) or 'nothing'}"]
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
        held = [each.coalesce().values() if each.is_sparse else local_part(each) for each in gradients]
        overflow = not all(bool(each.isfinite().all()) for each in held)

        def ask() -> torch.Tensor:
            agree(self.group, "step(x, y, scaler)", f"scale {scale:g}")
            return gathered(torch.tensor([overflow]), self.group)

        if self.attend(ask, "step(x, y, scaler)").any() and not overflow:
            for each in gradients:
                each.mul_(torch.inf)  # infinite, or NaN where it was 0

    def _holder(self, stage: int) -> int:
        return self.plan.replicas[stage][0]

    def _norm(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """Return the norm of all processes' gradients, from each gradient's own, as PyTorch does for one process."""
        group = self.group
        agree(group, "clip_grad_norm_()", f"max_norm {max_norm!r}; norm_type {norm_type!r}")
        every = [(stage, each) for stage, module in enumerate(self.stages.modules) for each in module.parameters()]
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


def _mode(module: nn.Module) -> str:
    """Return the mode of a stage's layers: `"train"`, `"eval"`, or how many of them train."""
    layers = [part.training for part in module.modules() if next(part.children(), None) is None]
    train = sum(layers)
    return "train" if train == len(layers) else f"{train} of {len(layers)} train" if train else "eval"


def _frozen(stage: int, module: nn.Module) -> str:
    """Return which of a stage's parameters do not learn: `"stage 0"` if none does, else their names."""
    named = list(module.named_parameters())
    names = [name for name, parameter in named if not parameter.requires_grad]
    if not names:
        return ""
    return f"stage {stage}" if len(names) == len(named) else f"{' '.join(names)} of stage {stage}"


# ── The state of one stage: the rank `source` holds it, and the others `receive` it ───────────────────────────────────


def _gather_state(module: nn.Module, group: dist.ProcessGroup, source: int, receive: bool) -> None:
    """Gather parameters, buffers and extra state; the stage may have new or larger buffers than in this process."""
    for parameter in module.parameters():
        _copy(parameter, group, source, receive)
    own = dict(module.named_buffers())
    box: list[Any] = [_describe_buffers(module) if dist.get_rank(group) == source else None]
    dist.broadcast_object_list(box, group=group, group_src=source)
    buffers, extra = box[0]
    for name, (shape, dtype, persistent) in buffers.items():
        buffer = own.pop(name, None)
        found = _broadcast(buffer, shape, dtype, group, source)
        if not receive:
            continue
        if buffer is not None and (tuple(buffer.shape), buffer.dtype) == (shape, dtype):
            overwrite(buffer, found)
        else:
            owner, leaf = _owner(module, name)
            device = next((tensor.device for tensor in module.parameters()), torch.device("cpu"))
            owner.register_buffer(leaf, found.to(device), persistent)
    if receive:
        for owner, leaf in (_owner(module, name) for name in own):
            setattr(owner, leaf, None)
        for name, state in extra.items():
            _owner(module, name)[0].set_extra_state(state)


def _gather_gradients(module: nn.Module, group: dist.ProcessGroup, source: int, receive: bool) -> None:
    parameters = list(module.parameters())
    there = torch.tensor([parameter.grad is not None for parameter in parameters])
    _copy(there, group, source, receive)
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
    tensor = local_part(tensor)
    found = _broadcast(tensor, tuple(tensor.shape), tensor.dtype, group, source)
    if receive:
        overwrite(tensor, found)


def _broadcast(
    tensor: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, group: dist.ProcessGroup, source: int
) -> torch.Tensor:
    if dist.get_rank(group) == source and tensor is not None:
        sent = tensor.detach().cpu().contiguous()
    else:
        sent = torch.empty(shape, dtype=dtype)
    broadcast(sent, group, source)
    return sent


def _describe_buffers(module: nn.Module) -> tuple[dict[str, tuple[tuple[int, ...], torch.dtype, bool]], dict[str, Any]]:
    """Return each buffer's shape, type and whether it is persistent; and the extra state of the module's parts."""
    state = module.state_dict(keep_vars=True)
    buffers = {name: (tuple(each.shape), each.dtype, name in state) for name, each in module.named_buffers()}
    extra = {name: each for name, each in state.items() if name.endswith(_EXTRA_STATE_KEY_SUFFIX)}
    return buffers, map_tensors(lambda tensor: tensor.detach().cpu(), extra)


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf


# ── What each process needs of the others' step ───────────────────────────────────────────────────────────────────────

_ROUNDS = 16
_BUDGET_NS = 20_000_000
"""How long a comparison of two clocks lasts if `_ROUNDS` rounds take less: a shorter round may follow."""

_STOP = -1


@dataclass(frozen=True, slots=True)
class Clock:
    """The difference between this process's clock and rank 0's.

    Attributes:
        ahead_ns: how far it is ahead of rank 0's; on several machines clocks count from different moments.
        error_ns: the largest error of `ahead_ns` on any process.
        set_at: when it was measured, on this process's clock.
    """

    ahead_ns: int = 0
    error_ns: int = 0
    set_at: int = 0


def set_clocks(group: dist.ProcessGroup) -> Clock:
    """Compare every process's clock with rank 0's; all processes must call it.

    Rank 0 asks each other process for its time, at least 16 times, and uses the shortest round: the clock was read
    between question and answer, so in the middle of the round, with an error of half its length. A smaller difference
    counts as none: processes on one machine share a clock.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    found = torch.zeros(size, 2, dtype=torch.int64)
    word = torch.zeros(1, dtype=torch.int64)
    for other in range(1, size):
        if rank == 0:
            length, ahead = min(_rounds(other, word, group))
            found[other] = torch.tensor([ahead if abs(ahead) > length // 2 else 0, length // 2])
        elif rank == other:
            _answer(word, group)
    dist.broadcast(found, group=group, group_src=0)
    return Clock(int(found[rank, 0]), int(found[:, 1].max()), time.perf_counter_ns())


def _rounds(other: int, word: torch.Tensor, group: dist.ProcessGroup) -> list[tuple[int, int]]:
    """Return the length of each round, and how far the other clock was ahead of this one."""
    rounds: list[tuple[int, int]] = []
    began = time.perf_counter_ns()
    while len(rounds) < _ROUNDS or time.perf_counter_ns() - began < _BUDGET_NS:
        asked = time.perf_counter_ns()
        word[0] = asked
        dist.send(word, group=group, group_dst=other)
        dist.recv(word, group=group, group_src=other)
        answered = time.perf_counter_ns()
        rounds.append((answered - asked, int(word) - (asked + answered) // 2))
    word[0] = _STOP
    dist.send(word, group=group, group_dst=other)
    return rounds


def _answer(word: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Send this process's time to rank 0, until it sends `_STOP`."""
    while True:
        dist.recv(word, group=group, group_src=0)
        if int(word) == _STOP:
            return
        word[0] = time.perf_counter_ns()
        dist.send(word, group=group, group_dst=0)


_ARRIVED_NS = 20_000
"""If a wait is shorter than this, the value had arrived before it."""

_LOSS_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def share(group: dist.ProcessGroup, plan: Plan, step: ProcessStep, loss: Loss | None, clock: Clock) -> StepState:
    """Exchange times and losses; of an evaluation, the outputs. All processes must call it.

    The exchange is one collective operation of `3 * longest row + micro-batches + 1` whole numbers from each. Gathers
    and frees count as actions at the end of their row.

    The loss gets the values of all micro-batches; it is `None` for an evaluation.
    """
    holders = plan.bound.rank_of_slot[plan.stages - 1 :: plan.stages]  # per micro-batch, the rank of its output
    state = StepState([None] * plan.microbatches, loss, step.watch_nan, step.caller)
    if loss is None:
        state.outputs = _outputs(group, holders, step)
        return state
    moves = Counter(move.rank for move in plan.bound.moves)
    longest = max(len(row) + moves[rank] for rank, row in enumerate(plan.bound.rows))
    read, moved = step.clocks[0].nanoseconds, zip(*step.mine.moves, strict=True)
    marks = ([*own, *next(moved, ())] for own in (step.mine.begun, step.mine.ended))
    begun, ended = ([each - clock.ahead_ns for each in read(both)] for both in marks)
    own = torch.zeros(3 * longest + plan.microbatches + 1, dtype=torch.int64)
    for number, numbers in enumerate((begun, ended, step.waited)):
        own[number * longest : number * longest + len(numbers)] = torch.tensor(numbers)
    own[3 * longest :] = _losses(plan, step)
    every = gathered(own, group)
    stream = step.mine.stream
    _set_losses(loss, every[:, 3 * longest :], holders, stream.runs_on.device)
    table = every[:, : 3 * longest].unflatten(1, (3, longest)).tolist()  # by rank: starts, ends, waits
    ranks, waited_by = [], []
    for rank, (codes, (starts, ends, waits)) in enumerate(zip(plan.bound.rows, table, strict=True)):
        length, last = len(codes), len(codes) + moves[rank]
        beside: list[Sequence[Any]] = list(zip(starts[length:last], ends[length:last], strict=True))
        ranks.append(RankState(rank, (), stream, {}, starts[:length], ends[:length], beside))
        waited_by.append(waits[:length])
    state.outputs = step.outputs
    state.outputs_on = sorted(set(holders))
    state.ranks = ranks
    times = [each.begun for each in ranks], [each.ended for each in ranks]
    state.travel = lambda: _travel_ms(plan, *times, waited_by)
    state.clocks = [HOST, *(HostClock(clock.error_ns) for _ in range(1, plan.ranks))]
    many = "es" if plan.ranks > 1 else ""
    state.note = f"{plan.ranks} process{many}, clocks within {clock.error_ns / 1e6:.2g} ms of rank 0's"
    return state


def _travel_ms(
    plan: Plan, begun: Sequence[Sequence[int]], ended: Sequence[Sequence[int]], waited: Sequence[Sequence[int]]
) -> dict[int, float]:
    """Return, by number of the value, how long it travelled; of a wait, until its end."""
    rows = zip(begun, waited, strict=True)
    arrived = [[start if wait > _ARRIVED_NS else None for start, wait in zip(*row, strict=True)] for row in rows]
    return {value: time / 1e6 for value, time in travelled(plan.bound, begun, ended, arrived).items()}


def _outputs(group: dist.ProcessGroup, holders: Sequence[int], step: ProcessStep) -> list[Any]:
    outputs: list[Any] = [None] * len(holders)
    for holder in sorted(set(holders)):
        turns = [microbatch for microbatch, rank in enumerate(holders) if rank == holder]
        box: list[Any] = [to_bytes([step.outputs[microbatch] for microbatch in turns])]
        dist.broadcast_object_list(box, group=group, group_src=holder)
        for microbatch, output in zip(turns, from_bytes(box[0]), strict=True):
            outputs[microbatch] = output
    return outputs


def _losses(plan: Plan, step: ProcessStep) -> torch.Tensor:
    """Return the type of this process's losses, then the bits of each as a 64-bit number; 0 for unknown ones."""
    assert step.loss is not None
    found = torch.zeros(plan.microbatches + 1, dtype=torch.int64)
    for microbatch, value in enumerate(step.loss.values):
        if value is not None:
            found[0] = _LOSS_TYPES.index(value.dtype)
            found[microbatch + 1] = value.detach().reshape(()).cpu().double().view(torch.int64)
    return found


def _set_losses(loss: Loss, numbers: torch.Tensor, holders: Sequence[int], device: torch.device) -> None:
    for microbatch, holder in enumerate(holders):
        kind = _LOSS_TYPES[int(numbers[holder, 0])]
        loss.values[microbatch] = numbers[holder, microbatch + 1].view(torch.float64).to(device, kind)
