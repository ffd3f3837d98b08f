import os

import torch
from torch import nn

import pipelab

torch.manual_seed(0)  # every process must build the same model and see the same batches
model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.ReLU())))
ranks = int(os.environ.get("WORLD_SIZE", "2"))  # as many as there are processes
schedule = pipelab.OneFOneB(ranks, microbatches=8)

with pipelab.Pipeline(model, schedule, nn.MSELoss(), engine="torch") as pipe:
    optimizer = torch.optim.Adam(pipe.parameters())  # of this process's stages
    for _ in range(20):
        x, y = torch.randn(32, 64), torch.randn(32, 64)
        optimizer.zero_grad()
        step = pipe.step(x, y)
        pipe.clip_grad_norm_(1.0)  # PyTorch's own sees this process's stages only
        optimizer.step()
    proof = pipe.verify(x, y)
    state = pipe.state_dict()  # the whole model's, in every process

if torch.distributed.get_rank() == 0:
    print(f"loss {step.loss:.3f}; {proof}")
    step.trace.save("1f1b.html")
    torch.save(state, "model.pt")
