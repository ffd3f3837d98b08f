"""Two traces compared: the effects of all actions add up to the difference of the makespans."""

from __future__ import annotations

import csv
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import catalogue_plans, costs, legal_cases

import pipelab
from pipelab import B, Cost, F, Plan, Trace
from pipelab.draw.wording import caption
from pipelab.trace.events import Transfer
from pipelab.trace.replay import Order, listed, order_of, passed


def shaken(trace, seed, share=0.3):
    """Return the trace as a noisy machine would have run it: other durations, transfers and late starts."""
    chance = Random(seed)  # noqa: S311
    number = {key: at for at, key in enumerate(listed(trace))}
    order = Order(trace, number)
    times = order.times
    times.durations[:] = [time * chance.uniform(1 - share, 1 + share) for time in times.durations]
    times.lates[:] = [time + chance.choice([0, 0, chance.random() * share]) for time in times.lates]
    for travel in sorted(order.travels):
        times.lags[travel] += chance.random() * share
    ends, begun = [], {}
    for slot, after in zip(order.turns, order.network.follows, strict=True):
        start = max((ends[at] + times.lags[lag] for at, lag in after), default=0)
        start += sum(times.lates[each] for each in slot)
        ends.append(start + sum(times.durations[each] for each in slot))
        begun |= dict.fromkeys(slot, (start, ends[-1]))
    rows = [[[0.0] * len(row) for row in trace.starts] for _ in range(2)]
    for name, ran in listed(trace).items():
        for side, time in zip(rows, begun[number[name]], strict=True):
            side[ran.rank][trace.plan.bound.computing[ran.rank].index(ran.code)] = time
    codes, moved = trace.plan.bound.codes, []
    for each in trace.transfers:
        giver, needer = codes.code(each.giver), codes.code(each.needer)
        left, lag = begun[order.number_of[giver]][1], times.lags[needer]
        moved.append(Transfer(each.source, each.target, each.giver, each.needer, left, left + lag))
    return Trace(trace.plan, *rows, unit=trace.unit, source="measured", transfers=moved)


def assert_sums(found):
    """Assert that the parts, and the actions' effects, are the difference of the makespans; and so the other way."""
    near = 1e-9 * max(found.before.makespan, found.after.makespan, 1)
    assert sum(found.parts.values()) == pytest.approx(found.longer, abs=near)
    assert sum(change.effect for change in found) == pytest.approx(found.longer, abs=near)
    for key in ("rank", "stage", "kind", "microbatch"):
        assert sum(found.by(key).values()) == pytest.approx(found.longer, abs=near)
    back = pipelab.diff(found.after, found.before)
    for part in {*found.parts, *back.parts}:
        assert back.parts.get(part, 0) == pytest.approx(-found.parts.get(part, 0), abs=near)


@given(legal_cases(), costs(), costs(), st.integers(0, 9))
@settings(deadline=None)
def test_the_parts_add_up_to_the_difference_for_any_legal_plan(case, forward, backward, seed):
    cost = Cost(forward=forward, backward=backward, latency=0.5, all_reduce=1)
    before = pipelab.simulate(case.plan, cost)
    found = pipelab.diff(before, shaken(before, seed))
    assert_sums(found)
    assert "order" not in found.parts
    assert len(found) == len(before.events)


@given(legal_cases(), st.integers(0, 99), st.integers(0, 9))
@settings(deadline=None)
def test_the_parts_add_up_to_the_difference_for_any_two_orders(case, seed, noise):
    """The same actions, dealt to their ranks in two orders in which they can run."""
    before, chance = case.runnable, Random(seed)  # noqa: S311
    rows, done = [[] for _ in before.rows], set()
    graph = case.plan.graph()
    todo = [action for row in before.rows for action in row]
    needs = {each: {one for one, _, edge in graph.in_edges(each, data=True) if edge["kind"] == "data"} for each in todo}
    while todo:
        action = chance.choice([each for each in todo if needs[each] <= done])
        todo.remove(action)
        done.add(action)
        rows[case.table[action.stage]].append(action)
    after = Plan(rows, case.stages, case.microbatches)
    cost = Cost(forward=1, backward=2, latency=0.5)
    assert_sums(pipelab.diff(pipelab.simulate(before, cost), shaken(pipelab.simulate(after, cost), noise)))


