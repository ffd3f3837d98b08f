"""DualPipe: the order of its authors' program, and their table of bubble and memory.

There is no DualPipe in PyTorch to compare with. The order is that of the eight steps in the program that the authors
published (DeepSeek-AI, DualPipe, 2025), written out here for the size of their figure: 8 ranks, 20 micro-batches.
"""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import costs

import pipelab
from pipelab import Cost, DualPipe, Pair, ScheduleError, check, simulate
from pipelab.errors import UsageError

# For each distance from the nearer end of the pipeline, the published steps: 0 is the direction that starts at that
# end, 1 the other. Step 6 is written out: backwards in its first half, input gradients in its second.
STEPS = {
    0: "6(F0) 1(F0 F1) 3(I1 W1 F1) 3(F0&B1 F1&B0) 3(B1 F1&B0) 1(B1 I0) 3(W I0) 1(W)",
    1: "4(F0) 2(F0 F1) 2(I1 W1 F1) 4(F0&B1 F1&B0) 2(B1 F1&B0) 1(B1 B0 I1 I0) 2(W I0) 2(W)",
    2: "2(F0) 3(F0 F1) 1(I1 W1 F1) 5(F0&B1 F1&B0) 1(B1 F1&B0) 1(B1 B0 B1 I0 I1 I0) 1(W I0) 3(W)",
    3: "0(F0) 4(F0 F1) 1(F0 B1 F1&B0) 5(F0&B1 F1&B0) 1(B1 B0 B1 B0 I1 I0 I1 I0) 4(W)",
}


def published(rank):
    """Return one rank's row for 8 ranks and 20 micro-batches, micro-batches numbered as they come."""
    steps = re.findall(r"(\d)\((.*?)\)", STEPS[min(rank, 7 - rank)])
    words = [word for times, step in steps for word in int(times) * step.split()]
    first = {"0": 0, "1": 10} if rank < 4 else {"0": 10, "1": 0}
    stage = {m: rank if m < 10 else 7 - rank for m in range(20)}
    forward, backward, owed = dict(first), dict(first), []

    def named(word):
        kind, direction = word[0], word[1:]
        if kind == "W":
            m = owed.pop(0)
        else:
            following = forward if kind == "F" else backward
            m = following[direction]
            following[direction] += 1
            owed.extend([m] * (kind == "I"))
        return f"{stage[m]}{kind}{m}"

    row = []
    for word in words:
        names = [named(half) for half in word.split("&")]
        row.append(names[0] if len(names) == 1 else f"({';'.join(names)})OVERLAP_F_B")
    return row


def dualpipes():
    """DualPipe at any size up to 10 ranks, with up to 12 micro-batches more than it needs."""
    halves = st.tuples(st.integers(1, 5), st.integers(0, 6))
    return halves.map(lambda pair: DualPipe(2 * pair[0], 4 * pair[0] + 2 * pair[1]))


# The order


@pytest.mark.parametrize("rank", range(8))
def test_the_order_is_the_published_one(rank):
    row = [str(item) for item in DualPipe(ranks=8, microbatches=20).plan().rows[rank]]
    assert [word for word in row if "R" not in word or "OVERLAP" in word] == published(rank)


@given(dualpipes())
def test_the_two_directions_mirror_each_other(schedule):
    half = schedule.microbatches // 2

    def mirrored(item):
        if isinstance(item, Pair):
            return Pair(mirrored(item.forward), mirrored(item.backward))
        return pipelab.Action(item.kind, (item.microbatch + half) % schedule.microbatches)

    for rank in range(schedule.ranks):
        other = schedule.ranks - 1 - rank
        assert list(map(mirrored, schedule.actions(rank))) == list(schedule.actions(other))


@given(dualpipes())
def test_all_forwards_of_the_steady_state_are_overlapped_with_a_backward(schedule):
    ranks, half = schedule.ranks, schedule.ranks // 2
    for rank, row in enumerate(schedule.plan().rows):
        behind = min(rank, ranks - 1 - rank)
        pairs = sum(isinstance(item, Pair) for item in row)
        assert pairs == schedule.microbatches - 2 * ranks + half + behind + 1 - (behind == half - 1)


