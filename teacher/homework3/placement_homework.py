"""Homework 3: spread a stack of layers over all devices.

    python placement_homework.py           prints where each layer is, with or without your code in the holes
    pipelab grade placement_homework.py    runs it on 2, 3 and 5 GPUs, which are emulated where there are none

Fill the three holes, and change nothing else. The course's first version splits by `i < depth // 2`, which uses two
devices however many there are. Yours finds all of them and spreads the layers evenly: 20 layers on 3 devices are 7, 7
and 6. Then answer:

- How many layers are on each device, and where exactly do the data cross?
- A forward calls `.to()` for every layer. How many of these calls copy, on 2 and on 5 devices? The grade counts them.
"""

import torch
from torch import nn


class SpreadStack(nn.Module):
    """Equal layers, one after the other, on all GPUs of this machine; without a GPU, on the processor."""

    def __init__(self, width=16, depth=20):
        super().__init__()
        # Hole 1: list the devices: all GPUs, or the processor if there is none.
        self.devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] or [torch.device("cpu")]

        self.layers = nn.ModuleList()
        self.places = []  # the device of each layer
        for i in range(depth):
            layer = nn.Sequential(nn.Linear(width, width), nn.ReLU())
            # Hole 2: choose the device of layer i, and put the layer there. The rule has one line.
            place = self.devices[i * len(self.devices) // depth]
            layer.to(place)

            self.places.append(place)
            self.layers.append(layer)

    def forward(self, x):
        """Return the output, `[rows, width]`, on the last layer's device."""
        for layer, place in zip(self.layers, self.places):
            # Hole 3: bring x to the layer's device.
            x = x.to(place)

            x = layer(x)
        return x


def main():
    """Print where each layer is, and run a forward."""
    torch.manual_seed(0)
    model = SpreadStack()
    for i, layer in enumerate(model.layers):
        print(f"layer {i}: {next(layer.parameters()).device}")
    print("the output is on", model(torch.randn(4, 16)).device)


if __name__ == "__main__":
    main()
