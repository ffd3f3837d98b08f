"""Every schedule in the catalogue: legal at every size it accepts, as long and as heavy as its formulas say."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import oracle
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import SIZES, costs, sizes

import pipelab
from pipelab import Cost, ScheduleError, schedules, simulate
from pipelab.catalogue.looped import Looped
from pipelab.catalogue.v_shape import VShaped
from pipelab.errors import SizeError

# Which sizes up to 6 ranks x 12 micro-batches a schedule accepts.
ACCEPTS = {
    "naive": lambda *_: True,
    "gpipe": lambda *_: True,
    "1f1b": lambda *_: True,
    "delayed": lambda *_: True,
    "interleaved-1f1b": lambda *_: True,
    "looped-bfs": lambda *_: True,
    "zb-h1": lambda *_: True,
    "zb-h2": lambda *_: True,
    "interleaved-zb": lambda *_: True,
    "zbv": lambda *_: True,
    "dualpipev": lambda *_: True,
    "greedy": lambda *_: True,
    "dualpipe": lambda ranks, microbatches: ranks % 2 == 0 and microbatches % 2 == 0 and microbatches >= 2 * ranks,
}


def any_times():
    """(F, I, W), whatever they are."""
    return st.tuples(costs(), costs(), costs())


def equal_times():
    """F = I = W, as the zero bubble papers draw it."""
    return costs().map(lambda time: (time, time, time))


def light_weights():
    """F = I >= W: attention has no weights, so the weight gradient is the least work."""
    return st.tuples(costs(), costs()).map(lambda pair: (max(pair), max(pair), min(pair)))


@dataclass(frozen=True)
class Formula:
    """The closed forms of a schedule.

    They are functions of P ranks, v stages on each, M micro-batches, of which the longest round has L, and of the times
    of a rank's share of the model: F, I and W, with B = I + W and T = F + B; the peak also of the rank r.
    """

    makespan: Callable[[SimpleNamespace], float]
    peak: Callable[[SimpleNamespace], int]
    times: Callable[[], st.SearchStrategy] = any_times
    """For which (F, I, W) the makespan holds."""
    enough: Callable[[SimpleNamespace], int] = lambda _: 1
    """From how many micro-batches on the makespan holds."""


FORMULAS = {
    # One rank works at a time: Huang et al. 2019 (arXiv:1811.06965), figure 2b.
    "naive": Formula(lambda n: n.M * n.P * n.T, lambda _: 1),
    # Huang et al. 2019 (arXiv:1811.06965), section 2.3: bubble O((K-1)/(M+K-1)), all micro-batches stored.
    "gpipe": Formula(lambda n: (n.M + n.P - 1) * n.T, lambda n: n.M),
    # Narayanan et al. 2021 (arXiv:2104.04473), section 2.2.1: GPipe's bubble, at most as many in flight as stages.
    "1f1b": Formula(lambda n: (n.M + n.P - 1) * n.T, lambda n: min(n.M, n.P - n.r)),
    # The course's single loop on every rank: the ranks wait for each other nearly as in naive.
    "delayed": Formula(
        lambda n: (n.P * (n.M - 1) + 1) * n.T if n.M > 1 else n.P * n.T,
        lambda n: min(n.M, 2),
    ),
    # Narayanan et al. 2021 (arXiv:2104.04473), section 2.2.2: the bubble shrinks by v, for M >= P. The rest is counted
    # from the order: with fewer micro-batches than ranks, a rank waits for them to come round; the warm-up's forwards
    # and one more are held.
    "interleaved-1f1b": Formula(
        lambda n: (max(n.M, n.P) + (min(n.M, n.P) - 1) / n.v) * n.T,
        lambda n: min(n.v * n.M, (n.v - 1) * n.L + 2 * (n.P - 1 - n.r) + 1),
    ),
    # Lamy-Poirier 2022 (arXiv:2211.05953), section 4: the same bubble, all micro-batches of all stages stored.
    "looped-bfs": Formula(lambda n: (max(n.M, n.P) + (min(n.M, n.P) - 1) / n.v) * n.T, lambda n: n.v * n.M),
    # Qi et al. 2023 (arXiv:2401.10241), table 2: bubble (p - 1)(F + I - W), which holds for M >= P and W <= F, I; the
    # minima extend it to all sizes and times. Section 2.1: as many in flight on every rank as on 1F1B's first.
    "zb-h1": Formula(
        lambda n: n.M * n.T + (n.P - 1) * (n.F + n.I) - (min(n.M, n.P) - 1) * min(n.F, n.I, n.W),
        lambda n: min(n.M, n.P),
    ),
    # Qi et al. 2023 (arXiv:2401.10241), section 2.2, with table 2's (p - 1)(F + I - 2W) in each rank's own span (see
    # SPANS); the makespan adds that the ranks start F after one another.
    "zb-h2": Formula(
        lambda n: n.M * n.T + (n.P - 1) * max(n.F, n.I - n.F, n.F + n.I - 2 * n.W),
        lambda n: min(n.M, 2 * n.P - 1),
        enough=lambda n: 2 * n.P - 1,
    ),
    # ZB-H1's bubble, divided by v as interleaved 1F1B's is.
    "interleaved-zb": Formula(
        lambda n: n.M * n.T + (n.P - 1) / n.v * (n.F + n.I - min(n.F, n.I, n.W)),
        lambda n: min(n.v * n.M, (n.v - 1) * n.L + n.P),
        enough=lambda n: n.P,
    ),
    # Qi et al. 2023 (arXiv:2401.10241), section 6: no bubble in a rank's own span (see SPANS) and 1F1B's memory, 2P
    # half stages, for F = I = W. What lighter weight gradients cost is counted from the order.
    "zbv": Formula(
        lambda n: n.M * n.T + (n.P - 1) * max(n.F / 2, n.F - n.W),
        lambda n: min(2 * n.M, n.M + 1 + n.r, 2 * n.P),
        times=light_weights,
        enough=lambda n: 2 * n.P - 1,
    ),
    # A pair as a forward, then a backward, counted from the order; as one slot, see the test of DeepSeek's formula.
    # DeepSeek-AI 2024 (arXiv:2412.19437), table 2: PP + 1 activations for PP = 2P stages.
    "dualpipev": Formula(
        lambda n: n.M * n.T + (n.P - 1) * (n.F + n.I - n.W) / 2,
        lambda n: min(2 * n.M, n.M + 1 + n.r, 2 * n.P + 1),
        times=light_weights,
        enough=lambda n: 2 * n.P,
    ),
}

# How much longer than its work a rank's own span is, from as many micro-batches on as above.
SPANS = {
    # Qi et al. 2023 (arXiv:2401.10241), table 2: (p - 1)(F + I - 2W) on the first rank, where that is positive and the
    # next forward is there in time.
    "zb-h2": (any_times, lambda n: (n.P - 1 - n.r) * max(0, n.I - n.F, n.F + n.I - 2 * n.W)),
    "zbv": (light_weights, lambda n: (n.P - 1 - n.r) * (n.F - n.W)),
}


def numbers(schedule, times=(1, 1, 1)):
    """Return what the formulas are functions of, but for the rank."""
    forward, inputs, weights = times
    return SimpleNamespace(
        P=schedule.ranks,
        v=schedule.stages_per_rank,
        M=schedule.microbatches,
        L=max(map(len, schedule.rounds)) if isinstance(schedule, Looped) else None,
        F=forward,
        I=inputs,
        W=weights,
        B=inputs + weights,
        T=forward + inputs + weights,
    )


def split_cost(forward, inputs, weights, **more):
    """Return the cost of these times."""
    return Cost(forward=forward, backward=inputs + weights, input_grad=inputs, weight_grad=weights, **more)


def exactly(value):
    """Equal but for the rounding of fractions such as a third of a rank's time."""
    return pytest.approx(value, rel=1e-12, abs=1e-12)


