"""Replicated schedules: data parallelism over pipelines."""

from __future__ import annotations

import re
from collections import Counter
from itertools import repeat

import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import OF_EACH, costs, legal_cases, sizes, written

import pipelab
from pipelab import B, Cost, F, I, Plan, R, ScheduleError, W, check, replicate, schedules, simulate
from pipelab.errors import UsageError

every_schedule = pytest.mark.parametrize("name", sorted(schedules))


def rows(plan):
    return [" ".join(map(str, row)) for row in plan.rows]


class Written(pipelab.Schedule):
    """Two ranks that list what they are given."""

    listed: tuple[list[object], ...] = ([F(0), B(0)], [F(0), B(0)])

    def __init__(self, ranks=2, microbatches=1, stages_per_rank=1):
        super().__init__(ranks, microbatches, stages_per_rank)

    def actions(self, rank):
        return self.listed[rank]


# What a replicated schedule is


def test_two_replicas_of_1f1b_share_sixteen_microbatches():
    both = replicate(pipelab.OneFOneB(ranks=2, microbatches=8), 2)
    assert (both.ranks, both.microbatches, both.stages) == (4, 16, 2)
    assert repr(both) == "replicate(OneFOneB(ranks=2, microbatches=8), 2)"
    plan = both.plan()
    assert plan.replicas == {0: (0, 2), 1: (1, 3)}
    assert plan.name == repr(both)


def test_microbatches_are_dealt_to_the_replicas_in_turn():
    assert rows(replicate(pipelab.OneFOneB(2, 2), 2).plan()) == [
        "0F0 0F2 0B0 0B2 0R",
        "1F0 1B0 1F2 1B2 1R",
        "0F1 0F3 0B1 0B3 0R",
        "1F1 1B1 1F3 1B3 1R",
    ]


def test_replicas_of_replicas_are_replicas():
    twice = replicate(replicate(pipelab.OneFOneB(2, 3), 2), 3)
    assert repr(twice) == "replicate(replicate(OneFOneB(ranks=2, microbatches=3), 2), 3)"
    assert (twice.ranks, twice.microbatches, twice.stages) == (12, 18, 2)
    assert twice.plan().replicas == {0: (0, 2, 4, 6, 8, 10), 1: (1, 3, 5, 7, 9, 11)}
    once = replicate(pipelab.OneFOneB(2, 3), 6)
    assert simulate(twice).ends == simulate(once).ends


def test_a_plan_can_be_replicated_as_a_schedule_can_and_one_replica_is_the_pipeline_itself():
    plan = pipelab.GPipe(2, 3).plan()
    assert replicate(plan, 2).plan() == replicate(pipelab.GPipe(2, 3), 2).plan()
    assert repr(replicate(plan, 2)) == "replicate(GPipe(ranks=2, microbatches=3), 2)"
    assert replicate(plan, 1).plan() == plan


def test_pairs_split_backwards_and_listed_all_reduces_are_replicated_too():
    class Everything(Written):
        listed = (
            [F(0, 0), F(0, 2), F(1, 0) & B(0, 2), B(0, 0), R(0), F(1, 2), I(1, 2), W(1, 2), B(1, 0), R(2)],
            [F(0, 1), F(1, 1), B(0, 1), I(1, 1), W(1, 1)],
        )

        @property
        def stages(self):
            return 3

        def place(self, microbatch, stage):
            return stage % 2

    # 0R stands before 0B1, its stage's last gradient
    assert [fault.code for fault in check(replicate(Everything(2, 2), 2))] == ["unordered"]
    Everything.listed[0].remove(R(0))
    assert rows(replicate(Everything(2, 2), 2).plan()) == [
        "0F0 2F0 (0F2;2B0)OVERLAP_F_B 0B0 2F2 2I2 2W2 0B2 0R 2R",
        "1F0 1F2 1B0 1I2 1W2 1R",
        "0F1 2F1 (0F3;2B1)OVERLAP_F_B 0B1 2F3 2I3 2W3 0B3 0R 2R",
        "1F1 1F3 1B1 1I3 1W3 1R",
    ]


