"""Batches as people have them, and random numbers: a step has plain training's gradients, and draws what it should.

The oracle cuts nothing: micro-batches are made first, and a batch is what they are together, with its marks. Plain
training runs them one after another. What the pipeline drew, it looks up by layer and input.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import plain
import processes
import torch
import torch.distributed as dist
from strategies import in_order
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import dropout, mse_loss, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import pipelab
from fuzz.verify import plan_of
from pipelab import GPipe, Pipeline, Plan, microbatches, rows, whole, with_recompute

NEAR = 1e-12
"""How far double numbers may be off, of the norm of all gradients, where sums have another order."""
WORDS = 4000
"""So many that no two micro-batches have the same ones."""


@dataclass
class Carried:
    """What travels between stages, as a class."""

    h: Any
    rest: dict[str, Any]


torch.export.register_dataclass(Carried)

FORMS = {
    "alone": lambda h, **_: h,
    "dict": dict,
    "tuple": lambda h, **rest: (h, [rest]),
    "class": lambda h, **rest: Carried(h, rest),
}
"""How it travels: alone, `h` does so without the other fields."""


def opened(given: Any) -> dict[str, Any]:
    """Return the fields that travelled in any form."""
    if isinstance(given, tuple | Carried):
        h, rest = (given[0], given[1][0]) if isinstance(given, tuple) else (given.h, given.rest)
        return {"h": h, **rest}
    return given if isinstance(given, dict) else {"h": given}


# --- layers, which take `h` and all fields

drawn = SimpleNamespace()
"""What the pipeline's layers drew (`found`, by layer and input), which plain training uses again (`used`)."""

NOISE = {
    "layer": lambda self, h: self.part(torch.ones_like(h)),
    "function": lambda _, h: dropout(torch.ones_like(h), 0.3),
    "bernoulli": lambda _, h: torch.bernoulli(torch.full_like(h, 0.5)),
    "normal": lambda _, h: torch.randn_like(h),
    "uniform": lambda _, h: torch.empty_like(h).uniform_(),
    "order": lambda _, h: torch.randperm(h.numel()).to(h).reshape(h.shape),
}


def noisy(self: plain.Made, h: torch.Tensor, _: dict[str, Any]) -> torch.Tensor:
    for call in range(self.times if self.training else 0):
        key = self.number, call, *h.shape, *h.detach().flatten().tolist()
        if drawn.again:
            noise = drawn.used[key] = drawn.found[key]
        else:
            noise = NOISE[self.kind](self, h.detach())
            if not dist.is_initialized():  # a process runs its stages once before, to learn what it will send
                drawn.unlike |= not torch.equal(drawn.found.get(key, noise), noise)  # in what ran again
            drawn.found[key] = noise
        h = h * (1 + noise)
    return h


def caches(self: plain.Made, h: torch.Tensor, _: dict[str, Any]) -> torch.Tensor:
    q, k, v = self.part(h.transpose(0, 1) if self.dim else h).chunk(3, -1)
    k, v = pipelab.cached(k, v)
    made = scaled_dot_product_attention(q, k, v, causal_lower_right(q.shape[-2], k.shape[-2]))
    return h + (made.transpose(0, 1) if self.dim else made)


def scaled(self: plain.Made, h: torch.Tensor, fields: dict[str, Any]) -> torch.Tensor:
    scale, table = fields.get("scale", h.new_ones(1)), fields.get("tables", (None, 0.0))[1]
    return self.part(h) * fields.get("number", 1.0) * scale.unflatten(0, (-1, *[1] * (2 - self.dim))) + table


def attends(self: plain.Made, h: torch.Tensor, fields: dict[str, Any]) -> torch.Tensor:
    masks = {"attn_mask": fields.get("mask"), "key_padding_mask": fields.get("padding")}
    return h + self.part(h, h, h, need_weights=False, **masks)[0]


def again(way: dict[str, bool], self: plain.Made, h: torch.Tensor, fields: dict[str, Any]) -> torch.Tensor:
    learns = torch.is_grad_enabled() and (h.requires_grad or not way["use_reentrant"])
    return checkpoint(self.inner, h, fields, **way) if learns else self.inner(h, fields)


