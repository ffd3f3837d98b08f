"""The whole model, where each process has trained its own stages only: gather what the others have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from pipelab.engine.processes.agreement import agree, gathered
from pipelab.engine.processes.bringing import Courier
from pipelab.engine.processes.stale import clear_stale, mark_stale
from pipelab.engine.splitting import Stages
from pipelab.plan.plan import Plan

if TYPE_CHECKING:
    from pipelab.engine.processes.engine import TorchEngine

__all__ = ["ManyProcesses"]


class ManyProcesses:
    """The home of a model whose stages learn in several processes, each of which has built all of it.

    Args:
        plan: the plan.
        stages: the model, split.
        engine: this process's part of the pipeline.
        rank: this process's rank.
        device: what this process runs on.
    """

    def __init__(self, plan: Plan, stages: Stages, engine: TorchEngine, rank: int, device: torch.device) -> None:
        """Note who holds what."""
        self.held: Sequence[int] = [stage for stage, ranks in plan.replicas.items() if rank in ranks]
        self.devices: Sequence[torch.device] = [device] * plan.stages
        self._holders = [plan.replicas[stage][0] for stage in range(plan.stages)]
        self._stages = stages
        self._engine = engine
        self._rank = rank

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Have all stages here for a while, as they are now, on this process's device."""
        self._gather_state("verify(x, y)")
        homes = {
            stage: next((tensor.device for tensor in [*module.parameters(), *module.buffers()]), None)
            for stage, module in enumerate(self._stages.modules)
            if stage not in self.held
        }
        away = {stage: home for stage, home in homes.items() if home != self.devices[stage]}
        try:
            for stage in away:
                self._stages.place_stage(stage, self.devices[stage])
            yield
        finally:
            for stage, home in away.items():
                if home is not None:
                    self._stages.place_stage(stage, home)

    def gather_state(self) -> None:
        """Bring every stage's parameters and buffers here from the process that holds it."""
        self._gather_state("state_dict()")

    def _gather_state(self, call: str) -> None:
        self._settle()
        self._engine.attend(lambda: self._each(call, Courier.bring_state), call)
        clear_stale(self._stages, self.held)

    def gather_gradients(self) -> None:
        """Bring every stage's gradients here from the process that holds it."""
        self._settle()
        self._engine.attend(lambda: self._each("verify(x, y)", _bring_gradients), "verify(x, y)")

    def stepped(self) -> None:
        """Note that the other processes' stages are about to learn."""
        mark_stale(self._stages, self.held)

    def first_to_say(self, words: str) -> str:
        """Return what the lowest rank says that says anything, on all processes alike; "" if none does."""
        found: str = self._engine.attend(lambda: self._first_to_say(words), "verify(x, y)")
        return found

    def clip_grad_norm_(self, parameters: list[nn.Parameter], max_norm: float, norm_type: float) -> torch.Tensor:
        """Scale this process's gradients so that those of all processes have a norm of at most `max_norm`."""
        kind, most = float(norm_type), float(max_norm)
        self._settle()
        total: torch.Tensor = self._engine.attend(lambda: self._norm(most, kind), "clip_grad_norm_()")
        nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
        return total

    def _norm(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """Return the norm of all processes' gradients, from each gradient's own, as PyTorch does for one process."""
        group = self._engine.group
        agree(group, "clip_grad_norm_()", f"max_norm {max_norm!r}; norm_type {norm_type!r}")
        every = [(stage, each) for stage, module in enumerate(self._stages.modules) for each in module.parameters()]
        # A replicated stage has the same gradients on all its ranks: it counts once.
        ours = [
            index
            for index, (stage, parameter) in enumerate(every)
            if self._holders[stage] == self._rank and parameter.grad is not None
        ]
        own = torch.zeros(2, len(every), dtype=torch.float64)  # each gradient's norm, and whether there is one
        if ours:
            norms = [torch.linalg.vector_norm(every[index][1].grad, norm_type).double() for index in ours]
            own[0, ours], own[1, ours] = torch.stack(norms).cpu(), 1.0
        found, there = gathered(own, group).sum(0)
        if not there.any():
            return torch.zeros((), device=self.devices[0])
        types = [parameter.dtype.to_real() for (_, parameter), has in zip(every, there, strict=True) if has]
        widest = reduce(torch.promote_types, types)
        total: torch.Tensor = torch.linalg.vector_norm(found[there.bool()].to(widest), norm_type)
        return total.to(self.devices[0])

    def _first_to_say(self, words: str) -> str:
        group = self._engine.group
        agree(group, "verify(x, y)", "compared what it knows")
        told = [""] * dist.get_world_size(group)
        dist.all_gather_object(told, words, group=group)
        return next(filter(None, told), "")

    def _settle(self) -> None:
        """Wait for what the caller has launched on this process's device: another thread will read what it makes."""
        for device in {device for device in self.devices if device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()

    def _each(self, call: str, bring: Callable[[Courier, nn.Module], None]) -> None:
        """Do something about every stage, together with all processes."""
        group = self._engine.group
        sizes = [sum(parameter.numel() for parameter in module.parameters()) for module in self._stages.modules]
        agree(group, call, f"{sizes} numbers in the stages' parameters")
        with torch.no_grad():
            for stage, module in enumerate(self._stages.modules):
                bring(Courier(group, self._holders[stage], takes=stage not in self.held), module)
        gathered(torch.zeros(1), group)  # nobody leaves before all have what was sent: it might pass for lost


def _bring_gradients(courier: Courier, module: nn.Module) -> None:
    parameters = list(module.parameters())
    there = torch.tensor([parameter.grad is not None for parameter in parameters])
    courier.bring(there)
    for parameter, known in zip(parameters, there.tolist(), strict=True):
        if not known:
            parameter.grad = None
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
        courier.bring(parameter.grad)
