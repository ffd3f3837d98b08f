"""One step on this process: a stage with the methods that PyTorch's pipelining runtime calls, and its replicas' sums.

The runtime works through its rank's order and calls one of these methods for every action. It sends and receives the
tensors that they return:

    RECV_F   get_fwd_recv_ops      an empty buffer              FORWARD          forward_one_chunk
    SEND_F   get_fwd_send_ops      the output                   FULL_BACKWARD    backward_one_chunk
    RECV_B   get_bwd_recv_ops      an empty buffer              BACKWARD_INPUT   backward_one_chunk, not full
    SEND_B   get_bwd_send_ops      the input's gradient         BACKWARD_WEIGHT  backward_weight_one_chunk

They compute with the same `Stage` as the threads engine: so both engines give the same numbers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from pipelab.engine.emulation import emulate_all_reduce
from pipelab.engine.engine import Act, RankState, StepState, awaited_action, run_action
from pipelab.engine.stage.errors import stage_error
from pipelab.engine.stage.replicas import Buffers, versions, written
from pipelab.engine.stage.stage import RETURN_A_CLONE, Stage, versions_of
from pipelab.engine.torchrun.messages import Connections, GradientPresence, Shapes, ValueMeta, bytes_of, copy_from
from pipelab.engine.torchrun.runtime import HaltError, batch_p2p
from pipelab.errors import StageError
from pipelab.plan.actions import UNSHARD, Action, B, F, I, R, W
from pipelab.plan.plan import Plan


@dataclass(slots=True)
class ProcessStep(StepState):
    """One step, or one evaluation, of the one rank that this process runs."""

    shapes: Sequence[Shapes] = ()  # per micro-batch, those of its input
    metas: dict[Shapes, list[ValueMeta]] = field(default_factory=dict)  # by those, of each stage's output
    waited: list[int] = field(default_factory=list)  # per action, nanoseconds of waiting for another rank's value
    waiting: bool = False  # whether the next action waits for a value from another rank
    peer: int | None = None  # the rank of the last send or receive since the last action
    reducing: list[tuple[Reducer, list[dist.Work], list[Any]]] = field(default_factory=list)  # beside, with their times

    @property
    def mine(self) -> RankState:
        """The state of this process's rank."""
        return self.ranks[0]

    def meta(self, stage: int, microbatch: int) -> ValueMeta:
        """Return the meta of a stage's output for a micro-batch."""
        return self.metas[self.shapes[microbatch]][stage]

    def wait(self, works: Sequence[Any], flags: Sequence[Any]) -> None:
        """Wait for the value that the next action needs from another rank; record for how long."""
        asked = time.perf_counter_ns()
        self.waiting = True
        timed, rest = (works, flags) if works else (flags, works)
        for work in timed:
            work.wait()
        self.waited[self.mine.position] = time.perf_counter_ns() - asked
        for work in rest:
            work.wait()
        self.waiting = False

    def look(self, *, wait: bool = False) -> None:
        """Note which all-reduces beside computing are over; or wait for all of them."""
        for reducer, works, times in self.reducing:
            if wait:
                reducer.finish(works)
            if times[0] is times[1] and all(work.is_completed() for work in works):
                times[1] = self.mine.stream.mark()

    def peer_of(self, plan: Plan) -> int | None:
        """Return the rank that this process receives from, or else sends to, now; `None` after the last action."""
        if self.mine.computing or self.mine.position >= len(self.mine.actions):
            return None
        if not self.waiting:
            return self.peer
        awaited = awaited_action(plan, self.mine)
        return None if awaited is None else awaited[2]


