"""Every schedule in the catalogue: legal at every size it accepts, as long and as heavy as its formulas say."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import SIZES, costs, sizes

import pipelab
from pipelab import Cost, ScheduleError, schedules, simulate

# Which sizes up to 6 ranks x 12 micro-batches a schedule accepts.
ACCEPTS = {
    "naive": lambda *_: True,
    "gpipe": lambda *_: True,
    "1f1b": lambda *_: True,
    "delayed": lambda *_: True,
    "greedy": lambda *_: True,
    "dualpipe": lambda ranks, microbatches: ranks % 2 == 0 and microbatches % 2 == 0 and microbatches >= 2 * ranks,
}

# (makespan, peak activations of rank r) for P ranks, M micro-batches, forward F, backward B.
FORMULAS = {
    # One rank works at a time: Huang et al. 2019 (arXiv:1811.06965), figure 2b.
    "naive": (lambda n: n.M * n.P * (n.F + n.B), lambda _: 1),
    # Huang et al. 2019 (arXiv:1811.06965), section 2.3: bubble O((K-1)/(M+K-1)), all micro-batches stored.
    "gpipe": (lambda n: (n.M + n.P - 1) * (n.F + n.B), lambda n: n.M),
    # Narayanan et al. 2021 (arXiv:2104.04473), section 2.2.1: GPipe's bubble, at most as many in flight as stages.
    "1f1b": (lambda n: (n.M + n.P - 1) * (n.F + n.B), lambda n: min(n.M, n.P - n.r)),
    # The course's single loop on every rank: the ranks wait for each other nearly as in naive.
    "delayed": (
        lambda n: (n.P * (n.M - 1) + 1) * (n.F + n.B) if n.M > 1 else n.P * (n.F + n.B),
        lambda n: min(n.M, 2),
    ),
}


def accepted(name):
    return [size for size in SIZES if schedules[name].refusal(*size) is None]


every_schedule = pytest.mark.parametrize("name", sorted(schedules))


def test_every_schedule_has_a_line_in_the_table_of_sizes():
    assert set(ACCEPTS) == set(schedules)


def test_every_line_of_the_formulas_is_a_schedule():
    assert set(FORMULAS) <= set(schedules)


@every_schedule
def test_every_schedule_accepts_the_sizes_of_the_table_and_no_others(name):
    kind = schedules[name]
    for size in SIZES:
        accepts = ACCEPTS[name](*size)
        reason = kind.refusal(*size)
        assert (reason is None) == accepts, f"{name} at {size}: {reason}"
        if accepts:
            assert kind(*size).plan().microbatches == size[1]
        else:
            assert any(character.isdigit() for character in reason), "a refusal names the nearest sizes that can"
            with pytest.raises(ScheduleError) as refusal:
                kind(*size).plan()
            assert [(fault.code, fault.message) for fault in refusal.value.faults] == [("refused", reason)]


@every_schedule
def test_every_schedule_runs_each_microbatch_once_through_each_stage_in_a_legal_order(name):
    for size in accepted(name):
        schedule = schedules[name](*size)
        plan = schedule.plan()
        assert (plan.ranks, plan.microbatches, plan.stages) == (*size, schedule.stages)
        assert oracle.legal(plan.rows, plan.stages, plan.microbatches, schedule.place), f"{name} at {size}"
        counts = Counter(half.kind for row in plan.rows for item in row for half in oracle.halves(item))
        whole = plan.stages * plan.microbatches
        assert counts["F"] == whole
        assert counts["B"] + counts["I"] == whole
        assert counts["I"] == counts["W"]


@every_schedule
@given(size=sizes(), forward=costs(), backward=costs(), latency=st.sampled_from([0, 0.5, 3]))
def test_every_schedule_is_simulated_within_every_dependency(name, size, forward, backward, latency):
    if schedules[name].refusal(*size) is not None:
        return
    plan = schedules[name](*size).plan()
    trace = simulate(plan, Cost(forward=forward, backward=backward, latency=latency))
    at = {event.action: event for event in trace.events}
    for giver, needer, edge in plan.graph().edges(data=True):
        travels = edge["kind"] == "data" and needer.kind != "R"  # an all-reduce's own time is that of its transfers
        crosses = travels and at[giver].rank != at[needer].rank
        assert at[needer].start >= at[giver].end + latency * crosses
    assert trace.makespan == max(event.end for event in trace.events)
    assert 0 <= trace.bubble < 1


@every_schedule
@given(size=sizes(), forward=costs(), backward=costs())
def test_every_schedule_does_the_same_work(name, size, forward, backward):
    if schedules[name].refusal(*size) is not None:
        return
    ranks, microbatches = size
    trace = simulate(schedules[name](*size), Cost(forward=forward, backward=backward))
    assert sum(trace.busy) == pytest.approx(ranks * microbatches * (forward + backward))
    assert trace.makespan >= max(trace.busy)


@pytest.mark.parametrize("name", sorted(FORMULAS))
@given(size=sizes(), forward=costs(), backward=costs())
def test_makespan_bubble_and_peak_are_the_closed_forms(name, size, forward, backward):
    ranks, microbatches = size
    makespan, peak = FORMULAS[name]
    trace = simulate(schedules[name](*size), Cost(forward=forward, backward=backward))
    n = SimpleNamespace(P=ranks, M=microbatches, F=forward, B=backward)
    expected = makespan(n)
    assert trace.makespan == expected
    assert trace.bubble == pytest.approx(1 - microbatches * (forward + backward) / expected, abs=1e-12)
    assert trace.peak_activations == tuple(
        peak(SimpleNamespace(P=ranks, M=microbatches, r=rank)) for rank in range(ranks)
    )


@given(sizes(), costs(), costs())
def test_gpipe_and_1f1b_share_the_bubble_of_the_papers(size, forward, backward):
    ranks, microbatches = size
    for kind in (pipelab.GPipe, pipelab.OneFOneB):
        trace = simulate(kind(*size), Cost(forward=forward, backward=backward))
        assert trace.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1), abs=1e-12)


def test_with_transfer_latency_1f1b_is_slower_than_gpipe():
    cost = Cost(forward=1, backward=2, latency=0.5)
    assert simulate(pipelab.OneFOneB(4, 8), cost).makespan > simulate(pipelab.GPipe(4, 8), cost).makespan


@every_schedule
def test_every_schedule_names_its_source(name):
    assert len(schedules[name].source) > 20


# The drawings in the docstrings

LANE = re.compile(r"^rank (\d+) \| ?(.*?)\s*$", re.MULTILINE)


def drawing(trace):
    """Draw a trace in fixed width: three columns for each unit of time, four where a name has a stage.

    Every action starts with its name; a line leads on to its end. Two that share a slot are joined.
    """
    named = trace.plan.stages > trace.ranks
    wide = 4 if named else 3
    lanes = []
    for rank in range(trace.ranks):
        slots = {}
        for event in trace.events_of(rank):
            if event.action.kind == "R":  # of no length, unless it is given a cost
                continue
            name = str(event.action if named else replace(event.action, stage=None))
            slots.setdefault((event.start, event.end), []).append(name)
        lane = ""
        for (start, end), names in slots.items():
            lane = f"{lane:{round(wide * start)}}{'&'.join(names):─<{round(wide * (end - start)) - 1}}"
        lanes.append(lane)
    return lanes


def drawn_trace(kind, ranks, microbatches):
    """Return what the docstrings draw: F, B, I and W take one unit; a B beside them, and a pair, all their parts'."""
    plan = kind(ranks, microbatches).plan()
    split = any(half.kind == "I" for row in plan.rows for item in row for half in oracle.halves(item))
    return simulate(plan, Cost(forward=1, backward=2 if split else 1, pair=3, per="stage"))


@every_schedule
def test_the_drawing_in_every_docstring_is_what_simulate_gives(name):
    kind = schedules[name]
    drawn = [(int(rank), lane) for rank, lane in LANE.findall(inspect.getdoc(kind).replace("    rank", "rank"))]
    if name in FORMULAS:
        assert drawn, f"the docstring of {kind.__name__} draws no `rank 0 | …`"
    if not drawn:
        pytest.skip("no drawing")
    assert [rank for rank, _ in drawn] == list(range(len(drawn)))
    microbatches = 1 + max(int(number) for _, lane in drawn for number in re.findall(r"[FBIW](\d+)", lane))
    assert [lane for _, lane in drawn] == drawing(drawn_trace(kind, len(drawn), microbatches))