LAYERS = {
    "linear": (lambda self, h, _: torch.tanh(self.part(h)) + h, lambda width, *_: nn.Linear(width, width)),
    "norm": (lambda self, h, _: self.part(h), lambda width, *_: nn.LayerNorm(width)),
    "scaled": (scaled, lambda width, *_: nn.Linear(width, width)),
    "caches": (caches, lambda width, *_: nn.Linear(width, 3 * width)),
    "attends": (attends, lambda width, dim, p: nn.MultiheadAttention(width, 2, p, batch_first=not dim)),
    "recurs": (lambda self, h, _: h + self.part(h)[0], lambda w, dim, p: nn.LSTM(w, w, 2, True, not dim, p)),
    "noisy": (noisy, lambda *_: nn.Dropout(0.5)),
    "statistics": (lambda self, h, _: self.part(h.flatten(0, 1)).reshape(h.shape), lambda w, *_: nn.BatchNorm1d(w)),
}
"""What a layer does, and its part, made of the width, the dimension of the rows, and how much it drops."""


def run(self: plain.Made, given: Any, **keywords: Any) -> Any:
    """Run a stage: the first one may look words up, and the last one pool tokens."""
    carried = opened(given)
    h = carried["h"] if self.words is None else self.words(carried["h"])
    for layer in self.layers:
        h = layer(h, carried | {name: each for name, each in keywords.items() if each is not None})
    return self.hands(**{**carried, "h": h if self.pooled is None else h.mean(self.pooled)})


FORWARDS = {
    (): lambda self, given: run(self, given),
    ("scale", "mask"): lambda self, given, mask=None, *, scale=None: run(self, given, mask=mask, scale=scale),
    ("scale", "mask", "padding", "tables", "number"): lambda self, given, **keywords: run(self, given, **keywords),
}
"""Stages' forwards, by the keywords that they take."""


def through(self: plain.Made, given: Any, **keywords: Any) -> Any:
    for stage in self.stages:
        given = stage(given, **{name: each for name, each in keywords.items() if name in stage.takes})
    return given


# --- random models and batches


def plan_for(draw: Random, slices: int, ranks: int | None) -> Plan:
    """Return a plan of any schedule: in threads, or for so many processes."""
    if slices > 1:
        ranks = ranks or draw.randint(1, slices)
        kind, of = draw.choice([(pipelab.Seq1F1B, draw.randint(1, 4)), (pipelab.SlimPipe, ranks * draw.randint(1, 2))])
        return kind(ranks, slices * of, slices=slices).plan()
    if ranks is None:
        return with_recompute(plan_of(draw)) if draw.random() < 0.25 else plan_of(draw)
    sizes = [(kind, many) for kind in pipelab.schedules.values() for many in range(1, 8)]
    kind, many = draw.choice([(kind, many) for kind, many in sizes if kind.refusal(ranks, many) is None])
    return kind(ranks, many).plan()


