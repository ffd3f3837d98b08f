"""Inputs where the first stage is, and targets where the last one is, give the numbers of all data everywhere."""

from __future__ import annotations

import os
import warnings
from itertools import repeat

import plain
import torch
from facts import attempt, say
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training import ROWS

import pipelab
from pipelab import Pipeline

mse, several = nn.functional.mse_loss, os.environ["WORLD_SIZE"] == "4"


def own(pipe, x, y):
    """Return what this process needs of a batch."""
    return x if pipe.is_first else None, y if pipe.is_last else None


def numbers(model, plan, loss_fn, batches, *, all_data, **settings):
    """Return the losses of some steps, the gradients here, an evaluation, and what `verify` finds."""
    with Pipeline(model, plan, loss_fn, engine="torch", timeout=60, **settings) as pipe:
        given = [batch if all_data else own(pipe, *batch) for batch in batches]
        losses = [float(pipe.step(*each).loss) for each in given]
        gradients = {name: each.grad for name, each in pipe.named_parameters()}
        told = [pipe.is_first, pipe.is_last]
        return losses, gradients, pipe.forward(given[0][0]), pipe.verify(*given[-1]), told


def cases():
    layers = plain.mlp(8)
    x, y = plain.batch(ROWS)
    batches = [(x, y), plain.batch(9, seed=3), plain.batch(ROWS, seed=5), (x, y)]
    size = 4 if several else 2
    yield "1f1b", layers, pipelab.OneFOneB(size, 5), mse, batches, {}
    yield "zbv", plain.mlp(2 * size), pipelab.ZBV(size, 2 * size), mse, batches, {}
    if several:
        yield "replicas", layers, pipelab.replicate(pipelab.GPipe(2, 4), 2), mse, batches, {}
    # weights that only the targets tell, other ones in each step
    torch.manual_seed(size)
    labels = [torch.randint(6, (ROWS,)).masked_fill(torch.rand(ROWS) < 0.3, -100) for _ in range(3)]
    weighs = {"reduction": lambda target: (target != -100).sum()}
    yield "weights", layers, pipelab.OneFOneB(size, 4), nn.CrossEntropyLoss(), [(x, each) for each in labels], weighs
    rows = [plain.batch(8), plain.batch(16, seed=1), plain.batch(8, seed=2)]
    stages = pipelab.split(plain.unlisted(layers), into=size, example=x[:2])
    yield "traced", stages, pipelab.OneFOneB(size, 4), mse, rows, {}


for name, model, plan, loss_fn, batches, settings in cases():
    found = []
    for all_data in (True, False):
        for each in getattr(model, "model", model).parameters():  # or of what `split` returned
            each.grad = None
        found.append(numbers(model, plan, loss_fn, batches, all_data=all_data, **settings))
    (losses, gradients, forward, proof, told), (losses_own, gradients_own, forward_own, proof_own, _) = found
    say(
        case=f"own data, {name}",
        losses=losses == losses_own,
        gradients=bool(gradients) and plain.equal(gradients_own, gradients),
        forward=torch.equal(forward, forward_own),
        proof=proof == proof_own,
        told=told,
    )

# what is missing, and what is wrong with a part that one process has, is raised on all; they go on
size = int(os.environ["WORLD_SIZE"])
x, y = plain.batch(8)
with Pipeline(plain.mlp(8), pipelab.OneFOneB(size, 4), mse, engine="torch", timeout=60) as pipe:
    mine = own(pipe, x, y)
    attempt("no inputs", lambda: pipe.step(None, mine[1]))
    attempt("no targets", lambda: pipe.step(mine[0], None))
    attempt("nothing", pipe.step)
    attempt("no rows to evaluate", pipe.forward)
    attempt("other rows", lambda: pipe.step(mine[0], y[:6] if pipe.is_last else None))
    attempt("too few rows", lambda: pipe.step(*own(pipe, x[:2], y[:2])))
    attempt("no tensor", lambda: pipe.step(*own(pipe, "text", y)))
    say(case="goes on", loss=float(pipe.step(*mine).loss) == float(pipe.step(x, y).loss))
labels = torch.tensor([0, 1, -100, -100, 2, 3, 4, 5])
with Pipeline(plain.mlp(8), pipelab.OneFOneB(size, 4), nn.CrossEntropyLoss(), engine="torch", timeout=60) as pipe:
    attempt("uneven targets", lambda: pipe.step(*own(pipe, x, labels)))

# the recipe of the documentation
data = TensorDataset(*(torch.arange(40.0).reshape(40, 1) * torch.ones(6) + 100 * part for part in (0, 1)))


def batches(part):
    """Return batches of inputs, or of targets, in one order on all processes."""
    order = torch.Generator().manual_seed(0)
    rows = TensorDataset(data.tensors[part])
    return (rows for (rows,) in DataLoader(rows, batch_size=8, shuffle=True, drop_last=True, generator=order))


def difference(output, target):
    return (output - target).abs().mean()


with warnings.catch_warnings():
    warnings.simplefilter("error")
    with Pipeline(
        [nn.Identity() for _ in range(size - 1)] + [Shift := nn.Linear(6, 6)],
        pipelab.GPipe(size, 4),
        difference,
        engine="torch",
    ) as pipe:
        with torch.no_grad():
            Shift.weight.copy_(torch.eye(6))
            Shift.bias.fill_(100.0)
        inputs = batches(0) if pipe.is_first else repeat(None)
        targets = batches(1) if pipe.is_last else repeat(None)
        losses = [float(pipe.step(x, y).loss) for _, x, y in zip(range(5), inputs, targets, strict=False)]
        say(case="recipe", losses=losses)