@given(dualpipes())
def test_half_of_the_microbatches_go_each_way_and_every_stage_is_on_two_ranks(schedule):
    ranks, half = schedule.ranks, schedule.microbatches // 2
    stages = range(ranks)
    assert [schedule.place(0, s) for s in stages] == [schedule.place(half - 1, s) for s in stages] == list(stages)
    assert [schedule.place(half, s) for s in stages] == [schedule.place(2 * half - 1, s) for s in stages]
    assert [schedule.place(half, s) for s in stages] == list(reversed(stages))
    assert schedule.plan().replicas == {s: tuple(sorted((s, ranks - 1 - s))) for s in stages}


# The table: its bubble in the middle, activations P + 1, parameters twice


@given(dualpipes(), costs(), costs(), st.sampled_from([0, 0.25, 0.5, 1]))
def test_the_ranks_in_the_middle_wait_longest_if_i_takes_as_long_as_f(schedule, one, other, overlap):
    forward, weights = max(one, other), min(one, other)
    backward = forward + weights
    pair = forward + backward - overlap * forward
    cost = Cost(forward=forward, backward=backward, input_grad=forward, weight_grad=weights, pair=pair)
    trace = simulate(schedule, cost)
    waits = [trace.makespan - busy for busy in trace.busy]
    half = trace.ranks // 2
    assert waits[half - 1] == waits[half] == max(waits)


@given(dualpipes(), st.sampled_from([None, 2.5]))
def test_every_rank_holds_one_activation_more_than_there_are_ranks(schedule, pair):
    assert simulate(schedule, Cost(pair=pair)).peak_activations == (schedule.ranks + 1,) * schedule.ranks


# All-reduces


@given(dualpipes(), costs())
def test_the_two_ranks_of_a_stage_reduce_it_together(schedule, reduce):
    trace = simulate(schedule, Cost(all_reduce=reduce))
    spans = {}
    for event in trace.events:
        if event.action.kind == "R":
            spans.setdefault(event.action.stage, []).append((event.rank, event.start, event.end))
    assert sorted(spans) == list(range(schedule.ranks))
    for stage, ((one, *times), (other, *same)) in spans.items():
        assert {one, other} == {stage, schedule.ranks - 1 - stage}
        assert times == same
        assert times[1] - times[0] == pytest.approx(reduce)


# Sizes


@pytest.mark.parametrize(
    ("size", "nearest"),
    [
        ((3, 12), "ranks=2, microbatches=12; ranks=4, microbatches=12"),
        ((4, 7), "ranks=4, microbatches=8"),
        ((4, 13), "ranks=4, microbatches=12 or 14"),
        ((4, 6), "ranks=4, microbatches=8"),
        ((1, 1), "ranks=2, microbatches=4"),
    ],
)
def test_a_refusal_names_the_nearest_sizes(size, nearest):
    (fault,) = check(DualPipe(*size))
    assert fault.code == "refused"
    assert fault.message.endswith(f"the nearest sizes are {nearest}")


def test_the_sizes_that_a_refusal_names_are_accepted():
    for ranks in range(1, 9):
        for microbatches in range(1, 20):
            reason = DualPipe.refusal(ranks, microbatches)
            if reason is None:
                continue
            for offer in reason.partition("sizes are ")[2].split("; "):
                even, counts = offer.removeprefix("ranks=").split(", microbatches=")
                assert all(DualPipe.refusal(int(even), int(count)) is None for count in counts.split(" or "))


@pytest.mark.parametrize("stages_per_rank", [0, 2, None])
def test_a_microbatch_finds_one_stage_on_every_rank(stages_per_rank):
    with pytest.raises(UsageError, match=f"stages_per_rank={stages_per_rank}: DualPipe cuts the model"):
        DualPipe(4, 8, stages_per_rank=stages_per_rank)


def test_dualpipe_can_be_replicated():
    plan = pipelab.replicate(DualPipe(4, 8), 2).plan()
    assert plan.replicas == {0: (0, 3, 4, 7), 1: (1, 2, 5, 6), 2: (1, 2, 5, 6), 3: (0, 3, 4, 7)}
    with pytest.raises(ScheduleError, match="nearest sizes"):
        pipelab.replicate(DualPipe(4, 7), 2).plan()
