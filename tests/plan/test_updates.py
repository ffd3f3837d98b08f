"""Updates within a plan: `U`, the versions of weights that backwards still need, PipeDream and PipeDream-2BW."""

from __future__ import annotations

import random

import pytest

import pipelab
from pipelab import Action, Plan

SIZES = [(1, 3), (2, 1), (2, 4), (3, 7), (4, 16)]


def oracle(rows, stages, microbatches):
    """Tell, from the rule alone, whether a plan runs, and which version each forward uses: by (m, s); or None."""
    given: set[tuple] = set()
    updated = dict.fromkeys(range(stages), 0)  # how many updates
    through = dict.fromkeys(range(stages), -1)  # up to which micro-batch
    used: dict[tuple[int, int], int] = {}
    left = [list(row) for row in rows]
    moved = True
    while moved:
        moved = False
        for row in left:
            while row:
                kind, m, s = row[0].kind, row[0].microbatch, row[0].stage
                if kind == "F" and s and ("F", m, s - 1) not in given:
                    break
                if kind == "B" and (("F", m, s) not in given or (s + 1 < stages and ("B", m, s + 1) not in given)):
                    break
                if kind == "U":
                    if m <= through[s] or any(("B", each, s) not in given for each in range(through[s] + 1, m + 1)):
                        break
                    updated[s], through[s] = updated[s] + 1, m
                if kind == "F":
                    used[m, s] = updated[s]
                given.add((kind, m, s))
                row.pop(0)
                moved = True
    return None if any(left) else used


def drawn(seed):
    """Return a random plan: 1F1B or GPipe with some updates, sometimes moved, one stage per rank."""
    chance = random.Random(seed)  # noqa: S311 - for tests
    ranks, microbatches = chance.randint(1, 4), chance.randint(1, 6)
    kind = chance.choice([pipelab.OneFOneB, pipelab.GPipe])
    rows = [list(row) for row in kind(ranks, microbatches).plan().rows]
    for stage, row in enumerate(rows):
        for m in sorted(chance.sample(range(microbatches), chance.randint(0, microbatches))):
            least = row.index(Action("B", m, stage)) + 1 if chance.random() < 0.9 else 0
            row.insert(chance.randint(least, len(row)), Action("U", m, stage))
    return rows, ranks, microbatches


def agrees(seed):
    """Tell whether pipelab and the oracle say the same of a random plan, and of its versions."""
    rows, ranks, microbatches = drawn(seed)
    plan = Plan(rows, ranks, microbatches)
    used = oracle(rows, ranks, microbatches)
    if used is None:
        return bool(pipelab.check(plan))
    found = {}
    for rank, row in enumerate(plan.bound.computing):
        for code, versions in zip(row, plan.bound.versions(rank), strict=True):
            action = plan.bound.codes.action(code)
            if action.kind == "F":
                found[action.microbatch, action.stage] = versions[action.microbatch]
    return not pipelab.check(plan) and found == used and pipelab.simulate(plan).makespan > 0


def test_random_plans_with_updates_run_if_and_only_if_the_rule_says_so():
    assert [seed for seed in range(300) if not agrees(seed)] == []
    legal = sum(oracle(*drawn(seed)) is not None for seed in range(300))
    assert 50 < legal < 250


@pytest.mark.parametrize(
    ("text", "code", "names"),
    [
        ("0F0 0U0 0B0", "unordered", ("0U0", "0B0", "the weight gradient of micro-batch 0 from stage 0")),
        ("0F0 0F1 0B1 0U1 0B0", "unordered", ("0U1", "0B0", "the weight gradient of micro-batch 0 from stage 0")),
        ("0F0 0F1 0B0 0B1 0U1 0U0", "unordered", ("0U1", "0U0", "the new weights of micro-batch 0")),
        ("0F0 0B0 0U0 0U0", "duplicate", ("0U0",)),
    ],
)
def test_an_update_before_its_gradients_or_out_of_order_is_refused(text, code, names):
    fault = pipelab.check(Plan.parse(text))[0]
    assert fault.code == code
    assert all(name in fault.message for name in names)
    assert "slices" not in fault.message


def test_a_stage_on_two_ranks_has_no_updates():
    plan = Plan.parse("0F0 0B0 0U0; 0F1 0B1")
    assert [(fault.code, fault.rank) for fault in pipelab.check(plan)] == [("wrong-rank", 0)]


def test_a_backward_whose_version_is_no_longer_kept_is_refused():
    plan = Plan.parse("0F0 0F1 0F2 0B0 0U0 0B1 0U1 0B2")
    assert pipelab.check(plan, versions=3) == pipelab.check(plan) == []
    (fault,) = pipelab.check(plan, versions=2)
    assert (fault.code, str(fault.action)) == ("memory-cap", "0B2")
    assert "0F2" in fault.message


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_pipedream_and_2bw_use_weights_as_late_as_their_papers_say(ranks, microbatches):
    for kind, versions, version in (
        (pipelab.PipeDream, ranks, lambda m, s: m - (ranks - 1 - s)),  # as many updates as ranks come after
        (pipelab.TwoBW, 2, lambda m, s: m // ranks - 1),  # one update late on every rank
    ):
        plan = kind(ranks, microbatches).plan()
        used = oracle(plan.rows, ranks, microbatches)
        assert used == {(m, s): max(0, version(m, s)) for m in range(microbatches) for s in range(ranks)}
        assert pipelab.check(plan, versions=versions) == []


def test_memory_counts_versions_and_the_gradients_of_each_group():
    memory = pipelab.Memory(weights=100, gradients=10, activations=1)
    assert memory.held(Plan.parse("0F0 0F1 0B0 0U0 0F2 0B1 0U1 0B2 0U2").bound, 0) == [
        101, 102, 112, 211, 202, 212, 211, 211, 110
    ]  # fmt: skip
    plan = pipelab.PipeDream(ranks=4, microbatches=12).plan()
    peaks = pipelab.memory_use(plan, pipelab.Memory(weights=100)).peaks
    assert peaks == (400, 300, 200, 100)


def test_an_update_takes_the_time_that_its_cost_says():
    trace = pipelab.simulate(Plan.parse("0F0 0B0 0U0 0F1 0B1"), pipelab.Cost(update=[0.5]))
    assert trace.makespan == 6.5
