"""The vocabulary's layer on all ranks: `S`, `T` and `V`, and 1F1B with them."""

from __future__ import annotations

import random

import pytest

import pipelab
from pipelab import Action, Cost, Plan


def needed(kind, m, s, stages, whole):
    """Return what an action waits for, from the rule alone; `whole`: whether the micro-batch has a `T`."""
    last = stages - 1
    every = [(each, m, stage) for each in ("T" if whole and kind == "B" else "S") for stage in range(stages)]
    return {
        "F": [("F", m, s - 1)] * (s > 0),
        "B": [("F", m, s), *([("B", m, s + 1)] if s < last else every)],
        "S": [("F", m, last)],
        "T": every,
        "V": every,
    }[kind]


def oracle(rows, stages, times, latency):
    """Return when each action starts, rank by rank and again until nothing moves; or None if some never does."""
    whole = {action.microbatch for row in rows for action in row if action.kind == "T"}
    rank_of = {(a.kind, a.microbatch, a.stage): rank for rank, row in enumerate(rows) for a in row}
    ends, starts, left, free = {}, {}, [list(row) for row in rows], [0.0] * len(rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(left):
            while row:
                key = (row[0].kind, row[0].microbatch, row[0].stage)
                before = needed(*key, stages, key[1] in whole)
                if any(each not in ends for each in before):
                    break
                arrived = [ends[each] + latency * (rank_of[each] != rank) for each in before]
                starts[key] = max([free[rank], *arrived])
                free[rank] = ends[key] = starts[key] + times[key[0]]
                row.pop(0)
                moved = True
    return None if any(left) else starts


def drawn(seed):
    """Return the rows of a random plan with shares, and times."""
    chance = random.Random(seed)  # noqa: S311 - for tests
    ranks, microbatches, kind = chance.randint(1, 4), chance.randint(1, 5), chance.choice("TV")
    rows = [list(row) for row in pipelab.OneFOneB(ranks, microbatches).plan().rows]
    if chance.random() < 0.5:
        rows = [list(row) for row in pipelab.VocabularyParallel(ranks, microbatches, 1 + (kind == "T")).plan().rows]
        for row in rows:
            if chance.random() < 0.5:
                row.insert(chance.randrange(len(row)), row.pop(chance.randrange(len(row))))
    else:
        for rank, row in enumerate(rows):
            for each in "S" + kind:
                for m in range(microbatches):
                    row.insert(chance.randint(0, len(row)), Action(each, m, rank))
    times = {each: chance.randint(1, 4) for each in "FBSTV"}
    return rows, ranks, microbatches, times, chance.choice([0, 0.5, 2])


def agrees(seed):
    rows, ranks, microbatches, times, latency = drawn(seed)
    expected, plan = oracle(rows, ranks, times, latency), Plan(rows, ranks, microbatches)
    if expected is None:
        return bool(pipelab.check(plan))
    scores = {"vocabulary": times["S"], "vocabulary_grad": times["T" if any(a.kind == "T" for a in rows[0]) else "V"]}
    cost = Cost(forward=times["F"], backward=times["B"], latency=latency, **scores)
    trace = pipelab.simulate(plan, cost)
    found = {(e.action.kind, e.action.microbatch, e.action.stage): e.start for e in trace.events}
    return not pipelab.check(plan) and found == expected and pipelab.lower_bound(plan, cost) <= trace.makespan


def test_random_plans_with_shares_start_when_the_rule_says_so_or_are_refused():
    assert [seed for seed in range(300) if not agrees(seed)] == []
    legal = sum(oracle(*(drawn(seed)[at] for at in (0, 1, 3, 4))) is not None for seed in range(300))
    assert 60 < legal < 240


@pytest.mark.parametrize("barriers", [1, 2])
@pytest.mark.parametrize("ranks", range(1, 9))
def test_a_rank_holds_an_activation_more_for_each_barrier(ranks, barriers):
    for microbatches in range(1, 3 * ranks, 2):
        trace = pipelab.simulate(pipelab.VocabularyParallel(ranks, microbatches, barriers))
        most = [min(ranks - rank + barriers, microbatches) for rank in range(ranks)]
        assert list(trace.peak_activations) == most


def test_one_barrier_leaves_no_more_idle_than_1f1b_without_a_vocabulary():
    for ranks in range(3, 9):
        for microbatches in (2 * ranks, 3 * ranks + 1, 5 * ranks):
            for share in (0.25, 0.5, 1):
                cost = Cost(forward=1, backward=2, vocabulary=share, vocabulary_grad=share)
                trace = pipelab.simulate(pipelab.VocabularyParallel(ranks, microbatches), cost)
                assert trace.makespan == microbatches * (3 + 2 * share) + 3 * (ranks - 1) - share


@pytest.mark.parametrize(
    ("text", "code", "names"),
    [
        ("0F0 0B0 0S0 0V0", "unordered", ("0B0", "0S0")),
        ("0S0 0F0 0B0 0V0", "unordered", ("0S0", "0F0")),
        ("0F0 0V0 0S0 0B0", "unordered", ("0V0", "0S0")),
        ("0F0 0S0 0B0 0T0", "unordered", ("0B0", "0T0")),
        ("0F0 0S0 0B0", "missing", ("no T or V", "stage 0")),
        ("0F0 0S0 0T0 0V0 0B0", "duplicate", ("both T and V",)),
        ("0F0 0S0 0F1 0S1 0B0 0V0 0B1 0V1; 1F0 1S0 1B0 1V0 1F1 1B1 1V1", "missing", ("no S", "micro-batch 1", "rank")),
    ],
)
def test_a_share_that_is_missing_or_comes_too_late_is_refused(text, code, names):
    fault = pipelab.check(Plan.parse(text))[0]
    assert fault.code == code
    assert all(name in str(fault) for name in names)


def test_what_shares_wait_for_is_neither_laid_out_as_transfers_nor_run():
    plan = pipelab.VocabularyParallel(2, 4).plan()
    for asked in ({"transport": "rank"}, {"max_outstanding_sends": 1}):
        with pytest.raises(pipelab.UsageError, match=r"S, V.*all ranks wait for all"):
            pipelab.simulate(plan, **asked)
    with pytest.raises(pipelab.UsageError, match="all ranks wait for all"):
        pipelab.lower(plan)


def test_a_trace_with_shares_is_written_read_and_explained(tmp_path):
    cost = Cost(vocabulary=0.5, vocabulary_grad=0.5, latency=0.25)
    trace = pipelab.simulate(pipelab.VocabularyParallel(3, 6), cost)
    assert pipelab.Trace.load(trace.save(tmp_path / "trace.json")).events == trace.events
    path = trace.critical_path
    assert path[-1].end == trace.makespan
    assert {event.action.kind for event in path} >= set("FBS")
    waited = next(event for event in trace.events_of(2) if event.action.kind == "B")
    assert "S0" in trace.why(2, waited.start - 1e-6)
