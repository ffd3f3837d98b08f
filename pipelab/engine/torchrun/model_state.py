"""Bring what a stage holds from the process that holds it to all others."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.utils.hooks import RemovableHandle

from pipelab.engine.model.split import Stages
from pipelab.engine.stage.pytree import map_tensors
from pipelab.engine.stage.snapshot import overwrite
from pipelab.engine.torchrun.agreement import agree, gathered
from pipelab.plan.plan import Plan

if TYPE_CHECKING:
    from pipelab.engine.torchrun.engine import TorchEngine

__all__ = ["Courier", "ManyProcesses", "clear_stale", "is_stale", "mark_stale", "spread", "warn_of_stale"]


def spread(tensor: torch.Tensor, group: dist.ProcessGroup, source: int) -> None:
    """Broadcast a contiguous tensor of any type, whatever the backend can count with."""
    line = tensor.as_strided((tensor.numel(),), (1,))  # of a single number, the stride may be any
    dist.broadcast(line.view(torch.uint8), group=group, group_src=source)


@dataclass(frozen=True, slots=True)
class Courier:
    """Brings a stage's tensors to this process, or from it; all processes must ask for the same.

    Attributes:
        group: all processes.
        source: the process that holds the stage.
        takes: whether this process takes what is brought; it does not if it holds the stage itself.
    """

    group: dist.ProcessGroup
    source: int
    takes: bool

    def bring(self, tensor: torch.Tensor) -> None:
        """Bring the source's numbers into this process's tensor."""
        brought = self._brought(tensor, tuple(tensor.shape), tensor.dtype)
        if self.takes:
            overwrite(tensor, brought)

    def bring_state(self, module: nn.Module) -> None:
        """Bring parameters, buffers and extra state; a buffer may have come or grown since the module was made."""
        for parameter in module.parameters():
            self.bring(parameter)
        own = dict(module.named_buffers())
        box: list[Any] = [_facts(module) if self._is_source else None]
        dist.broadcast_object_list(box, group=self.group, group_src=self.source)
        facts, extra = box[0]
        for name, (shape, dtype, persistent) in facts.items():
            buffer = own.pop(name, None)
            brought = self._brought(buffer, shape, dtype)
            if not self.takes:
                continue
            if buffer is not None and (tuple(buffer.shape), buffer.dtype) == (shape, dtype):
                overwrite(buffer, brought)
            else:
                part, leaf = _place(module, name)
                device = next((tensor.device for tensor in module.parameters()), torch.device("cpu"))
                part.register_buffer(leaf, brought.to(device), persistent)
        if self.takes:
            for part, leaf in (_place(module, name) for name in own):
                setattr(part, leaf, None)
            for part, state in ((_place(module, name)[0], state) for name, state in extra.items()):
                part.set_extra_state(state)

    @property
    def _is_source(self) -> bool:
        return dist.get_rank(self.group) == self.source

    def _brought(self, tensor: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self._is_source and tensor is not None:
            parcel = tensor.detach().cpu().contiguous()
        else:
            parcel = torch.empty(shape, dtype=dtype)
        spread(parcel, self.group, self.source)
        return parcel


def _facts(module: nn.Module) -> tuple[dict[str, tuple[tuple[int, ...], torch.dtype, bool]], dict[str, Any]]:
    """Return each buffer's shape, type and whether it is saved, and what else the module's parts save."""
    state = module.state_dict(keep_vars=True)
    buffers = {name: (tuple(each.shape), each.dtype, name in state) for name, each in module.named_buffers()}
    extra = {name: each for name, each in state.items() if name.endswith(_EXTRA_STATE_KEY_SUFFIX)}
    return buffers, map_tensors(lambda tensor: tensor.detach().cpu(), extra)


def _place(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the part of a module that a name is of, and the name there."""
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf


@dataclass(frozen=True, slots=True, eq=False)
class _Stale:
    """What is known of a module that is stale.

    Attributes:
        trained: what this process trains of it, in words.
        own: that, and how often it had been written into when it became stale.
        hooks: what warns.
    """

    trained: str
    own: list[tuple[weakref.ref[nn.Parameter], int]]
    hooks: list[RemovableHandle]

    def has_learnt(self) -> bool:
        """Tell whether an optimizer has stepped here, as far as one can see: fused ones leave no trace."""
        return any(own is not None and _version(own) != version for own, version in self._alive())

    def trains(self, module: nn.Module) -> bool:
        """Tell whether this process trains all of another module's parameters."""
        own = {id(each) for each, _ in self._alive()}
        return all(id(parameter) in own for parameter in module.parameters())

    def _alive(self) -> list[tuple[nn.Parameter | None, int]]:
        return [(own(), version) for own, version in self.own]


