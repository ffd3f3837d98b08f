"""Plain PyTorch, as a student would write it: what pipelines are held against. It never imports pipelab.

Importing it gives every operation one processor thread: the tests share few cores, and small models want no more.
"""

from __future__ import annotations

import warnings
import weakref
from contextlib import contextmanager

import torch
from torch import nn

torch.set_num_threads(1)


def one_after_another(model, loss_fn, x, y, microbatches):
    """Run micro-batches forward and backward, one after another; each loss weighs its share of the rows."""
    total = torch.zeros(())
    for rows, targets in zip(x.tensor_split(microbatches), y.tensor_split(microbatches), strict=True):
        loss = loss_fn(model(rows), targets) * (len(rows) / len(x))
        loss.backward()
        total = total + loss.detach()
    return total


def gradients(model, loss_fn, x, y, microbatches):
    """Return the gradients of micro-batches, one after another, and leave none in the model."""
    one_after_another(model, loss_fn, x, y, microbatches)
    return taken(model)


def at_once(model, loss_fn, x, y):
    """Run the whole batch forward and backward."""
    loss = loss_fn(model(x), y)
    loss.backward()
    return loss.detach()


def each_alone(model, loss_fn, x, y, microbatches):
    """Return the gradients of every micro-batch by itself, weighed."""
    alone = []
    for rows, targets in zip(x.tensor_split(microbatches), y.tensor_split(microbatches), strict=True):
        model.zero_grad()
        (loss_fn(model(rows), targets) * (len(rows) / len(x))).backward()
        alone.append(taken(model))
    return alone


def taken(model):
    """Return the gradients by name, and clear them."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return gradients


def difference(ours, plain):
    """Return the largest relative difference of a parameter's gradient, in the 2-norm; none where the others are."""
    learning = [name for name, gradient in plain.items() if gradient is not None]
    assert ours.keys() == plain.keys()
    assert learning == [name for name in plain if ours[name] is not None]
    return max(float((ours[name] - plain[name]).norm() / plain[name].norm()) for name in learning)


def equal(ours, plain):
    """Tell whether all gradients are equal bit for bit, and `None` where the others are."""
    return ours.keys() == plain.keys() and all(
        ours[name] is plain[name] or torch.equal(ours[name], plain[name]) for name in plain
    )


@contextmanager
def no_waiting_for_the_gpu():
    """Make whatever waits for the device an error."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch says that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Made(nn.Module):
    """A model in a line: what its forward does with itself and its input, and its parts by name."""

    def __init__(self, does, **parts):
        super().__init__()
        self.does = does
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *given, **named):
        return self.does(self, *given, **named)


def unlisted(layers):
    """Return the same layers in no sequence: PyTorch's tracer must cut it, for each length of a row anew."""

    def through(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    return Made(through, layers=nn.ModuleList(layers))


def root_of_weight():
    """Return a module whose weight's gradient, of a root at zero, is not finite; all else is."""
    return Made(lambda self, x: x + self.weight.sqrt(), weight=nn.Parameter(torch.zeros(1)))


class Counts(nn.Module):
    """A planted bug: what it computes depends on how often it was called, which is in no buffer."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(6, 6), 0

    def forward(self, x):
        self.calls += 1
        return self.calls * self.linear(x)


class Remembers(nn.Module):
    """A planted bug: the backward uses what the *latest* forward kept, not its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        module = self

        class Product(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, weight):
                module.latest = x
                ctx.save_for_backward(weight)
                return x * weight

            @staticmethod
            def backward(ctx, gradient):
                (weight,) = ctx.saved_tensors
                rows = min(len(gradient), len(module.latest))
                return gradient * weight, (gradient[:rows] * module.latest[:rows]).sum(0)

        self.product = Product.apply

    def forward(self, x):
        return self.product(x, self.weight)


class Held(nn.Module):
    """Counts how many of its outputs are alive at each of its forwards."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.outputs, self.given, self.peak = weakref.WeakSet(), weakref.WeakSet(), 0

    def forward(self, x):
        output = self.linear(x)
        product = output * output  # keeps `output` for its backward
        self.outputs.add(output)
        self.given.add(product)
        self.peak = max(self.peak, len(self.outputs))
        return product


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x):
        return self.layer(x.reshape(len(x), 1, 6).expand(-1, 3, -1)).mean(dim=1)


def mlp(layers, width=6, seed=0):
    """Return `layers` layers, a linear one and a tanh by turns, the same for the same seed."""
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Tanh() if layer % 2 else nn.Linear(width, width) for layer in range(layers)))


def batch(rows, width=6, seed=1):
    """Return inputs and targets, `[rows, width]` each."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator), torch.randn(rows, width, generator=generator)
