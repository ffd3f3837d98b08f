import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import pipelab


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
torch.manual_seed(0)  # every process must build the same model and see the same batches
blocks = [Block() for _ in range(4)]
for block in blocks:
    parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})

schedule = pipelab.OneFOneB(ranks=2, microbatches=4)
pp = mesh["pp"].get_group()
with pipelab.Pipeline(nn.Sequential(*blocks), schedule, nn.MSELoss(), engine="torch", group=pp) as pipe:
    optimizer = torch.optim.AdamW(pipe.parameters())
    for _ in range(20):
        x, y = torch.randn(32, 64), torch.randn(32, 64)
        optimizer.zero_grad()
        step = pipe.step(x, y)
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
    state = pipe.state_dict()  # the whole model's; the sharded weights are DTensors

whole = {name: tensor.full_tensor() for name, tensor in state.items()}  # every process must call it
if mesh.get_rank() == 0:
    print(f"loss {step.loss:.3f}")
    torch.save(whole, "model.pt")
torch.distributed.destroy_process_group()
