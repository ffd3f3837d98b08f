"""Random training steps, right and wrong: `diagnose` accuses no right one, and names what is wrong in the others.

Each function takes a seed, and returns what went wrong, or nothing.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

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


# ── Wrong steps of which the doctor's author did not think ────────────────────────────────────────────────────────────


@dataclass
class Student:
    """What a wrong step is written with: a model in two stages, and its batch in micro-batches."""

    case: Case
    draw: random.Random

    def __post_init__(self) -> None:
        model, self.many = self.case.model, self.case.plan.microbatches
        self.one = self.draw.randrange(self.many - 1)
        if isinstance(model, nn.Sequential):
            self.learning = [at for at, layer in enumerate(model) if any(True for _ in layer.parameters())]
            at = self.draw.choice(self.learning[1:])
            self.first, self.second = model[:at], model[at:]

    def pieces(self, x: torch.Tensor, y: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor, float]]:
        """Return rows, targets and share of each micro-batch."""
        cut = zip(x.tensor_split(self.many), y.tensor_split(self.many), strict=True)
        return [(rows.clone(), own, weight_of(self.case, own) / weight_of(self.case, y)) for rows, own in cut]

    def run(self, x, y, between=lambda m, value: value, inputs=lambda rows: rows, loss=None, after=lambda m: None):
        """Run a right loop, but for what is changed: the value between the stages, inputs, the loss, `.grad` after."""
        for m, (rows, targets, share) in enumerate(self.pieces(x, y)):
            output = self.second(between(m, self.first(inputs(rows))))
            if share:
                (share * (loss or self.case.loss)(output, targets)).backward()
            after(m)

    def apart(self, x, y, back):
        """Run stages apart; `back` gets the gradients of all micro-batches between them, and returns others."""
        made, sent = [], []
        for rows, targets, share in self.pieces(x, y):
            made.append(self.first(rows))
            sent.append(made[-1].detach().clone().requires_grad_())
            (share * self.case.loss(self.second(sent[-1].clone()), targets)).backward() if share else None
        own = [torch.zeros_like(each) if each.grad is None else each.grad for each in sent]
        for value, gradient in zip(made, back(own), strict=True):
            value.backward(gradient)

    def parameters(self) -> list[nn.Parameter]:
        return [*self.case.model.parameters()]

    def last(self) -> nn.Module:
        return self.case.model[self.learning[-1]]


def turned(a: list, one: int) -> list:
    a[one], a[one + 1] = a[one + 1], a[one]
    return a


class Through(torch.autograd.Function):
    """Changes a gradient on its way back."""

    @staticmethod
    def forward(ctx, value, change):
        ctx.change = change
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.change(gradient), None


def put(parameters, values):
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = value


def kept(s: Student, x, y, before, change):
    """Leave a batch's gradients changed with those of another batch."""
    s.run(*before)
    old = [each.grad.clone() for each in s.parameters()]
    s.case.model.zero_grad()
    s.run(x, y)
    put(s.parameters(), [change(a, each.grad) for a, each in zip(old, s.parameters(), strict=True)])


def stale_stage(s: Student, x, y):
    stale = copy.deepcopy(s.first)
    with torch.no_grad():
        for each in stale.parameters():
            noise = torch.randn(each.shape, generator=torch.Generator().manual_seed(0))  # the same in each run
            each.add_(0.3 * each.std().nan_to_num(1.0) * noise)
    for rows, targets, share in s.pieces(x, y):
        (share * s.case.loss(s.second(stale(rows)), targets)).backward() if share else None
    put(s.first.parameters(), [each.grad for each in stale.parameters()])


def overwritten(s: Student, x, y):
    layer = [*s.last().parameters()]

    def before(m, value):
        for each in layer:
            each.grad = None
        return value

    s.run(x, y, between=before)


def buffered(s: Student, x, y):
    """A buffer is used again: the second stage's backward reads what another micro-batch has left there."""
    pieces = s.pieces(x, y)
    for m, (rows, targets, share) in enumerate(pieces):
        buffer, other = s.first(rows).detach().clone(), s.first(pieces[m - 1][0].clone()).detach()
        loss = share * s.case.loss(s.second(buffer), targets)
        buffer.data[: len(other)] = other[: len(buffer)]
        loss.backward()
    own = [each.grad for each in s.second.parameters()]
    s.case.model.zero_grad()
    s.run(x, y)
    put(s.second.parameters(), own)


