"""One step of several stages per rank: its numbers and its trace."""

from __future__ import annotations

import copy

import plain
import torch
from facts import say
from torch import nn
from training import ROWS

import pipelab
from pipelab import Pipeline

mse = nn.functional.mse_loss
plan = pipelab.Interleaved1F1B(4, 8).plan()
model = plain.mlp(2 * plan.stages)
twin = copy.deepcopy(model)
x, y = plain.batch(ROWS)
with Pipeline(twin, plan, mse) as pipe:
    theirs = pipe.step(x, y)
    with torch.no_grad():
        known = pipe.evaluate(x, y)
gradients = {name: parameter.grad for name, parameter in twin.named_parameters()}
with Pipeline(model, plan, mse, engine="torch", timeout=60) as pipe:
    ours = pipe.step(x, y)
    here = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    try:
        outputs = "same" if torch.equal(ours.outputs, theirs.outputs) else "others"
    except pipelab.EngineError as error:
        outputs = str(error)
    forward = pipe.forward(x)
    evaluated = pipe.evaluate(x if pipe.is_first else None, y if pipe.is_last else None)
    untouched = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if name in here}
    proof = pipe.verify(x, y)
    say(
        case="bits",
        held=list(pipe.engine.local_stages),
        parameters=sum(1 for _ in pipe.parameters()),
        loss=torch.equal(ours.loss, theirs.loss),
        gradients=all(torch.equal(gradient, gradients[name]) for name, gradient in here.items()),
        names=sorted(here),
        outputs=outputs,
        forward=torch.equal(forward, theirs.outputs),
        evaluated=torch.equal(evaluated.loss, known.loss) and torch.equal(known.loss, theirs.loss),
        its_outputs=not pipe.is_last or torch.equal(evaluated.outputs, theirs.outputs),
        its_gradients=all(torch.equal(gradient, gradients[name]) for name, gradient in untouched.items()),
        its_trace=evaluated.trace.to_dict(),
        exact=proof.exact,
        compared=proof.parameters,
        whole=proof.whole_batch_difference < 1e-6,
    )
    trace = ours.trace
    start = {event.action: event.start for event in trace.events}
    say(
        case="trace",
        rows=[" ".join(str(event.action) for event in trace.events_of(rank)) for rank in range(4)],
        after=all(event.start < event.end for event in trace.events),
        note=trace.note,
        lanes=trace.lanes,
        transfers=len({(str(each.giver), str(each.needer)) for each in trace.transfers}),
        takes_time=min(each.end - each.start for each in trace.transfers),
        before_its_needer=all(each.end <= start[each.needer] + 1e-9 for each in trace.transfers),
        makespan=trace.makespan,
    )
