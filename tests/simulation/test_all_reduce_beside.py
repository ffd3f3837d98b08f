"""All-reduces beside a rank's own work, against an oracle written apart."""

from __future__ import annotations

import csv
import random

import oracle
import pytest

import pipelab
from pipelab import B, Cost, F, Trace, check, compare, lower_bound, replicate, simulate
from pipelab.draw import page


def by_rule(plan, cost):
    """Return the makespan: each rank computes in order, and runs the all-reduces that it has passed on a channel."""
    times = cost.times(plan)
    rows = [[half for item in row for half in oracle.halves(item)] for row in plan.rows]
    work = [[each for each in row if each.kind != "R"] for row in rows]
    sizes = plan.stages, plan.microbatches
    lasts = {"lasts": lambda action: times[action.kind][action.stage], "lag": lambda _: cost.latency}
    ended = {action: end for _, action, _, end in oracle.clock(work, *sizes, **lasts)}
    passed, free = {}, [0.0] * len(rows)  # (stage, rank): when the rank comes to the all-reduce
    for rank, row in enumerate(rows):
        for each in row:
            if each.kind == "R":
                passed[each.stage, rank] = free[rank]
            else:
                free[rank] = ended[each]
    waiting = [[each.stage for each in row if each.kind == "R"] for row in rows]
    channel = [0.0] * len(rows)
    while any(waiting):
        fronts = {row[0] for row in waiting if row}
        stage = next(s for s in fronts if all(row[0] == s for row in waiting if s in row))
        group = [rank for rank, row in enumerate(waiting) if stage in row]
        end = max(max(passed[stage, rank], channel[rank]) for rank in group) + times["R"][stage]
        for rank in group:
            waiting[rank].pop(0)
            channel[rank] = end
    return max(free + channel)


def random_case(seed):
    draw = random.Random(seed)  # noqa: S311 - not for secrets
    kind = draw.choice(
        ["interleaved-1f1b", "looped-bfs", "zbv", "chimera", "dualpipev", "1f1b", "zb-h1", "interleaved-zb"]
    )
    ranks = draw.choice([2, 4])
    plan = pipelab.schedules[kind](ranks=ranks, microbatches=2 * ranks).plan()
    stages = plan.stages
    numbers = {name: [draw.randint(1, 9) for _ in range(stages)] for name in ("forward", "backward", "all_reduce")}
    return replicate(plan, draw.choice([1, 2, 3])).plan(), numbers | {"latency": draw.choice([0, 0.5])}


@pytest.mark.parametrize("first", [0, 40, 80])
def test_random_plans_take_as_long_as_the_oracle_says(first):
    sooner = 0
    for seed in range(first, first + 40):
        plan, numbers = random_case(seed)
        cost = Cost(**numbers, all_reduce_runs="beside")
        trace, alone = simulate(plan, cost), simulate(plan, Cost(**numbers))
        assert trace.makespan == pytest.approx(by_rule(plan, cost)), seed
        assert lower_bound(plan, cost) <= trace.makespan + 1e-9, seed
        assert trace.makespan <= alone.makespan + 1e-9, seed
        sooner += trace.makespan < alone.makespan
        assert sum(trace.busy) == pytest.approx(sum(each.end - each.start for each in trace.events)), seed
        assert "R" not in {each.action.kind for each in trace.events}
        idle = sum(each.duration for each in trace.idle)
        assert sum(trace.busy) + idle == pytest.approx(trace.ranks * trace.makespan), seed
    assert sooner > 10


BESIDE = {"all_reduce": 5, "per": "stage", "all_reduce_runs": "beside"}


def test_two_cases_by_hand():
    """One rank of two copies runs F F B B; stage 1's all-reduce begins at 4, beside stage 0's backward until 6."""
    both = replicate(pipelab.LoopedBFS(ranks=1, microbatches=1), 2)
    trace = simulate(both, Cost(**BESIDE))
    assert {(str(each.action), each.start, each.end) for each in trace.moves} == {("1R", 4, 9), ("0R", 9, 14)}
    assert simulate(both, Cost(**BESIDE | {"all_reduce_runs": "in-row"})).makespan == 4 + 5 + 2 + 5
    # With one stage a rank, the all-reduce is a rank's last action, so it ends when it did.
    single = replicate(pipelab.OneFOneB(ranks=2, microbatches=4), 2)
    cost = Cost(**BESIDE)
    assert simulate(single, cost).makespan == 20 == simulate(single, Cost(all_reduce=5)).makespan
    assert simulate(single, cost).ledger[0] == {"wait": 3, "all-reduce": 5}