@given(catalogue_plans(), st.integers(0, 9))
@settings(deadline=None)
def test_the_parts_add_up_to_the_difference_for_every_schedule(plan, seed):
    before = pipelab.simulate(plan, Cost(forward=1, backward=2, latency=0.25, pair=2.5, all_reduce=2))
    assert_sums(pipelab.diff(before, shaken(before, seed)))


@given(legal_cases(), costs())
@settings(deadline=None)
def test_a_trace_against_itself_is_all_zeros(case, backward):
    trace = pipelab.simulate(case.plan, Cost(forward=1, backward=backward, latency=0.5))
    found = pipelab.diff(trace, trace)
    assert (found.longer, found.parts) == (0, {})
    assert all((each.shift, each.change, each.effect, each.effects) == (0, 0, 0, {}) for each in found)
    assert "as long as" in found.sentence


def test_an_action_that_takes_longer_counts_only_while_it_is_critical():
    """Stage 1's forward grows from 0.5 to 1.5: its last one is always on the critical path, the others from 1 on."""
    before, after = (pipelab.simulate(pipelab.GPipe(2, 4), Cost(forward=[1, time])) for time in (0.5, 1.5))
    found = pipelab.diff(before, after)
    effects = {str(each.action): each.effects for each in found if each.effects}
    assert effects == {"1F3": {"durations": 1.0}, **{name: {"durations": 0.5} for name in ("1F0", "1F1", "1F2")}}
    order = Order(before, {key: at for at, key in enumerate(listed(before))})
    other = Order(after, {key: at for at, key in enumerate(listed(after))})
    shares = [(path.taking(order.times), share) for path, share in passed(order, order.times, other.times)]
    assert shares == [(before.makespan, 0.5), (before.makespan - 1.5, 0.5)]  # the second was not yet the longest


@pytest.mark.parametrize("kind", [pipelab.GPipe, pipelab.OneFOneB, pipelab.ZBH1])
def test_effects_are_what_many_simulations_on_the_way_add_up_to(kind):
    """At 100 moments of the way, the clock says how fast the makespan grows if only one rank's actions change."""
    plan, chance, steps, nudge = kind(3, 5).plan(), Random(7), 100, 1e-6  # noqa: S311
    actions = [action for row in plan.rows for action in row]
    old, new = ({action: chance.uniform(1, 2) for action in actions} for _ in range(2))

    def simulated(ways):
        """Return the trace in which each stage's actions are so far on the way from old times to new ones."""

        def cost_of(letter):
            times = {each: old[each] + ways[each.stage] * (new[each] - old[each]) for each in actions}
            return lambda m, s: times.get(pipelab.Action(letter, m, s), 1.0)

        forward, backward, inputs, weights = map(cost_of, "FBIW")
        cost = Cost(forward=forward, backward=backward, input_grad=inputs, weight_grad=weights, latency=0.125)
        return pipelab.simulate(plan, cost)

    found = pipelab.diff(simulated([0, 0, 0]), simulated([1, 1, 1])).by("rank")
    for rank in range(3):
        total = 0.0
        for step in range(steps):
            way = (step + 0.5) / steps
            there, back = (
                simulated([way + side * (each == rank) for each in range(3)]).makespan for side in (nudge, -nudge)
            )
            total += (there - back) / (2 * nudge) / steps
        assert total == pytest.approx(found[rank], abs=0.01)


def test_an_action_that_is_late_for_no_reason_in_the_trace_is_a_late_start():
    """0B0 starts at 10 in both traces, so if 1B0 takes 3 units longer, 0B0 waits 3 units less for nothing."""
    rows = [[F(0, 0), F(1, 0), B(0, 0), B(1, 0)], [F(0, 1), B(0, 1), F(1, 1), B(1, 1)]]
    plan = Plan(rows, stages=2, microbatches=2)
    before = Trace(plan, [[0, 1, 10, 12], [1, 2, 4, 5]], [[1, 2, 12, 14], [2, 4, 5, 7]])
    after = Trace(plan, [[0, 1, 10, 12], [1, 2, 7, 8]], [[1, 2, 12, 14], [2, 7, 8, 10]])
    found = pipelab.diff(before, after)
    assert (found.longer, found.parts) == (0, {"durations": 3, "late starts": -3})
    effects = {str(each.action): each.effects for each in found if each.effects}
    assert effects == {"1B0": {"durations": 3}, "0B0": {"late starts": -3}}