def case_of(draw: Random, ranks: int | None) -> SimpleNamespace:
    """Return a random model and plan; of the first two dimensions, `dim` has the rows, and the other one the tokens."""
    slices = draw.choice([2, 3]) if draw.random() < 0.12 and ranks != 3 else 1
    plan, dim, width = plan_for(draw, slices, ranks), draw.choice([0, 1]), draw.choice([4, 6])
    words, pools = draw.random() < 0.2, slices == 1 and draw.random() < 0.2
    kinds, last, number = [*LAYERS, "noisy"], plan.stages - 1, itertools.count()
    kinds.remove("caches")
    if any(len(each) > 1 for each in plan.replicas.values()):
        kinds.remove("statistics")  # of which each rank has a part
    kinds = kinds if slices == 1 else ["linear", "norm", "scaled", "caches", "caches"]

    def layer(kind: str) -> nn.Module:
        does, make = LAYERS[kind]
        settings = {"dim": dim, "number": next(number), "times": draw.choice([1, 1, 2]), "kind": draw.choice([*NOISE])}
        made = plain.Made(does, part=make(width, dim, draw.choice([0.0, 0.0, 0.4])), **settings)
        way = draw.choice([None, None, {"use_reentrant": False}, {"use_reentrant": True}])
        return made if way is None or kind in ("statistics", "caches") else plain.Made(partial(again, way), inner=made)

    def stage(at: int) -> nn.Module:
        layers = [layer(draw.choice(kinds)) for _ in range(draw.choice([1, 2]))] + [layer("linear")] * (at == last)
        takes, forward = draw.choice([*FORWARDS.items()])
        made = type("Stage", (plain.Made,), {"forward": forward, "takes": takes})(None, layers=nn.ModuleList(layers))
        made.words, made.hands = nn.Embedding(WORDS, width) if words and not at else None, FORMS[draw.choice([*FORMS])]
        made.pooled = 1 - dim if pools and at == last else None
        return made.requires_grad_(at == last or draw.random() < 0.9)

    model = plain.Made(through, stages=nn.ModuleList(map(stage, range(plan.stages)))).double()
    same = [each for each in model.modules() if type(each) is nn.Linear and each.out_features == width]
    if tied := len(same) > 1 and draw.random() < 0.2:
        same[-1].weight = same[0].weight
    way, many = draw.choice(["mean", "sum", lambda y: opened(y)["h"].numel()]), plan.microbatches // slices
    mode, exact = "sum" if way == "sum" else "mean", in_order(plan) and not tied and slices == 1
    found = SimpleNamespace(draw=draw, plan=plan, dim=dim, width=width, slices=slices, many=many, words=words)
    vars(found).update(model=model, pools=pools, way=way, exact=exact, ready=draw.random() < 0.3)
    found.loss = lambda output, y: mse_loss(opened(output)["h"], opened(y)["h"], reduction=mode)
    found.settings = {"reduction": way, "batch_dim": dim, "whole_model": model}
    found.settings |= {"sequence_dim": 1 - dim} if slices > 1 else {}
    return found


