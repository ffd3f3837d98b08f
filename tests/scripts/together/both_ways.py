"""Micro-batches enter at both ends: every stage is on two processes, and gradients are as in plain training."""

from __future__ import annotations

import os

import plain
from facts import say
from torch import nn

from pipelab import BitPipe, Chimera, DualPipe, Pipeline

mse = nn.functional.mse_loss
rank = int(os.environ["RANK"])
for schedule in (DualPipe(4, 8), Chimera(4, 4), BitPipe(4, 4)):
    plan = schedule.plan()
    model, twin = plain.mlp(8), plain.mlp(8)
    x, y = plain.batch(2 * plan.microbatches - 1)  # one micro-batch is shorter
    plain.one_after_another(twin, mse, x, y, plan.microbatches)
    expected, output = plain.taken(twin), twin(x).detach()
    with Pipeline(model, plan, mse, engine="torch", timeout=60) as pipe:
        step = pipe.step(x, y)
        ours = {name: gradient for name, gradient in plain.taken(model).items() if gradient is not None}
        forward = pipe.forward(x)
        proof = pipe.verify(x, y)
    say(
        case="both ways",
        schedule=plan.name,
        held=sorted(stage for stage, ranks in plan.replicas.items() if rank in ranks),
        parameters=sorted({int(name.split(".")[0]) // 2 for name in ours}),
        gradients=plain.difference(ours, {name: expected[name] for name in ours}),
        loss=float(step.loss - mse(output, y)),
        forward=float((forward - output).abs().max()),
        verified=proof.largest_difference,
        order=[str(event.action) for event in step.trace.events if event.rank == rank]
        == [str(plan.bound.codes.action(code)) for code in plan.bound.computing[rank]],
    )
