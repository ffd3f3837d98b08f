"""Plain training with stashed weights, the oracle of updates (`U`): a backward has the weights of its forward."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch.func import functional_call


class Stashed:
    """Stages that are trained in plain PyTorch, in a plan's order; `make` makes a stage's optimizer of its parameters.

    As many micro-batches as `slices` are one sequence. `prepare(stage, microbatch)` is called before each forward.
    """

    def __init__(self, stages, plan, make, slices=1):
        self.stages, self.slices, self.prepare = stages, slices, lambda _stage, _microbatch: None
        self.rows = [[(a.kind, a.microbatch, a.stage) for a in row if a.kind != "R"] for row in plan.rows]
        learning = {s: [p for p in stages[s].parameters() if p.requires_grad] for row in self.rows for _, _, s in row}
        self.optimizers = {s: make(each) for s, each in learning.items() if each}

    def step(self, xs, ys, loss_fn):
        """Run all rows, given inputs and targets by micro-batch; return the loss of the whole batch."""
        self.loss, self.weights, self.found = {}, {}, defaultdict(dict)  # gradients by stage and micro-batch
        given, back = {(m, 0): x for m, x in enumerate(xs)}, {(m, len(self.stages)) for m in range(len(xs))}
        rows, rest = [list(row) for row in self.rows], {}
        while any(rows):
            for row in filter(None, rows):
                kind, m, s = row[0]
                if (m, s) not in given or (kind in "BI" and (m, s + 1) not in back):
                    continue  # the rank waits
                row.pop(0)
                if kind == "F":
                    given[m, s + 1] = self._forward(m, s, given[m, s])
                    if s + 1 == len(self.stages):
                        self.loss[m] = loss_fn(given[m, s + 1], ys[m]) * (len(xs[m]) / sum(map(len, xs)))
                elif kind in "BI":
                    back.add((m, s))
                if kind in "BW":
                    self.found[s][m] = self._gradients(m, s)
                elif kind == "U":
                    self._update(m, s)
        for found in self.found.values():
            rest = _sum([rest, *found.values()])
        for parameter, gradient in rest.items():
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return sum(self.loss.values()).detach()

    def _forward(self, m, s, given):
        self.prepare(s, m)
        version = {n: p.detach().clone().requires_grad_(p.requires_grad) for n, p in self.stages[s].named_parameters()}
        self.weights[m, s] = [(p, version[n]) for n, p in self.stages[s].named_parameters() if p.requires_grad]
        return functional_call(self.stages[s], version, (given,))

    def _gradients(self, m, s):
        loss = sum(each for other, each in self.loss.items() if other // self.slices == m // self.slices)
        parameters, leaves = zip(*self.weights[m, s], strict=True) if self.weights[m, s] else ((), ())
        gradients = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True) if leaves else ()
        return {p: gradient for p, gradient in zip(parameters, gradients, strict=True) if gradient is not None}

    def _update(self, m, s):
        gradients = _sum([self.found[s].pop(each) for each in [*self.found[s]] if each <= m])
        kept = {each: each.grad for each in self.stages[s].parameters()}
        for each in kept:
            each.grad = gradients.get(each)
        if s in self.optimizers:
            self.optimizers[s].step()
        for each, gradient in kept.items():
            each.grad = gradient


def _sum(several):
    total = {}
    for gradients in several:
        total |= {p: total[p] + gradient if p in total else gradient for p, gradient in gradients.items()}
    return total
