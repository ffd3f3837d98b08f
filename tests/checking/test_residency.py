"""Gathers, frees, offloads and loads: what `check` refuses, when they run, and an oracle written apart."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest
from oracle import halves, resident

import pipelab
from pipelab import LOAD, OFFLOAD, RESHARD, UNSHARD, B, Cost, F, I, Plan, W, check, simulate
from pipelab.draw import page

RIGHT = "0UNSHARD 0F0 0F1 0RESHARD 2UNSHARD 2F0 2F1 2B0 2B1 2RESHARD 0UNSHARD 0B0 0B1 0RESHARD; 1F0 1F1 1B0 1B1"


@pytest.mark.parametrize("name", ["overlapped-1f1b", "dualpipev", "dualpipe"])
@pytest.mark.parametrize("most", [1, 2])
def test_gathered_pairs_keep_the_cap_that_they_were_gathered_for(name, most):
    plan = pipelab.schedules[name](4, 8).plan()
    gathered = pipelab.with_gathers(plan, most)
    assert pipelab.check(gathered, gather_cap=most) == []
    assert bool(gathered.bound.pairs) == (most > 1)
    listed = [[half for item in row for half in halves(item)] for row in plan.rows]
    kept = [[half for item in row for half in halves(item)] for row in gathered.rows]
    work = [[[half for half in row if half.kind in "FBIW"] for row in rows] for rows in (listed, kept)]
    assert work[0] == work[1]


def random_rows(seed: int) -> list[list[pipelab.Action]]:
    """Return a plan that runs, with moves that are mostly right, and one of them sometimes elsewhere."""
    draw = random.Random(seed)  # noqa: S311 - not for secrets
    ranks, microbatches = draw.randint(1, 3), draw.randint(1, 3)
    per_rank = draw.randint(1, 2)
    kind = pipelab.LoopedBFS if per_rank == 2 else draw.choice([pipelab.GPipe, pipelab.OneFOneB, pipelab.ZBH1])
    plan = kind(ranks, microbatches).plan()
    if draw.random() < 0.7:
        plan = pipelab.with_gathers(plan, draw.randint(1, 3), draw.choice(["full", "auto"]))
    rows = [[each for each in row if each.kind != "R"] for row in plan.rows]
    for row in rows:
        for forward in [each for each in row if each.kind == "F"]:
            if draw.random() < 0.4:
                start = row.index(forward) + 1
                backward = next(
                    at for at, e in enumerate(row) if e.kind in "BI" and e.stage == forward.stage
                    and e.microbatch == forward.microbatch
                )  # fmt: skip
                out, back = sorted(draw.choices(range(start, backward + 1), k=2))
                row.insert(back, LOAD(forward.microbatch, forward.stage))
                row.insert(out, OFFLOAD(forward.microbatch, forward.stage))
    row = draw.choice(rows)
    moves = [at for at, each in enumerate(row) if each.traits.channel]
    if moves and draw.random() < 0.7:
        at = draw.choice(moves)
        moved = row[at] if draw.random() < 0.2 else row.pop(at)
        if draw.random() < 0.8:
            row.insert(draw.randint(0, len(row)), moved)
    return rows


@pytest.mark.parametrize("first", range(0, 300, 100))
def test_random_plans_with_moves_are_refused_exactly_if_the_oracle_says_so(first):
    verdicts = Counter()
    for seed in range(first, first + 100):
        rows = random_rows(seed)
        plan, right = Plan(rows), resident(rows)
        assert (check(plan) == []) == right, (seed, str(plan))
        assert [str(each) for row in plan.rows for each in row] == [str(each) for row in rows for each in row], seed
        verdicts[right] += 1
        if right:
            on_channels(simulate(plan, Cost(gather=0.5, offload=0.75, load=1.25)))
    assert min(verdicts[True], verdicts[False]) > 10


def on_channels(trace):
    """Each channel does one thing at a time, and every action has what it needs when it starts."""
    for rank in range(trace.ranks):
        events = [each for each in (*trace.events, *trace.moves) if each.rank == rank]
        for channel in ("", "gather", "offload", "load"):
            spans = sorted((e.start, e.end) for e in events if e.action.traits.channel == channel)
            assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    for event in trace.events:
        mine = [each for each in trace.moves if each.rank == event.rank and each.action.stage == event.action.stage]
        weights = [each for each in mine if each.action.microbatch is None and each.start <= event.start]
        if weights:
            last = max(weights, key=lambda each: (each.start, each.action.kind == "UNSHARD"))
            assert last.action.kind == "UNSHARD"
            assert last.end <= event.start


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ("0F0 0UNSHARD 0B0 0RESHARD", ("0F0", "needs the weights of stage 0", "not gathered", "UNSHARD(stage=0)")),
        ("0UNSHARD 0F0 0RESHARD 0B0", ("0B0", "freed at position 2", "one gather before each use")),
        ("0UNSHARD 0F0 0UNSHARD 0B0 0RESHARD", ("0UNSHARD", "gathered since position 0", "RESHARD(stage=0)")),
        ("0RESHARD 0UNSHARD 0F0 0B0 0RESHARD", ("0RESHARD", "which is not gathered")),
        ("0UNSHARD 0F0 0B0", ("0UNSHARD", "nothing frees")),
        ("0F0 0B0 1UNSHARD; 1UNSHARD 1F0 1B0 1RESHARD", ("1UNSHARD on rank 0", "does not hold")),
        ("0F0 0OFFLOAD0 0B0", ("0B0", "taken away at position 1", "LOAD(0, stage=0)")),
        ("0F0 0LOAD0 0B0", ("0LOAD0", "is here")),
        ("0OFFLOAD0 0F0 0B0", ("0OFFLOAD0", "between F and B")),
    ],
)  # fmt: skip
def test_what_is_not_there_is_explained(rows, says):
    (fault,) = check(Plan.parse(rows))
    assert fault.code == "residency"
    assert all(word in str(fault) for word in says)
    with pytest.raises(pipelab.ScheduleError):
        simulate(Plan.parse(rows))


def test_a_cap_counts_the_stages_that_are_gathered_together():
    plan = pipelab.with_gathers(pipelab.Interleaved1F1B(2, 4), 2)
    assert check(plan, gather_cap=2) == []
    assert {fault.code for fault in check(plan, gather_cap=[2, 1])} == {"residency"}
    with pytest.raises(pipelab.UsageError, match="gather_cap"):
        check(plan, gather_cap=0)


def test_a_gather_overlaps_with_computing_and_its_first_use_waits_for_it():
    trace = simulate(Plan.parse(RIGHT), Cost(gather=3, per="stage"))
    times = {(str(each.action), at): (each.start, each.end) for at, each in enumerate(trace.moves)}
    assert times["0UNSHARD", 0] == (0, 3)
    assert times["2UNSHARD", 2] == (5, 8)  # once 0F1 is done
    assert times["0UNSHARD", 4][0] == trace.ends[0][5] == 14  # after 2B1
    assert trace.starts[0][:4] == (3, 4, 8, 9)
    assert trace.ledger[0]["channel"] == 6
    ahead = RIGHT.replace(" 2UNSHARD", "").replace("0UNSHARD 0F0", "0UNSHARD 2UNSHARD 0F0", 1)
    early = simulate(Plan.parse(ahead), Cost(gather=3, per="stage"))
    assert early.makespan < trace.makespan
    assert pipelab.Trace.from_dict(trace.to_dict()) == trace


def test_gathered_weights_count_as_bytes_over_time():
    memory = pipelab.Memory(weights=10, gathered=100, activations=1)
    use = pipelab.memory_use(simulate(Plan.parse(RIGHT), Cost(gather=3, per="stage")), memory)
    assert use.peaks == (10 * 2 + 100 + 4, 10 + 2)
    both = pipelab.with_gathers(pipelab.Interleaved1F1B(1, 1, stages_per_rank=2), 2)
    assert pipelab.memory_use(both, memory).peaks == (2 * 10 + 2 * 100 + 2,)
    assert check(both, memory_cap=222, memory=memory) == []
    assert [fault.code for fault in check(both, memory_cap=221, memory=memory)] == ["memory-cap"]


def test_an_activation_that_is_away_is_not_held():
    away = Plan([[F(0), OFFLOAD(0), F(1), LOAD(0), B(1), B(0)]])
    assert check(away, memory_cap=2) == []
    assert simulate(away).peak_activations == (2,)
    slow = simulate(away, Cost(offload=5))
    assert slow.peak_activations == (2,)
    early = Plan([[F(0), OFFLOAD(0), F(1), B(1), LOAD(0), B(0)]])
    assert check(early, memory_cap=1) == []
    assert simulate(early).peak_activations == (1,)
    assert simulate(early, Cost(offload=1)).peak_activations == (2,)  # it leaves while 1 is computed
    memory = pipelab.Memory(activations=7)
    assert pipelab.memory_use(simulate(early), memory).peaks == (7,)
    assert pipelab.memory_use(simulate(early, Cost(offload=1)), memory).peaks == (14,)


def test_moves_are_written_in_pytorchs_words_and_read_back(tmp_path):
    plan = Plan([[UNSHARD(), F(0), OFFLOAD(0), LOAD(0), I(0), W(0), RESHARD()]])
    assert str(plan) == "rank 0 | 0UNSHARD 0F0 0OFFLOAD0 0LOAD0 0I0 0W0 0RESHARD"
    assert Plan.from_csv(plan.to_csv(tmp_path / "plan.csv")) == plan
    assert check(plan) == []


MOVING = {
    "one room": (pipelab.with_gathers(pipelab.Interleaved1F1B(3, 6), 1), Cost(gather=1)),
    "two rooms": (pipelab.with_gathers(pipelab.InterleavedZeroBubble(3, 7, 3), 2), Cost(gather=3)),
    "slow loads": (pipelab.PipeOffload(3, 6, sent=2), Cost(offload=1, load=4)),
    "slow pairs": (pipelab.BPipe(5, 9), Cost(offload=3, load=2)),
}


@pytest.mark.parametrize("name", MOVING)
def test_the_critical_path_goes_without_a_gap_through_gathers_offloads_and_loads(name):
    trace = simulate(*MOVING[name])
    path = trace.critical_path
    assert (path[0].start, path[-1].end) == pytest.approx((0, trace.makespan))
    assert [one.end for one in path[:-1]] == pytest.approx([other.start for other in path[1:]])
    assert any(event.action.traits.channel for event in path)
    computing = sum(not event.action.traits.channel for event in path)
    assert len(page.content(trace)["data"]["traces"][0]["critical"]) == computing


def test_who_waits_for_a_gather_is_told_which_one_and_what_it_waited_for():
    trace = simulate(pipelab.with_gathers(pipelab.Interleaved1F1B(2, 2), 1), Cost(gather=1))
    (wait,) = [idle for idle in trace.idle if idle.rank == 0 and idle.reason == "channel"]
    assert (str(wait.needer), str(wait.giver)) == ("2F0", "2UNSHARD")
    first, second, third, *_ = trace.why(0, 1.75).splitlines()
    assert "2F0 needs 2UNSHARD, which ends at 2" in first
    assert ("2UNSHARD begins on rank 0 at 1.5" in second, "0F1" in second) == (True, True)
    assert third.startswith("0F1 begins")
    assert trace.why(0, 0.1).endswith("0UNSHARD begins on rank 0 at 0: nothing comes before it.")


@pytest.mark.parametrize("kind", [pipelab.BPipe, pipelab.PipeOffload])
def test_gathers_are_written_into_plans_that_send_activations_away(kind):
    plan = kind(4, 8).plan()
    sharded = pipelab.with_gathers(plan)
    assert pipelab.check(sharded) == []
    for row, gathered in zip(plan.rows, sharded.rows, strict=True):
        assert [item for item in gathered if item.kind not in ("UNSHARD", "RESHARD", "R")] == list(row)