def test_the_critical_path_goes_without_a_gap_through_all_reduces_to_the_end():
    trace = simulate(pipelab.OneFOneB(2, 2), Cost(**BESIDE | {"all_reduce": 10}), replicas=2)
    assert [str(each.action) for each in trace.critical_path[-2:]] == ["0B1", "0R"]
    uneven = pipelab.Plan([[F(0, 0), B(0, 0)], [F(1, 0), B(1, 0), F(2, 0), B(2, 0)]], stages=1, microbatches=3)
    path = simulate(uneven, Cost(**BESIDE)).critical_path  # the R of rank 0 waits for rank 1
    assert [str(each.action) for each in path] == ["0F1", "0B1", "0F2", "0B2", "0R"]
    for seed in range(20):
        plan, numbers = random_case(seed)
        trace = simulate(plan, Cost(**numbers | {"latency": 0, "all_reduce_runs": "beside"}))
        path = trace.critical_path
        assert (path[0].start, path[-1].end) == (0, trace.makespan), seed
        assert [one.end for one in path[:-1]] == [other.start for other in path[1:]], seed
        reduces = sum(each.action.kind == "R" for each in path)
        assert len(page.content(trace)["data"]["traces"][0]["critical"]) == len(path) - reduces


def test_a_ranks_span_and_the_table_of_events_have_the_all_reduces(tmp_path):
    trace = simulate(pipelab.OneFOneB(2, 2), Cost(**BESIDE | {"all_reduce": 10}), replicas=2)
    assert trace.spans == (19, 16)
    assert max(trace.spans) == trace.makespan
    with trace.save(tmp_path / "x.events.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = [(each["stage"], each["start"], each["end"], each["waited_for"]) for each in rows if each["kind"] == "R"]
    assert found == [("0", "9.0", "19.0", "0B1"), ("1", "7.0", "17.0", "1B1")]
    for rank, lost in enumerate(trace.ledger):
        listed = sum(float(each["idle_before"]) for each in rows if each["rank"] == str(rank))
        assert listed == pytest.approx(sum(lost.values()) - lost.get("drain", 0))


def test_one_of_64_replicas_takes_as_long_as_all_of_two():
    schedule, cost = pipelab.Interleaved1F1B(2, 4), Cost(all_reduce=5, all_reduce_runs="beside")
    assert simulate(schedule, cost, replicas=64).makespan == simulate(replicate(schedule, 2), cost).makespan == 16.5


def test_everything_that_reads_a_trace_reads_this_one(tmp_path):
    both, cost = replicate(pipelab.LoopedBFS(2, 4), 2), Cost(all_reduce=5, all_reduce_runs="beside")
    trace = simulate(both, cost)
    assert Trace.load(trace.save(tmp_path / "a.json")) == trace
    assert check(trace.plan) == []
    assert simulate(trace.plan, cost) == trace
    assert simulate(trace.plan, Cost(all_reduce=5)) == simulate(both, Cost(all_reduce=5)) != trace
    assert "all-reduce 2.5" in str(trace)
    assert "0R runs beside computing" in trace.why(0, at=15)
    assert compare(both, cost=cost).rows[0].makespan == 16 == lower_bound(trace)
    assert pipelab.lower(trace.plan).rows == pipelab.lower(both.plan()).rows
    assert pipelab.memory_use(trace, pipelab.Memory(weights=3, gradients=2)).peaks == (10,) * 4
    assert '"0R","R"' in trace.save(tmp_path / "a.html").read_text(encoding="utf-8").replace(" ", "")
    assert pipelab.diff(trace, trace).parts == {}
    assert simulate(trace.plan, Cost.fit(trace)).makespan == trace.makespan
    with pytest.raises(pipelab.CostError, match="0R|2R"):
        simulate(both, cost, transport="rank")
    with pytest.raises(pipelab.CostError, match="all_reduce_runs"):
        Cost(all_reduce_runs="aside")
