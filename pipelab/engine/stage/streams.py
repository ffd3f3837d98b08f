"""Random numbers that hold: every layer draws from a stream of its own.

    seed of the step, micro-batch, name of the layer, how often it has drawn for the micro-batch ──▶ a generator's seed

So they depend neither on the order of actions, nor on threads or processes, nor on the cut. PyTorch's operations that
draw ask here for a generator, on a thread that runs an action. Which layer draws, the stack of calls says: nothing is
asked of a model that does not draw.

What runs again for a backward draws again what its forward drew. For a `C`, draws are numbered from 0 again. A part
under an activation checkpoint goes on where its forward began.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from hashlib import blake2b
from types import FrameType
from typing import Any, cast

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.utils.checkpoint import CheckpointFunction, _CheckpointFrame

from pipelab.errors import EngineError
from pipelab.plan.actions import Action

LOSS = "loss()"
"""The name of the loss, among those of layers: in a forward, it alone draws outside of them."""


class _Thread(threading.local):
    """For what a thread draws: the step, the stage and the action, until the first draw; `None` outside of actions."""

    draws_for: tuple[StepStreams, int, Action] | _Drawing | None = None


thread = _Thread()
_latest: list[StepStreams] = []
_swap = threading.Lock()  # for operations that draw from a device's default generator only

_Place = tuple[int, int, str]
"""The stage, the micro-batch and the kind of an action."""


# ── One step ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class StepStreams:
    """The random numbers of one step of all ranks here; `start` is its seed, or the state of a generator that has it.

    `own` are the stages, with names from `named`; of `running`, what runs now by stage and rank, their copies.
    """

    def __init__(
        self,
        start: int | torch.Tensor,
        named: nn.Module | None = None,
        own: Sequence[nn.Module] = (),
        running: Callable[[], Mapping[tuple[int, int], nn.Module]] = dict,
    ) -> None:
        self._start, self._named, self._own, self._running = start, named, own, running
        self._given = torch.default_generator.initial_seed()
        self.drew: set[str] = set()  # the names of what drew
        self.apart = False  # whether something drew in a backward that had not drawn in the forward
        self.drawn: dict[_Place, dict[str, int]] = {}  # by layer, how often

    @cached_property
    def seed(self) -> int:
        """The seed of all streams."""
        return self._start if isinstance(self._start, int) else peek(self._start)

    @cached_property
    def layers(self) -> tuple[dict[int, str], dict[tuple[int, str], int]]:
        """The names of layers; and by stage and name of one that earlier stages have too, how often they do.

        It has layers by their `id`, so that copies end with their step.
        """
        full = {} if self._named is None else {each: name for name, each in self._named.named_modules()}
        names, earlier, seen = dict[int, str](), dict[tuple[int, str], int](), Counter[str]()
        for stage, module in enumerate(self._own):
            found = [
                (each, names.setdefault(id(each), full.get(each, f"stage {stage}.{name}")))
                for name, each in _inside(module)
            ]
            earlier |= {(stage, name): seen[name] for _, name in found if name in seen}
            seen.update(name for _, name in found)
            for copy in (each for (index, _), each in self._running().items() if index == stage and each is not module):
                names |= {id(each): name for (_, each), (_, name) in zip(_inside(copy), found, strict=True)}
        return names, earlier

    def require_no_own_seed(self, stage: int) -> None:
        """Refuse a draw of a stage after the model has set PyTorch's seed: all threads have the same generator."""
        if torch.default_generator.initial_seed() == self._given:
            return
        with _swap:  # another thread may have it for one operation
            own = torch.default_generator.initial_seed()
        if own != self._given:
            raise EngineError(
                f"the model sets PyTorch's seed to {own} within a step (torch.manual_seed), and stage {stage} draws "
                "random numbers then: all ranks share that generator, so they would not follow the seed\n"
                "  try: a generator of its own: torch.randn(…, generator=torch.Generator().manual_seed(…))"
            )

    def running(self, stage: int, microbatch: int | None, kind: str, *, forward: bool) -> _Drawing:
        """Return a context in which an action of a kind runs on this thread; one that is no forward may repeat one."""
        place = stage, -1 if microbatch is None else microbatch, kind
        self.drawn[place] = drawn = dict[str, int]()
        return _Drawing(self, place, forward, drawn)