def batch_of(case: SimpleNamespace) -> SimpleNamespace:
    """Return `x`, `y` and keywords, as a pipeline takes them, and in micro-batches."""
    draw, many, dim, width = case.draw, case.many, case.dim, case.width
    total, length, unlike = draw.randint(many, 3 * many), draw.randint(2, 4), case.ready and draw.random() < 0.7
    sizes = [draw.randint(1, 3) if case.ready else total // many + (m < total % many) for m in range(many)]
    tokens = [case.slices * (draw.randint(2, 4) if unlike else length) for _ in range(many)]
    normal, first = partial(torch.randn, dtype=torch.float64), draw.random() < 0.5  # or else y is cut already

    def field(make: Any, along: int | None, ready: bool = False, *, long: bool = True) -> list[Any]:
        pieces = [make(*each) for each in zip(sizes, tokens, strict=True)]
        mark = whole if along is None else lambda piece: piece
        if along is not None and (along != dim or (not long if case.slices > 1 else draw.random() < 0.1)):
            mark = partial(rows, dim=draw.choice([along, along - pieces[0].dim()]))
        if case.ready and (ready or (long and unlike) or draw.random() < 0.5):
            return [pieces, marked := [*map(mark, pieces)], microbatches(marked)]
        joined = pieces[0] if along is None else torch.cat(pieces, along)
        pieces = pieces[:1] * many if along is None else joined.split(sizes, along)  # of like strides: rounding differs
        return [pieces, [*map(mark, pieces)], mark(joined)]

    def together(fields: dict[str, list[Any]], form: Any) -> tuple[list[Any], Any]:
        columns = [dict(zip(fields, each, strict=True)) for each in zip(*fields.values(), strict=True)]
        one, two = ([form(**{name: each[m] for name, each in its.items()}) for m in range(many)] for its in columns[:2])
        return one, microbatches(two) if case.ready and draw.random() < 0.5 else form(**columns[2])

    def shaped(count: int, long: int, *more: int) -> tuple[int, ...]:
        return (long, count, *more) if dim else (count, long, *more)

    make_h = (lambda *of: torch.randint(WORDS, shaped(*of))) if case.words else lambda *of: normal(shaped(*of, width))
    fields = {"h": field(make_h, dim, first), "scale": field(lambda count, _: normal(count), 0, long=False)}
    if case.slices == 1:
        fields["mask"] = field(lambda _, long: torch.ones(long, long).triu(1).bool(), None)
        fields["padding"] = field(lambda count, long: torch.arange(long) >= torch.randint(1, long + 1, (count, 1)), 0)
    *tables, table = field(lambda *_: normal(width), None, long=False)
    fields["tables"] = [*([(None, each) for each in some] for some in tables), (None, table)]
    fields |= {"number": [[0.5] * many, [0.5] * many, 0.5], "nothing": [[None] * many, [None] * many, None]}
    where = {name: draw.choice(["x", "keywords", "x and keywords", ""]) for name in fields} | {"h": "x", "nothing": "x"}
    where["number"] = "keywords" if dist.is_initialized() else where["number"]  # processes send tensors only
    taken = {name for stage in case.model.stages for name in stage.takes}
    outer = {name: each for name, each in fields.items() if "keywords" in where[name] and name in taken}
    inner = {name: each for name, each in fields.items() if "x" in where[name]}
    goal = (lambda count, _: normal(count, width)) if case.pools else lambda *of: normal(shaped(*of, width))
    aims = {"h": field(goal, 0 if case.pools else dim, not first, long=not case.pools)}
    named = [{name: each[0][m] for name, each in outer.items()} for m in range(many)]
    found = SimpleNamespace(
        sizes=sizes, keywords=named, alone=first or not case.ready
    )  # `alone`: `x` says how it is cut
    found.x, found.given = together(inner, FORMS[draw.choice([*FORMS])])
    found.y, found.targets = together(aims, FORMS[draw.choice(["alone", "dict"])])
    found.named = {name: each[2] for name, each in outer.items()}
    counts = sizes if case.way == "mean" else [opened(y)["h"].numel() for y in found.y]
    found.weights = [1.0 if case.way == "sum" else count / sum(counts) for count in counts]
    return found


# --- the pipeline, and plain training


def left(held: set[str], model: nn.Module, loss: torch.Tensor, outputs: list[Any]) -> dict[str, Any]:
    """Return what a step left: of a model, in what a process holds."""
    named = [(name, each) for name, each in model.named_parameters() if name in held]
    found = {f"the gradient of {name}": None if each.grad is None else each.grad.clone() for name, each in named}
    found |= {f"the buffer {name}": each for name, each in model.named_buffers() if name[: name.index(".", 7)] in held}
    return found | {"the loss": loss} | {f"output {number}": each for number, each in enumerate(outputs)}


def differs(case: SimpleNamespace, ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """Return what differs: in a bit, or by more than rounding where sums have another order."""
    norm = sum(float(each.double().norm()) for each in theirs.values() if each is not None)
    for name, mine in ours.items():
        each = theirs.get(name)
        if (each is None) != (mine is None):
            return f"{name} is {mine}, and {each} in plain training"
        if each is not None and not torch.equal(mine, each):
            off = float((mine - each).double().norm()) / norm
            if (case.exact and name.startswith("the gradient")) or not off < NEAR:
                return f"{name} is off by {off:.1e}"
    return None


def plainly(case: SimpleNamespace, model: nn.Module, batch: SimpleNamespace) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Train on the micro-batches, one after another; in evaluation, run them only."""
    total, outputs = torch.zeros((), dtype=torch.float64), []
    for x, y, keywords, weight in zip(batch.x, batch.y, batch.keywords, batch.weights, strict=True):
        outputs.append(model(x, **keywords))
        loss = case.loss(outputs[-1], y) * weight
        if model.training:
            loss.backward()
        total += loss.detach()
    return total, [opened(each)["h"].detach() for each in outputs]


def wrong_step(case: SimpleNamespace, pipe: Pipeline) -> str | None:
    """Compare a step with plain training, and with one rank that has the same seed."""
    draw, model, batch, seed = case.draw, case.model, batch_of(case), case.draw.randrange(10**9)
    needless, evaluates, verifies = draw.random() < 0.5 or case.ready, draw.random() < 0.3, draw.random() < 0.1
    twin, other = copy.deepcopy(model), copy.deepcopy(model)
    held = {*dict(pipe.named_parameters()), *(f"stages.{stage}" for stage in pipe.engine.local_stages)}
    taken = {name for stage in pipe.engine.local_stages for name in model.stages[stage].takes}
    keywords = {name: each for name, each in batch.named.items() if name in taken or needless}
    x, y = batch.given if pipe.is_first or needless else None, batch.targets if pipe.is_last or needless else None

    def pieces(outputs: Any) -> list[torch.Tensor]:
        if isinstance(outputs, list):
            return [opened(each)["h"] for each in outputs]
        return opened(outputs)["h"].split(batch.sizes, 0 if case.pools else case.dim)

    # [1] a step; of processes, each draws for its own stages
    vars(drawn).update(found={}, used={}, again=False, unlike=False)
    torch.manual_seed(seed)
    step = pipe.step(x, y, keywords=keywords)
    whole_outputs = pipe.is_last and not (dist.is_initialized() and len(case.plan.replicas[case.plan.stages - 1]) > 1)
    ours = left(held, model, step.loss, pieces(step.outputs) if whole_outputs else [])
    if dist.is_initialized():
        boxes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(boxes, drawn.found)
        drawn.found = {key: noise for each in boxes for key, noise in each.items()}
    # [2] plain training, and one rank
    drops, draws = any(getattr(each, "dropout", 0) for each in model.modules()), bool(drawn.found)
    drawn.again, told = True, "what ran again drew other numbers" if drawn.unlike else None
    if not drops:
        told = told or differs(case, ours, left(held, twin, *plainly(case, twin, batch)))
    noise = [each for each in drawn.used.values() if each.numel() > 40]
    if any(one.shape == two.shape and one.equal(two) for one, two in itertools.combinations(noise, 2)):
        told = told or "two layers, micro-batches or calls drew the same numbers"
    if not told and (drops or draws) and not dist.is_initialized():
        vars(drawn).update(found={}, again=False)
        with Pipeline([other], GPipe(1, case.many), case.loss, **case.settings | {"whole_model": other}) as one:
            torch.manual_seed(seed)
            first = one.step(batch.given, batch.targets, keywords=batch.named)
        told = differs(case, ours, left(held, other, first.loss, pieces(first.outputs)))
    # [3] no gradients
    if evaluates and not (dist.is_initialized() and (drops or [*model.buffers()])):
        trained = other if drops else twin
        with torch.no_grad():
            expected = plainly(case, trained.eval(), batch)
        done = pipe.eval().evaluate(x, y, keywords=keywords)
        found = [left(set(), model, done.loss, pieces(done.outputs) if whole_outputs else [])]
        if batch.alone:
            found.append(left(set(), model, done.loss, pieces(pipe.forward(x, keywords=keywords))))
        pipe.train()
        told = told or next(
            filter(None, (differs(case, each, left(set(), trained, *expected)) for each in found)), None
        )
    if verifies:
        drawn.again = False
        pipe.verify(batch.given, batch.targets, against="microbatches", keywords=batch.named)
    model.zero_grad()
    return told


def fuzz_inputs(seed: int, ranks: int | None = None) -> str | None:
    """Train a random model on random batches, in threads; or in this process, on one of several ranks."""
    torch.manual_seed(seed)
    case = case_of(draw := Random(seed), ranks)
    devices, engine = (["cpu"] * case.plan.ranks, "threads") if ranks is None else (None, "torch")
    told = f"seed {seed}, {case.plan.name}, batch_dim={case.dim}, slices {case.slices}, ready {case.ready}"
    with Pipeline([*case.model.stages], case.plan, case.loss, devices, engine, **case.settings) as pipe:
        wrong = next(filter(None, (wrong_step(case, pipe) for _ in range(draw.choice([1, 2])))), None)
    return wrong and f"{told}: {wrong}\n{case.model}"


def fuzz_inputs_in_processes(seed: int) -> str | None:
    """Train ten such models in two or three processes."""
    ended = processes.run_in(Random(seed).choice([2, 3]), "inputs_attacked.py", str(10 * seed), "10", seconds=50)
    wrong = any(each.code or any("wrong" in fact for fact in each.facts) for each in ended)
    return processes.shown(ended) if wrong else None


fuzz_inputs.seeds = 120
fuzz_inputs_in_processes.dist = True
