# B: GPipe, all micro-batches forward, then all backward. Try microbatches = 2, 4, 8.
import torch

import pipelab

schedule = pipelab.GPipe(ranks=2, microbatches=4)
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
x, y = torch.randn(128, 512), torch.randn(128, 512)
with pipelab.Pipeline(model, schedule, torch.nn.functional.mse_loss) as pipe:
    pipe.step(x, y)  # the first step warms up
    step = pipe.step(x, y)
print(f"loss {step.loss:.6f}, bubble {step.trace.bubble:.1%}, activations held {step.trace.peak_activations}")
print(step.trace)  # step.trace.save("b.html") draws it
