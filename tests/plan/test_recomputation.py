"""Recomputation within a plan: `C` runs a forward again for its backward; when, and what it costs and saves."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import accumulate

import oracle
import pytest
from tiers import sampled

import pipelab
from pipelab import Action, B, C, Cost, F, I, Memory, Plan, U, W, with_recompute

SIZES = sampled((ranks, microbatches) for ranks in range(1, 11) for microbatches in range(1, 11))
TIMES = [(1, 2, 1), (3, 1, 3), (1, 1, 4), (2, 7, 1)]
"""(F, B, C)."""


def by_rule(rows, stages, microbatches, lasts):
    """Return each rank's peak of activations, and the makespan, from the rule alone; or `None` if it cannot run."""
    flat = [action for row in rows for action in row]
    spans = oracle.clock(rows, stages, microbatches, lasts=lambda action: lasts[action.kind])
    if spans is None or len(set(flat)) < len(flat):
        return None
    again = {(each.microbatch, each.stage) for each in flat if each.kind == "C"}

    def change(action):
        if action.kind == "F":
            return (action.microbatch, action.stage) not in again
        return {"C": 1, "B": -1, "W": -1}.get(action.kind, 0)

    peaks = tuple(max(accumulate(map(change, row)), default=0) for row in rows)
    return peaks, max(end for *_, end in spans)


def drawn(seed):
    """Return a random plan with some `C`, mostly in places where it may be: rows, stages, micro-batches."""
    chance = random.Random(seed)  # noqa: S311 - for tests
    ranks, microbatches = chance.randint(1, 4), chance.randint(1, 6)
    kind = chance.choice([pipelab.OneFOneB, pipelab.GPipe, pipelab.ZBH1, pipelab.Interleaved1F1B])
    if kind is pipelab.Interleaved1F1B:
        microbatches = ranks * chance.randint(1, 2)
    plan = kind(ranks, microbatches).plan()
    rows = [list(row) for row in plan.rows]
    for row in rows:
        for each in [each for each in row if each.kind in "BI" and chance.random() < 0.6]:
            forward, backward = row.index(F(each.microbatch, each.stage)), row.index(each)
            place = chance.randint(forward + 1, backward)
            if chance.random() < 0.05:
                place = chance.randint(0, len(row))
            row.insert(place, C(each.microbatch, each.stage))
    if chance.random() < 0.1:
        row = chance.choice(rows)
        row.insert(chance.randint(0, len(row)), row.pop(chance.randrange(len(row))))
    return rows, plan.stages, microbatches


def agrees(seed):
    """Tell whether pipelab and the oracle say the same of a random plan: if it runs, its makespan and its peaks."""
    rows, stages, microbatches = drawn(seed)
    chance = random.Random(-seed)  # noqa: S311 - for tests
    lasts = {kind: Fraction(chance.randint(1, 9), 4) for kind in "FCBIW"}
    names = {"forward": "F", "recompute": "C", "backward": "B", "input_grad": "I", "weight_grad": "W"}
    cost = Cost(per="stage", **{name: float(lasts[kind]) for name, kind in names.items()})
    plan = Plan(rows, stages, microbatches)
    expected = by_rule(rows, stages, microbatches, lasts)
    if expected is None:
        return bool(pipelab.check(plan))
    trace = pipelab.simulate(plan, cost)
    most = [max(1, peak) for peak in expected[0]]
    return (
        pipelab.check(plan, memory_cap=most) == []
        and (trace.peak_activations, trace.makespan) == expected
        and pipelab.lower_bound(plan, cost, memory_cap=most) <= trace.makespan
        and pipelab.lower_bound(plan, cost) <= trace.makespan
        and sum(trace.ledger[0].values()) + sum(each.duration for each in trace.events_of(0)) == trace.makespan
    )


def test_random_plans_run_if_and_only_if_the_rule_says_so_and_take_and_hold_what_it_says():
    assert [seed for seed in range(100) if not agrees(seed)] == []
    legal = sum(by_rule(*drawn(seed), dict.fromkeys("FCBIW", 1)) is not None for seed in range(100))
    assert 50 < legal < 95