@dataclass(slots=True)
class _Drawing:
    """What a thread draws for: an action, or a part of one that runs again."""

    step: StepStreams
    place: _Place
    forward: bool
    drawn: dict[str, int]  # by layer, how often
    outside: str = LOSS  # what draws where no layer runs
    named: tuple[str, int] | None = None  # the layer and the number of a traced stage's next draw
    before: _Drawing | None = None

    def __enter__(self) -> None:
        self.before, thread.draws_for = _drawing(), self

    def __exit__(self, *_: object) -> None:
        thread.draws_for = self.before

    def repeatable(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that draws, whenever it runs again, what it would draw if it ran now."""
        now = replace(self, drawn=dict(self.drawn), outside=self._layer() or self.outside, before=None)
        return partial(_run_again, function, now)

    def generator(self, device: torch.device) -> torch.Generator | None:
        """Return the generator of the next draw; `None` for parts of a DTensor, which has a random state of its own."""
        named, self.named = self.named, None
        if named is None:
            layer = self._layer()
            if layer is None:
                return None
            named = self._next(layer) if self.forward else self._repeated(layer)
        self.step.require_no_own_seed(self.place[0])
        self.step.drew.add(named[0])
        words = repr((self.step.seed, self.place[1], *named)).encode()
        made = torch.Generator(device)
        return made.manual_seed(int.from_bytes(blake2b(words, digest_size=8).digest(), "big") >> 1)

    def _layer(self) -> str | None:
        """Return the innermost layer that runs; `None` in an operation on a DTensor."""
        names = self.step.layers[0]
        frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the one way to it
        while frame is not None and frame.f_code is not _run_again.__code__:
            if frame.f_code is _CALL and (name := names.get(id(frame.f_locals["self"]))) is not None:
                return name
            if frame.f_globals.get("__name__", "").startswith("torch.distributed.tensor"):
                return None
            frame = frame.f_back
        return self.outside

    def _next(self, layer: str) -> tuple[str, int]:
        """Return the name and the number of a layer's next draw."""
        number = self.drawn.get(layer, self.step.layers[1].get((self.place[0], layer), 0))
        self.drawn[layer] = number + 1
        return layer, number

    def _repeated(self, layer: str) -> tuple[str, int]:
        """Return the name and the number of a draw in a backward; refuse one that repeats one of several."""
        stage, microbatch, kind = self.place
        if layer == LOSS and not torch.is_grad_enabled():  # noise on gradients
            self.step.apart = True
            return self._next(f"{kind} of stage {stage}")
        first = self.step.layers[1].get((stage, layer), 0)
        many = self.step.drawn.get((stage, microbatch, "F"), {}).get(layer, first) - first
        if layer == LOSS or many > 1:
            what = "a function" if layer == LOSS else f"layer {layer!r}, which drew {many} times in the forward,"
            raise EngineError(
                f"stage {stage} runs {what} again in a backward, where it draws random numbers: pipelab cannot tell "
                "which ones it drew in the forward\n  try: torch.utils.checkpoint around this part, in place of what "
                "runs it again; or a layer of its own for each draw, such as a second nn.Dropout"
            )
        return (layer, first) if many else self._next(layer)


def _drawing() -> _Drawing | None:
    """Return for what this thread draws."""
    if not isinstance(found := thread.draws_for, tuple):
        return found
    step, stage, action = found
    forward = action.traits.forward or action.traits.again
    thread.draws_for = made = step.running(stage, action.microbatch, action.kind, forward=forward)
    return made


_CALL = nn.Module._wrapped_call_impl.__code__  # noqa: SLF001 - which layer runs, no public name says


def _run_again(function: Callable[..., Any], first: _Drawing, *args: Any, **named: Any) -> Any:
    with replace(first, drawn=dict(first.drawn)):
        return function(*args, **named)


def name_draw(layer: str, number: int) -> None:
    """Say for which layer a traced stage draws next, and how often that has drawn."""
    if (drawing := _drawing()) is not None:
        drawing.named = layer, number


# ── PyTorch's operations that draw, and its checkpoints ───────────────────────────────────────────────────────────────

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
    rest = next((each for each in ("dropout_p", "train", "training") if each in names), None)

    def run(keys: Any, *args: Any, **named: Any) -> Any:
        drawing, generator = _drawing(), None
        if drawing is not None:
            given = {**dict(zip(names, args, strict=False)), **named}
            if given.get("generator") is None and (rest is None or given.get(rest)):  # else its own, or it is at rest
                device = next(each.device for each in given.values() if isinstance(each, torch.Tensor))
                generator = drawing.generator(device)
        if generator is None:
            return kernel.call_boxed(keys, *args, **named)
        if "generator" in names:
            return kernel.call_boxed(keys, **{**given, "generator": generator})
        return _from_default(generator, partial(kernel.call_boxed, keys, *args, **named))

    return run


def _from_default(generator: torch.Generator, operate: Callable[[], Any]) -> Any:
    """Run an operation that takes no generator, with this one in place of its device's default generator."""
    device, drawing = generator.device, thread.draws_for
    default = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]
    with _swap:
        before = default.get_state()
        default.set_state(generator.get_state())
        thread.draws_for = None  # it may call another one
        try:
            return operate()
        finally:
            thread.draws_for = drawing
            default.set_state(before)


