"""Random models, schedules and batches: `verify` accuses no right pipeline, and gradients are plain training's.

Each function takes a seed, and returns what went wrong, or nothing.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import plain
import torch
from torch import nn

from pipelab import Pipeline, Plan, schedules, split
from pipelab.errors import VerificationError

WIDTHS = (3, 4, 5, 7, 8, 13, 16, 17, 31, 32)


@dataclass
class Case:
    """A model with what it learns from, and a plan. `stages` is what the pipeline is made of."""

    name: str
    model: nn.Module
    stages: object
    plan: Plan
    x: torch.Tensor
    y: torch.Tensor
    loss: object
    optimizer: torch.optim.Optimizer

    def train(self, steps: int) -> None:
        """Train without the pipeline, which is quicker."""
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.loss(self.model(self.x), self.y).backward()
            self.optimizer.step()


def attends(self: plain.Made, x: torch.Tensor) -> torch.Tensor:
    """One head; the gradient of the key's bias is zero, but for rounding."""
    query, key, value = self.layers
    return x + nn.functional.scaled_dot_product_attention(query(x), key(x), value(x))


def adds(self: plain.Made, x: torch.Tensor) -> torch.Tensor:
    """No sequence: PyTorch's tracer cuts it."""
    first = x
    for layer in self.layers:
        x = torch.relu(layer(x)) + first
    return x


def layered(does: object, width: int, layers: int) -> nn.Module:
    """Return a model of linear layers, and what it does with them."""
    return plain.Made(does, layers=nn.ModuleList(nn.Linear(width, width) for _ in range(layers)))


def cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the loss of a language model."""
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


def mlp(draw: random.Random, width: int, stages: int) -> nn.Sequential:
    """Return layers with one of several activations, with or without norms, the first of which may be in place."""
    activation = draw.choice([nn.ReLU, nn.ReLU, nn.Tanh, nn.GELU, nn.Identity])
    norm = draw.random() < 0.3
    layers: list[nn.Module] = [nn.ReLU(inplace=True)] if draw.random() < 0.2 else []
    for _ in range(stages + draw.randrange(3)):
        layers += [nn.Linear(width, width), *([nn.LayerNorm(width)] if norm else []), activation()]
    return nn.Sequential(*layers[:-1])


def plan_of(draw: random.Random) -> Plan:
    """Return a small plan of any schedule."""
    schedule = schedules[draw.choice(sorted(schedules))]
    sizes = [(ranks, many) for ranks in range(1, 5) for many in range(1, 10) if schedule.refusal(ranks, many) is None]
    return schedule(*draw.choice(sizes)).plan()


def case_of(seed: int) -> Case:
    """Return a random case."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    plan = plan_of(draw)
    kind, width = (
        draw.choice(["random", "teacher", "teacher", "one", "words", "attention", "traced"]),
        draw.choice(WIDTHS),
    )
    rows = draw.choice(
        [plan.microbatches, draw.randint(1, 4) * plan.microbatches + draw.randrange(plan.microbatches), 256]
    )
    if kind == "traced":
        rows -= rows % plan.microbatches  # traced stages run one number of rows
    x = torch.randn(rows, width)
    loss = nn.functional.mse_loss
    stages: object
    if kind == "words":
        x, y = torch.randint(11, (rows, 5)), torch.randint(11, (rows, 5))
        model: nn.Module = nn.Sequential(nn.Embedding(11, width), *mlp(draw, width, plan.stages), nn.Linear(width, 11))
        loss = cross_entropy
    elif kind == "attention":
        x = torch.randn(rows, 4, width)
        y = torch.randn(rows, 4, width)
        blocks = [layer for _ in range(plan.stages) for layer in (layered(attends, width, 3), nn.LayerNorm(width))]
        model = nn.Sequential(*blocks, nn.Linear(width, width))
    elif kind == "traced":
        model, y = layered(adds, width, plan.stages), torch.randn(rows, width)
    else:
        model = mlp(draw, width, plan.stages)
        y = torch.randn(rows, width)
        if kind == "one":
            model, y = nn.Sequential(*model, nn.Linear(width, 1)), torch.randn(rows, 1)
        if kind == "teacher":
            with torch.no_grad():
                y = mlp(random.Random(seed), width, 1)(x.clone())
    stages = split(model, plan.stages, example=x[: rows // plan.microbatches]) if kind == "traced" else model
    adam = draw.random() < 0.7
    weights = model.parameters()
    optimizer = torch.optim.Adam(weights, draw.choice([1e-2, 3e-3])) if adam else torch.optim.SGD(weights, 0.05)
    name = f"seed {seed}: {kind}, width {width}, {rows} rows, {plan.name}, {type(optimizer).__name__}\n{model}"
    return Case(name, model, stages, plan, x, y, loss, optimizer)


def fuzz_verify(seed: int, steps: int = 300, every: int = 25) -> str | None:
    """Train, and verify on the way: no right pipeline is accused, and a wrong `reduction` is found at the end."""
    case = case_of(seed)
    with Pipeline(case.stages, case.plan, case.loss) as pipe:
        for step in range(0, steps + 1, every):
            if not case.loss(case.model(case.x.clone()), case.y).isfinite():
                return None  # too large a learning rate: plain training diverges, and there is nothing to compare
            try:
                pipe.verify(case.x, case.y)
            except VerificationError as error:
                return f"after {step} steps a right pipeline was accused: {error}\n{case.name}"
            case.train(every)
    if case.plan.microbatches == 1:
        return None
    with Pipeline(case.stages, case.plan, case.loss, reduction="sum") as pipe:
        try:
            wrong = pipe.verify(case.x, case.y)
        except VerificationError:
            return None
    return f"a wrong reduction was not found: {wrong}\n{case.name}"


def differs(pipe: Pipeline, model: nn.Module, loss: object, x: torch.Tensor, y: torch.Tensor) -> str | None:
    """Run a step, and the same micro-batches one after another in PyTorch; return how the gradients differ."""
    alone = plain.each_alone(model, loss, x.clone(), y, pipe.plan.microbatches)
    model.zero_grad()
    pipe.step(x.clone(), y)
    for name, ours in plain.taken(model).items():
        theirs = [each[name] for each in alone]
        if (ours is None) != (theirs[0] is None):
            return f"{name}: {ours} in the pipeline, {theirs[0]} in plain training"
        if ours is not None:
            off, added = float((ours - sum(theirs)).norm()), sum(float(each.norm()) for each in theirs)
            if not off <= 1e-6 * added:
                return f"the gradient of {name} is off by {off:.1e}, of {added:.1e} that is added up"
    return None


def fuzz_gradients(seed: int) -> str | None:
    """Compare a step's gradients with those of the same micro-batches, one after another, written out in PyTorch."""
    case = case_of(seed)
    case.train(random.Random(seed).choice([0, 3, 30, 300]))
    with Pipeline(case.stages, case.plan, case.loss) as pipe:
        found = differs(pipe, case.model, case.loss, case.x, case.y)
        loss, expected = pipe.step(case.x, case.y).loss, case.loss(case.model(case.x.clone()), case.y)
    if not found and not torch.isclose(loss, expected, rtol=1e-4, atol=1e-9):
        found = f"the loss is {loss}, not {expected}"
    return found and f"{found}\n{case.name}"


fuzz_verify.seeds = fuzz_gradients.seeds = 4
