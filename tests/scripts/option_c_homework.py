"""Homework 4 as students write it on a machine with two GPUs: a script that moves everything when it is imported."""

import time

import torch
from torch import nn

torch.manual_seed(0)
torch.cuda.manual_seed_all(0)
device0 = torch.device("cuda:0")
device1 = torch.device("cuda:1")
print(torch.cuda.get_device_name(0), torch.cuda.memory_allocated(device1) / 1e6, "MB")


class Split(nn.Module):
    def __init__(self, width=64, depth=4):
        super().__init__()
        self.layers = nn.ModuleList()
        for i in range(depth):
            self.layers.append(nn.Linear(width, width).to(device0 if i < depth // 2 else device1))

    def forward(self, x):
        half = len(self.layers) // 2
        for i, layer in enumerate(self.layers):
            if i == half:
                x = x.to(device1)
            x = torch.relu(layer(x))
        return x


def run_1F1B_homework(model, micro_batches, loss_fn):
    outputs, targets = [], []
    for i, (micro_x, micro_y) in enumerate(micro_batches):
        output = model(micro_x.to(device0, non_blocking=True))
        outputs.append(output)
        targets.append(micro_y.to(device1, non_blocking=True))
        print(f"F{i}", end=" ")
        if i > 0:
            loss_fn(outputs[i - 1], targets[i - 1]).backward()
            print(f"B{i - 1}", end=" ")
    loss_fn(outputs[-1], targets[-1]).backward()
    torch.cuda.synchronize()


model = Split()
model.train()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(32, 64, device=device0)
y = torch.randn(32, 64, device=device1)
assert x.is_cuda
assert next(model.layers[3].parameters()).device == device1
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
for step in range(2):
    torch.cuda.synchronize()
    began = time.time()
    start.record()
    optimizer.zero_grad()
    run_1F1B_homework(model, list(zip(x.chunk(4), y.chunk(4), strict=True)), nn.MSELoss())
    optimizer.step()
    end.record()
    torch.cuda.synchronize()
    print(f"step {step}: {time.time() - began:.4f} s, {start.elapsed_time(end):.2f} ms")
print(torch.cuda.max_memory_allocated(device0))
