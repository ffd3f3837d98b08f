"""Homework 4: write the single-loop 1F1B yourself.

The model is cut into two halves, each on a device of its own. Your function runs its micro-batches in the order that
the course calls 1F1B: after the forward of micro-batch i comes the backward of micro-batch i - 1, and after the loop
the backward of the last one. (True 1F1B is a step further: each rank has an order of its own, and earlier ranks begin
with more forwards; `pipelab simulate delayed` and `pipelab simulate 1f1b` draw both.)

    python pipeline_homework.py            runs this file, with or without your code in the holes
    pipelab grade pipeline_homework.py     grades what your function runs

Fill the holes in `run_1F1B_homework`, and change nothing else. Then

- print F{i} after each forward, and B{i-1} after each backward inside the `if`; run 1 step, and
  write down the sequence;
- explain it: Why i - 1? What happens if the condition goes away? Does a forward ever run beside a backward?
"""

import torch
from torch import nn

MICRO_BATCHES, ROWS = 4, 8
STEPS = 1


def two_devices():
    """Return two GPUs if there are two; otherwise, the processor plays both."""
    if torch.cuda.device_count() > 1:
        return [torch.device("cuda", 0), torch.device("cuda", 1)]
    return [torch.device("cpu"), torch.device("cpu")]


class TwoStages(nn.Module):
    """A model in two halves: the first is on `devices[0]`, the second on `devices[1]`."""

    def __init__(self, width=16):
        super().__init__()
        self.devices = two_devices()
        self.first = nn.Sequential(nn.Linear(width, width), nn.Tanh()).to(self.devices[0])
        self.second = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)).to(self.devices[1])

    def forward(self, x):
        hidden = self.first(x.to(self.devices[0]))
        return self.second(hidden.to(self.devices[1]))


def run_1F1B_homework(model, micro_batches, loss_fn):
    """Run forward and backward of all micro-batches, and leave their gradients in the parameters' `.grad`.

    `micro_batches` is a list of pairs (micro_x, micro_y), which are not on the model's devices yet. The gradients may
    be of the sum of the micro-batches' losses, or of their mean: say which.
    """
    outputs, targets = [], []
    for i, (micro_x, micro_y) in enumerate(micro_batches):
        # Hole 1: move the target to the right device, run the forward of micro-batch i, store output and target.
        output = model(micro_x)
        outputs.append(output)
        targets.append(micro_y.to(output.device))

        if i > 0:
            # Hole 2: run the backward of micro-batch i - 1.
            loss_fn(outputs[i - 1], targets[i - 1]).backward()

    # Hole 3: run the backward of the last one.
    loss_fn(outputs[-1], targets[-1]).backward()


def make_data(rows=MICRO_BATCHES * ROWS, width=16):
    """Return inputs, and the targets that the model is to learn."""
    x = torch.randn(rows, width)
    return x, torch.sin(x.sum(dim=1, keepdim=True))


def compare(model, x, y, loss_fn):
    """Print how the gradients that your function left compare with right ones."""
    mine = [parameter.grad for parameter in model.parameters()]
    if any(gradient is None for gradient in mine):
        print("no gradients yet: the holes are empty, or no backward reached all parameters")
        return
    mine = torch.cat([gradient.flatten().cpu() for gradient in mine])
    output = model(x)
    whole = torch.autograd.grad(loss_fn(output, y.to(output.device)), list(model.parameters()))
    whole = torch.cat([gradient.flatten().cpu() for gradient in whole])
    factor = (mine @ whole / (whole @ whole)).item()
    rest = ((mine - factor * whole).norm() / whole.norm()).item()
    print(f"gradient: {factor:.2f} times the whole batch's, and {rest:.0%} of something else")
    print(f"right is 1 (the mean of the losses) or {MICRO_BATCHES} (their sum), and 0% of something else")


def main():
    """Train for a few steps, and compare the first step's gradients with the whole batch's."""
    torch.manual_seed(0)
    model, loss_fn = TwoStages(), nn.MSELoss()
    x, y = make_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        run_1F1B_homework(model, list(zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES))), loss_fn)
        if step == 0:
            compare(model, x, y, loss_fn)
        optimizer.step()
        with torch.no_grad():
            output = model(x)
            print(f"step {step}: the whole batch's loss is {loss_fn(output, y.to(output.device)).item():.4f}")


if __name__ == "__main__":
    main()
