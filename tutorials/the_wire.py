# %% [markdown]
# # The wire: a legal plan that hangs
#
# Your 1F1B passes every check, and on threads its gradients are right. You write a script for two machines, with a
# blocking `send` after each action that gives a value and a `recv` before each action that needs one. It hangs. There
# is no error, both processes wait, and a night of rented GPUs is gone.
#
# On this page you build a machine on which a legal plan hangs, in 25 lines, and see why. Then you repair it by changing
# nothing but the order of sends and receives, and see on which machines of today it would have hung.
#
# It takes about 22 minutes, and you need [Several stages per rank](interleaved.md) before it. Run it with
# `pipelab tutorial the_wire`, which asks for your predictions before it shows the answers.
#
# ## Rows with sends and receives
#
# Until now, a value simply arrived. On a real wire one rank must send it, and another must be there to receive it.
# `pipelab.lower` writes both into the rows. `0SEND_F1` sends what `0F1` gave, `1RECV_F1` receives it on the next rank.

# %%
import pipelab

rows = pipelab.lower(pipelab.OneFOneB(ranks=2, microbatches=4), order="at-use").rows
for rank, row in enumerate(rows):
    print(f"rank {rank} | {' '.join(row)}")

# %% [markdown]
# This is what most people write first: receive right before you need it (the order *at-use*), send right after you have
# it.
#
# A `send` like `torch.distributed`'s **meets** its `recv`: neither returns before the other side is there.
# (Sometimes a buffer lets a small message through. Then the program works in the test and hangs with the real model.)

# %% [markdown]
# Here is a machine that runs such rows. Each rank has its own clock. A forward or a backward takes its time; a send or
# a receive waits until the other side has reached the matching call.


# %%
def run(rows, forward=1, backward=2):
    """Run rows whose sends and receives meet; return when it is over, and the words at which ranks are stuck."""
    clock, at = [0.0] * len(rows), [0] * len(rows)

    def word(rank):
        return rows[rank][at[rank]] if at[rank] < len(rows[rank]) else ""

    moved = True
    while moved:
        moved = False
        for rank in range(len(rows)):
            while word(rank) and "_" not in word(rank):  # a forward or a backward
                clock[rank] += forward if "F" in word(rank) else backward
                at[rank] += 1
                moved = True
            if "SEND" in word(rank):
                value = word(rank).split("_")[1]
                peer = rank + 1 if "F" in value else rank - 1
                if word(peer) == f"{peer}RECV_{value}":
                    clock[rank] = clock[peer] = max(clock[rank], clock[peer])
                    at[rank] += 1
                    at[peer] += 1
                    moved = True
    return max(clock), [word(rank) for rank in range(len(rows)) if word(rank)]


# %% [markdown]
# ## Predict: where does it hang?
#
# Be the machine: go through the two rows above with a finger on each. On which two words do your fingers stop?

# %%
my_prediction = None  # the two words

# %% tags=["answer"]
print(f"predicted {my_prediction}; stuck at {run(rows)[1]}")
assert run(rows) == (4, ["0SEND_F1", "1SEND_B0"])

# %% [markdown] tags=["answer"]
# Rank 0 wants to send the second micro-batch down. Rank 1 wants to send the first gradient up. Each waits before a
# send, and would receive only afterwards. Two people in a doorway, each holding the door for the other one.

# %% [markdown]
# ## Ask before it runs
#
# `check` finds it without running anything, if you say two things: in which *order* a rank posts its sends and
# receives, and which *transport* carries them. With `transport="rank"`, all sends and receives of a rank wait in one
# queue and meet there, as in our script: so it hangs where our script hangs. (How long it takes is another matter. In
# that queue transfers wait beside the rank, which computes meanwhile.) The plan itself is right; its transfers are not.

# %%
schedule = pipelab.OneFOneB(ranks=4, microbatches=8)
assert pipelab.check(schedule) == []
faults = pipelab.check(schedule, order="at-use", transport="rank")
print(faults[0])
assert [fault.code for fault in faults] == ["transfer-deadlock"]

# %% [markdown]
# We tested `check` on hundreds of random plans in four real processes with blocking sends: they hung exactly when it
# said so ([the wire, in full](../wire.md)).
#
# Which schedules hang?

# %%
for kind in (pipelab.Naive, pipelab.GPipe, pipelab.OneFOneB, pipelab.Eager1F1B, pipelab.DelayedBackward):
    late = pipelab.lower(kind(4, 8), order="at-use").rows
    _, stuck = run(late)
    assert bool(stuck) == bool(pipelab.check(kind(4, 8), order="at-use", transport="rank"))
    print(f"{kind.__name__:16} {'hangs at ' + stuck[0] if stuck else 'ends'}")

# %% [markdown]
# GPipe never hangs: all forwards go down before any gradient comes up. So a wire that hangs has both directions in
# use.
#
# ## What PyTorch does
#
# PyTorch's pipelining puts each receive as *early* as its send can be placed. Look at rank 1: it now receives its next
# input before it computes a backward, so that rank 0's send can end.

# %%
early = pipelab.lower(pipelab.OneFOneB(ranks=2, microbatches=4), order="pytorch").rows
for rank, row in enumerate(early):
    print(f"rank {rank} | {' '.join(row)}")
assert run(early)[1] == []

# %% [markdown]
# ## Predict: what does the wire cost?
#
# Without a wire, GPipe and 1F1B both take 33 units on four ranks with eight micro-batches. Our wire takes no time at
# all for a transfer: it only makes both sides meet. How long do the two take on it, in PyTorch's order?

