"""Every schedule in the catalogue: legal at every size it accepts, drawn as it is."""

from __future__ import annotations

import inspect
import itertools
import re
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import oracle
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import SIZES, costs, sizes
from tiers import sampled

import pipelab
from pipelab import Cost, ScheduleError, schedules, simulate
from pipelab.catalogue import moving
from pipelab.catalogue.bases import SingleStage, VShaped
from pipelab.errors import UsageError


def equal_times():
    """F = I = W, as the zero bubble papers draw it."""
    return costs().map(lambda time: (time, time, time))


def split_cost(forward, inputs, weights, **more):
    """Return the cost of these times."""
    return Cost(forward=forward, backward=inputs + weights, input_grad=inputs, weight_grad=weights, **more)


def exactly(value):
    """Equal but for the rounding of fractions such as a third of a rank's time."""
    return pytest.approx(value, rel=1e-12, abs=1e-12)


def accepted(name):
    return [size for size in SIZES if schedules[name].refusal(*size) is None]


every_schedule = pytest.mark.parametrize("name", sorted(schedules))


def meets_its_needs(kind, ranks, microbatches, per_rank):
    values = {"P": ranks, "M": microbatches, "v": per_rank}
    return all(eval(formula, {}, values) for formula in kind.needs.values())  # noqa: S307 - our own formulas


@every_schedule
def test_every_schedule_accepts_the_sizes_that_meet_its_needs_and_no_others(name):
    kind = schedules[name]
    usual = kind(4, 8).stages_per_rank
    for size in sampled(product(range(1, 9), range(1, 17))):
        accepts = meets_its_needs(kind, *size, usual)
        reason = kind.refusal(*size)
        assert (reason is None) == accepts, f"{name} at {size}: {reason}"
        if accepts:
            assert kind(*size).plan().microbatches == size[1]
        else:
            assert any(character.isdigit() for character in reason), "a refusal names the nearest sizes that can"
            with pytest.raises(ScheduleError) as refusal:
                kind(*size).plan()
            assert [(fault.code, fault.message) for fault in refusal.value.faults] == [("refused", reason)]


@pytest.mark.sweep
@every_schedule
@pytest.mark.parametrize("per_rank", range(1, 5))
def test_every_schedule_accepts_the_stages_per_rank_that_meet_its_needs(name, per_rank):
    kind = schedules[name]
    if meets_its_needs(kind, 4, 8, per_rank):
        assert kind(4, 8, per_rank).plan().ranks == 4
    else:
        with pytest.raises(UsageError, match=f"stages_per_rank={per_rank}"):
            kind(4, 8, per_rank)


@every_schedule
def test_every_schedule_runs_each_microbatch_once_through_each_stage(name):
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
    assert len(schedules[name].source) > 20


@given(sizes(), equal_times())
def test_no_rank_of_zb_h2_or_zbv_ever_waits_once_it_has_begun_if_all_times_are_equal(size, times):
    ranks, microbatches = size
    for kind in (pipelab.ZBH2, pipelab.ZBV):
        trace = simulate(kind(ranks, microbatches + 2 * ranks - 2), split_cost(*times))
        assert trace.spans == exactly(trace.busy)


@given(sizes(), st.tuples(costs(), costs(), costs()))
def test_splitting_the_backward_is_never_slower_than_1f1b(size, times):
    cost = split_cost(*times)
    whole = simulate(pipelab.OneFOneB(*size), cost).makespan
    assert simulate(pipelab.ZBH1(*size), cost).makespan <= whole
    assert simulate(pipelab.ZBH2(*size), cost).makespan <= whole


@given(sizes())
def test_with_few_microbatches_zb_h1_is_never_slower_if_all_times_are_equal(size):
    ranks, microbatches = size
    assume(microbatches < 2 * ranks - 1)
    assert simulate(pipelab.ZBH1(*size)).makespan <= simulate(pipelab.ZBH2(*size)).makespan


@given(sizes())
def test_interleaved_zero_bubble_with_one_stage_per_rank_is_zb_h1(size):
    assert pipelab.InterleavedZeroBubble(*size, stages_per_rank=1).plan().rows == pipelab.ZBH1(*size).plan().rows


@given(sizes())
def test_rounds_hold_every_microbatch_once_and_differ_by_one_at_most(size):
    ranks, microbatches = size
    rounds = pipelab.Interleaved1F1B(*size).rounds
    assert [m for each in rounds for m in each] == list(range(microbatches))
    lengths = list(map(len, rounds))
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths) - min(lengths) <= 1
    assert min(lengths) >= min(ranks, microbatches)
    number = [index for index, each in enumerate(rounds) for _ in each]
    for row, kind in itertools.product(pipelab.Interleaved1F1B(*size).plan().rows, "FB"):
        numbers = [number[action.microbatch] for action in row if action.kind == kind]
        assert numbers == sorted(numbers)


