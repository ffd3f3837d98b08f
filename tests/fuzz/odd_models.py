"""Models that do more than compute values: hooks, backwards of their own, attributes that change, buffers in use.

The oracle is plain training, one micro-batch after another. A pipeline either gives its gradients or raises an error;
and it raises none for a model with which nothing is wrong.
"""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import plain
import torch
from torch import nn

from fuzz.verify import differs, plan_of
from pipelab import Pipeline, Plan, split
from pipelab.errors import EngineError, SplitError, StageError

WIDTH = 6

mse = nn.functional.mse_loss


def batch_of(draw: random.Random, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch with as many rows in each micro-batch."""
    rows = draw.randint(1, 4) * plan.microbatches
    return torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)


# --- hooks at cuts


HOOKS = {
    "none": None,
    "doubles": lambda gradient: gradient * 2,
    "turns": lambda gradient: -gradient,
    "clips": lambda gradient: gradient.clamp(-1e-3, 1e-3),
    "looks": lambda gradient: None,
}


class Hooked(nn.Module):
    """Hooks its input, a tensor between, its output, or its weight as it is used."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.names = [draw.choice(list(HOOKS)) for _ in range(4)]
        self.retains = draw.random() < 0.2

    def hook(self, place: int, tensor: torch.Tensor) -> torch.Tensor:
        hook = HOOKS[self.names[place]]
        if hook is not None and tensor.requires_grad:
            tensor.register_hook(hook)
        if self.retains and tensor.requires_grad:
            tensor.retain_grad()
        return tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        between = self.hook(1, torch.tanh(self.first(self.hook(0, x))))
        weight = self.hook(2, self.second.weight * 1.5)
        return self.hook(3, nn.functional.linear(between, weight, self.second.bias) + x)


def fuzz_hooks(seed: int) -> str | None:
    """Hook tensors at cuts and between them; some stages are frozen."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    plan = plan_of(draw)
    stages = [Hooked(draw) for _ in range(plan.stages)]
    for giver, taker in itertools.pairwise(stages):
        if {giver.names[3], taker.names[0]} == {"clips", "doubles"}:  # plain training runs the giver's hook first
            taker.names[0] = "looks"
    for stage in stages[:-1]:
        stage.requires_grad_(draw.random() < 0.8)
    with Pipeline(stages, plan, mse) as pipe:
        for _ in range(2):
            if found := differs(pipe, nn.Sequential(*stages), mse, *batch_of(draw, plan)):
                return f"seed {seed}, {plan.name}, hooks {[stage.names for stage in stages]}: {found}"
    return None


# --- traced models


class Scales(torch.autograd.Function):
    """Passes a value on, and a multiple of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.factor, None


class Rounds(torch.autograd.Function):
    """Rounds a value, and passes its gradient on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return (x * 8).round() / 8

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@torch.library.custom_op("pipelab_fuzz::turned", mutates_args=())
def turned(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


turned.register_fake(torch.empty_like)
turned.register_autograd(lambda _, gradient: -gradient)


def hooked(x: torch.Tensor) -> torch.Tensor:
    if x.requires_grad:
        x.register_hook(HOOKS["doubles"])
    return x


LOST = {
    "turns": lambda x: Scales.apply(x, -1.0),
    "clips": lambda x: Scales.apply(x, 1.0),
    "rounds": Rounds.apply,
    "hooked": hooked,
}
"""What PyTorch's tracer drops."""

KEPT = {"tanh": torch.tanh, "detached": lambda x: x + torch.sin(x).detach(), "turned": turned, "same": lambda x: x}


class Functions(nn.Module):
    """Layers with a function after each, and attributes of several kinds."""

    def __init__(self, draw: random.Random, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.names = [draw.choice(list(LOST if draw.random() < 0.1 else KEPT)) for _ in range(layers)]
        self.dropout = nn.Dropout(draw.choice([0.0, 0.5]))
        self.alpha, self.factors, self.config = 1.0, {"own": [1.0]}, SimpleNamespace(shift=0.0)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, name in zip(self.layers, self.names, strict=True):
            x = (LOST | KEPT)[name](layer(x)) * self.alpha + self.config.shift
        return self.dropout(x) * self.factors["own"][0] * self.scale


def change(draw: random.Random, model: Functions) -> str:
    """Change something on a model; return what."""
    number, layer = draw.uniform(0.5, 2.0), draw.choice(model.layers)
    changes = {
        "alpha": lambda: setattr(model, "alpha", number),
        "an entry": lambda: model.factors["own"].__setitem__(0, number),
        "the config": lambda: setattr(model.config, "shift", number),
        "a buffer": lambda: setattr(model, "scale", torch.full((WIDTH,), number)),
        "a written buffer": lambda: model.scale.mul_(number),
        "a hook": lambda: layer.register_forward_hook(lambda *given: given[-1] * number),
        "a forward": lambda: setattr(layer, "forward", lambda x: nn.functional.linear(x, layer.weight) * number),
        "a function": lambda: model.names.__setitem__(0, draw.choice(list(KEPT))),
        "the mode": lambda: model.train(not model.training),
        "a weight": lambda: layer.weight.data.mul_(number),
        "nothing": lambda: None,
    }
    name = draw.choice(list(changes))
    changes[name]()
    return name


def fuzz_traced(seed: int) -> str | None:
    """Trace models with backwards of their own, then change them from step to step."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    plan = plan_of(draw)
    model = Functions(draw, plan.stages + draw.randrange(2))
    x, y = batch_of(draw, plan)
    name = f"seed {seed}, {plan.name}, functions {model.names}, dropout {model.dropout.p}"
    wrong = [each for each in model.names if each in LOST]
    try:
        stages = split(model, plan.stages, example=x[: len(x) // plan.microbatches])
    except SplitError as error:
        return None if wrong else f"{name}: refused without a reason: {error}"
    if wrong:
        return f"{name}: {wrong} would be lost, and nothing was said"
    model.dropout.p = 0.0  # a change of its own
    done = []
    with Pipeline(stages, plan, mse) as pipe:
        for _ in range(4):
            done.append(change(draw, model))
            if found := differs(pipe, model, mse, x, y):
                return f"{name}, changed {done}: {found}"
    return None


# --- buffers that are written into


class Buffered(nn.Module):
    """Writes into a buffer of its own, in one of several ways, and may return it."""

    WAYS = ("counts", "averages", "fresh", "copies", "rewrites quietly", "rewrites", "window", "quiet window")
    RIGHT = WAYS[:4]

    def __init__(self, draw: random.Random, rows: int) -> None:
        super().__init__()
        self.linear, self.way, self.calls = nn.Linear(WIDTH, WIDTH), draw.choice(self.WAYS), 0
        self.register_buffer("room", torch.zeros(3 * rows, WIDTH))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, given: Any) -> Any:
        x, beside = given if isinstance(given, tuple) else (given, given)
        made = torch.tanh(self.linear(x)) + beside
        if self.way == "counts":
            self.count += 1
        if self.way == "averages":
            self.count.lerp_(made.detach().mean(), 0.1)
        if self.way in self.RIGHT[:3]:
            return made, made.detach() * 2
        self.calls += 1
        start = self.calls % 3 if "window" in self.way else 0
        room = self.room[start : start + len(x)]
        (room.data if "quiet" in self.way else room).copy_(made.detach() * 2)
        return made, room.clone() if self.way == "copies" else room


def adds(self: plain.Made, given: Any) -> torch.Tensor:
    return self.linear(given[0] + given[1] if isinstance(given, tuple) else given)


def fuzz_buffers(seed: int) -> str | None:
    """Return memory that is used again: a step gives plain training's gradients, or it names the stage."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    plan = plan_of(draw)
    x, y = batch_of(draw, plan)
    stages = [
        *(Buffered(draw, len(x) // plan.microbatches) for _ in range(plan.stages - 1)),
        plain.Made(adds, linear=nn.Linear(WIDTH, WIDTH)),
    ]
    for stage in stages[:-1]:
        stage.requires_grad_(draw.random() < 0.8)
    ways = [stage.way for stage in stages[:-1]]
    name = f"seed {seed}, {plan.name}, {len(x)} rows, {ways}"
    replicated = any(len(ranks) > 1 for ranks in plan.replicas.values())
    with Pipeline(stages, plan, mse) as pipe:
        try:
            found = differs(pipe, nn.Sequential(*stages), mse, x, y)
        except (EngineError, StageError) as error:
            told = "written into" in str(error) or "wrote into" in str(error)
            if told and not all(way in Buffered.RIGHT for way in ways):
                return None
            return None if replicated and "writes into its buffer" in str(error) else f"{name}: {error}"
    return found and f"{name}: {found}"


fuzz_hooks.seeds = 12
fuzz_traced.seeds = 2
fuzz_buffers.seeds = 12