class ProcessStage:
    """One stage on this process. Its methods have the names that PyTorch's runtime calls."""

    def __init__(
        self, runner: Stage, stage_id: int, plan: Plan, rank: int, connections: Connections, reducer: Reducer | None
    ) -> None:
        self.runner = runner
        self.stage_index = stage_id  # PyTorch's: see `routes_of`
        self.num_stages = plan.stages
        self.group_rank = rank
        self.group_size = plan.ranks
        self.is_first = runner.is_first
        self.is_last = runner.is_last
        self.submod = nn.Identity()  # a module of FSDP2 gathers itself; the runtime would want to have gathered it
        self.has_backward = True
        self.device = connections.transport_device
        self.group = connections.values
        self.output_chunks: list[Any] = []
        self.stage_index_to_group_rank: dict[int, int] = {}
        self._reducer = reducer
        self._sharded: list[Any] = fsdp_modules(runner.module)
        self._planned = any(move.action == UNSHARD(runner.index) for move in plan.bound.moves)
        self._gathering: list[Any] = []
        self._beside = plan.bound.beside
        self.presence = None if self.device.type == "cpu" else GradientPresence(connections.everyone)

    def begin(self, step: ProcessStep) -> None:
        """Prepare a step."""
        self.step = step
        self.given: dict[int, Any] = {}
        self.gradients: dict[int, Any] = {}
        self.made: dict[int, Any] = {}
        self.back: dict[int, Any] = {}
        self.sent: list[tuple[int, torch.Tensor, list[int]]] = []
        self.left = sum(action.stage == self.runner.index and action.kind == "B" for action in step.mine.actions)
        step.mine.kept[self.runner.index] = {}
        for part in self._sharded if self._planned else ():
            part.set_reshard_after_forward(False, recurse=False)  # the plan says when

    def end(self) -> None:
        """Forget the step and its values."""
        del self.step
        for part in self._sharded:
            part.reshard()  # PyTorch leaves that to the next backward
            if self._planned:
                part.set_reshard_after_forward(True, recurse=False)
                part.set_reshard_after_backward(True, recurse=False)
        for values in (self.given, self.gradients, self.made, self.back, self.sent):
            values.clear()
        if self.presence:
            self.presence.clear()

    def refuse_overwritten(self) -> None:
        """After the last send, refuse a stage that wrote into its output: the value that was sent is unknown."""
        for microbatch, message, version in self.sent:
            if versions_of(message) != version:
                raise self._error(
                    microbatch,
                    f"returned a tensor that stage {self.runner.index} wrote into afterwards, before or after it was "
                    f"sent\n  try: {RETURN_A_CLONE}",
                )

    # --- what the runtime computes

    def forward_one_chunk(self, microbatch: int, inputs: tuple[Any, ...], *_: Any, **__: Any) -> Any:
        """Run one micro-batch forward."""
        step, runner = self.step, self.runner
        loss, receive = step.loss, step.mine.stream.receive
        if runner.is_first:
            given = inputs[0] if receive is None else receive(inputs[0])
        else:
            given = self._arrived(self.given.pop(microbatch), step.meta(runner.index - 1, microbatch).value)
        if runner.is_last and loss is not None and receive is not None:
            loss.targets[microbatch] = receive(loss.targets[microbatch])
        runner.receive_keywords(microbatch, receive)
        self._gathered()
        act = runner.evaluate if step.plan.forwards_only else runner.forward
        made = self._run(F(microbatch, runner.index), act, given)
        if runner.is_last:
            step.outputs[microbatch] = made
        else:
            meta = step.meta(runner.index, microbatch)
            if misfit := meta.misfit(made, f"stage {runner.index}"):
                raise HaltError(self._error(microbatch, misfit))
            if self.stage_index_to_group_rank[self.stage_index + 1] != self.group_rank:
                self.made[microbatch] = made  # to be sent
        return made

    def backward_one_chunk(
        self,
        microbatch: int,
        loss: Any = None,  # noqa: ARG002 - the stage has it
        full_backward: bool = True,
        **_: Any,
    ) -> None:
        """Run one micro-batch backward: the whole of it, or the input gradient alone."""
        gradients = None
        if not self.is_last:
            meta = self.step.meta(self.runner.index, microbatch)
            there = self.presence.take if self.presence else lambda _: None
            gradients = self._arrived(
                self.gradients.pop(microbatch),
                lambda found: meta.gradients(found, there(microbatch)),
                self.presence.under_way(microbatch) if self.presence else (),
            )
        self.left -= full_backward
        for part in self._sharded:
            # As PyTorch's PipelineStage: weights stay whole between backwards; the last one reduces the sum of all.
            part.set_is_last_backward(not self.left)
            part.set_reshard_after_backward(not self.left and not self._planned)
            part.set_requires_gradient_sync(not self.left)
        self._gathered()
        kind, act = (B, self.runner.backward) if full_backward else (I, self.runner.backward_input)
        self.back[microbatch] = self._run(kind(microbatch, self.runner.index), act, gradients)

    def backward_weight_one_chunk(self, microbatch: int, **_: Any) -> None:
        """Run the rest of one micro-batch's backward: the weights' gradients."""
        self._run(W(microbatch, self.runner.index), self.runner.backward_weight, None)

    def unshard(self) -> None:
        """Begin to gather the stage's weights. They are there at the latest when an action has waited for them."""
        began = self.step.mine.stream.mark()
        self._gathering = [part.unshard(async_op=True) for part in self._sharded]
        self._moved = [began, self.step.mine.stream.mark()]
        self.step.mine.moves.append(self._moved)

    def _gathered(self) -> None:
        """Wait for the weights, if they are being gathered."""
        if self._gathering:
            for handle in self._gathering:
                handle.wait()
            self._gathering, self._moved[1] = [], self.step.mine.stream.mark()

    def reshard(self) -> None:
        """Free the stage's gathered weights."""
        self._gathered()
        began = self.step.mine.stream.mark()
        for part in self._sharded:
            part.reshard()
        self.step.mine.moves.append([began, self.step.mine.stream.mark()])

    def perform_reduce_grad(self) -> None:
        """Sum the stage's gradients over its replicas; the action begins when the last of them has arrived."""
        if self._beside:
            times = [self.step.mine.stream.mark()] * 2
            self.step.mine.moves.append(times)
            if self._reducer is not None:
                self.step.reducing.append((self._reducer, self._reducer.start(), times))
            return
        if self._reducer is not None:
            self._reducer.meet()
        self._run(R(self.runner.index), self._all_reduce, None)

    def _all_reduce(self, *_: object) -> None:
        if self._reducer is not None:
            self._reducer.reduce()
            emulate_all_reduce(self.runner.module)

    # --- values between stages of this rank

    def set_local_fwd_input(self, value: Any, microbatch: int) -> None:
        """Store the output of the previous stage, which is on this rank too."""
        self.given[microbatch] = _Local(value)

    def get_local_bwd_output(self, microbatch: int) -> Any:
        """Return the gradient of the input for the previous stage, which is on this rank too."""
        return self.back.pop(microbatch, None)

    def set_local_bwd_input(self, gradients: Any, microbatch: int) -> None:
        """Store the gradient of the output from the next stage, which is on this rank too."""
        self.gradients[microbatch] = _Local(gradients)

    # --- values to and from other ranks

    def get_fwd_recv_ops(self, microbatch: int) -> list[dist.P2POp]:
        """Begin to receive a micro-batch's input, for which its forward waits; the runtime has nothing to do."""
        buffers = self.step.meta(self.runner.index - 1, microbatch).empty_buffers(self.device)
        self.given[microbatch] = self._receiving(buffers, self.stage_index - 1)
        return []

    def get_fwd_send_ops(self, microbatch: int) -> list[dist.P2POp]:
        """Return sends of a micro-batch's output."""
        meta = self.step.meta(self.runner.index, microbatch)
        messages = meta.messages(self.made.pop(microbatch), self.device)
        self.sent += [(microbatch, message, versions_of(message)) for message in messages]
        return self._ops(dist.isend, messages, self.stage_index + 1)

    def get_bwd_recv_ops(self, microbatch: int) -> list[dist.P2POp]:
        """Begin to receive the gradients of a micro-batch's output, likewise."""
        buffers = self.step.meta(self.runner.index, microbatch).gradient_buffers(self.device)
        self.gradients[microbatch] = self._receiving(buffers, self.stage_index + 1)
        if self.presence:
            self.presence.receive(microbatch, len(buffers), self.stage_index_to_group_rank[self.stage_index + 1])
        return []

    def get_bwd_send_ops(self, microbatch: int) -> list[dist.P2POp]:
        """Return sends of the gradients of a micro-batch's input."""
        meta = self.step.meta(self.runner.index - 1, microbatch)
        gradients = self.back.pop(microbatch)
        ops = self._ops(dist.isend, meta.gradient_messages(gradients, self.device), self.stage_index - 1)
        if self.presence:
            self.presence.send(meta.present(gradients), self.stage_index_to_group_rank[self.stage_index - 1])
        return ops

    def release_fwd_send_outputs(self, microbatch: int) -> None:
        """Do nothing: `get_fwd_send_ops` has released the output already; torch 2.15 calls this."""

    def _ops(self, kind: Any, tensors: list[torch.Tensor], stage: int) -> list[dist.P2POp]:
        self.step.peer = peer = self.stage_index_to_group_rank[stage]  # the connection may be lost
        return [dist.P2POp(kind, bytes_of(tensor), group=self.group, group_peer=peer) for tensor in tensors]

    def _receiving(self, buffers: list[torch.Tensor], stage: int) -> _Receiving:
        if self.device.type != "cpu":
            return _Receiving(buffers, batch_p2p(self._ops(dist.irecv, buffers, stage)))
        # As PyTorch does, without its checks of each, which take as long as a small message.
        self.step.peer = peer = self.stage_index_to_group_rank[stage]
        return _Receiving(buffers, [self.group.recv([bytes_of(buffer)], peer, 0) for buffer in buffers])

    def _arrived(self, found: Any, put_together: Any, flags: Sequence[Any] = ()) -> Any:
        """Return a value on this rank's device, made by this rank, or received from another: wait for it."""
        if isinstance(found, _Local):
            return found.value
        try:
            self.step.wait(found.works, flags)
        except Exception as error:
            raise HaltError(error) from error
        receive = self.step.mine.stream.receive
        return put_together(found.buffers if receive is None else receive(found.buffers))

    def _run(self, action: Action, act: Act, given: Any) -> Any:
        """Run an action; raise a `StageError` with its place for any error."""
        step, runner, microbatch = self.step, self.runner, action.microbatch or 0
        step.peer = None
        try:
            return run_action(step, step.mine, runner, action, act, microbatch, given)
        except Exception as error:
            raise HaltError(stage_error(error, action, self.group_rank, step.mine.stream.runs_on)) from error
        finally:
            step.look()

    def _error(self, microbatch: int, message: str) -> StageError:
        rank, stage = self.group_rank, self.runner.index
        action = str(F(microbatch, stage))
        return StageError(f"{action} on rank {rank} {message}", rank, stage, action)