# %%
my_second_prediction = None  # two numbers: GPipe, 1F1B

# %% tags=["answer"]
gpipe = run(pipelab.lower(pipelab.GPipe(4, 8), order="pytorch").rows)
one_f_one_b = run(pipelab.lower(pipelab.OneFOneB(4, 8), order="pytorch").rows)
print(f"predicted {my_second_prediction}; GPipe {gpipe[0]:g}, 1F1B {one_f_one_b[0]:g}")
assert (gpipe, one_f_one_b) == ((33, []), (45, []))

# %% [markdown] tags=["answer"]
# 1F1B takes a third longer than GPipe, with transfers that take no time. A rank that waits at a meeting cannot compute.
#
# ## Which machines are like ours?
#
# A script with blocking calls is exactly ours. PyTorch's own runtime does not block: its sends and receives wait beside
# the rank, while it computes. What they wait for depends on the machine, and on its version:
#
# - **gloo**, on CPUs: for nothing. A value arrives (`transport="buffered"`).
# - **NCCL, up to PyTorch 2.11**: all sends and receives of a rank wait in *one* queue (`"rank"`).
# - **NCCL, since PyTorch 2.12**: each *pair* of ranks has a queue (`"pair"`). But if you write
#   `init_process_group(device_id=...)`, it is one queue again.
# - Some machines let a receive that waits **hold the rank** (`"holding"`): it computes nothing until then.
#
# With one stage per rank, 1F1B takes 33 units again in each of the queues. With several, a value that is ready may
# wait behind one that is not:

# %%
for transport in ("rank", "pair"):
    assert pipelab.simulate(pipelab.OneFOneB(4, 8), transport=transport).makespan == 33
times = {}
for transport in ("buffered", "rank", "pair", "holding"):
    times[transport] = pipelab.simulate(pipelab.Interleaved1F1B(8, 16), transport=transport).makespan
    print(f"interleaved 1F1B, 8 ranks, 16 micro-batches, {transport}: {times[transport]:g} units")
assert times == {"buffered": 58.5, "rank": 84, "pair": 58.5, "holding": 123}

# %% [markdown]
# Four ranks with eight micro-batches and one queue for each rank show why:

# %%
pipelab.simulate(pipelab.Interleaved1F1B(4, 8), transport="rank")

# %% [markdown]
# Rank 0 has run [`4F0`](#s=0:4F0.0) at 2.5, and at 6 rank 1 [still waits](#s=0:idle.1.5.5) for its output. In rank 0's
# queue, that send is behind the receive for `4F3`, whose value comes at 6.5.
#
# So the step from PyTorch 2.11 to 2.12 saves 30 % of the time here, without a line of your code. On a machine where a
# receive holds the rank, `at-use`, the order that hangs in a queue, is the best one.

# %%
best = {"rank": "by-time", "holding": "at-use"}
for transport, order in best.items():
    found = pipelab.simulate(pipelab.Interleaved1F1B(8, 16), transport=transport, order=order)
    assert found.makespan == 58.5
    print(f"{transport}, {order}: 58.5 units")

# %% [markdown]
# `by-time` is an order of the same transfers that pipelab works out. PyTorch runs it as it is, from the file that
# `pipelab.lower(plan, order="by-time").to_csv("plan.csv")` writes.
#
# ## Exercise: one order for the wire
#
# You get a rank's row of 1F1B, with each receive at its use. Return the same words in an order that does not hang, and
# that costs nothing on our machine.
#
# - **Par on two ranks with 8 micro-batches: 27 units.**
# - **Par on four ranks with 8 micro-batches: 33 units.**
#
# These are the times without any wire, so nothing beats them. Forwards and backwards must stay in their order, and a
# rank cannot send what it has not computed or compute what it has not received. The function below changes nothing. (A
# hint: both people hold the door. How many of the two have to change their habit?)


# %%
def answer(row):
    """Return a rank's words in an order that does not hang."""
    return row


# %%
def reaches_par(answer):
    """Print how far an answer is from par; return whether it reaches both pars."""
    reached = []
    for ranks, par in ((2, 27), (4, 33)):
        given = [list(row) for row in pipelab.lower(pipelab.OneFOneB(ranks, 8), order="at-use").rows]
        mine = [list(answer(list(row))) for row in given]
        for rank, (row, before) in enumerate(zip(mine, given, strict=True)):
            if (problem := what_is_wrong(row, before)) is not None:
                print(f"{ranks} ranks: rank {rank}: {problem}")
                return False
        time, stuck = run(mine)
        print(f"{ranks} ranks: " + (f"hangs at {', '.join(stuck)}" if stuck else f"{time:g} units, par {par}"))
        reached.append(not stuck and time <= par)
    return all(reached)


def what_is_wrong(row, before):
    """Return why a row cannot replace another one, or None."""
    if sorted(row) != sorted(before):
        return "it has other words than before"
    if [word for word in row if "_" not in word] != [word for word in before if "_" not in word]:
        return "its forwards and backwards are in another order"
    for word in row:
        if "SEND" in word and row.index(word) < row.index(word.replace("SEND_", "")):
            return f"{word} comes before what it sends"
        if "RECV" in word and row.index(word) > row.index(word.replace("RECV_", "")):
            return f"{word} comes after what needs it"
    return None


print("par!" if reaches_par(answer) else "not yet")

# %% [markdown]
# When you are done: the same idea is one function in Megatron-LM, which sends a forward's output and receives a
# backward's gradient in one call. What does the call's name begin with, and why is there no such function for the
# warm-up? Teachers have the solution, `teacher/solutions/the_wire.py`.
