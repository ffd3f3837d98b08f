# True 1F1B: as fast as GPipe, with fewer activations held, so a larger batch fits. Try microbatches = 2, 4, 8.
import torch

import pipelab

schedule = pipelab.OneFOneB(ranks=2, microbatches=4)
torch.manual_seed(0)
x, y = torch.randn(256, 1024), torch.randn(256, 1024)
torch.manual_seed(0)
layers = [torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.ReLU()) for _ in range(8)]
model = torch.nn.Sequential(*layers)
with pipelab.Pipeline(model, schedule, torch.nn.functional.mse_loss) as pipe:
    steps = [pipe.step(x, y) for _ in range(8)][1:]  # the first one warms up
step = sorted(steps, key=lambda step: step.trace.makespan)[3]  # the one of median length
print(f"loss {step.loss:.6f}, {step.trace}")  # step.trace.save("d.html") draws it