@st.composite
def schedules_of(draw, name, enough=lambda _: 1):
    """A schedule of one kind, with one to three stages per rank where it takes any number."""
    kind = schedules[name]
    more = {"stages_per_rank": draw(st.integers(1, 3))} if issubclass(kind, Looped) else {}
    ranks, microbatches = draw(sizes())
    least = enough(SimpleNamespace(P=ranks))
    return kind(ranks, max(microbatches, least + microbatches % 3), **more)


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
@given(data=st.data())
def test_makespan_and_bubble_are_the_closed_forms(name, data):
    formula = FORMULAS[name]
    schedule = data.draw(schedules_of(name, formula.enough))
    n = numbers(schedule, data.draw(formula.times()))
    trace = simulate(schedule, split_cost(n.F, n.I, n.W))
    assert trace.makespan == exactly(formula.makespan(n))
    assert trace.bubble == exactly(1 - n.M * n.T / formula.makespan(n))


@pytest.mark.parametrize("name", sorted(FORMULAS))
@given(data=st.data())
def test_peak_activations_are_the_closed_forms(name, data):
    schedule = data.draw(schedules_of(name))
    n = numbers(schedule)
    expected = tuple(FORMULAS[name].peak(SimpleNamespace(**vars(n), r=rank)) for rank in range(n.P))
    assert simulate(schedule).peak_activations == expected


