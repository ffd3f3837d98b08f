"""Marked inputs, each part in the process that needs it, give the numbers of the threads engine."""

from __future__ import annotations

import os
from itertools import chain

import plain
import torch
from facts import attempt, say
from torch import nn

import pipelab
from pipelab import Pipeline, microbatches, whole

mse, size = nn.functional.mse_loss, int(os.environ["WORLD_SIZE"])


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 8)

    def forward(self, x):
        return self.lstm(x)[0]


class Mix(nn.Module):
    """Mixes tokens by a mask, which it hands on."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, given):
        return given | {"x": given["mask"] @ self.linear(given["x"])}


class Last(nn.Module):
    def forward(self, given):
        return given["x"]


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, mask):
        return self.linear(x) * mask[..., None]


class Widened(nn.Module):
    """Its output is as long as a keyword says."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, table):
        return self.linear(x)[:, None] + table


class Traced(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, mask):
        for layer in self.layers:
            x = x + mask @ layer(x)
        return x


def first(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def tokens(lengths):
    return microbatches(
        [torch.randint(0, 9, (2, length), generator=torch.Generator().manual_seed(3)) for length in lengths]
    )


def per_token(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def cases():
    mask = whole(torch.ones(5, 5).tril())
    ways = {"batch_dim": 1}
    yield "sequence first", [Recurrent() for _ in range(size)], [(first(5, 9, 8), first(5, 9, 8))] * 2, mse, ways
    mixing = [*(Mix() for _ in range(size - 1)), nn.Sequential(Mix(), Last())]
    x = {"x": first(8, 5, 8), "mask": mask}
    yield (
        "a mask that is whole",
        mixing,
        [(x, first(8, 5, 8)), ({"x": first(9, 5, 8), "mask": mask}, first(9, 5, 8))],
        mse,
        {},
    )
    words = [nn.Embedding(9, 8), *(nn.Linear(8, 8) for _ in range(size - 2)), nn.Linear(8, 9)]
    lengths = [(5, 7, 6, 5), (7, 5, 5, 6), (3, 3, 3, 3)]
    yield (
        "lengths unlike",
        words,
        [(tokens(each), tokens(each)) for each in lengths],
        per_token,
        {"reduction": torch.numel},
    )
    pieces = [first(many, 8) for many in (1, 3, 2, 2)]
    y = microbatches([*torch.arange(64.0).reshape(8, 8).split([1, 3, 2, 2])])
    yield "pieces and rows", [nn.Linear(8, 8) for _ in range(size)], [({"x": microbatches(pieces)}["x"], y)], mse, {}
    stages = pipelab.split(Traced(), into=size, example={"x": first(2, 5, 8), "mask": mask})
    yield "traced with a mask", stages, [(x, first(8, 5, 8))], mse, {}


def named():
    """Yield cases with keywords, which each process gives only where its stage takes them."""
    middle = [nn.Linear(8, 8) for _ in range(size - 3)]
    table = {"table": microbatches([whole(first(length, 8)) for length in (5, 3, 5, 4)])}
    ready = microbatches([first(2, length, 8) for length in (5, 3, 5, 4)])
    pieces = [nn.Linear(8, 8), Widened(), *middle, nn.Linear(8, 8)]
    yield (
        "keywords of ready pieces",
        pieces,
        [(microbatches([*first(8, 8).split(2)]), ready)],
        mse,
        {"keywords": (table, (1,))},
    )
    mask = {"mask": first(8, 5).sigmoid()}
    masked = [nn.Linear(8, 8), Masked(), *middle, Masked()]
    yield "keywords", masked, [(first(8, 5, 8), first(8, 5, 8))] * 2, mse, {"keywords": (mask, (1, size - 1))}


def numbers(model, batches, loss, settings, engine):
    """Return what steps, an evaluation and `verify` give; each process has its own part of the batches."""
    given, taken_by = settings.get("keywords", (None, ()))
    settings = {key: value for key, value in settings.items() if key != "keywords"}
    with Pipeline(model, pipelab.OneFOneB(size, 4), loss, ["cpu"] * size, engine=engine, **settings) as pipe:
        takes = engine == "threads" or int(os.environ["RANK"]) in taken_by
        named = {"keywords": given} if given and takes else {}
        own = [(x if pipe.is_first else None, y if pipe.is_last else None) for x, y in batches]
        steps = [pipe.step(*each, **named) for each in own]
        gradients = {name: None if each.grad is None else each.grad.clone() for name, each in pipe.named_parameters()}
        outputs = steps[-1].outputs if pipe.is_last else None
        proof = str(pipe.verify(*own[-1], **named))
        return [float(step.loss) for step in steps], gradients, pipe.forward(own[-1][0], **named), outputs, proof


def same(one, other):
    """Tell whether outputs are the same, lists of micro-batches' too."""
    return all(map(torch.equal, one, other)) if isinstance(one, list) else torch.equal(one, other)


for name, model, batches, loss, settings in chain(cases(), named()):
    torch.manual_seed(0)
    given = model if isinstance(model, pipelab.engine.model.split.Stages) else nn.ModuleList(model)
    module = getattr(given, "model", given)
    state = {key: torch.randn_like(each) / 3 for key, each in module.state_dict().items()}
    module.load_state_dict(state)
    found = []
    for engine in ("threads", "torch"):
        module.zero_grad()
        found.append(numbers(model, batches, loss, settings, engine))
    (
        (losses, gradients, forward, outputs, proof),
        (losses_here, gradients_here, forward_here, outputs_here, proof_here),
    ) = found
    say(
        case=f"inputs, {name}",
        losses=losses == losses_here,
        gradients=bool(gradients_here) and plain.equal(gradients_here, {key: gradients[key] for key in gradients_here}),
        forward=same(forward, forward_here),
        outputs=outputs_here is None or same(outputs, outputs_here),
        proof=proof == proof_here,
    )

with Pipeline([nn.Linear(8, 8) for _ in range(size)], pipelab.OneFOneB(size, 4), mse, engine="torch") as pipe:
    pieces = microbatches([first(many, 8) for many in (1, 3, 2, 2)])
    attempt(
        "inputs, cut apart", lambda: pipe.step(pieces if pipe.is_first else None, first(8, 8) if pipe.is_last else None)
    )