@pytest.mark.parametrize(
    ("text", "code", "names"),
    [
        ("0C0 0F0 0B0", "unordered", ("0C0", "its own forward 0F0", "the output of micro-batch 0 from stage 0")),
        (
            "0F0 0B0 0C0",
            "unordered",
            ("0B0", "its own recomputation 0C0", "the recomputed activation of micro-batch 0 from stage 0"),
        ),
        ("0F0 0I0 0C0 0W0", "unordered", ("0I0", "0C0")),
        ("0F0 0C0 0C0 0B0", "duplicate", ("0C0",)),
        ("0F0 1F0 1B0 0B0; 1C0", "wrong-rank", ("1C0", "rank 0")),
        ("0F0 0B0 0C1", "missing", ("micro-batch 1", "backward")),
    ],
)
def test_a_recomputation_before_its_forward_after_its_backward_twice_or_elsewhere_is_refused(text, code, names):
    fault = pipelab.check(Plan.parse(text))[0]
    assert fault.code == code
    assert all(name in fault.message for name in names)


def test_a_cap_counts_what_runs_again_and_says_when_that_is_early():
    plan = Plan.parse("0F0 0F1 0C0 0C1 0B0 0B1")
    assert pipelab.check(plan, memory_cap=2) == []
    (fault,) = pipelab.check(plan, memory_cap=1)
    assert (str(fault.action), fault.code) == ("0C1", "memory-cap")
    assert "later" in fault.hint


def test_bytes_are_the_input_until_it_runs_again_and_the_activations_from_then_on():
    memory = Memory(weights=1000, activations=100, inputs=7, for_weight_grad=30)
    plan = Plan.parse("0F0 0F1 0C0 0B0 0C1 0I1 0W1")
    assert memory.held(plan.bound, 0) == [1007, 1014, 1107, 1107, 1100, 1100, 1030]
    assert pipelab.memory_use(plan, memory).peaks == (1107,)
    assert len(pipelab.check(plan, memory_cap=1106, memory=memory)) == 1


def test_the_hint_for_a_cap_in_bytes_counts_inputs_that_wait_to_run_again():
    memory = Memory(weights=1000, gradients=1000, optimizer=2000, activations=100, inputs=10)
    assert pipelab.check(with_recompute(pipelab.Naive(4, 8)), memory_cap=4150, memory=memory) == []
    faults = pipelab.check(with_recompute(pipelab.GPipe(4, 8)), memory_cap=4150, memory=memory)
    assert faults
    assert all("fewer forwards" in fault.hint for fault in faults)
    for text in ("0F0 0C0 0F1 0B0 0C1 0B1", "0F0 0F1 0C0 0B0 0C1 0B1", "0F0 0F1 0B0 0C1 0B1"):
        for cap in (3009, 3109):  # over with its second input, and as its input becomes an activation
            for fault in pipelab.check(Plan.parse(text), memory_cap=cap, memory=memory):
                assert "no order" not in fault.hint or str(fault.action) in ("0F0", "0C0")
    for cap in (3005, 3050):  # neither one input fits, nor one activation
        (fault,) = pipelab.check(Plan.parse("0F0 0C0 0B0 0F1 0C1 0B1"), memory_cap=cap, memory=memory)
        assert "no order holds less" in fault.hint


def test_what_is_away_between_f_and_c_is_refused():
    assert pipelab.check(Plan.parse("0F0 0C0 0OFFLOAD0 0LOAD0 0B0")) == []
    assert [fault.code for fault in pipelab.check(Plan.parse("0F0 0OFFLOAD0 0LOAD0 0C0 0B0"))] == ["residency"] * 2


def test_files_replicas_pairs_slices_updates_and_transports_have_it(tmp_path):
    plan = with_recompute(pipelab.GPipe(2, 3))
    plan.to_csv(tmp_path / "plan.csv")
    assert Plan.from_csv(tmp_path / "plan.csv").rows == plan.rows
    for each in (pipelab.DualPipe(2, 4), pipelab.SlimPipe(2, 8), pipelab.PipeDream(2, 4), pipelab.ZBV(2, 4)):
        again = with_recompute(each)
        assert pipelab.check(again) == []
        assert pipelab.simulate(again).makespan > pipelab.simulate(each).makespan
    assert pipelab.check(pipelab.replicate(plan, 2)) == []
    for more in ({"transport": "pair", "order": "by-time"}, {"max_outstanding_sends": 1}):
        assert pipelab.simulate(plan, **more).makespan >= pipelab.simulate(plan).makespan
    assert pipelab.simulate(plan, Cost(latency=1, sender="busy")).makespan > pipelab.simulate(plan).makespan