_stale: weakref.WeakKeyDictionary[nn.Module, _Stale] = weakref.WeakKeyDictionary()


def mark_stale(stages: Stages, held: Sequence[int]) -> None:
    """Note that a step has run: other processes' stages are about to learn there, and not here.

    Args:
        stages: the model, split.
        held: the stages that this process trains.
    """
    others = [module for stage, module in enumerate(stages.modules) if stage not in held]
    for module in _looked_after(stages, [module for module in others if _changes(module)]):
        if module not in _stale:
            own = [parameter for stage in held for parameter in stages.modules[stage].parameters()]
            _stale[module] = _Stale(
                f"{len(held)} of {len(stages)} stages",
                [(weakref.ref(parameter), _version(parameter)) for parameter in own],
                [
                    module.register_state_dict_pre_hook(_warn),
                    module.register_forward_pre_hook(_warn_of_call),
                    module.register_load_state_dict_post_hook(_loaded),
                ],
            )


def clear_stale(stages: Stages, held: Sequence[int]) -> None:
    """Note that all stages are here as they are now."""
    for module in _looked_after(stages, [each for stage, each in enumerate(stages.modules) if stage not in held]):
        _forget(module)


def is_stale(stages: Stages, stage: int) -> bool:
    """Tell whether another process trains a stage, as far as is known here."""
    module = stages.modules[stage]
    known = _stale.get(stages.model) or _stale.get(module)
    return known is not None and not known.trains(module)


def warn_of_stale(stages: Stages, held: Sequence[int]) -> None:
    """Warn if this process is about to train what another one has trained in an earlier pipeline.

    Args:
        stages: the model, split.
        held: the stages that this process is about to train.
    """
    for stage in held:
        known = _stale.get(stages.model) or _stale.get(stages.modules[stage])
        if known is not None and known.has_learnt() and is_stale(stages, stage):
            warnings.warn(
                f"stage {stage} is here as it was before an earlier pipeline, in which another process trained it: it "
                "begins anew from there\n"
                "  try: pipe.state_dict() of the earlier pipeline, in every process, before that is closed",
                stacklevel=5,
            )
            return


def _looked_after(stages: Stages, others: list[nn.Module]) -> list[nn.Module]:
    """Return the model, if other processes train some of its stages; of stages that were given as a list, those."""
    if not others:
        return []
    modules = others if isinstance(stages.model, nn.ModuleList) else [stages.model]
    return [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]  # these take no hooks


def _changes(module: nn.Module) -> bool:
    """Tell whether training changes a module: it has a parameter that learns, or a buffer."""
    return any(each.requires_grad for each in module.parameters()) or next(module.buffers(), None) is not None


def _forget(module: nn.Module) -> None:
    known = _stale.pop(module, None)
    for hook in () if known is None else known.hooks:
        hook.remove()


def _warn(module: nn.Module, _prefix: str, keep_vars: bool) -> None:
    known = _stale.get(module)
    if known is not None and not keep_vars:  # with keep_vars, PyTorch's tracer asks what parameters there are
        warnings.warn(
            f"model.state_dict(): this process has trained {known.trained}, and the others are here as they were "
            "before\n  try: pipe.state_dict(), in every process, before the pipeline is closed: it brings the model up "
            "to date as well",
            stacklevel=3,
        )


def _warn_of_call(module: nn.Module, _given: Any) -> None:
    known = _stale.get(module)
    if known is None:  # a copy of a module that was stale
        for number in [number for number, hook in module._forward_pre_hooks.items() if hook is _warn_of_call]:  # noqa: SLF001 - it is where hooks are
            del module._forward_pre_hooks[number]  # noqa: SLF001 - see above
        return
    if torch.compiler.is_compiling():  # that is also so while PyTorch traces or exports a model
        return
    frame, level = sys._getframe(1), 2  # noqa: SLF001 - inspect.stack would read every file
    while frame.f_back is not None and _module_of(frame).startswith("torch."):
        frame, level = frame.f_back, level + 1
    if not _module_of(frame).startswith("pipelab."):  # which asks for shapes
        warnings.warn(
            f"model(x): this process has trained {known.trained}, and the others are here as they were before\n"
            "  try: pipe.forward(x), in every process; or first pipe.state_dict(), which brings the model up to date",
            stacklevel=level,
        )


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def _loaded(module: nn.Module, keys: Any) -> None:
    if not keys.missing_keys:
        _forget(module)


def _version(parameter: nn.Parameter) -> int:
    """Return how often a parameter was written into."""
    return 0 if parameter.is_inference() else parameter._version  # noqa: SLF001 - there is no public way


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