def fsdp_modules(module: nn.Module) -> list[nn.Module]:
    """Return the parts of a module that PyTorch's `fully_shard` has spread over processes."""
    return [part for part in module.modules() if hasattr(part, "set_requires_gradient_sync")]


class _Local(NamedTuple):
    """A value of this rank for another stage of this rank."""

    value: Any


class _Receiving(NamedTuple):
    """Where the tensors of a value arrive, and what waits for them."""

    buffers: list[torch.Tensor]
    works: Sequence[Any]


# ── The replicas of a stage ───────────────────────────────────────────────────────────────────────────────────────────


class Reducer:
    """The gradients of one stage's parameters, summed over the stage's replicas.

    `.grad` may hold the sums of earlier steps: a step stores them elsewhere, and adds them back at its end.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, transport_device: torch.device) -> None:
        self._module = module
        self._parameters: list[nn.Parameter] = []
        self._group = group
        self._transport_device = transport_device
        self._earlier: list[torch.Tensor | None] = []
        self._known = torch.zeros(0)

    def begin(self) -> None:
        """Store and clear the `.grad` of the parameters that learn now."""
        self._parameters = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        self._earlier = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    def meet(self, async_op: bool = False) -> Any:
        """Wait for the other replicas, and exchange which parameters have a gradient on any of them."""
        here = [float(parameter.grad is not None) for parameter in self._parameters]
        self._known = torch.tensor(here, device=self._transport_device)
        return dist.all_reduce(self._known, group=self._group, async_op=async_op)

    def reduce(self) -> None:
        """Sum the gradients over the replicas."""
        known = zip(self._parameters, self._known.tolist(), strict=True)
        for sums in self._sums([parameter for parameter, replicas in known if replicas]):
            _take(*sums)

    def start(self) -> list[dist.Work]:
        """Begin to sum the gradients over the replicas, without waiting for them; `finish` waits."""
        known = self.meet(async_op=True)
        self._begun = list(self._sums(self._parameters, async_op=True))
        return [known, *(work for work, *_ in self._begun)]

    def finish(self, works: list[dist.Work]) -> None:
        """Wait for the sums; a parameter that has no gradient on any replica has none."""
        for work in works:
            work.wait()
        for sums in self._begun:
            _take(*sums)
        for parameter, replicas in zip(self._parameters, self._known.tolist(), strict=True):
            parameter.grad = parameter.grad if replicas else None

    def _sums(self, summed: list[nn.Parameter], async_op: bool = False) -> Iterator[_Sum]:
        """Sum some parameters' gradients, type by type."""
        # In the parameters' order, which is every process's; a set's differs between processes.
        for dtype in dict.fromkeys(parameter.dtype for parameter in summed):
            some = [parameter for parameter in summed if parameter.dtype == dtype]
            for parameter in some:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                elif parameter.grad.is_sparse:  # another replica's may have other rows
                    parameter.grad = parameter.grad.to_dense()
            gradients = [parameter.grad for parameter in some if parameter.grad is not None]
            flat = torch.cat([gradient.flatten() for gradient in gradients]).to(self._transport_device)
            yield dist.all_reduce(flat, group=self._group, async_op=async_op), flat, gradients

    def end(self) -> None:
        """Add the earlier gradients."""
        for parameter, before in zip(self._parameters, self._earlier, strict=True):
            if before is not None:
                if before.is_sparse:
                    before = before.to_dense()  # noqa: PLW2901 - a sparse one cannot take a dense one
                if parameter.grad is not None:
                    before.add_(parameter.grad)
                parameter.grad = before
        self._earlier = []

    def settle_buffers(
        self, module: nn.Module, policy: Buffers, before: dict[str, tuple[torch.Tensor, int]]
    ) -> str | None:
        """Copy the lowest rank's buffers to all; or return the name of one that was written into on another rank."""
        if policy == "lowest":
            for buffer in module.buffers():
                copy_from(0, buffer, self._group, self._transport_device)
        elif dist.get_rank(self._group):
            return written(before, versions(module))
        return None


_Sum = tuple[Any, torch.Tensor, list[torch.Tensor]]
"""The operation that sums gradients, the gradients one behind the other, and where their sums go."""


def _take(_: Any, flat: torch.Tensor, gradients: list[torch.Tensor]) -> None:
    """Take the sums into the gradients."""
    pieces = flat.split([gradient.numel() for gradient in gradients])
    for gradient, piece in zip(gradients, pieces, strict=True):
        gradient.copy_(piece.view_as(gradient))
