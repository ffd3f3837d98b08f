"""Check, simulate, draw and run a plan with `X`, which `tests/test_kinds.py` adds to a copy of pipelab; print facts."""

import copy
import json
import sys
from pathlib import Path

import torch
from torch import nn

import pipelab

LATE = "0F0 0B0 0X0 0F1 0B1 0X1; 1F0 1B0 1X0 1F1 1B1 1X1"
EARLY = "0F0 0B0 0X0 0F1 0B1 0X1; 1F0 1X0 1B0 1F1 1B1 1X1"
SPLIT = "0F0 0I0 0X0 0W0; 1F0 1I0 1W0 1X0"
LOST = "0F0 0B0 0X0; 1F0 1B0 1X0 0X0"
RATE = 0.1

folder = Path(sys.argv[1])
plan = pipelab.Plan.parse(LATE)
trace = pipelab.simulate(plan, pipelab.Cost(forward=1, backward=2, weight_grad=3, latency=0.5))
trace.save(folder / "updates.svg")
trace.save(folder / "updates.html")
trace.save(folder / "updates.events.csv")
plan.to_csv(folder / "plan.csv")

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
plain, x, y = copy.deepcopy(model), torch.randn(4, 4), torch.randn(4, 2)
with pipelab.Pipeline(model, plan, nn.functional.mse_loss) as pipe:
    step = pipe.step(x, y)
for rows, targets in zip(x.chunk(2), y.chunk(2), strict=True):
    (nn.functional.mse_loss(plain(rows), targets) / 2).backward()
    with torch.no_grad():
        for each in plain.parameters():
            each -= RATE * each.grad
            each.grad = None

weights = zip(model.parameters(), plain.parameters(), strict=True)
facts = {
    "package": pipelab.__file__,
    "late": [str(fault) for fault in pipelab.check(plan)],
    "without": [str(fault) for fault in pipelab.check(pipelab.OneFOneB(2, 2))],
    "kinds": {
        name: each.bound.codes.kinds for name, each in (("late", plan), ("without", pipelab.OneFOneB(2, 2).plan()))
    },
    "faults": {
        name: [[fault.code, fault.message] for fault in pipelab.check(pipelab.Plan.parse(text))]
        for name, text in (("early", EARLY), ("split", SPLIT), ("lost", LOST))
    },
    "starts": [[str(event.action), event.start, event.end] for event in trace.events if event.action.kind == "X"],
    "peaks": trace.peak_activations,
    "text": str(trace),
    "bound": pipelab.lower_bound(plan),
    "makespan": trace.makespan,
    "read": pipelab.Plan.from_csv(folder / "plan.csv").rows == plan.rows,
    "ran": [[str(event.action) for event in step.trace.events if event.rank == rank] for rank in (0, 1)],
    "equal": all(torch.equal(ours, theirs) for ours, theirs in weights),
}
print(json.dumps(facts))