def test_each_part_is_named_by_what_changed():
    plan = pipelab.OneFOneB(2, 4).plan()
    usual = pipelab.simulate(plan, Cost(latency=1))
    for part, cost in {"transfers": Cost(latency=1.5), "durations": Cost(latency=1, forward=[1, 2])}.items():
        other = pipelab.simulate(plan, cost)
        assert pipelab.diff(usual, other).parts == {part: pytest.approx(other.makespan - usual.makespan)}
    starts, ends = ([list(row) for row in rows] for rows in (usual.starts, usual.ends))
    starts[0][-1], ends[0][-1] = starts[0][-1] + 3, ends[0][-1] + 3
    late = Trace(plan, starts, ends, transfers=usual.transfers)
    assert pipelab.diff(usual, late).parts == {"late starts": 3}
    gpipe = pipelab.simulate(pipelab.GPipe(2, 4), Cost(latency=1))
    assert pipelab.diff(gpipe, usual).parts == {"order": usual.makespan - gpipe.makespan}


def test_a_value_that_travels_in_one_order_only_is_due_to_the_order():
    apart = Plan([[F(0, 0), B(0, 0)], [F(0, 1), B(0, 1)]], stages=2, microbatches=1)
    together = Plan([[F(0, 0), F(0, 1), B(0, 1), B(0, 0)], []], stages=2, microbatches=1)
    before, after = (pipelab.simulate(plan, Cost(latency=1, per="stage")) for plan in (apart, together))
    assert pipelab.diff(before, after).parts == {"order": -2}
    kinds = (pipelab.Interleaved1F1B, pipelab.SlimPipe)  # whole sequences, and slices
    assert_sums(pipelab.diff(*(pipelab.simulate(kind(2, 4), Cost(latency=1)) for kind in kinds)))


def test_what_runs_beside_computing_is_compared_too():
    schedule = pipelab.LoopedBFS(2, 4)
    beside, in_row = (
        pipelab.simulate(pipelab.replicate(schedule, 2), Cost(all_reduce=5, all_reduce_runs=runs))
        for runs in ("beside", "in-row")
    )
    for pair in [(beside, in_row), (in_row, beside)]:
        assert_sums(pipelab.diff(*pair))
        assert set(pipelab.diff(*pair).parts) <= {"order"}
    longer = pipelab.simulate(beside.plan, Cost(all_reduce=7, all_reduce_runs="beside"))
    assert pipelab.diff(beside, longer).parts == {"moves": longer.makespan - beside.makespan}
    gathers = pipelab.with_gathers(schedule, 1)
    quick, slow = (pipelab.simulate(gathers, Cost(gather=each)) for each in (0.5, 3))
    found = pipelab.diff(quick, slow)
    assert found.parts == {"moves": slow.makespan - quick.makespan}
    assert found.by("kind")["UNSHARD"] == found.longer > 0
    ahead = pipelab.simulate(pipelab.with_gathers(schedule, 2), Cost(gather=3))
    assert_sums(pipelab.diff(slow, ahead))  # other gathers, and fewer
    unmeasured = Trace(gathers, slow.starts, slow.ends, source="measured")
    assert_sums(pipelab.diff(slow, unmeasured))
    moved = pipelab.diff(*(pipelab.simulate(pipelab.BPipe(4, 8), Cost(offload=1, load=each)) for each in (1, 4)))
    assert set(moved.parts) == {"moves"}
    assert {kind for kind, effect in moved.by("kind").items() if effect} == {"LOAD"}


@pytest.mark.parametrize(
    ("plan", "cost"),
    [
        (pipelab.with_gathers(pipelab.Interleaved1F1B(2, 4), 1), Cost(gather=1.5, latency=0.25)),
        (pipelab.PipeOffload(2, 4), Cost(offload=2, load=3)),
        (pipelab.replicate(pipelab.LoopedBFS(2, 2), 2), Cost(all_reduce=4, all_reduce_runs="beside")),
    ],
)
def test_a_replay_with_its_own_times_is_the_trace(plan, cost):
    trace = pipelab.simulate(plan, cost)
    order = order_of(trace)
    again = order.again(order.times, trace.name)
    assert (again.events, again.moves, again.transfers) == (trace.events, trace.moves, trace.transfers)
    assert order.path(order.times).length == trace.makespan


