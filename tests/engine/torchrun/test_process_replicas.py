"""A stage on several processes: its copies stay alike, and what would let them part is refused."""

from __future__ import annotations

import json

import processes
import pytest

pytestmark = pytest.mark.dist

SCRIPT = """
import json
import plain, torch
import torch.distributed as dist
from torch import nn
import pipelab

mse = nn.functional.mse_loss
plan = pipelab.replicate(pipelab.OneFOneB(1, 2), 2).plan()
x, y = plain.batch(8)


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("mask", torch.ones(1, 6).expand(4, 6))
        self.register_buffer("small", torch.zeros(2, dtype=torch.int16))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += x.sum()
        return self.linear(x)


found = []
for engine in ("torch", "threads"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
    with pipelab.Pipeline(model, plan, mse, engine=engine, replicated_buffers="lowest", timeout=60) as pipe:
        pipe.step(x, y)
        found.append([buffer.tolist() for buffer in model.buffers()])

# gradients that are clipped stay alike, whatever their type
for dtype in (torch.float64, torch.bfloat16):
    model = plain.mlp(2).to(dtype)
    with pipelab.Pipeline(model, plan, mse, engine="torch", timeout=60) as pipe:
        pipe.step(x.to(dtype), y.to(dtype))
        norm = pipe.clip_grad_norm_(0.01)
        found.append([str(norm.dtype), model[0].weight.grad.tolist()])

# whoever ends PyTorch's process group may go on afterwards
dist.destroy_process_group()
model, twin = plain.mlp(2), plain.mlp(2)
with pipelab.Pipeline(twin, plan, mse) as pipe:
    pipe.step(x, y)
with pipelab.Pipeline(model, plan, mse, engine="torch", timeout=5) as pipe:
    hook = model[0].bias.register_post_accumulate_grad_hook(lambda parameter: None)
    try:
        pipe.step(x, y)
        hooked = ""
    except pipelab.EngineError as error:
        hooked = str(error)
    hook.remove()
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    pipe.step(x, y)
again = plain.equal(plain.taken(model), plain.taken(twin))

try:
    with pipelab.Pipeline([Counts()], plan, mse, engine="torch", timeout=60) as pipe:
        pipe.step(x, y)
        refused = ""
except pipelab.EngineError as error:
    refused = f"{type(error).__name__}: {error}"
ours, theirs, *clipped = found
print(json.dumps(dict(ours=ours, theirs=theirs, clipped=clipped, again=again, hooked=hooked, refused=refused)))
"""


@pytest.fixture(scope="module")
def said():
    """What each of two processes said."""
    ended = processes.run_in(2, SCRIPT, fresh=True)
    assert [each.code for each in ended] == [0, 0], processes.shown(ended)
    return [json.loads(each.out) for each in ended]


def test_all_processes_have_the_lowest_ranks_running_statistics(said):
    for fact in said:
        assert fact["ours"] == fact["theirs"]
        assert fact["ours"][2] == 2  # its own micro-batches


def test_a_buffer_that_is_written_into_is_refused_by_name_on_every_process(said):
    for fact in said:
        assert "stage 0 writes into its buffer 'seen', and rank 1 runs a copy of the stage" in fact["refused"]
    assert said[1]["refused"].startswith("EngineError: ")
    assert said[0]["refused"].startswith("RankError: ")


def test_replicas_are_clipped_alike_to_the_last_bit(said):
    first, second = (fact["clipped"] for fact in said)
    assert [dtype for dtype, _ in first] == ["torch.float64", "torch.bfloat16"]
    assert first == second


def test_a_pipeline_can_be_made_after_the_process_group_was_destroyed_and_parameters_replaced(said):
    assert [fact["again"] for fact in said] == [True, True]


def test_a_hook_that_would_see_a_part_of_the_gradient_is_refused(said):
    for fact in said:
        assert fact["hooked"].startswith("stage 0 is on ranks 0, 1, and its 0.bias has a post-accumulate-grad hook")