def test_its_time_is_the_forwards_or_its_own_and_can_be_fitted():
    plan = Plan.parse("0F0 0C0 0B0")
    assert pipelab.simulate(plan, Cost(forward=3)).makespan == 8
    own = pipelab.simulate(plan, Cost(forward=3, recompute=lambda m, s: 0.5))
    assert own.makespan == 5.5
    assert Cost.fit(own).recompute == (0.5,)
    assert Cost(forward=[1, 2], recompute=[3, 4]).merged(1).recompute == (7,)


def test_a_picture_a_page_and_a_text_show_it(tmp_path):
    assert C(3, stage=1) == Action.parse("1C3") == Action("C", 3, 1)
    trace = pipelab.simulate(with_recompute(pipelab.GPipe(2, 3)))
    for suffix in ("svg", "html", "txt"):
        text = trace.save(tmp_path / f"again.{suffix}").read_text(encoding="utf-8")
        assert "C0" in text
        assert suffix == "txt" or C(3).word == "recomputation" in text
    assert "#56b4e9" in (tmp_path / "again.svg").read_text().lower()
    assert "C" in "".join(map(str, trace.critical_path))
    assert trace.why(0, 5)


def test_a_page_counts_what_runs_again_once(tmp_path, browser):
    trace = pipelab.simulate(with_recompute(pipelab.OneFOneB(2, 3), ahead=1))
    tab = browser.new_page()
    tab.goto(trace.save(tmp_path / "again.html").as_uri())
    peaks = tab.evaluate("[0, 1].map((rank) => Math.max(...models[0].memory(rank).map((each) => each[1])))")
    assert tuple(peaks) == trace.peak_activations == (2, 1)
    needs = tab.evaluate("models[0].needs(models[0].named('0B1')).map((each) => models[0].name(each))")
    assert needs == ["0F1", "1B1", "0C1"]
    tab.close()


def test_a_forward_right_before_its_backward_is_not_run_again():
    assert with_recompute(pipelab.OneFOneB(2, 3)).rows[1] == pipelab.OneFOneB(2, 3).plan().rows[1]
    assert with_recompute(pipelab.GPipe(1, 1)).rows == ((F(0, 0), B(0, 0)),)
    assert with_recompute(Plan([[F(0, 0) & B(0, 0)]])).rows == ((F(0, 0) & B(0, 0),),)
    assert with_recompute(Plan.parse("0F0 0F1 0I0 0W0 0I1 0W1")).rows == (
        (F(0, 0), F(1, 0), C(0, 0), I(0, 0), W(0, 0), C(1, 0), I(1, 0), W(1, 0)),
    )
    updated = with_recompute(Plan.parse("0F0 0F1 0B0 0U0 0B1 0U1"))
    assert updated.rows[0][2:6] == (C(0, 0), B(0, 0), U(0, 0), C(1, 0))


def test_what_is_sent_away_is_not_run_again():
    plan = Plan.parse("0F0 0OFFLOAD0 0F1 0F2 0C1 0B1 0B2 0LOAD0 0B0")
    again = with_recompute(plan, ahead=1)
    assert pipelab.check(again) == []
    assert [str(item) for item in again.rows[0] if item.kind == "C"] == ["0C1", "0C2"]
    assert pipelab.check(with_recompute(pipelab.BPipe(4, 8))) == []


def test_some_stages_may_run_again_and_what_is_there_stays():
    once = with_recompute(pipelab.GPipe(3, 2), stages=[1])
    assert [sum(item.kind == "C" for item in row) for row in once.rows] == [0, 2, 0]
    assert with_recompute(once, stages=[1]).rows == once.rows
    assert with_recompute(with_recompute(once)).rows == with_recompute(pipelab.GPipe(3, 2)).rows


@pytest.mark.parametrize(
    ("given", "told"), [*(({"ahead": each}, "ahead") for each in (-1, 0.5, None)), ({"stages": [0, 9]}, r"\[9\].*to 1")]
)
def test_ahead_is_a_whole_number_and_stages_are_those_there_are(given, told):
    with pytest.raises(pipelab.UsageError, match=told):
        with_recompute(pipelab.GPipe(2, 2), **given)


