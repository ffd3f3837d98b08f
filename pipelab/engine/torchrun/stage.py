"""A stage as PyTorch's pipelining runtime asks for it.

The runtime works through its rank's order. For every action it calls one of these methods; sends and receives it makes
itself, of the tensors that it is given here:

    RECV_F   get_fwd_recv_ops      an empty buffer              FORWARD          forward_one_chunk
    SEND_F   get_fwd_send_ops      the output                   FULL_BACKWARD    backward_one_chunk
    RECV_B   get_bwd_recv_ops      an empty buffer              BACKWARD_INPUT   backward_one_chunk, not full
    SEND_B   get_bwd_send_ops      the input's gradient         BACKWARD_WEIGHT  backward_weight_one_chunk

What they compute is what the threads engine computes, by the same `Stage`: so both give the same numbers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from pipelab.engine.stage.errors import stage_error
from pipelab.engine.stage.stage import Stage
from pipelab.engine.step import Act, run_action
from pipelab.engine.torchrun.groups import Connections, PipelineReplica
from pipelab.engine.torchrun.messages import GradientPresence, ValueMeta
from pipelab.engine.torchrun.replicas import Reducer
from pipelab.engine.torchrun.step_state import ProcessStep
from pipelab.errors import StageError
from pipelab.plan.actions import Action, B, F, I, R, W

__all__ = ["ProcessStage"]


class ProcessStage:
    """One stage on this process. Its methods have the names that PyTorch's runtime calls.

    Args:
        runner: the stage.
        part: the pipeline that this process belongs to.
        rank: this process's rank in the whole plan.
        connections: to the other processes.
        reducer: sums its gradients over its replicas; `None` where it has none.
    """

    def __init__(
        self, runner: Stage, part: PipelineReplica, rank: int, connections: Connections, reducer: Reducer | None
    ) -> None:
        """Take the place of a `PipelineStage`."""
        self.runner = runner
        self.stage_index = runner.index
        self.num_stages = part.plan.stages
        self.group_rank = part.ranks.index(rank)
        self.group_size = len(part.ranks)
        self.is_first = runner.is_first
        self.is_last = runner.is_last
        self.submod = runner.module
        self.has_backward = True
        self.device = connections.transport_device
        self.group = connections.pipeline
        self.output_chunks: list[Any] = []
        self.stage_index_to_group_rank: dict[int, int] = {}
        self._rank = rank
        self._ranks = part.ranks
        self._microbatches = part.microbatches
        self._reducer = reducer
        self.presence = GradientPresence(connections.everyone, part.ranks)

    def begin(self, step: ProcessStep) -> None:
        """Get ready for a step."""
        self.step = step
        self.given: dict[int, Any] = {}
        self.gradients: dict[int, Any] = {}
        self.made: dict[int, Any] = {}
        self.back: dict[int, Any] = {}
        self.sent: list[tuple[int, torch.Tensor, int]] = []
        step.mine.kept[self.stage_index] = {}

    def end(self) -> None:
        """Let go of the step, and of all that is left of it."""
        del self.step
        for values in (self.given, self.gradients, self.made, self.back, self.sent):
            values.clear()
        self.presence.clear()

    def refuse_overwritten(self) -> None:
        """After all is sent, refuse a stage that wrote into an output of its own: nobody knows what left.

        Raises:
            StageError: naming the output.
        """
        for microbatch, message, version in self.sent:
            if _version(message) != version:
                raise self._error(
                    microbatch,
                    f"gave a tensor that stage {self.stage_index} wrote into afterwards: it may have been sent before "
                    "that or after\n  try: clone what the stage keeps and goes on writing into, before it returns it",
                )

    # --- what the runtime computes

    def forward_one_chunk(self, microbatch: int, inputs: tuple[Any, ...], *_: Any, **__: Any) -> Any:
        """Run one micro-batch forward."""
        step, runner = self.step, self.runner
        loss, receive = step.loss, step.mine.stream.receive
        if runner.is_first:
            given = inputs[0] if receive is None else receive(inputs[0])
        else:
            given = self._arrived(self.given.pop(microbatch), step.meta(self.stage_index - 1, microbatch).value)
        if runner.is_last and loss is not None and receive is not None:
            loss.targets[microbatch] = receive(loss.targets[microbatch])
        made = self._run(F(microbatch, self.stage_index), runner.evaluate if loss is None else runner.forward, given)
        if runner.is_last:
            step.outputs[microbatch] = made
        else:
            self._require_meta(made, microbatch)
            if self.stage_index_to_group_rank[self.stage_index + 1] != self.group_rank:
                self.made[microbatch] = made  # to be sent; a stage on this rank is given it
        return made

    def backward_one_chunk(
        self,
        microbatch: int,
        loss: Any = None,  # noqa: ARG002 - the stage knows it
        full_backward: bool = True,
        **_: Any,
    ) -> None:
        """Run one micro-batch backward: the whole of it, or the input gradient alone."""
        if self.step.loss is None:
            return
        gradients = None
        if not self.is_last:
            meta = self.step.meta(self.stage_index, microbatch)
            gradients = self._arrived(
                self.gradients.pop(microbatch), lambda found: meta.gradients(found, self.presence.take(microbatch))
            )
        kind, act = (B, self.runner.backward) if full_backward else (I, self.runner.backward_input)
        self.back[microbatch] = self._run(kind(microbatch, self.stage_index), act, gradients)

    def backward_weight_one_chunk(self, microbatch: int, **_: Any) -> None:
        """Run what is left of one micro-batch's backward: the weights' gradients."""
        if self.step.loss is not None:
            self._run(W(microbatch, self.stage_index), self.runner.backward_weight, None)

    def perform_reduce_grad(self, _: int) -> None:
        """Sum the stage's gradients over its replicas. The time it receive begins when the last of them has come."""
        if self.step.loss is None:
            return
        if self._reducer is not None:
            self._reducer.meet()
        self._run(R(self.stage_index), self._all_reduce, None)

    def _all_reduce(self, *_: object) -> None:
        if self._reducer is not None:
            self._reducer.reduce()

    # --- what it hands over on this rank

    def set_local_fwd_input(self, value: Any, microbatch: int) -> None:
        """Take the output of the stage before, which is on this rank too."""
        self.given[microbatch] = _Local(value)

    def get_local_bwd_output(self, microbatch: int) -> Any:
        """Return the gradient of the input for the stage before, which is on this rank too."""
        return self.back.pop(microbatch, None)

    def set_local_bwd_input(self, gradients: Any, microbatch: int) -> None:
        """Take the gradient of the output from the stage after, which is on this rank too."""
        self.gradients[microbatch] = _Local(gradients)

    # --- what it sends to other ranks, and receives

    def get_fwd_recv_ops(self, microbatch: int) -> list[dist.P2POp]:
        """Return receives for a micro-batch's input."""
        self.given[microbatch] = buffers = self.step.meta(self.stage_index - 1, microbatch).empty_buffers(self.device)
        return self._ops(dist.irecv, buffers, self.stage_index - 1)

    def get_fwd_send_ops(self, microbatch: int) -> list[dist.P2POp]:
        """Return sends of a micro-batch's output."""
        meta = self.step.meta(self.stage_index, microbatch)
        messages = meta.messages(self.made.pop(microbatch), self.device)
        self.sent += [(microbatch, message, _version(message)) for message in messages]
        return self._ops(dist.isend, messages, self.stage_index + 1)

    def get_bwd_recv_ops(self, microbatch: int) -> list[dist.P2POp]:
        """Return receives for the gradients of a micro-batch's output."""
        if self.step.loss is None:
            return []
        buffers = self.step.meta(self.stage_index, microbatch).gradient_buffers(self.device)
        self.gradients[microbatch] = buffers
        ops = self._ops(dist.irecv, buffers, self.stage_index + 1)
        self.presence.receive(microbatch, len(buffers), self.stage_index_to_group_rank[self.stage_index + 1])
        return ops

    def get_bwd_send_ops(self, microbatch: int) -> list[dist.P2POp]:
        """Return sends of the gradients of a micro-batch's input."""
        if self.step.loss is None:
            return []
        meta = self.step.meta(self.stage_index - 1, microbatch)
        gradients = self.back.pop(microbatch)
        ops = self._ops(dist.isend, meta.gradient_messages(gradients, self.device), self.stage_index - 1)
        self.presence.send(meta.present(gradients), self.stage_index_to_group_rank[self.stage_index - 1])
        return ops

    def release_fwd_send_outputs(self, microbatch: int) -> None:
        """Let go of an output that has been sent; torch 2.14 asks for it."""

    def _ops(self, kind: Any, tensors: list[torch.Tensor], stage: int) -> list[dist.P2POp]:
        peer = self.stage_index_to_group_rank[stage]
        self.step.peer = self._ranks[peer]  # what follows may find that a connection is lost
        # They have no gaps, so they go as bytes: not every backend knows every type.
        lines = [tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8) for tensor in tensors]
        return [dist.P2POp(kind, line, group=self.group, group_peer=peer) for line in lines]

    def _arrived(self, found: Any, put_together: Any) -> Any:
        """Return a value that was received, on this rank's device; one of this rank's own, as it is."""
        if isinstance(found, _Local):
            return found.value
        receive = self.step.mine.stream.receive
        return put_together(found if receive is None else receive(found))

    def _run(self, action: Action, act: Act, given: Any) -> Any:
        """Run an action; whatever it raises is told with its place.

        Raises:
            StageError: if it raised.
        """
        step, microbatch = self.step, action.microbatch or 0
        step.peer = None
        try:
            return run_action(step, step.mine, self.runner, action, act, microbatch, given)
        except StageError:
            raise
        except Exception as error:
            named = self._named(action)
            place = (self._rank, self.stage_index, named.microbatch or 0, step.mine.stream.runs_on)
            raise stage_error(error, str(named), *place) from error

    def _named(self, action: Action) -> Action:
        """Return an action as the whole plan numbers it."""
        return Action(action.kind, self._microbatches[action.microbatch or 0], action.stage)

    def _require_meta(self, made: Any, microbatch: int) -> None:
        """Refuse an output unlike the one that the next stage has a buffer for.

        Raises:
            StageError: with both.
        """
        meta: ValueMeta = self.step.meta(self.stage_index, microbatch)
        if misfit := meta.misfit(made, f"stage {self.stage_index}", self.step.counts[microbatch]):
            raise self._error(microbatch, misfit)

    def _error(self, microbatch: int, told: str) -> StageError:
        """Return what is wrong about a forward."""
        action = str(self._named(F(microbatch, self.stage_index)))
        return StageError(f"{action} on rank {self._rank} {told}", self._rank, self.stage_index, action)


class _Local:
    """A value that stays on this rank."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def _version(tensor: torch.Tensor) -> int:
    """Return how often a tensor's memory was written into; 0 for one of inference mode, which does not count."""
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001 - there is no public way
