# %% [markdown]
# # Gradients around a ring
#
# Eight copies of a model have each seen a different part of the batch. Now all of them need the *mean* of their
# gradients. If all send to one, that one is the bottleneck; if all send to all, the network is. On this page you follow
# the numbers of an all-reduce around a **ring**, count the bytes, and make the messages smaller.
#
# It takes about 19 minutes, and you need PyTorch before it. What an **all-reduce** means for the choice between copies
# and stages is in [Data x pipeline](data_and_pipeline.md). All replicas are in one process here, so any laptop will do.
# Run it with `pipelab tutorial gradients_around_a_ring`, which asks for your predictions before it shows the answers.

# %%
import torch
from torch import nn

import pipelab_course
from pipelab import Column, Table

# %% [markdown]
# ## Who sends what to whom?
#
# Every replica cuts its gradient into as many **chunks** as there are replicas, and sends only to the next one. In the
# **reduce-scatter**, each chunk goes once around the ring, and every rank adds its own numbers to it. Each rank then
# owns one finished chunk. In the **all-gather**, the finished chunks go around once more. Here are three ranks with
# seven numbers each, `2+0` is the sum of what rank 2 and rank 0 had:

# %%
gradients = [torch.arange(7.0) + 10 * rank for rank in range(3)]
result = pipelab_course.ring_all_reduce(gradients)
print(result)
print(result.tensors[0])

assert all(torch.equal(each, torch.arange(7.0) + 10) for each in result.tensors)

# %% [markdown]
# In the picture a column is a step and a box is a chunk, which has the colours of the ranks that are added up in it. A
# finished chunk has a bold frame.

# %%
result.plot()

# %% [markdown]
# ## Predict: how many bytes?
#
# With two ranks, each sends as many numbers as its gradient has: one half of them in each phase. With 64 ranks, how
# many times its gradient does each rank send?

# %%
my_prediction = None  # times the gradient

# %% tags=["answer"]
print(f"predicted {my_prediction}")
for ranks in (2, 4, 8, 64):
    reduced = pipelab_course.ring_all_reduce([torch.zeros(960)] * ranks)
    share = reduced.bytes_per_rank[0] / (960 * 4)
    print(f"{ranks:2d} ranks: {len(reduced.steps):3d} steps, each rank sends {share:.2f} times its gradient")
    assert share == 2 * (ranks - 1) / ranks

# %% [markdown] tags=["answer"]
# Less than twice, however many ranks there are: each of D ranks sends 2(D - 1) chunks, and a chunk is 1/D of the
# gradient. The *steps* do grow with the ranks: 2(D - 1), not log D. With small gradients and many ranks, it is their
# latency that counts.

# %% [markdown]
# ## Smaller messages
#
# A **codec** turns a chunk into a message. `fp16` and `bf16` send 2 bytes for each number. `int8` sends one byte, an
# integer from -127 to 127, and one **scale** for the message: its largest magnitude / 127. The scales count too.

# %%
torch.manual_seed(0)
gradients = [torch.randn(1000) for _ in range(4)]
mean = torch.stack(gradients).mean(0)
rows = []
for codec in ("none", "fp16", "bf16", "int8"):
    result = pipelab_course.ring_all_reduce(gradients, codec)
    error = (result.tensors[0] - mean).norm() / mean.norm()
    rows.append({"codec": codec, "payload": result.payload_bytes, "scales": result.scale_bytes, "error": float(error)})
    assert all(torch.equal(each, result.tensors[0]) for each in result.tensors)
columns = [Column("codec"), Column("payload", "payload bytes"), Column("scales", "bytes of scales")]
print(Table(rows, [*columns, Column("error", "relative error", "{:.0e}".format)]))

# %% [markdown]
# The last assertion is about something that is easy to get wrong: all replicas must end with the same *bits*. If they
# do not, their weights drift apart, step by step, without a warning. Two rules are enough. A rank passes a message on
# as it arrived, and never encodes it again. And the owner of a chunk keeps what it sent, not what it had.
#
# ## What does not fit?
#
# The largest `fp16` number is 65504, and what travels are *sums*. So three ranks that hold 40000 each overflow. `bf16`
# has the range of a float32 and only 8 bits of precision. NaN reaches all ranks, as it should; `int8` has one scale for
# a chunk, so the whole chunk is NaN.

# %%
large = [torch.full((3,), 40000.0)] * 3
print("fp16:", pipelab_course.ring_all_reduce(large, "fp16").tensors[0])
print("bf16:", pipelab_course.ring_all_reduce(large, "bf16").tensors[0])
broken = [torch.ones(6), torch.ones(6), torch.tensor([1, 1, 1, 1, 1, float("nan")])]
print("int8:", pipelab_course.ring_all_reduce(broken, "int8").tensors[0])

assert pipelab_course.ring_all_reduce(large, "fp16").tensors[0].isinf().all()
assert pipelab_course.ring_all_reduce(broken, "int8").tensors[0].isnan().tolist() == [False] * 4 + [True] * 2

# %% [markdown]
# ## What does it cost in training?
#
# With `int8`, a number below half a scale is rounded to 0, in every step again. **Error feedback** (`int8-ef`) keeps
# what was lost, and adds it to what is sent the next time; so it arrives later, but it arrives. Each all-reduce needs
# the `feedback` of the one before.
#
# Four replicas learn what a small network computes. All codecs see the same data. The distance is between the weights
# and the weights of uncompressed training, divided by their length.


