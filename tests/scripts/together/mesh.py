"""Two replicas of two ranks, which begin alike although their scripts made other weights."""

from __future__ import annotations

import os
import warnings

import plain
import torch
from facts import say
from torch import nn
from training import ROWS, train

import pipelab
from pipelab import Pipeline

mse = nn.functional.mse_loss
x, y = plain.batch(ROWS)
plan = pipelab.replicate(pipelab.OneFOneB(2, 4), 2).plan()
try:
    Pipeline([nn.BatchNorm1d(6), nn.Linear(6, 6)], plan, mse, engine="torch")
except pipelab.EngineError as error:
    refused = str(error)
model = plain.mlp(4, seed=10 + int(os.environ["RANK"]))
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", ".* other weights than rank 0")
    pipe = Pipeline(model, plan, mse, engine="torch", timeout=60)
twin = plain.mlp(4)
with pipe:
    twin.load_state_dict(pipe.state_dict())
    figures = train(pipe, torch.optim.Adam(pipe.parameters(), lr=0.01), range(3))
    pipe.step(x, y)
    pipe.step(x, y)
    twice = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    proof = pipe.verify(x, y)
    trace = pipe.step(x, y).trace
    state = pipe.state_dict()
    forward = pipe.forward(x)
    evaluated = pipe.evaluate(x, y).loss
with Pipeline(twin, plan, mse) as pipe:
    expected = train(pipe, torch.optim.Adam(pipe.parameters(), lr=0.01), range(3))
    pipe.step(x, y)
    pipe.step(x, y)
say(
    case="replicas",
    figures=figures,
    expected=expected,
    parameters=all(torch.allclose(state[name], value, atol=1e-6) for name, value in twin.state_dict().items()),
    gradients=plain.difference(twice, {name: twin.get_parameter(name).grad for name in twice}),
    largest_difference=proof.largest_difference,
    forward=torch.allclose(forward, twin(x), atol=1e-6),
    evaluated=torch.allclose(evaluated, mse(twin(x), y), atol=1e-6),
    refused=refused,
    reduces=[str(event.action) for event in trace.events if event.action.kind == "R"],
)