@pytest.mark.parametrize("name", sorted(SPANS))
@given(data=st.data())
def test_each_ranks_own_span_is_the_closed_form(name, data):
    times, wait = SPANS[name]
    schedule = data.draw(schedules_of(name, FORMULAS[name].enough))
    n = numbers(schedule, data.draw(times()))
    spans = simulate(schedule, split_cost(n.F, n.I, n.W)).spans
    assert spans == exactly(tuple(n.M * n.T + wait(SimpleNamespace(**vars(n), r=rank)) for rank in range(n.P)))


@given(sizes(), equal_times())
def test_no_rank_of_zb_h2_or_zbv_ever_waits_once_it_has_begun_if_all_times_are_equal(size, times):
    ranks, microbatches = size
    for kind in (pipelab.ZBH2, pipelab.ZBV):
        trace = simulate(kind(ranks, microbatches + 2 * ranks - 2), split_cost(*times))
        assert trace.spans == exactly(trace.busy)


@given(sizes(), costs(), costs())
def test_zb_h1_and_zb_h2_take_equally_long_from_first_start_to_last_end_if_both_gradients_do(size, one, other):
    forward, gradient = max(one, other), min(one, other)
    ranks, microbatches = size
    cost = split_cost(forward, gradient, gradient)
    early, late = (simulate(kind(ranks, microbatches + 2 * ranks - 2), cost) for kind in (pipelab.ZBH1, pipelab.ZBH2))
    assert early.makespan == exactly(late.makespan)
    # What ZB-H2 gains is that its first rank is done so much earlier than its last one.
    assert late.ends[-1][-1] - late.ends[0][-1] == exactly((ranks - 1) * gradient)
    assert early.ends[0][-1] == exactly(early.makespan)


@given(sizes(), any_times())
def test_splitting_the_backward_is_never_slower_than_1f1b(size, times):
    cost = split_cost(*times)
    whole = simulate(pipelab.OneFOneB(*size), cost).makespan
    assert simulate(pipelab.ZBH1(*size), cost).makespan <= whole
    assert simulate(pipelab.ZBH2(*size), cost).makespan <= whole


@given(sizes())
def test_zb_h1_has_a_third_of_1f1bs_bubble_in_the_memory_of_its_first_rank(size):
    ranks, microbatches = size
    microbatches += ranks - 1
    plain, split = (simulate(kind(ranks, microbatches)) for kind in (pipelab.OneFOneB, pipelab.ZBH1))
    work = 3 * microbatches
    assert split.makespan - work == (plain.makespan - work) / 3
    assert max(split.peak_activations) == max(plain.peak_activations)


@given(sizes())
def test_with_few_microbatches_zb_h1_is_never_slower_than_zb_h2_if_all_times_are_equal(size):
    ranks, microbatches = size
    assume(microbatches < 2 * ranks - 1)
    assert simulate(pipelab.ZBH1(*size)).makespan <= simulate(pipelab.ZBH2(*size)).makespan