def tied(often: float) -> Callable[..., None]:
    """Return a step in which the head's gradient of a tied weight counts so often."""

    def step(s: Student, x: torch.Tensor, y: torch.Tensor) -> None:
        model = s.case.model
        for rows, targets, share in s.pieces(x, y):
            hidden = torch.tanh(model.hidden(model.embed(rows)))
            head = often * model.head.weight + (1 - often) * model.head.weight.detach()
            (share * s.case.loss(nn.functional.linear(hidden, head), targets)).backward()

    return step


class TiedWords(nn.Module):
    """A language model whose embedding is its head's weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.hidden = nn.Embedding(11, width), nn.Linear(width, width)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.hidden(self.embed(tokens))))


def other_loss(output, target):
    if target.is_floating_point():
        return nn.functional.l1_loss(output, target)
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten(), label_smoothing=0.5)


def summed(output, target):
    if target.is_floating_point():
        return nn.functional.mse_loss(output, target, reduction="sum")
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="sum")


def roll_inside(s: Student, x, y):
    s.run(x, torch.cat([each.roll(1, 0) for each in y.tensor_split(s.many)]))


def swap_targets(s: Student, x, y):
    s.run(x, torch.cat(turned([*y.tensor_split(s.many)], s.one)))


def row_back(s: Student, x, y):
    """The last row is left out, as by drop_last; what is there is averaged."""
    s.run(x[:-1], y[:-1])


def padded(s: Student, x, y):
    s.run(torch.cat([x, x[-1:], x[-1:]]), torch.cat([y, y[-1:], y[-1:]]))


def skipped(s: Student, x, y):
    for rows, targets, share in s.pieces(x, y):
        value = rows
        for at, layer in enumerate(s.case.model):
            value = value if at == s.learning[-2] else layer(value)
        (share * s.case.loss(value, targets)).backward() if share else None


def exchanged(s: Student, x, y):
    order = list(s.case.model)
    a, b = s.learning[-3:-1] if len(s.learning) > 2 else s.learning
    order[a], order[b] = order[b], order[a]
    for rows, targets, share in s.pieces(x, y):
        value = rows
        for layer in order:
            value = layer(value)
        (share * s.case.loss(value, targets)).backward() if share else None


def clipped_each(s: Student, x, y):
    total = [torch.zeros_like(each) for each in s.parameters()]

    def after(m):
        nn.utils.clip_grad_norm_(s.parameters(), 0.02)
        for own, each in zip(total, s.parameters(), strict=True):
            own += 0 if each.grad is None else each.grad
            each.grad = None

    s.run(x, y, after=after)
    put(s.parameters(), total)


def summed_in_bfloat16(s: Student, x, y):
    total = [torch.zeros_like(each, dtype=torch.bfloat16) for each in s.parameters()]

    def after(m):
        for own, each in zip(total, s.parameters(), strict=True):
            own += 0 if each.grad is None else each.grad.bfloat16()
            each.grad = None

    s.run(x, y, after=after)
    put(s.parameters(), [each.float() for each in total])


def changed(change, which=lambda s: s.parameters()):
    """Return a step whose `.grad` is changed at the end."""

    def step(s: Student, x, y):
        s.run(x, y)
        for each in which(s):
            each.grad = change(s, each, each.grad)

    return step


def emptied(which, once=True):
    def step(s: Student, x, y):
        def after(m):
            if m == s.one:
                for each in which(s):
                    each.grad = None

        s.run(x, y, after=after)

    return step


def updated(s: Student, x, y):
    optimizer = torch.optim.SGD(s.parameters(), 0.5)
    s.run(x, y, after=lambda m: optimizer.step() if m == s.one else None)


def through(change):
    """Return a step in which each gradient is changed between the stages."""
    return lambda s, x, y: s.run(x, y, between=lambda m, value: Through.apply(value, lambda g: change(s, g)))


def accumulated(gradients: list) -> list:
    shape = gradients[0].shape
    if any(each.shape != shape for each in gradients):
        return [2 * gradients[0], *gradients[1:]]
    return [sum(gradients[: m + 1]) for m in range(len(gradients))]


def alike(gradients: list, one: int) -> list:
    return (
        turned(gradients, one) if gradients[one].shape == gradients[one + 1].shape else [g.flip(0) for g in gradients]
    )


LOSS = {"other-targets", "other-loss"}
COUNTS = {"missing-microbatches", "repeated-microbatches", "sign", "collinear"}
FORWARD = {"other-outputs"}
BACK = {"passed-back"}
OWN = {"only-their-own"}
SCALE = {"scaled", "times-microbatches", "divided-by-microbatches", "times-tokens", "divided-by-tokens", "loss-scale"}

UNSEEN = {
    "targets rolled by a row in each micro-batch": (roll_inside, LOSS),
    "targets rolled by a row": (lambda s, x, y: s.run(x, y.roll(1, 0)), LOSS),
    "targets rolled by two rows": (lambda s, x, y: s.run(x, y.roll(2, 0)), LOSS),
    "targets shuffled": (lambda s, x, y: s.run(x, y[torch.randperm(len(y))]), {*LOSS, "random-numbers"}),
    "targets reversed": (lambda s, x, y: s.run(x, y.flip(0)), LOSS),
    "targets of two micro-batches swapped": (swap_targets, LOSS),
    "inputs rolled": (lambda s, x, y: s.run(x.roll(1, 0), y), LOSS),
    "bfloat16 sends": (lambda s, x, y: s.run(x, y, between=lambda m, v: v.bfloat16().float()), {"right"}),
    "bfloat16 gradients back": (through(lambda s, g: g.bfloat16().float()), {"right"}),
    "float16 sends": (lambda s, x, y: s.run(x, y, between=lambda m, v: v.half().float()), {"right"}),
    "bfloat16 sums": (summed_in_bfloat16, {"right"}),
    "detached": (lambda s, x, y: s.run(x, y, between=lambda m, v: v.detach()), {"missing-gradients"}),
    "one detached": (lambda s, x, y: s.run(x, y, between=lambda m, v: v.detach() if m == s.one else v), COUNTS),
    "a stale stage": (stale_stage, {*FORWARD, "stale-weights"}),
    "updated on the way": (updated, {"weights-change"}),
    "another loss": (lambda s, x, y: s.run(x, y, loss=other_loss), LOSS),
    "half of the loss": (lambda s, x, y: s.run(x, y, loss=lambda o, t: s.case.loss(o, t) / 2), SCALE),
    "a sum": (lambda s, x, y: s.run(x, y, loss=summed), {*SCALE, *COUNTS, "other-weights", "weighed-by-rows"}),
    "temperature": (lambda s, x, y: s.run(x, y, loss=lambda o, t: s.case.loss(o / 2, t)), LOSS),
    "the sum of outputs": (lambda s, x, y: s.run(x, y, loss=lambda o, t: o.sum()), LOSS),
    "a penalty on outputs": (
        lambda s, x, y: s.run(x, y, loss=lambda o, t: s.case.loss(o, t) + 0.1 * o.square().mean()),
        LOSS,
    ),
    "no gradient of a bias": (
        changed(lambda s, p, g: None, lambda s: [[*s.last().parameters()][-1]]),
        {"missing-gradients"},
    ),
    "gradients of two micro-batches exchanged": (lambda s, x, y: s.apart(x, y, lambda g: alike(g, s.one)), BACK),
    "boundary gradients added up": (lambda s, x, y: s.apart(x, y, accumulated), {*BACK, *COUNTS}),
    "boundary gradients of ones": (through(lambda s, g: torch.ones_like(g)), BACK),
    "boundary gradients clamped": (through(lambda s, g: g.clamp(-float(g.abs().mean()), float(g.abs().mean()))), BACK),
    "boundary gradients negated": (through(lambda s, g: -g), {"sign"}),
    "boundary gradients times micro-batches": (through(lambda s, g: s.many * g), SCALE),
    "boundary gradients rolled": (through(lambda s, g: g.roll(1, -1)), BACK),
    "clipped": (lambda s, x, y: (s.run(x, y), nn.utils.clip_grad_norm_(s.parameters(), 0.01)), {"clipped"}),
    "each micro-batch clipped": (clipped_each, {"clipped", "other-weights"}),
    "clamped": (changed(lambda s, p, g: g.clamp(-float(g.abs().mean()), float(g.abs().mean()))), OWN),
    "zero_grad on the way": (emptied(lambda s: s.parameters()), COUNTS),
    "zero_grad of a stage": (emptied(lambda s: s.first.parameters()), COUNTS),
    "overwritten": (overwritten, COUNTS),
    "tied, once": (tied(0.0), {"tied-weights"}),
    "tied, twice": (tied(2.0), {"tied-weights"}),
    "weight decay": (changed(lambda s, p, g: g + 0.1 * p.detach()), {"weight-decay", *OWN}),
    "a penalty of signs": (changed(lambda s, p, g: g + 0.1 * p.detach().sign()), {*OWN, "other-batch"}),
    "noise": (changed(lambda s, p, g: g + torch.randn_like(g) * g.norm()), {"random-numbers", *OWN}),
    "one layer's noise": (
        changed(lambda s, p, g: g + torch.randn_like(g) * g.norm(), lambda s: s.last().parameters()),
        {"random-numbers", *OWN},
    ),
    "one layer averaged twice": (changed(lambda s, p, g: g / s.many, lambda s: s.last().parameters()), SCALE),
    "one weight transposed": (
        changed(lambda s, p, g: g.flip(0), lambda s: [next(s.last().parameters())]),
        {"swapped", *OWN},
    ),
    "a scale left": (lambda s, x, y: s.run(x, y, loss=lambda o, t: 1024 * s.case.loss(o, t)), {"loss-scale", "scaled"}),
    "dropout between stages": (
        lambda s, x, y: s.run(x, y, between=lambda m, v: nn.functional.dropout(v, 0.2)),
        {"random-numbers", *FORWARD},
    ),
    "a layer skipped": (skipped, {*FORWARD, "missing-gradients"}),
    "layers exchanged": (exchanged, {"swapped", *FORWARD}),
    "an activation more": (lambda s, x, y: s.run(x, y, between=lambda m, v: v.tanh()), FORWARD),
    "inputs scaled": (
        lambda s, x, y: s.run(x, y, inputs=lambda r: r * 1.1 if r.is_floating_point() else (r + 1) % 11),
        FORWARD,
    ),
    "a row left out": (row_back, FORWARD),
    "padded with rows": (padded, FORWARD),
    "gradients of another batch added": (
        lambda s, x, y: kept(s, x, y, (x.flip(0)[:2], y[:2]), lambda old, new: old + new),
        {"other-batch", "no-zero-grad", *FORWARD},
    ),
    "activations overwritten": (buffered, {*OWN, *BACK}),
}
"""By what is wrong: the step, and the codes that name it."""


def student_of(seed: int, name: str) -> Student:
    """Return a random case that can be cut in two, for a wrong step."""
    for again in range(1000):
        draw, case = drawn(seed + 1_000_003 * again, (0, 0, 3))
        enough = isinstance(case.model, nn.Sequential) and 1 < case.plan.microbatches <= len(case.x) / 2
        if enough and name.startswith("tied"):
            x, y = torch.randint(11, (2, len(case.x), 5))
            return Student(replace(case, model=TiedWords(8), loss=cross_entropy, x=x, y=y), draw)
        if enough and sum(any(True for _ in each.parameters()) for each in case.model) > 2:
            return Student(case, draw)
    raise AssertionError


def judged(name: str, seed: int) -> str:
    """Let `diagnose` see a wrong step: return "named", "unexplained", "not wrong", or how it is misnamed."""
    step, codes = UNSEEN[name]
    s = student_of(seed, name)
    case, model = s.case, s.case.model
    looped(case, s.many)(case.x, case.y)
    right = [each.grad.clone() for each in model.parameters()]
    before = copy.deepcopy(model.state_dict())
    model.zero_grad()
    step(s, case.x, case.y)
    least = 1e-3 * max(float(each.norm()) for each in right)
    left = [0 if each.grad is None else each.grad for each in model.parameters()]
    off = max(float((own - its).norm()) / (float(own.norm()) + least) for own, its in zip(right, left, strict=True))
    model.zero_grad()
    model.load_state_dict(before)
    if codes != {"right"} and not off > 0.05:
        return "not wrong"
    rows = [len(each) for each in case.x.tensor_split(s.many)]
    found = diagnose(lambda x, y: step(s, x, y), model, case.x, case.y, case.loss, microbatches=rows)
    if found.code in codes:
        return "named"
    if codes != {"right"} and found.code in ("unexplained", "other-weights", "rounding", "collinear"):
        return "unexplained"  # the counts, if there are any, and no cause
    return f"misnamed {found.code}: {found}\n{case.name}"


def fuzz_unseen_steps(seed: int) -> str | None:
    """Diagnose a step that is wrong as nobody thought of: it gets its name, or none."""
    name = [*UNSEEN][seed % len(UNSEEN)]
    verdict = judged(name, seed)
    return f"{name}: {verdict}" if verdict.startswith("misnamed") else None


fuzz_unseen_steps.seeds = 12


if __name__ == "__main__":  # PYTHONPATH=.:tests python -m fuzz.diagnose 6: of 6 seeds, how each is called
    for name in UNSEEN:
        verdicts = Counter(judged(name, seed).partition(":")[0] for seed in range(int(sys.argv[1])))
        print(f"{name:45}", ", ".join(f"{verdict} {many}" for verdict, many in verdicts.items()), flush=True)