@cache
def _see_checkpoints() -> None:
    """Let parts under activation checkpoints, of both kinds, draw again what they drew; once in a process.

    PyTorch has no public way: a checkpoint's `context_fn` is the model's.
    """
    first: Any = _CheckpointFrame
    begin, forward = first.__init__, cast("Any", CheckpointFunction.forward)

    def begin_repeatable(frame: Any, recompute_fn: Callable[..., Any], *args: Any, **named: Any) -> None:
        begin(frame, _repeatable(recompute_fn), *args, **named)

    def forward_repeatable(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        again = _repeatable(run_function)
        made = forward(ctx, run_function, *args)
        ctx.run_function = again
        return made

    first.__init__ = begin_repeatable
    CheckpointFunction.forward = staticmethod(forward_repeatable)  # type: ignore[method-assign]


def _repeatable(function: Callable[..., Any]) -> Callable[..., Any]:
    return function if (drawing := _drawing()) is None else drawing.repeatable(function)


# ── A pipeline's steps ────────────────────────────────────────────────────────────────────────────────────────────────


class Streams:
    """The streams of a model's steps; `named` has the layers' names."""

    def __init__(self, named: nn.Module, devices: Iterable[torch.device] = ()) -> None:
        self._named = named
        self._gpus = sorted({each.index for each in devices if each.type == "cuda"})
        for kind in ["CPU", "CUDA"] if self._gpus else ["CPU"]:
            _see_draws(kind)
        _see_checkpoints()
        self._warned = False
        self._before: list[torch.Tensor] = []
        self.last = StepStreams(0)

    def begin(self, *stages: Any, seed: int | None = None) -> StepStreams:
        """Begin a step of these stages, given as to `StepStreams`."""
        self._before = self._states()
        self.last = StepStreams(self._before[0] if seed is None else seed, self._named, *stages)
        return self.last

    def end(self, *, drew: bool | None = None) -> None:
        """End a step that has succeeded; move the caller's generator, if something drew, of all processes."""
        if self.last.drew:
            _latest[:] = [self.last]
        if not self._warned and not all(map(torch.equal, self._states(), self._before)):
            self._warned = True
            warnings.warn(
                "something in this model draws random numbers that pipelab does not see, or sets PyTorch's random "
                "state: they may differ from run to run\n  try: PyTorch's operations without torch.compile around "
                "them, or a torch.Generator of the model's own",
                stacklevel=2,
            )
        if bool(self.last.drew) if drew is None else drew:
            _drawn(torch.default_generator)

    @contextmanager
    def plainly(self, models: Sequence[nn.Module], seed: int) -> Iterator[StepStreams]:
        """Return a context in which a step runs that is no pipeline's."""
        self.last = StepStreams(seed, self._named, models)
        yield self.last

    def _states(self) -> list[torch.Tensor]:
        """Return the state of the default generators."""
        return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self._gpus)]


def _inside(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield a module and what is in it, as often as it is there; of what is compiled, nothing is seen inside."""
    yield name, module
    compiled = isinstance(module, OptimizedModule) or module._compiled_call_impl is not None  # noqa: SLF001
    if not compiled and not isinstance(module, torch.jit.ScriptModule):
        for key, child in module._modules.items():  # noqa: SLF001 - with doubles
            if child is not None:
                yield from _inside(child, f"{name}.{key}" if name else key)


def latest() -> StepStreams | None:
    """Return the last step of a pipeline in which something drew."""
    return _latest[0] if _latest else None


def peek(state: torch.Tensor | None = None) -> int:
    """Return the seed of a step that begins now: the next number of the default generator, which does not move."""
    copy = torch.Generator()
    copy.set_state(torch.get_rng_state() if state is None else state)
    return _drawn(copy)


def _drawn(generator: torch.Generator) -> int:
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator))