@pytest.mark.parametrize("name", [name for name, kind in schedules.items() if issubclass(kind, VShaped)])
def test_v_shapes_go_down_the_ranks_and_back_up_and_have_two_stages_per_rank(name):
    kind = schedules[name]
    assert [kind(3, 4).place(0, stage) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    for stages_per_rank in (1, 3, None):
        with pytest.raises(UsageError, match=rf"={stages_per_rank}: {kind.__name__} needs exactly 2"):
            kind(4, 8, stages_per_rank=stages_per_rank)


@pytest.mark.parametrize(("name", "stages_per_rank"), [("gems", 1), ("bitpipe", 2)])
def test_only_the_middle_one_of_an_odd_number_of_ranks_shares_its_stages_with_no_other(name, stages_per_rank):
    replicas = schedules[name](5, 4).plan().replicas
    assert [stage for stage, ranks in replicas.items() if len(ranks) == 1] == [2, 7][:stages_per_rank]
    assert {ranks for ranks in replicas.values() if len(ranks) == 1} == {(2,)}


@pytest.mark.parametrize("name", [name for name, kind in schedules.items() if issubclass(kind, SingleStage)])
def test_single_stage_schedules_refuse_more_and_name_what_has_more(name):
    kind = schedules[name]
    for stages_per_rank in (2, 3):
        told = f"stages_per_rank={stages_per_rank}: {kind.__name__} has exactly 1"
        with pytest.raises(UsageError, match=re.escape(told)) as caught:
            kind(4, 8, stages_per_rank=stages_per_rank)
        assert schedules[str(caught.value).rpartition(" ")[2]](4, 8, stages_per_rank=2).plan().stages == 8


def test_a_students_class_may_give_a_single_stage_schedule_more_stages():
    class Twice(pipelab.GPipe):
        def actions(self, rank):
            yield from pipelab.LoopedBFS(self.ranks, self.microbatches, self.stages_per_rank).actions(rank)

    in_the_class = type("InTheClass", (Twice,), {"stages_per_rank": 2})
    for schedule in (in_the_class(2, 3), Twice(2, 3, stages_per_rank=2)):
        assert schedule.plan().rows == pipelab.LoopedBFS(2, 3).plan().rows


@given(sizes())
def test_dualpipev_overlaps_all_but_the_first_and_last_few_actions(size):
    ranks, microbatches = size
    microbatches += 2 * ranks - 1
    for rank, row in enumerate(pipelab.DualPipeV(ranks, microbatches).plan().rows):
        pairs = sum(isinstance(item, pipelab.Pair) for item in row)
        assert pairs == 2 * microbatches - 3 * ranks + rank + 1 - (rank == ranks - 1)


def test_the_table_of_the_reference_has_every_schedule_and_what_simulate_gives():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "schedules.md").read_text(encoding="utf-8")
    table = page.partition("| makespan | bubble | peak | of the batch |")[2].partition("\n\n")[0]
    figures = dict(re.findall(r"^\| `([\w-]+)` \| (.*) \|$", table, re.MULTILINE))
    assert list(figures) == list(schedules)
    for name, cells in figures.items():
        (row,) = pipelab.compare(simulate(schedules[name](4, 8))).rows
        share = f"{100 * max(row.peak_share) + 1e-9:.0f} %"
        peaks = " ".join(map(str, row.peak_activations))
        assert cells == f"{row.makespan:g} | {100 * row.bubble:.1f} % | {peaks} | {share}"


def gathers(plan):
    """Return how often each rank gathers weights."""
    return [
        sum(move.action.kind == "UNSHARD" for move in plan.bound.moves if move.rank == r) for r in range(plan.ranks)
    ]


def test_the_references_table_of_gathers_is_what_with_gathers_and_simulate_give():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "schedules.md").read_text(encoding="utf-8")
    table = page.partition("| schedule | gathers, room for 1 ")[2].partition("\n\n")[0]
    figures = re.findall(r"^\| `([\w-]+)`.*? \| (.*) \|$", table, re.MULTILINE)
    assert len(figures) == 4
    for name, cells in figures:
        sharded = [pipelab.with_gathers(schedules[name](4, 32, 4), room) for room in (1, 2, 3)]
        trace = simulate(sharded[1], Cost(gather=1))
        found = [*(sum(gathers(plan)) for plan in sharded), trace.makespan, max(trace.peak_activations)]
        assert cells == " | ".join(f"{each:g}" for each in found)


def test_bf_pp_gathers_as_rarely_as_a_room_allows_whatever_the_number_of_microbatches():
    for ranks, microbatches, v in product((1, 2, 3), (1, 3, 8), range(1, 6)):
        for room in range(1, v + 1):
            plan = pipelab.with_gathers(pipelab.LoopedBFS(ranks, microbatches, v), room)
            assert gathers(plan) == [2 * v - room] * ranks