def test_with_few_microbatches_zb_h2_may_be_quicker_if_the_inputs_gradient_takes_longer():
    early, late = (simulate(kind(4, 6), split_cost(1, 2, 1)).makespan for kind in (pipelab.ZBH1, pipelab.ZBH2))
    assert late < early


@given(sizes())
def test_zbv_holds_no_larger_a_share_of_the_batch_than_1f1bs_first_rank(size):
    shares = [pipelab.compare(simulate(kind(*size))).rows[0].peak_share for kind in (pipelab.ZBV, pipelab.OneFOneB)]
    assert max(shares[0]) <= max(shares[1])


@pytest.mark.parametrize(
    ("times", "waits"),
    [
        ((1, 1, 1), (0, 0, 0, 0)),
        ((2, 2, 1), (3, 2, 1, 0)),
        ((2, 1, 1), (3, 2, 1.5, 1)),
        ((1, 2, 1), (3, 2.5, 2, 1.5)),
        ((1, 1, 2), (0, 0, 0.5, 1)),
        ((12, 14, 9), (15, 11, 7, 3)),
    ],
)
def test_zbvs_fixed_order_waits_where_times_differ(times, waits):
    trace = simulate(pipelab.ZBV(4, 16), split_cost(*times))
    assert tuple(span - 16 * sum(times) for span in trace.spans) == waits


@given(sizes(), light_weights(), st.sampled_from([0, 0.25, 0.5, 1]))
def test_dualpipev_waits_as_deepseeks_formula_says_if_a_pair_is_one_slot(size, times, overlap):
    """DeepSeek-AI 2024 (arXiv:2412.19437), table 2, for a V of P ranks, per stage: (P - 1)(F&B + B - 3W).

    It is the last two ranks' wait. Each rank before them has one pair less to save time with, and waits so much less.
    """
    ranks, microbatches = size
    microbatches += 2 * ranks - 1
    forward, inputs, weights = times
    backward = inputs + weights
    saved = overlap * min(forward, backward)
    together = forward + backward - saved
    trace = simulate(pipelab.DualPipeV(ranks, microbatches), split_cost(*times, pair=together, per="stage"))
    wait = (ranks - 1) * (together + backward - 3 * weights)
    assert trace.makespan == exactly(
        2 * microbatches * (forward + backward) - (2 * microbatches - 2 * ranks - 1) * saved + wait
    )
    idle = tuple(trace.makespan - busy for busy in trace.busy)
    assert idle == exactly(tuple(wait - max(0, ranks - 2 - rank) * saved for rank in range(ranks)))


@given(sizes(), costs(), costs())
def test_gpipe_and_1f1b_share_the_bubble_of_the_papers(size, forward, backward):
    ranks, microbatches = size
    for kind in (pipelab.GPipe, pipelab.OneFOneB):
        trace = simulate(kind(*size), Cost(forward=forward, backward=backward))
        assert trace.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1), abs=1e-12)


def test_with_transfer_latency_1f1b_is_slower_than_gpipe():
    cost = Cost(forward=1, backward=2, latency=0.5)
    assert simulate(pipelab.OneFOneB(4, 8), cost).makespan > simulate(pipelab.GPipe(4, 8), cost).makespan


def test_dualpipevs_pairs_can_be_one_slot_at_every_size():
    for size in SIZES:
        trace = simulate(pipelab.DualPipeV(*size), Cost(pair=2.5))
        assert trace.makespan <= simulate(pipelab.OneFOneB(*size)).makespan


@given(sizes())
def test_interleaved_zero_bubble_with_one_stage_per_rank_is_zb_h1(size):
    assert pipelab.InterleavedZeroBubble(*size, stages_per_rank=1).plan().rows == pipelab.ZBH1(*size).plan().rows


@pytest.mark.parametrize("name", [name for name, kind in schedules.items() if issubclass(kind, Looped)])
def test_looping_schedules_hold_two_stages_per_rank_unless_told_otherwise(name):
    assert schedules[name](3, 4).stages == 6
    for stages_per_rank in (1, 2, 3, 4):
        for size in SIZES:
            schedule = schedules[name](*size, stages_per_rank=stages_per_rank)
            plan = schedule.plan()
            assert plan.stages == size[0] * stages_per_rank
            assert oracle.legal(plan.rows, plan.stages, plan.microbatches, schedule.place)