def test_running_ahead_comes_before_gathers():
    schedule = pipelab.Interleaved1F1B(4, 8)
    gathers = pipelab.with_gathers(schedule, 1)
    assert pipelab.check(with_recompute(gathers)) == []
    with pytest.raises(pipelab.UsageError, match=r"gathers weights.*\n.*try: with_gathers\(with_recompute"):
        with_recompute(gathers, ahead=1)
    assert pipelab.check(pipelab.with_gathers(with_recompute(schedule, ahead=1), 1)) == []


@pytest.mark.sweep
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 3), (3, 8), (4, 8), (6, 9)])
@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "eager-1f1b", "zb-h1", "zbv", "dualpipe", "interleaved-1f1b"])
def test_running_ahead_delays_nothing_and_holds_no_more_than_allowed(kind, ranks, microbatches):
    if pipelab.schedules[kind].refusal(ranks, microbatches) is not None:
        return
    schedule = pipelab.schedules[kind](ranks, microbatches)
    for cost in (Cost(), Cost(latency=0.75, recompute=1.25), Cost(forward=lambda m, s: 1 + (m + s) % 3)):
        before = pipelab.simulate(with_recompute(schedule), cost)
        starts = {event.action: event.start for event in before.events}
        for ahead in (1, 2, 5):
            plan = with_recompute(schedule, ahead=ahead, cost=cost)
            assert sorted(map(str, plan.graph())) == sorted(map(str, before.plan.graph()))
            trace = pipelab.simulate(plan, cost)
            assert all(event.start <= starts[event.action] for event in trace.events)
            peaks = zip(trace.peak_activations, before.peak_activations, strict=True)
            assert all(peak <= least + ahead for peak, least in peaks)


def test_gpipe_with_its_backwards_reversed_as_in_its_paper_runs_one_forward_less_again():
    rows = [[*row[:8], *reversed(row[8:])] for row in pipelab.GPipe(4, 8).plan().rows]
    trace = pipelab.simulate(with_recompute(Plan(rows)))
    assert trace.makespan == pipelab.simulate(with_recompute(pipelab.GPipe(4, 8))).makespan - 1 == 40


def test_running_ahead_makes_1f1b_as_quick_as_any_order():
    inside = pipelab.simulate(pipelab.OneFOneB(4, 8), Cost(backward=3))
    right_before = pipelab.simulate(with_recompute(pipelab.OneFOneB(4, 8)))
    early = pipelab.simulate(with_recompute(pipelab.OneFOneB(4, 8), ahead=1))
    assert [each.makespan for each in (inside, right_before, early)] == [44, 39, 38]
    assert (right_before.peak_activations, early.peak_activations) == ((1, 1, 1, 1), (2, 2, 2, 1))
    assert pipelab.lower_bound(early.plan) == 38


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_closed_forms_with_recomputation_hold_at_a_hundred_sizes(kind):
    forms = pipelab.schedules[kind].closed_forms
    (key,) = (each for each in forms if each.startswith("makespan with recomputation"))
    for ranks, microbatches in SIZES:
        plan = with_recompute(pipelab.schedules[kind](ranks, microbatches))
        for forward, backward, again in TIMES:
            letters = {"P": ranks, "M": microbatches, "F": forward, "B": backward, "C": again, "max": max}
            trace = pipelab.simulate(plan, Cost(forward=forward, backward=backward, recompute=again))
            assert set(trace.peak_activations) == {1}
            if eval(key.partition(" if ")[2], letters):  # noqa: S307 - this project's own formulas
                assert trace.makespan == eval(forms[key], letters), letters  # noqa: S307 - likewise


def test_the_optimum_places_what_runs_again_within_the_cap():
    pytest.importorskip("ortools")
    plan = with_recompute(pipelab.GPipe(2, 3))
    best = pipelab.optimum(plan, memory_cap=1)
    assert best.proven
    assert pipelab.check(best.plan, memory_cap=1) == []
    v_shape = with_recompute(pipelab.V1F1B(2, 4))  # two stages on a rank, and yet one activation at a time
    assert pipelab.optimum(v_shape, memory_cap=1).makespan == 17.5
    assert best.makespan == 15 < pipelab.optimum(pipelab.GPipe(2, 3), memory_cap=1).makespan