@pytest.mark.parametrize(
    ("plan", "cost"),
    [
        (pipelab.OneFOneB(3, 4), Cost(latency=0.25)),
        (pipelab.DualPipe(4, 8), Cost(pair=2.5, all_reduce=1)),  # the two of a pair share their time
        (pipelab.with_gathers(pipelab.Interleaved1F1B(2, 4), 1), Cost(gather=1.5)),
    ],
)
def test_work_without_slack_is_what_makes_the_step_longer_if_it_takes_longer(plan, cost):
    trace = pipelab.simulate(plan, cost)
    ran = listed(trace)
    order, works = order_of(trace), [0.0] * trace.ranks
    for at, each in enumerate(ran.values()):
        longer = replace(order.times, durations=[*order.times.durations])
        longer.durations[at] += 1e-3
        limits = order.path(longer).length > trace.makespan + 1e-6 and trace.plan.bound.computes(each.code)
        works[each.rank] += order.times.durations[at] * limits
    assert order.work_without_slack() == pytest.approx(works)


@pytest.mark.parametrize("latency", [0, 0.5])
def test_a_slow_rank_limits_a_step_that_was_measured_with_gaps(latency):
    slow = Cost(forward=[1, 1, 4, 1], backward=[2, 2, 8, 2], latency=latency, sender="busy" if latency else "free")
    simulated = pipelab.simulate(pipelab.OneFOneB(4, 8), slow)
    for trace in (simulated, shaken(simulated, 1, 0.01)):
        assert order_of(trace).work_without_slack()[2] > 0.8 * trace.makespan
        assert "rank 2 limits it" in caption(trace)


ONE = pipelab.simulate(pipelab.OneFOneB(2, 2))


@pytest.mark.parametrize(
    ("other", "names", "error", "told"),
    [
        (pipelab.simulate(pipelab.ZBH1(2, 2)), None, pipelab.UsageError, r"\(\d+ differ, such as \dB\d, only in"),
        (pipelab.simulate(pipelab.OneFOneB(2, 3)), None, pipelab.UsageError, "2 micro-batches and 2 stages x 3 micro"),
        (pipelab.simulate(pipelab.OneFOneB(2, 2), Cost(unit="ms")), None, pipelab.UsageError, "different units"),
        (pipelab.OneFOneB(2, 2), None, TypeError, "simulate schedules and plans first"),
        (ONE, ["one"], pipelab.UsageError, "1 name for 2 traces"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_the_reason(other, names, error, told):
    with pytest.raises(error, match=told):
        pipelab.diff(ONE, other, names=names)
    with pytest.raises(pipelab.UsageError, match="rank, stage, kind or microbatch"):
        pipelab.diff(ONE, ONE).by("colour")


def test_the_table_has_every_action_the_largest_effect_first(tmp_path):
    before = pipelab.simulate(pipelab.OneFOneB(4, 8))
    found = pipelab.diff(before, shaken(before, 3), names=["predicted", "measured"])
    with found.save(tmp_path / "diff.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 64
    effects = [abs(float(row["effect"])) for row in rows]
    assert effects == sorted(effects, reverse=True)
    assert sum(float(row["effect"]) for row in rows) == pytest.approx(found.longer)
    for row in rows:
        parts = sum(float(row[part]) for part in ("durations", "transfers", "late starts", "order"))
        assert parts == pytest.approx(float(row["effect"]))
    assert len(str(found).splitlines()) < 30
    assert str(found).startswith("measured is")
    assert "predicted" in found._repr_html_()
    with pytest.raises(pipelab.FormatError):
        found.save(tmp_path / "diff.png")


def test_an_action_that_moved_to_another_rank_says_where_it_was():
    here = Plan([[F(0), B(0)], [F(1), B(1)]], stages=1, microbatches=2, place=lambda m, s: m)
    there = Plan([[F(1), B(1)], [F(0), B(0)]], stages=1, microbatches=2, place=lambda m, s: 1 - m)
    found = pipelab.diff(pipelab.simulate(here), pipelab.simulate(there))
    assert {(each.rank, each.moved_from) for each in found if each.action.kind != "R"} == {(0, 1), (1, 0)}
    assert "on rank before" in str(found.table)


def test_a_difference_that_no_measurement_could_show_is_not_explained():
    plan = pipelab.OneFOneB(2, 4).plan()
    simulated = pipelab.simulate(plan)
    measured = pipelab.Trace(
        plan, simulated.starts, [[1.0005 * end for end in row] for row in simulated.ends], source="measured"
    )
    words = pipelab.diff(simulated, measured, names=["model", "machine"]).sentence
    assert words == "machine takes as long as model, within 0.1 % (15 units)"
    exact = pipelab.Trace(plan, simulated.starts, measured.ends)  # two calculations differ by what they differ
    assert "longer than" in pipelab.diff(simulated, exact).sentence