# %%
def train(codec, steps=200, replicas=4):
    """Yield the loss and the weights after each step."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.2)
    feedback = None
    for _ in range(steps):
        gradients, total = [], 0.0
        for _ in range(replicas):
            x = torch.randn(8, 16)
            model.zero_grad()
            loss = nn.functional.mse_loss(model(x), 3 * teacher(x).detach())
            loss.backward()
            total += loss.item()
            gradients.append(torch.cat([each.grad.flatten() for each in parameters]))
        result = pipelab_course.ring_all_reduce(gradients, codec, feedback=feedback)
        feedback = result.feedback
        pieces = result.tensors[0].split([each.numel() for each in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.grad = piece.view_as(parameter)
        optimizer.step()
        yield total / replicas, nn.utils.parameters_to_vector(parameters).detach()


uncompressed = list(train("none"))
rows = []
for codec in ("none", "fp16", "bf16", "int8", "int8-ef"):
    for step, ((loss, weights), (_, exact)) in enumerate(zip(train(codec), uncompressed, strict=True), 1):
        if step in (1, 5, 10, *range(20, 201, 20)):
            distance = float((weights - exact).norm() / exact.norm())
            rows.append({"codec": codec, "step": step, "loss": loss, "distance": distance or None})
columns = [
    Column("codec"),
    Column("step"),
    Column("loss", show="{:.4f}".format),
    Column("distance", "distance from uncompressed", "{:.1e}".format),
]
axes = ("step", ["loss", "distance"])
print(Table([row for row in rows if row["step"] in (1, 10, 100, 200)], columns, across="step"))

# %%
drawing = Table(rows, columns, axes=axes).plot()
for plot in drawing.axes:
    plot.set_xticks(range(0, 201, 50))
drawing.axes[1].set_ylim(1e-5, 1e-1)
drawing.axes[1].set_yscale("log")
drawing

# %% [markdown]
# The losses coincide: none of the codecs harms *this* model. The weights show the difference. With `int8` they are the
# farthest away, and feedback brings them several times nearer, for the same bytes.

# %%
last = {row["codec"]: row for row in rows if row["step"] == 200}
assert last["fp16"]["distance"] < last["bf16"]["distance"] < last["int8"]["distance"]
assert 3 * last["int8-ef"]["distance"] < last["int8"]["distance"]
assert all(abs(row["loss"] / last["none"]["loss"] - 1) < 0.02 for row in last.values())

# %% [markdown]
# ## Across processes, and in DistributedDataParallel
#
# Under torchrun, each process passes its own tensor: `pipelab_course.ring_all_reduce(gradient, "int8")`. To have
# PyTorch's `DistributedDataParallel` use the ring and a codec for its gradients, add one line:
#
#     model = DistributedDataParallel(module)
#     model.register_comm_hook(model.process_group, pipelab_course.codec_hook("int8-ef"))
#
# ## Exercise: the order of the ring
#
# Write the ring yourself. In each step, a rank may send one chunk to the next rank (the last one sends to rank 0).
# Return a list of steps; a step says for each rank which chunk it sends, or `None`. If the two sums of a chunk have
# nothing in common, the receiver adds them up. If what arrives contains all that the receiver has, the receiver takes
# it. Otherwise a gradient would count twice, and the check refuses it.
#
# - **Par for 4 ranks: 6 steps.**
# - **Par for 8 ranks: 14 steps.**
#
# The function below is right, but only one rank sends at a time: the starting point, not the solution.


# %%
def answer(ranks):
    """Return the steps of an all-reduce around a ring."""
    return [
        [chunk if rank == hop % ranks else None for rank in range(ranks)]
        for chunk in range(ranks)
        for hop in range(2 * (ranks - 1))  # once around to add up, once more to hand on
    ]


# %%
def reaches_par(answer):
    """Print how far an answer is from par; return whether it reaches both pars."""
    reached = []
    for ranks, par in ((4, 6), (8, 14)):
        has = [[{rank} for _ in range(ranks)] for rank in range(ranks)]  # whose gradients are in a rank's chunks
        steps = answer(ranks)
        for number, step in enumerate(steps):
            sent = [(rank, chunk, set(has[rank][chunk])) for rank, chunk in enumerate(step) if chunk is not None]
            for rank, chunk, value in sent:
                to = (rank + 1) % ranks
                common = value & has[to][chunk]
                if common and common != has[to][chunk]:
                    print(
                        f"{ranks} ranks, step {number}: rank {to} has {has[to][chunk]} of chunk {chunk}, gets {value}"
                    )
                    return False
                has[to][chunk] |= value
        missing = [(rank, chunk) for rank in range(ranks) for chunk in range(ranks) if len(has[rank][chunk]) < ranks]
        if missing:
            print(f"{ranks} ranks: at the end, rank {missing[0][0]} lacks a part of chunk {missing[0][1]}")
            return False
        print(f"{ranks} ranks: {len(steps)} steps, par {par}")
        reached.append(len(steps) <= par)
    return all(reached)


print("par!" if reaches_par(answer) else "not yet")

# %% [markdown]
# When you are done: how many different chunks does a rank send in the first phase, and which one does it never send
# there? Teachers have the solution, `teacher/solutions/gradients_around_a_ring.py`.
