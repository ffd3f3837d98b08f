"""Random models, schedules and batches: `verify` accuses no right pipeline, and gradients are plain training's.

    python tests/fuzz/verify.py 20 5000    # models, and the training steps of each

Each function takes a seed, and returns what went wrong, or nothing.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import plain

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


class Attention(nn.Module):
    """One head; the gradient of the key's bias is zero, but for rounding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))


class Residual(nn.Module):
    """No sequence: PyTorch's tracer cuts it."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x
        for layer in self.layers:
            x = torch.relu(layer(x)) + first
        return x


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
        blocks = [layer for _ in range(plan.stages) for layer in (Attention(width), nn.LayerNorm(width))]
        model = nn.Sequential(*blocks, nn.Linear(width, width))
    elif kind == "traced":
        model, y = Residual(width, plan.stages), torch.randn(rows, width)
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


def fuzz_gradients(seed: int) -> str | None:
    """Compare a step's gradients with those of the same micro-batches, one after another, written out in PyTorch."""
    case = case_of(seed)
    case.train(random.Random(seed).choice([0, 3, 30, 300]))
    many = case.plan.microbatches
    alone = plain.each_alone(case.model, case.loss, case.x.clone(), case.y, many)
    case.optimizer.zero_grad()
    with Pipeline(case.stages, case.plan, case.loss) as pipe:
        loss = pipe.step(case.x, case.y).loss
    for name, ours in plain.taken(case.model).items():
        theirs = [each[name] for each in alone]
        if ours is None or theirs[0] is None:
            if ours is not theirs[0]:
                return f"{name}: {ours} in the pipeline, {theirs[0]} in plain training\n{case.name}"
            continue
        off, added = float((ours - sum(theirs)).norm()), sum(float(each.norm()) for each in theirs)
        if not off <= 1e-6 * added:
            return f"the gradient of {name} is off by {off:.1e}, of {added:.1e} that is added up\n{case.name}"
    expected = case.loss(case.model(case.x.clone()), case.y)
    if not torch.isclose(loss, expected, rtol=1e-4, atol=1e-9):
        return f"the loss is {loss}, not {expected}\n{case.name}"
    return None


if __name__ == "__main__":
    models, steps = map(int, sys.argv[1:])
    for seed in range(models):
        found = fuzz_verify(seed, steps) or fuzz_gradients(seed)
        print(f"seed {seed}: {found or 'right'}", flush=True)
