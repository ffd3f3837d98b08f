"""Random training steps, right and wrong: `diagnose` accuses no right one, and names what is wrong in the others.

Each function takes a seed, and returns what went wrong, or nothing.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import torch
from torch import nn

from pipelab import Pipeline, diagnose

from .verify import Case, case_of, cross_entropy


def weight_of(case: Case, target: torch.Tensor) -> float:
    """Return over how much the loss averages."""
    return float((target != -100).sum()) if case.loss is cross_entropy else float(len(target))


def looped(case: Case, many: int, model: nn.Module | None = None) -> Callable[..., None]:
    """Return a student's loop over micro-batches of a batch, whose losses weigh what they are worth in it."""

    def step(x: torch.Tensor, y: torch.Tensor, total: float = 0.0) -> None:
        for rows, targets in zip(x.tensor_split(many), y.tensor_split(many), strict=True):
            if weight := weight_of(case, targets):
                share = weight / (total or weight_of(case, y))
                (share * case.loss((model or case.model)(rows), targets)).backward()

    return step


def replicated(case: Case, replicas: int, many: int) -> Callable[..., None]:
    """Return a step of replicas, each of which has a part of the batch, and adds to the model's gradients."""

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        for rows, targets in zip(x.tensor_split(replicas), y.tensor_split(replicas), strict=True):
            replica = copy.deepcopy(case.model)
            replica.zero_grad()
            looped(case, many, replica)(rows, targets, weight_of(case, y))
            for own, its in zip(case.model.parameters(), replica.parameters(), strict=True):
                if its.grad is not None:
                    own.grad = its.grad if own.grad is None else own.grad + its.grad

    return step


def drawn(seed: int, steps: tuple[int, ...]) -> tuple[random.Random, Case]:
    """Return a case in which words are sometimes padded, after some steps of training."""
    draw, case = random.Random(seed), case_of(seed)
    if case.loss is cross_entropy and draw.random() < 0.7:
        case.y[torch.rand(case.y.shape) < draw.choice([0.1, 0.5, 0.9])] = -100
        case.y[0, 0] = 0  # one counts
    case.train(draw.choice(steps))
    if isinstance(case.model, nn.Sequential):  # the other kind is traced in training mode
        case.model.append(nn.Dropout(0.5)).eval()
    case.optimizer.zero_grad()
    return draw, case


def fuzz_right_steps(seed: int) -> str | None:
    """Diagnose a right step: all at once, a loop, a pipeline or replicas, cut as `diagnose` cuts or otherwise.

    It computes in single or double precision or in bfloat16, which are its weights' type or autocast's.
    """
    draw, case = drawn(seed, (0, 0, 3, 30, 300))
    rows, many = len(case.x), case.plan.microbatches
    kept = draw.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16])
    if isinstance(case.model, nn.Sequential):
        case.model.to(kept)
        case.x, case.y = (each.to(kept) if each.is_floating_point() else each for each in (case.x, case.y))
    computed = torch.autocast("cpu", torch.bfloat16, enabled=kept == torch.float32 and draw.random() < 0.5)
    replicas = draw.randint(1, min(3, rows // many))
    pipe = Pipeline(case.stages, case.plan, case.loss, reduction=lambda target: weight_of(case, target))
    kinds = {
        "at once": looped(case, 1),
        "a loop": looped(case, many),
        "another cut": looped(case, draw.randint(1, rows)),
        "replicas": replicated(case, replicas, many),
        "a pipeline": pipe.step,
    }
    kind = draw.choice(list(kinds))

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        with computed:
            kinds[kind](x, y)

    with pipe:
        found = diagnose(step, case.model, case.x, case.y, case.loss, microbatches=many, replicas=replicas)
    if found.code in ("right", "rounding"):  # the latter where a model has learned its targets
        return None
    if found.code == "not-finite" and "plain training" in found.sentence:  # it has learned nothing
        return None
    return f"{kind} was accused: {found!r}\n{case.name}"


fuzz_right_steps.seeds = 12


def alive_of(case: Case, many: int) -> list[int]:
    """Return the micro-batches that add something to the gradient: those with targets, and not only dead ReLUs."""
    norms = []
    for rows, targets in zip(case.x.tensor_split(many), case.y.tensor_split(many), strict=True):
        case.optimizer.zero_grad()
        if weight := weight_of(case, targets):
            (weight * case.loss(case.model(rows.clone()), targets)).backward()
        norms.append(sum(float(each.grad.norm()) for each in case.model.parameters() if each.grad is not None))
    case.optimizer.zero_grad()
    return [m for m, norm in enumerate(norms) if norm > 0.01 * max(norms)]


def fuzz_wrong_steps(seed: int) -> str | None:
    """Diagnose a loop with a mistake: it is named, if the micro-batches can be told apart."""
    draw, case = drawn(seed, (0,))
    many, kinds = case.plan.microbatches, list(MISTAKES)
    rows, cuts = case.x.tensor_split(many), case.y.tensor_split(many)
    worth = [weight_of(case, each) for each in cuts]
    alive = alive_of(case, many)
    if len(alive) < 3:
        return None
    kind, one, divisor = draw.choice(kinds), draw.choice(alive), draw.choice([1.1, 2, many])
    code, counts, about = MISTAKES[kind](one, many, sum(worth))

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        for m, (part, targets) in enumerate(zip(x.tensor_split(many), y.tensor_split(many), strict=True)):
            if worth[m] and counts[m]:
                (counts[m] * worth[m] / sum(worth) * case.loss(case.model(part), targets)).backward()
            for each in case.model.parameters() if kind == "moving average" else ():
                each.grad = None if each.grad is None else each.grad / divisor

    found = diagnose(step, case.model, case.x, case.y, case.loss, microbatches=[len(each) for each in rows])
    about = tuple(m for m in about if m in alive)
    if found.code == "collinear" or (kind == "moving average" and not {many - 2, many - 1} <= {*alive}):
        return None  # of a moving average, too little may be left to be seen
    if found.code == code and {*found.microbatches} & {*alive} == {*about}:
        right = kind != "moving average" or abs(found.factor / divisor - 1) < 0.01
        return None if right else f"{divisor} was called {found!r}\n{case.name}"
    if found.code == "scaled" and code.startswith(("times", "divided")) and ", and " in found.sentence:
        return None
    return f"{kind} ({code}, {about}) was called {found!r}\n{case.name}"


fuzz_wrong_steps.seeds = 12

MISTAKES = {
    "sum": lambda one, many, worth: ("times-microbatches", [many] * many, ()),
    "mean of means": lambda one, many, worth: ("divided-by-microbatches", [1 / many] * many, ()),
    "tokens": lambda one, many, worth: ("times-tokens", [worth] * many, ()),
    "one left out": lambda one, many, worth: (
        "missing-microbatches",
        [float(m != one) for m in range(many)],
        tuple(m for m in range(many) if m != one),
    ),
    "only one": lambda one, many, worth: ("missing-microbatches", [float(m == one) for m in range(many)], (one,)),
    "twice": lambda one, many, worth: ("repeated-microbatches", [1.0 + (m == one) for m in range(many)], (one,)),
    "sign": lambda one, many, worth: ("sign", [-1.0] * many, ()),
    "one sign": lambda one, many, worth: ("sign", [1.0 - 2 * (m == one) for m in range(many)], (one,)),
    "moving average": lambda one, many, worth: ("moving-average", [1.0] * many, ()),
}
"""By name: the code, how often each micro-batch counts, and which micro-batches the code is about."""