def test_zeropp_gathers_at_most_twice_per_stage_and_unit():
    for ranks, units, v in product((1, 2, 3, 4), (1, 2, 3, 4), (2, 3, 4)):
        plan = pipelab.with_gathers(pipelab.ZeroPP(ranks, units * (2 * ranks - 1), v), 1)
        last = units * (2 * v - 2) + 1
        assert gathers(plan) == [last + 2 * (units - 1)] * (ranks - 1) + [last]
        assert last + 2 * (units - 1) < 2 * v * units


def peak_with_what_a_partner_sends(trace, rank):
    """Return the most activations on a rank, its own and its partner's, from an offload's start to a load's end."""
    mine = [(e.start, 1) if e.action.kind == "F" else (e.end, -1) for e in trace.events_of(rank)]
    theirs = [move for move in trace.moves if move.rank == trace.ranks - 1 - rank]
    mine += [(e.start, 1) if e.action.kind == "OFFLOAD" else (e.end, -1) for e in theirs]
    return max(itertools.accumulate(change for _, change in sorted(mine)))


@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_bpipes_claim_holds_where_a_move_takes_no_longer_than_a_forward(microbatches):
    for ranks in range(2, 13):
        size = (ranks, microbatches * ranks + microbatches % 2)
        trace = simulate(pipelab.BPipe(*size), Cost(offload=1, load=1))
        assert trace.makespan == simulate(pipelab.OneFOneB(*size)).makespan
        half = ranks // 2
        peaks = [*trace.peak_activations[:half]]
        peaks += [peak_with_what_a_partner_sends(trace, rank) for rank in range(half, ranks)]
        assert max(peaks) == (ranks + 3) // 2
        assert peaks[half + ranks % 2 :] == [(ranks + 2) // 2] * half


@pytest.mark.parametrize(("name", "size"), [("bpipe", (4, 8)), ("pipe-offload", (2, 4))])
def test_the_row_in_the_docstring_of_what_moves_is_the_plans(name, size):
    kind = moving[name]
    drawn = re.search(r"rank 0 \| (.*?) …", kind.__doc__)[1].split()
    row = kind(*size).plan().rows[0]
    words = [str(each if drawn[0].startswith("0") else replace(each, stage=None)) for each in row]
    assert drawn == words[: len(drawn)]


def test_bpipes_claim_does_not_hold_where_a_move_takes_longer():
    trace = simulate(pipelab.BPipe(8, 24), Cost(offload=2, load=2))
    assert (trace.makespan, simulate(pipelab.OneFOneB(8, 24)).makespan) == (103, 93)
    assert (trace.peak_activations[0], (8 + 3) // 2) == (6, 5)


@pytest.mark.parametrize("v", [1, 2, 3, 4])
def test_offloads_as_quick_as_forwards_cost_no_time_and_hold_what_the_form_says(v):
    for ranks, microbatches in product((1, 2, 3, 5, 8), (1, 4, 5, 8, 16)):
        usual = simulate(pipelab.Interleaved1F1B(ranks, microbatches, v))
        for sent in (None, v):
            trace = simulate(pipelab.PipeOffload(ranks, microbatches, v, sent), Cost(offload=1, load=1))
            assert trace.makespan == exactly(usual.makespan)
            assert sent is None or max(trace.peak_activations) <= 3
    assert simulate(pipelab.Interleaved1F1B(8, 16)).peak_activations[0] == 23
    assert simulate(pipelab.PipeOffload(8, 16), Cost(offload=1, load=1)).peak_activations[0] == 10


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


@pytest.mark.parametrize("name", sorted(schedules.keys() - {"greedy"}))
def test_the_drawing_in_every_docstring_is_what_simulate_gives(name):
    kind = schedules[name]
    drawn = [(int(rank), lane) for rank, lane in LANE.findall(inspect.getdoc(kind).replace("    rank", "rank"))]
    assert drawn, f"the docstring of {kind.__name__} draws no `rank 0 | …`"
    assert [rank for rank, _ in drawn] == list(range(len(drawn)))
    microbatches = 1 + max(int(number) for _, lane in drawn for number in re.findall(r"[FBIW](\d+)", lane))
    assert [lane for _, lane in drawn] == drawing(drawn_trace(kind, len(drawn), microbatches))


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [
        *(("1F1B", "1f1b"), ("OneFOneB", "1f1b"), ("zb_h1", "zb-h1"), ("GPipe", "gpipe"), ("zbh2", "zb-h2")),
        *(("quantum", None), (7, None)),
    ],
)
def test_a_name_that_is_not_registered_is_told_with_the_nearest(asked, nearest):
    assert asked not in schedules
    assert schedules.get(asked) is None
    with pytest.raises(pipelab.UsageError) as refusal:
        _ = schedules[asked]
    first, registered = str(refusal.value).splitlines()
    guess = f"; did you mean {nearest}?" if nearest else ""
    assert first == f"{asked!r} is not a registered schedule{guess}"
    assert registered == f"  registered: {', '.join(schedules)}"
