"""Gather the full model, of which each process trains its own stages: parameters, buffers, gradients, their norm."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from pipelab.engine.engine import Engine
from pipelab.engine.model.split import Stages
from pipelab.engine.stage.pytree import full_tensor, local_part, map_tensors
from pipelab.engine.stage.snapshot import overwrite
from pipelab.engine.torchrun.agreement import agree, gathered
from pipelab.engine.torchrun.groups import broadcast
from pipelab.plan.plan import Plan


class DistributedModel(Engine):
    """An engine whose stages learn in several processes, each of which has built all of the model.

    Attributes:
        plan: the plan.
        stages: the model, split.
        group: all processes.
        rank: this process's rank.
    """

    plan: Plan
    stages: Stages
    group: dist.ProcessGroup
    rank: int

    @abstractmethod
    def attend(self, work: Callable[[], Any], call: str) -> Any:
        """Run work that communicates, supervised; return its result."""

    @contextmanager
    def full_model(self) -> Iterator[None]:
        """Return a context in which this process has the present state of all stages, on its device."""
        self._gather(_gather_state, "verify(x, y)")
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

    def gather_parameters(self) -> None:
        """Gather every stage's parameters and buffers from the process that holds it."""
        self._gather(_gather_state, "state_dict()")

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
        """Scale this process's gradients so that those of all processes have a norm of at most `max_norm`."""
        kind, most = float(norm_type), float(max_norm)
        self._settle()
        total: torch.Tensor = self.attend(lambda: self._norm(most, kind), "clip_grad_norm_()")
        # PyTorch's functions of many tensors at once refuse DTensors beside others.
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
        """Gather something of every stage, together with all processes."""
        sizes = [sum(parameter.numel() for parameter in module.parameters()) for module in self.stages.modules]

        def work() -> None:
            agree(self.group, call, f"{sizes} numbers in the stages' parameters")
            with torch.no_grad():
                for stage, module in enumerate(self.stages.modules):
                    gather(module, self.group, self._holder(stage), stage not in self.local_stages)
            gathered(torch.zeros(1), self.group)  # all wait until the last message has arrived

        self._settle()
        self.attend(work, call)


# --- one stage: every process calls these; the rank `source` holds the stage, and the others `receive` it


def _gather_state(module: nn.Module, group: dist.ProcessGroup, source: int, receive: bool) -> None:
    """Gather parameters, buffers and extra state; the stage may have new or larger buffers than in this process."""
    for parameter in module.parameters():
        _gather(parameter, group, source, receive)
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
    _gather(there, group, source, receive)
    for parameter, known in zip(parameters, there.tolist(), strict=True):
        if not known:
            parameter.grad = None
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
        _gather(parameter.grad, group, source, receive)


def _gather(tensor: torch.Tensor, group: dist.ProcessGroup, source: int, receive: bool) -> None:
    """Copy the source's numbers into this process's tensor; of a DTensor, into its part: all have like parts of it."""
    tensor = local_part(tensor)
    found = _broadcast(tensor, tuple(tensor.shape), tensor.dtype, group, source)
    if receive:
        overwrite(tensor, found)


def _broadcast(
    tensor: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, group: dist.ProcessGroup, source: int
) -> torch.Tensor:
    """Return the source's tensor, on the CPU."""
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
    """Return the submodule that a parameter or buffer belongs to, and its name there."""
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf
