"""Random numbers that hold: every draw of a layer has a generator of its own.

    seed of the step, micro-batch, name of the layer, number of its call, number of the draw ──▶ the generator's seed

So they depend neither on the order of actions, nor on threads or processes, nor on the cut. PyTorch's operations that
draw ask here for a generator, on a thread that runs an action. Which layer draws, hooks know: in a first step, all
layers have them, and later only those that drew.

What runs again for a backward draws again what its forward drew. For a `C`, calls are numbered from 0 again. Of a part
under an activation checkpoint, the numbers with which its forward began are kept, and set when it runs again.
"""

from __future__ import annotations

import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import string_at
from dataclasses import dataclass, field
from functools import cache, partial
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import CheckpointFunction, checkpoint
from torch.utils.hooks import RemovableHandle

from pipelab.engine.stage.autograd import saving_hooks
from pipelab.errors import EngineError

LOSS = "loss()"
"""The name of the loss, among those of layers."""

_REENTRANT = (CheckpointFunction.forward.__code__, CheckpointFunction.backward.__code__)

_local = threading.local()
_latest: list[StepStreams] = []
_swap = threading.Lock()  # for operations that draw from a device's default generator only


# ── One step ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _Call:
    """A call of a layer, and its stream; with `repeats`, which of so many calls it repeats cannot be known."""

    layer: str
    stream: tuple[object, ...]
    draws: int = 0  # so far
    repeats: int = 0


@dataclass(slots=True)
class _Part:
    """A part under a checkpoint: how its forward numbers calls, and draws outside of its layers."""

    numbers: dict[str, int]
    first: tuple[tuple[object, ...], int] | None = None  # of these draws: the stream, and the number


@dataclass(slots=True)
class _Entry:
    """A run of a checkpointed part: within which call, and whether it runs again."""

    part: _Part
    within: _Call
    again: bool
    checkpoint: object  # so that no other one gets its identity meanwhile
    call: _Call | None = None  # if it runs again, what draws in it outside of its layers


@dataclass(slots=True)
class _Forward:
    """What the forward of one micro-batch leaves for what runs again in its backward."""

    numbers: dict[str, int] = field(default_factory=dict)  # by layer, its next call's
    parts: WeakKeyDictionary[Any, _Part] = field(default_factory=WeakKeyDictionary)


@dataclass(slots=True)
class StepStreams:
    """The random numbers of one step of all ranks here."""

    seed: int
    first: Mapping[tuple[int, str], int] = field(default_factory=dict)  # how often earlier stages have a layer too
    spread: bool = False  # whether a stage has DTensors
    drew: set[str] = field(default_factory=set)
    layers: set[str] = field(default_factory=set)  # what drew, by the names of the streams
    apart: bool = False  # whether something drew in a backward that had not drawn in the forward
    _forwards: dict[tuple[int, int], _Forward] = field(default_factory=dict)

    def running(self, stage: int, microbatch: int | None, kind: str, *, forward: bool) -> _Action:
        """Return a context in which an action of a kind runs on this thread; one that is no forward may repeat one."""
        place = stage, -1 if microbatch is None else microbatch
        if forward or place not in self._forwards:
            self._forwards[place] = _Forward()
        return _Action(self, place, kind, self._forwards[place], again=not forward)


class _Action:
    """An action on its thread: the calls that run, the outermost first, and how calls are numbered."""

    __slots__ = ("_again", "_calls", "_entries", "_forward", "_microbatch", "_numbers", "_stage", "_step")

    def __init__(self, step: StepStreams, place: tuple[int, int], kind: str, forward: _Forward, *, again: bool) -> None:
        self._step, self._forward, self._again = step, forward, again
        self._stage, self._microbatch = place
        self._numbers = {} if again else forward.numbers
        self._calls = [_Call(outside := f"{kind} of stage {place[0]}", (outside,))]
        self._entries: dict[tuple[int, int], _Entry] = {}

    def __enter__(self) -> None:
        _local.action = self

    def __exit__(self, *_: object) -> None:
        _local.action = None

    def spread(self) -> bool:
        """Return whether an operation on a DTensor draws, which has a random state of its own for its parts."""
        frame = sys._getframe() if self._step.spread else None  # noqa: SLF001 - the one way to it
        while frame is not None and not frame.f_globals.get("__name__", "").startswith("torch.distributed.tensor"):
            frame = frame.f_back
        return frame is not None

    def begin(self, layer: str) -> None:
        """Begin a call of a layer."""
        entry, first = self._entry(), self._step.first.get((self._stage, layer), 0)
        number, repeats = self._numbers.get(layer, first), 0
        self._numbers[layer] = number + 1
        if self._again and not (entry is not None and entry.again):
            many = self._forward.numbers.get(layer, first) - first
            number, repeats = first, many if many > 1 else 0
        self._calls.append(_Call(layer, (layer, number), repeats=repeats))

    def end(self) -> None:
        """End the innermost call."""
        self._calls.pop()

    def name(self, layer: str, number: int, draws: int) -> None:
        """Let a traced stage draw next as this call of a layer of its model does."""
        self._calls[-1].stream, self._calls[-1].draws = (layer, number), draws

    def generator(self, device: torch.device) -> torch.Generator:
        """Return the generator of the next draw: of the innermost call, or of what that runs again."""
        call, entry = self._calls[-1], self._entry()
        if entry is not None and entry.within is call:
            part = entry.part
            if not entry.again:
                part.first = part.first or (call.stream, call.draws)
            elif part.first is not None:
                call = entry.call = entry.call or _Call(call.layer, *part.first, repeats=call.repeats)
        self._note(call)
        words = repr((self._step.seed, self._microbatch, *call.stream, call.draws)).encode()
        call.draws += 1
        made = torch.Generator(device)
        return made.manual_seed(int.from_bytes(blake2b(words, digest_size=8).digest(), "big") >> 1)

    def _note(self, call: _Call) -> None:
        """Note that a call draws; refuse it, if what it repeats cannot be known."""
        self._step.drew.add(self._calls[-1].layer)
        self._step.layers.add(str(call.stream[0]))
        outside = self._again and call is self._calls[0]
        if call.repeats or (outside and torch.is_grad_enabled()):
            many = f"called {call.repeats} times in the forward,"
            what = f"layer {call.layer!r}, {many}" if call.repeats else "a function"
            raise EngineError(
                f"stage {self._stage} runs {what} again in a backward, where it draws random numbers: pipelab cannot "
                "tell which ones it drew in the forward\n  try: torch.utils.checkpoint around this part alone, not "
                "inside another checkpoint; and a layer of its own for each call, such as a second nn.Dropout"
            )
        self._step.apart |= outside

    def _entry(self) -> _Entry | None:
        """Return the run of a checkpointed part that goes on; at its begin, keep or set how calls are numbered."""
        running = _running_checkpoint(reentrant=self._again or not torch.is_grad_enabled())
        if running is None:
            return None
        key = id(running), torch._C._current_graph_task_id()  # noqa: SLF001 - two backwards may run one part each
        entry = self._entries.get(key)
        if entry is None:
            part = self._forward.parts.get(running)
            again = part is not None
            if part is None:
                part = self._forward.parts[running] = _Part(dict(self._numbers))
            else:
                self._numbers = dict(part.numbers)
            entry = self._entries[key] = _Entry(part, self._calls[-1], again, running)
        return entry


def _running_checkpoint(*, reentrant: bool) -> object | None:
    """Return the checkpoint whose part runs on this thread: the same object in its forward, and when it runs again.

    PyTorch has no public way: it is in a closure of its hooks on saved tensors; of a reentrant one, on the stack.
    """
    hooks = saving_hooks()
    if hooks is not None and getattr(hooks[0], "__module__", "") == checkpoint.__module__:
        pack: Any = inspect.unwrap(hooks[0])
        held = dict(zip(pack.__code__.co_freevars, pack.__closure__, strict=True))
        found: object = held["frame"].cell_contents if "frame" in held else held["target_frame_ref"].cell_contents()
        return found
    frame = sys._getframe() if reentrant else None  # noqa: SLF001 - the one way to it
    while frame is not None and frame.f_code not in _REENTRANT:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["ctx"]


# ── PyTorch's operations that draw ────────────────────────────────────────────────────────────────────────────────────

_DRAW = """
bernoulli.out bernoulli_.Tensor bernoulli_.float binomial cauchy_ exponential_ geometric_ log_normal_ multinomial
multinomial.out normal.Tensor_Tensor normal.Tensor_Tensor_out normal.Tensor_float normal.Tensor_float_out
normal.float_Tensor normal.float_Tensor_out normal_ poisson random_ random_.from random_.to randperm.generator_out
rrelu_with_noise rrelu_with_noise.out rrelu_with_noise_ uniform_ _sample_dirichlet _standard_gamma native_dropout
_fused_dropout _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention
_scaled_dot_product_cudnn_attention _flash_attention_forward _efficient_attention_forward _cudnn_attention_forward
"""
"""The operations of PyTorch that draw, as far as they do not call one another."""


@cache
def _see_draws(kind: str) -> None:
    """Let operations on a kind of device, `"CPU"` or `"CUDA"`, ask for a generator; once in a process.

    A mode of PyTorch would see them too. But it slows down all operations, and some models do not run under one.
    """
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)  # with it, what it registers would go
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there was a kernel before: each calls it
        for name in _DRAW.split():
            if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", kind):  # noqa: SLF001 - no public way
                library.impl(name, _steered(name, kind), kind, with_keyset=True, allow_override=True)


_libraries: list[torch.library.Library] = []


def _steered(name: str, kind: str) -> Callable[..., Any]:
    """Return an operation that draws from the stream of its thread's action, if there is one."""
    kernel = torch.library.get_kernel(f"aten::{name}", kind)
    base, _, overload = name.partition(".")
    operation = getattr(getattr(torch.ops.aten, base), overload or "default")
    names = [argument.name for argument in operation._schema.arguments]  # noqa: SLF001 - there is no public way
    at = names.index("generator") if "generator" in names else None
    rest = next((names.index(each) for each in ("dropout_p", "train", "training") if each in names), None)

    def run(keys: Any, *args: Any, **named: Any) -> Any:
        action: _Action | None = getattr(_local, "action", None)
        at_rest = rest is not None and not (args[rest] if len(args) > rest else named.get(names[rest]))
        if action is None or at_rest or action.spread():
            return kernel.call_boxed(keys, *args, **named)
        if named.get("generator") is not None or (at is not None and len(args) > at and args[at] is not None):
            return kernel.call_boxed(keys, *args, **named)  # the model's own
        device = next(each.device for each in (*args, *named.values()) if isinstance(each, torch.Tensor))
        generator = action.generator(device)
        if at is None:
            return _from_default(generator, partial(kernel.call_boxed, keys, *args, **named))
        if len(args) > at:
            return kernel.call_boxed(keys, *args[:at], generator, *args[at + 1 :], **named)
        return kernel.call_boxed(keys, *args, **{**named, "generator": generator})

    return run


def _from_default(generator: torch.Generator, operate: Callable[[], Any]) -> Any:
    """Run an operation that takes no generator, with this one in place of its device's default generator."""
    device, action = generator.device, _local.action
    default = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]
    with _swap:
        before = default.get_state()
        default.set_state(generator.get_state())
        _local.action = None  # it may call another one
        try:
            return operate()
        finally:
            _local.action = action
            default.set_state(before)


# ── What a pipeline learns of its layers ──────────────────────────────────────────────────────────────────────────────


def begin_call(layer: str, *_: object) -> None:
    """Begin a call of a layer, if this thread runs an action."""
    if (action := getattr(_local, "action", None)) is not None:
        action.begin(layer)


def end_call(*_: object) -> None:
    """End it."""
    if (action := getattr(_local, "action", None)) is not None:
        action.end()


def name_draw(layer: str, number: int, draws: int) -> None:
    """Say which call of a layer a traced stage draws for next, and how often that has drawn."""
    if (action := getattr(_local, "action", None)) is not None:
        action.name(layer, number, draws)


class Streams:
    """Which layers of a model draw, as its steps have shown, and the streams of the next step.

    `named` has the layers' names. Hooks are on layers during a step only: the model is the user's.
    """

    def __init__(self, named: nn.Module, devices: Iterable[torch.device] = ()) -> None:
        _see_draws("CPU")
        self._named = named
        self._gpus = sorted({each.index for each in devices if each.type == "cuda"})
        if self._gpus:
            _see_draws("CUDA")
        self._layers: list[tuple[object, ...]] = []  # as they were when it was learned which draw
        self._learned = self._everywhere = self._spread = False
        self._drawing: set[str] = set()
        self._warned = False
        self._before: list[bytes] = []
        self._hooks: list[RemovableHandle] = []
        self.last = StepStreams(0)

    def begin(
        self,
        own: Sequence[nn.Module],
        running: Mapping[tuple[int, int], nn.Module],
        seed: int | None = None,
        *,
        learning: bool,
    ) -> StepStreams:
        """Begin a step of these stages, which runs some modules by stage and rank.

        Hooks keep `nn.TransformerEncoder` from its quick way, so an evaluation has none unless something draws.
        """
        layers = [*_settings(own)]
        if layers != self._layers:
            self._layers, self._learned, self._drawing = layers, False, set()
            self._spread = any(hasattr(each, "to_local") for module in own for each in module.parameters())
        trains = learning or any(each.training for each in self._named.modules() if not [*each.children()])
        self._everywhere = not self._learned and (trains or bool(self._drawing))
        self._before, first = self._states(), {}
        if self._everywhere or self._drawing:
            names = self._names(own, running)
            first = _first(names, own)
            hooked = {each: name for each, name in names.items() if self._everywhere or name in self._drawing}
            self._hooks = _hooked(hooked)
        self.last = StepStreams(peek() if seed is None else seed, first, self._spread)
        return self.last

    def end(self) -> None:
        """End a step, also one that failed: leave the layers as they were."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def learn(self, *, drew: bool | None = None) -> None:
        """Learn from a step that has succeeded; move the caller's generator, if something drew, of all processes."""
        if self.last.drew:
            _latest[:] = [self.last]
        self._learned = self._everywhere or (self._learned and self.last.drew <= self._drawing)
        self._drawing |= self.last.drew
        if self._states() != self._before and not self._warned:
            self._warned = True
            warnings.warn(
                "something in this model draws random numbers that pipelab does not see, or sets PyTorch's random "
                "state: they may differ from run to run\n  try: PyTorch's operations without torch.compile around "
                "them, or a torch.Generator of the model's own",
                stacklevel=2,
            )
        if bool(self.last.drew) if drew is None else drew:
            _drawn(torch.default_generator)

    def watch(self, own: Sequence[nn.Module]) -> None:
        """Learn anew in the next step which layers draw."""
        self._layers, self._learned = [*_settings(own)], False

    @contextmanager
    def plainly(self, models: Sequence[nn.Module], seed: int) -> Iterator[StepStreams]:
        """Return a context in which a step runs that is no pipeline's, with all of its layers watched."""
        hooks = _hooked(self._names(models, {}))
        self.last = StepStreams(seed)
        try:
            yield self.last
        finally:
            for hook in hooks:
                hook.remove()

    def _names(self, own: Sequence[nn.Module], running: Mapping[tuple[int, int], nn.Module]) -> dict[nn.Module, str]:
        """Return the layers of stages and of their copies with their names, in the whole model if they are there."""
        full = {each: name for name, each in self._named.named_modules()}
        found: dict[nn.Module, str] = {}
        for stage, module in enumerate(own):
            layers = [(each, full.get(each, f"stage {stage}.{name}")) for name, each in _layers_of(module)]
            found |= dict(layers)
            for copy in (each for (index, _), each in running.items() if index == stage and each is not module):
                pairs = zip(_layers_of(copy), layers, strict=True)
                found |= {each: name for (_, each), (_, name) in pairs}
        return found

    def _states(self) -> list[bytes]:
        """Return the state of the default generators."""
        # As bytes: `torch.equal` would let go of the interpreter, for which all ranks wait, and is slower.
        states = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self._gpus)]
        return [string_at(state.data_ptr(), state.nbytes) for state in states]


def _settings(modules: Sequence[nn.Module]) -> Iterator[tuple[object, ...]]:
    """Yield every layer with what decides whether it draws. Every step waits for this: `modules()` is slow."""
    todo: list[nn.Module | None] = [*modules]
    for each in todo:
        if each is not None:
            yield each, each.training, each.p if isinstance(each, _DropoutNd) else None
            todo.extend(each._modules.values())  # noqa: SLF001


def _layers_of(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers of a module that hooks can watch, with their names."""
    if not _is_opaque(module):
        yield name, module
        for key, child in module.named_children():
            yield from _layers_of(child, f"{name}.{key}" if name else key)


def _is_opaque(module: nn.Module) -> bool:
    compiled = isinstance(module, OptimizedModule) or module._compiled_call_impl is not None  # noqa: SLF001
    return compiled or isinstance(module, torch.jit.ScriptModule)


def _first(names: Mapping[nn.Module, str], own: Sequence[nn.Module]) -> dict[tuple[int, str], int]:
    """Return, by stage and name, how many calls of a layer that several stages have earlier stages make."""
    found: dict[tuple[int, str], int] = {}
    before: dict[str, int] = {}
    for stage, module in enumerate(own):
        paths = [names[each] for _, each in _layers_of(module)]
        for name in paths:
            if name in before:
                found.setdefault((stage, name), before[name])
        for name in paths:
            before[name] = before.get(name, 0) + 1
    return found


def _hooked(names: Mapping[nn.Module, str]) -> list[RemovableHandle]:
    """Put hooks on layers; a copy may have the hooks of what it is a copy of."""
    handles: list[RemovableHandle] = []
    done: set[int] = set()
    for layer, name in names.items():
        before, after = layer._forward_pre_hooks, layer._forward_hooks  # noqa: SLF001
        if id(before) not in done:
            handles.append(layer.register_forward_pre_hook(partial(begin_call, name), prepend=True))
        if id(after) not in done:
            handles.append(layer.register_forward_hook(end_call, always_call=True))
        done |= {id(before), id(after)}
    return handles


def latest() -> StepStreams | None:
    """Return the last step of a pipeline in which something drew."""
    return _latest[0] if _latest else None


def peek() -> int:
    """Return the seed of a step that begins now: the next number of the default generator, which does not move."""
    copy = torch.Generator()
    copy.set_state(torch.get_rng_state())
    return _drawn(copy)


def _drawn(generator: torch.Generator) -> int:
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator))