def test_the_drawing_in_the_docstring_is_what_simulate_gives():
    lanes = re.findall(r"rank \d+ \| ?(.*)", replicate.__doc__)
    trace = simulate(replicate(pipelab.OneFOneB(2, 2), 2), Cost(forward=1, backward=1, all_reduce=1))
    drawn = []
    for rank in range(4):
        lane = [" "] * 30
        for event in trace.events_of(rank):
            text = str(event.action)[1:]
            lane[round(3 * event.start) : round(3 * event.start) + len(text)] = text
        drawn.append("".join(lane).rstrip())
    assert lanes == drawn


# What holds for every schedule


@every_schedule
@OF_EACH
@given(size=sizes(), replicas=st.integers(1, 3))
def test_every_schedule_can_be_replicated_and_runs_every_microbatch_once(name, size, replicas):
    if schedules[name].refusal(*size) is not None:
        return
    schedule = schedules[name](*size)
    plan = replicate(schedule, replicas).plan()
    assert (plan.ranks, plan.microbatches, plan.stages) == (size[0] * replicas, size[1] * replicas, schedule.stages)
    place = [
        [(m % replicas) * size[0] + schedule.place(m // replicas, s) for s in range(plan.stages)]
        for m in range(plan.microbatches)
    ]
    assert oracle.legal(plan.rows, plan.stages, plan.microbatches, lambda m, s: place[m][s])
    counts = Counter(half.kind for row in plan.rows for item in row for half in oracle.halves(item))
    assert counts["F"] == counts["B"] + counts["I"] == plan.stages * plan.microbatches
    assert counts["I"] == counts["W"]
    assert counts["R"] == sum(len(ranks) for ranks in plan.replicas.values() if len(ranks) > 1)


@every_schedule
@OF_EACH
@given(size=sizes(), replicas=st.integers(2, 3), forward=costs(), backward=costs(), reduce=costs())
def test_replicas_take_as_long_as_one_pipeline_and_an_all_reduce_on_each_rank(
    name, size, replicas, forward, backward, reduce
):
    if schedules[name].refusal(*size) is not None:
        return
    schedule = schedules[name](*size)
    cost = Cost(forward=forward, backward=backward, all_reduce=reduce)
    alone = simulate(schedule, Cost(forward=forward, backward=backward))
    together = simulate(replicate(schedule, replicas), cost)
    assert together.peak_activations == alone.peak_activations * replicas
    if schedule.stages == schedule.ranks and not schedule.plan().bound.reduces:
        assert together.makespan == max(end[-1] for end in alone.ends) + reduce
    else:  # a rank's all-reduces stand between its other work, and others may wait for that
        per_rank = [sum(e.action.kind == "R" for e in together.events_of(rank)) for rank in range(together.ranks)]
        assert alone.makespan <= together.makespan
        assert max(per_rank) * reduce * schedule.ranks / schedule.stages <= together.makespan


@every_schedule
@OF_EACH
@given(size=sizes(), replicas=st.integers(2, 3))
def test_without_a_cost_of_the_all_reduce_replicas_are_as_quick_as_one(name, size, replicas):
    if schedules[name].refusal(*size) is None:
        alone = simulate(schedules[name](*size))
        assert simulate(replicate(schedules[name](*size), replicas)).makespan == alone.makespan


@given(legal_cases(), st.integers(1, 3))
def test_whatever_runs_can_be_replicated(case, replicas):
    plan = replicate(case.plan, replicas).plan()
    table = [
        [(m % replicas) * case.plan.ranks + case.place(m // replicas, s) for s in range(case.stages)]
        for m in range(plan.microbatches)
    ]
    assert oracle.legal(plan.rows, plan.stages, plan.microbatches, lambda m, s: table[m][s])


# Mistakes


def test_faults_of_the_pipeline_are_told_once_in_the_words_it_was_written_in():
    class Stuck(Written):
        listed = ([F(0), B(0), F(1), B(1)], [F(0), F(1), B(0), B(1)])

    inner = check(Stuck(2, 2))
    assert [fault.code for fault in inner] == ["deadlock"]
    assert check(replicate(Stuck(2, 2), 3)) == inner
    with pytest.raises(ScheduleError, match=r"1 fault in Stuck\(ranks=2, microbatches=2\)"):
        replicate(Stuck(2, 2), 3).plan()
    with pytest.raises(ScheduleError, match="1 fault in Stuck"):
        simulate(replicate(Stuck(2, 2), 3))


def test_an_error_inside_the_pipelines_actions_is_told_with_its_line():
    class Raises(Written):
        def actions(self, rank):
            yield F(0)
            yield B(self.nothing)

    (fault,) = check(replicate(Raises(2, 1), 2))
    assert fault.code == "exception"
    assert "yield B(self.nothing)" in fault.message
    assert fault.message.startswith("actions(0) raised AttributeError after 1 action, the last one F0: 'Raises'")
    endless = written(lambda *_: repeat(F(0)))
    assert "endless" in [fault.code for fault in check(replicate(endless(2, 1), 2))]
    assert {fault.code for fault in check(replicate(Plan([[], []], 2, 1), 2))} == {"missing"}


def test_a_pipeline_without_its_sizes_is_told_to_call_super():
    sizeless = type("Sizeless", (Written,), {"__init__": lambda _: None})
    with pytest.raises(ScheduleError, match=r"call super\(\).__init__\(ranks, microbatches\) there, first"):
        replicate(sizeless(), 2)


@pytest.mark.parametrize("replicas", [0, -1, 1.5, "2", None, True])
@pytest.mark.parametrize("make", [replicate, lambda plan, replicas: simulate(plan, replicas=replicas)])
def test_a_number_of_replicas_is_a_positive_whole_number(make, replicas):
    with pytest.raises(UsageError, match="replicas="):
        make(pipelab.GPipe(2, 2), replicas)


@pytest.mark.parametrize("thing", [None, "1f1b", [[F(0), B(0)]], 3, pipelab.GPipe])
def test_only_a_schedule_or_a_plan_can_be_replicated(thing):
    with pytest.raises(TypeError, match="expected a"):
        replicate(thing, 2)


def test_a_memory_cap_is_checked_on_every_replica():
    both = replicate(pipelab.GPipe(2, 3), 2)
    assert [(fault.rank, fault.action) for fault in check(both, memory_cap=[3, 3, 3, 2])] == [(3, F(5, 1))]


# Simulated without laying out each replica


def alike(schedule, cost, replicas):
    """Assert that one replica's simulation is what the first of all of them does, and that all do the same."""
    alone, whole = simulate(schedule, cost, replicas=replicas), simulate(replicate(schedule, replicas), cost)
    assert (whole.starts, whole.ends) == (alone.starts * replicas, alone.ends * replicas)
    assert (alone.makespan, alone.bubble) == (whole.makespan, pytest.approx(whole.bubble))
    assert alone.peak_activations * replicas == whole.peak_activations
    kinds, laid_out = (
        [[(half.kind, half.stage) for item in row for half in oracle.halves(item)] for row in trace.plan.rows]
        for trace in (alone, whole)
    )
    assert kinds * replicas == laid_out


@every_schedule
@OF_EACH
@given(
    sizes(), costs(), costs(), st.sampled_from([0, 0.5, 7]), st.sampled_from([0, 0.5]), st.none() | costs(),
    st.integers(2, 4),
)  # fmt: skip
def test_one_replica_does_what_all_of_them_do(name, size, forward, backward, reduce, latency, pair, replicas):
    kind = schedules[name]
    size = size if kind.refusal(*size) is None else (2, 4)
    cost = Cost(forward=forward, backward=backward, all_reduce=reduce, latency=latency, pair=pair)
    alike(kind(*size), cost, replicas)


@given(legal_cases(), costs(), costs(), st.sampled_from([0, 0.5, 7]), st.integers(2, 3))
def test_one_replica_of_any_plan_does_what_all_of_them_do(case, forward, backward, reduce, replicas):
    alike(case.plan, Cost(forward=forward, backward=backward, all_reduce=reduce, per="stage"), replicas)


def test_sixty_four_replicas_take_one_pipelines_time_and_an_all_reduce_of_each_stage():
    schedule = pipelab.Interleaved1F1B(4, 32, 4)
    trace = simulate(schedule, Cost(all_reduce=16), replicas=64)
    assert sum(item.kind == "R" for row in trace.plan.rows for item in row) == schedule.stages == 16
    assert trace.makespan == simulate(schedule).makespan + 16  # a rank's four all-reduces, 16 / 4 each
    assert "1 of 64 replicas" in trace.name