@given(sizes())
def test_rounds_hold_every_microbatch_once_and_differ_by_one_at_most(size):
    ranks, microbatches = size
    rounds = pipelab.Interleaved1F1B(*size).rounds
    assert [m for each in rounds for m in each] == list(range(microbatches))
    lengths = list(map(len, rounds))
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths) - min(lengths) <= 1
    assert min(lengths) >= min(ranks, microbatches)


V_SHAPES = [name for name, kind in schedules.items() if issubclass(kind, VShaped)]


@pytest.mark.parametrize("name", V_SHAPES)
def test_v_shapes_go_down_the_ranks_and_back_up(name):
    assert [schedules[name](3, 4).place(0, stage) for stage in range(6)] == [0, 1, 2, 2, 1, 0]


@pytest.mark.parametrize("name", V_SHAPES)
@pytest.mark.parametrize("stages_per_rank", [1, 3, None])
def test_v_shapes_say_that_they_have_two_stages_per_rank(name, stages_per_rank):
    with pytest.raises(
        SizeError, match=rf"stages_per_rank={stages_per_rank}: {schedules[name].__name__} needs exactly 2"
    ):
        schedules[name](4, 8, stages_per_rank=stages_per_rank)


@given(sizes())
def test_dualpipev_overlaps_all_but_the_first_and_last_few_actions(size):
    ranks, microbatches = size
    microbatches += 2 * ranks - 1
    for rank, row in enumerate(pipelab.DualPipeV(ranks, microbatches).plan().rows):
        pairs = sum(isinstance(item, pipelab.Pair) for item in row)
        assert pairs == 2 * microbatches - 3 * ranks + rank + 1 - (rank == ranks - 1)


@every_schedule
def test_every_schedule_names_its_source(name):
    assert len(schedules[name].source) > 20


def test_the_tables_of_the_reference_have_every_schedule_and_what_simulate_gives():
    page = (Path(__file__).parents[1] / "docs" / "reference" / "schedules.md").read_text(encoding="utf-8")
    formulas, figures = ({}, {})
    for name, cells in re.findall(r"^\| `([\w-]+)` \| (.*) \|$", page, re.MULTILINE):
        (figures if name in formulas else formulas)[name] = cells.split(" | ")
    assert list(formulas) == list(figures) == list(schedules)
    for name, cells in figures.items():
        (row,) = pipelab.compare(simulate(schedules[name](4, 8))).rows
        share = f"{100 * max(row.peak_share) + 1e-9:.0f} %"
        peaks = " ".join(map(str, row.peak_activations))
        assert cells == [f"{row.makespan:g}", f"{100 * row.bubble:.1f} %", peaks, share]


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


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [("1F1B", "1f1b"), ("OneFOneB", "1f1b"), ("zb_h1", "zb-h1"), ("GPipe", "gpipe"), ("zbh2", "zb-h2")],
)
def test_a_name_that_is_not_registered_is_told_with_the_nearest(asked, nearest):
    with pytest.raises(KeyError) as refusal:
        _ = schedules[asked]
    assert isinstance(refusal.value, pipelab.UnknownScheduleError)
    first, registered = str(refusal.value).splitlines()
    assert first == f"{asked!r} is no registered schedule; did you mean {nearest}?"
    assert registered == f"  registered: {', '.join(schedules)}"


def test_a_name_that_is_near_to_none_is_told_without_a_guess():
    with pytest.raises(KeyError, match=r"^'quantum' is no registered schedule\n"):
        _ = schedules["quantum"]
    with pytest.raises(KeyError, match=r"^7 is no registered schedule\n"):
        _ = schedules[7]


def test_schedules_are_looked_for_as_in_any_dict():
    assert "1F1B" not in schedules
    assert schedules.get("1F1B") is None
    assert schedules.get("1f1b") is pipelab.OneFOneB
