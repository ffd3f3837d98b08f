"""The clock of plans whose transfers wait for each other, and the order of them that costs least."""

from __future__ import annotations

from itertools import pairwise, product
from operator import add, ge
from pathlib import Path

import pytest
from hypothesis import given
from strategies import WIRES, costs, legal_cases, near
from tiers import sampled

import pipelab
from pipelab import Cost, F, Plan, ScheduleError, Trace, check, compare, lower, schedules, simulate
from pipelab.checking.transfers import Wire
from pipelab.draw import wording
from pipelab.errors import UsageError
from pipelab.plan.transfers import Runtime, lowered
from pipelab.trace.waits import waits

HANGS = None

# (schedule, ranks, micro-batches, latency): makespans with F=1, B=2 per rank; the columns are those of `COLUMNS`.
COLUMNS = {
    "buffered": {},
    "rank": {"transport": "rank"},
    "rank, at-use": {"transport": "rank", "order": "at-use"},
    "pair": {"transport": "pair"},
    "edge": {"transport": "edge"},
    "edge, at-use": {"transport": "edge", "order": "at-use"},
    "holding": {"transport": "holding"},
    "holding, at-use": {"transport": "holding", "order": "at-use"},
    "rank, by-time": {"transport": "rank", "order": "by-time"},
}
INDEPENDENT = ("buffered", "rank", "rank, at-use", "pair", "holding", "holding, at-use")
"""Of these, there are figures from a model written apart."""
MAKESPANS = {
    ("interleaved-1f1b", 8, 16, 0): (58.5, 84.0, HANGS, 58.5, 123.0, 58.5),
    ("interleaved-1f1b", 4, 8, 0): (28.5, 33.5, HANGS, 28.5, 45.5, 28.5),
    ("interleaved-1f1b", 2, 8, 0): (25.5, 25.5, HANGS, 25.5, 39.0, 25.5),
    ("interleaved-1f1b", 2, 4, 0): (13.5, 13.5, HANGS, 13.5, 20.0, 13.5),
    ("1f1b", 4, 8, 0): (33.0, 33.0, HANGS, 33.0, 45.0, 33.0),
}
WITH_LATENCY = {
    ("interleaved-1f1b", 8, 16, 0.1): (61.5, 94.9),
    ("1f1b", 4, 8, 0.05): (33.8, 33.9),
    ("gpipe", 4, 8, 0.05): (33.3, 34.7),
    ("looped-bfs", 4, 8, 0.05): (28.8, 40.6),
    ("interleaved-zb", 4, 8, 0.05): (26.3, 30.9),
    ("zbv", 4, 8, 0.05): (26.15, 28.4),
}
"""The first two columns."""


@pytest.mark.parametrize(("name", "ranks", "microbatches", "latency"), [*MAKESPANS, *WITH_LATENCY])
def test_makespans_and_hangs_are_those_of_an_independent_model(name, ranks, microbatches, latency):
    plan = schedules[name](ranks, microbatches).plan()
    expected = (MAKESPANS | WITH_LATENCY)[name, ranks, microbatches, latency]
    for column, makespan in zip(INDEPENDENT, expected, strict=False):
        wire = COLUMNS[column]
        if makespan is HANGS:
            assert {fault.code for fault in check(plan, **wire)} == {"transfer-deadlock"}
        else:
            assert simulate(plan, Cost(latency=latency), **wire).makespan == pytest.approx(makespan, abs=1e-9)


@pytest.mark.parametrize(("waits", "units"), [(False, 86), (True, 87)])
def test_the_words_of_pytorchs_runtime_take_turns_so_some_receives_stand_elsewhere(waits, units):
    # Without words, the rows take 84 units in one queue for each rank; with those of 2.13, 86, and of 2.15, 87.
    plan = schedules["interleaved-1f1b"](8, 16).plan()
    low = lowered(plan.bound, "pytorch", runtime=Runtime(waits, [3] * 8))
    wire = Wire(low, "rank")
    lasts = [{"F": 0.5, "B": 1.0}.get(kind, 0.0) for kind in plan.bound.codes.kind]
    lasts += [0.0] * (len(wire.network.follows) - len(lasts))
    assert max(map(add, wire.network.starts(lasts), lasts)) == units


def test_two_transfers_of_a_rank_take_turns():
    # Rank 0 gives at 1 and 2, and a transfer takes 3: the second waits until 4.
    plan = Plan.parse("0F0 0F1 0B0 0B1; 1F0 1F1 1B0 1B1")
    trace = simulate(plan, Cost(latency=3), transport="rank")
    first, second = (each for each in trace.transfers if each.source == 0)
    assert (first.start, first.end, first.queued, first.behind) == (1, 4, 0, None)
    assert (second.start, second.end, second.queued) == (4, 7, 2)
    assert second.behind == (first.giver, first.needer)
    assert [each.start for each in simulate(plan, Cost(latency=3)).transfers if each.source == 0] == [1, 2]


@given(legal_cases(), costs(), costs(), costs())
def test_queues_only_delay_and_every_value_still_takes_its_time(case, forward, backward, latency):
    plan = case.plan
    cost = Cost(forward=forward, backward=backward, latency=latency, per="stage")
    free = simulate(plan, cost)
    for wire in WIRES:
        if wire["transport"] == "buffered":
            continue
        if check(plan, **wire):
            with pytest.raises(ScheduleError):
                simulate(plan, cost, **wire)
            continue
        trace = simulate(plan, cost, **wire)
        for row, before in zip(trace.starts, free.starts, strict=True):
            assert all(map(ge, row, before))
        assert {each.end - each.start for each in trace.transfers} <= {latency}
        assert all(each.queued >= 0 and (each.behind is None) == (each.queued == 0) for each in trace.transfers)
        if wire["transport"] == "rank":  # one queue: a rank has one transfer at a time
            for rank in range(plan.ranks):
                spans = sorted((t.start, t.end) for t in trace.transfers if rank in (t.source, t.target))
                assert all(end <= start for (_, end), (start, _) in pairwise(spans))


@pytest.mark.parametrize("wire", WIRES, ids=str)
def test_in_one_rank_nothing_crosses(wire):
    plan = schedules["1f1b"](1, 4).plan()
    assert simulate(plan, **wire).starts == simulate(plan).starts


def test_what_a_pair_gives_leaves_after_both_halves():
    plan = Plan([[F(0), F(1) & pipelab.B(0), pipelab.B(1)], [F(0), pipelab.B(0), F(1), pipelab.B(1)]])
    trace = simulate(plan, transport="edge")
    left = {str(each.giver): each.start for each in trace.transfers}
    ends = {str(event.action): event.end for event in trace.events}
    assert left["0F1"] == ends["0B0"] > ends["0F1"]


def test_a_pair_as_one_slot_waits_for_both_receives():
    plan = schedules["dualpipev"](2, 4).plan()
    trace = simulate(plan, Cost(pair=3, per="stage"), transport="rank")
    codes = plan.bound.codes
    for row, starts in zip(plan.bound.computing, trace.starts, strict=True):
        for at, code in enumerate(row):
            if code in plan.bound.pairs:
                both = {str(codes.action(code)), str(codes.action(row[at + 1]))}
                assert starts[at] == starts[at + 1]
                assert all(each.end <= starts[at] for each in trace.transfers if str(each.needer) in both)


@pytest.mark.thorough
@pytest.mark.parametrize("name", schedules)
def test_the_order_by_time_costs_next_to_nothing_at_8_by_32(name):
    latency, plan = 0.1, schedules[name](8, 32).plan()
    best = simulate(plan, Cost(latency=latency), order="by-time", transport="rank").makespan
    free = simulate(plan, Cost(latency=latency)).makespan
    if plan.bound.pairs:  # a pair's sends stand after both of its halves: that alone costs more
        rows = [[half for item in row for half in halves(item)] for row in plan.rows]
        apart = Plan(rows, plan.stages, plan.microbatches, plan.place)
        best = simulate(apart, Cost(latency=latency), order="by-time", transport="rank").makespan
    assert free <= best <= (1.015 if name == "bitpipe" else 1.01) * free


def halves(item):
    return (item.forward, item.backward) if isinstance(item, pipelab.Pair) else (item,)


@pytest.mark.sweep
@pytest.mark.parametrize("name", schedules)
def test_by_time_is_never_longer_than_pytorchs_order(name):
    plan = near(name, 4, 8)
    for latency, transport in product((0, 1), ("rank", "pair", "edge", "holding")):
        by_time, pytorch = (
            simulate(plan, Cost(latency=latency), transport=transport, order=each).makespan
            for each in ("by-time", "pytorch")
        )
        assert by_time <= pytorch + 1e-9


@pytest.mark.parametrize("unused", ["all_reduce", "weight_grad", "input_grad"])
def test_a_cost_of_what_the_plan_does_not_have_changes_no_order(unused):
    cost, wire = Cost(**{unused: 200}), {"order": "by-time", "transport": "rank"}
    assert simulate(schedules["interleaved-1f1b"](8, 16), cost, **wire).makespan == 58.5
    assert lower(schedules["interleaved-1f1b"](8, 16), cost, **wire).order == "by-time"


def test_time_behind_another_transfer_is_idle_time_of_its_own():
    plan = schedules["interleaved-1f1b"](4, 8).plan()
    trace = simulate(plan, transport="rank")
    assert simulate(plan).queued == (0, 0, 0, 0)
    assert trace.queued == (0, 6, 2.5, 0)
    words = [wording.stood_behind(trace, wait) for row in waits(trace) for wait in row if wait is not None]
    assert "0F1 had made it by 1, but its send waited behind the receive of 4F0" in words
    assert any(text.endswith("but its receive waited behind the one of 5B0") for text in words)
    assert wording.caption(trace).endswith(" Idle behind other transfers: 0 6 2.5 0.")
    assert trace.note == "transport rank"
    path = trace.critical_path  # goes through the transfer in front
    assert sum(after.start - before.end for before, after in pairwise(path)) == pytest.approx(0)
    assert path[0].start == 0


def test_a_saved_trace_keeps_what_stood_behind_what(tmp_path):
    trace = simulate(schedules["interleaved-1f1b"](2, 4), Cost(latency=0.5), transport="rank")
    assert any(trace.queued)
    again = Trace.load(trace.save(tmp_path / "trace.json"))
    assert again == trace
    assert again.queued == trace.queued
    assert "waited behind" in trace.save(tmp_path / "trace.html").read_text()


@pytest.mark.parametrize("behind", [[1, "0F0"], [1, "0F0", "oops"], ["x", "0F0", "1F0"], [1, "0F0", "9F9"]])
def test_a_file_with_nonsense_behind_a_transfer_is_refused(behind):
    data = simulate(schedules["1f1b"](2, 2)).to_dict()
    data["transfers"][0] += behind
    with pytest.raises(pipelab.FormatError, match=r"'transfers', number 0|is not an action"):
        Trace.from_dict(data)


def test_transfers_that_stand_behind_each_other_in_a_file_end():
    data = simulate(schedules["1f1b"](2, 2)).to_dict()
    one, other = data["transfers"][:2]
    one, other = [*one[:5], 50, 40, *other[2:4]], [*other[:5], 50, 40, *one[2:4]]
    data["transfers"][:2] = [one, other]
    trace = Trace.from_dict(data)
    assert trace.critical_path
    assert len(trace.queued) == 2


def test_lowered_rows_are_written_for_pytorch_with_its_words(tmp_path):
    low = lower(schedules["1f1b"](2, 2), order="at-use")
    runtime = low.for_runtime("2.13")[1]
    assert low.to_csv(tmp_path / "plan.csv", "2.13").read_text().splitlines()[1] == ",".join(runtime)
    assert runtime[:3] == ("1UNSHARD", "1RECV_F0", "1F0")
    assert runtime[-2:] == ("1REDUCE_GRAD", "1RESHARD")
    assert not any("SHARD" in word or "REDUCE" in word for row in low.rows for word in row)


@pytest.mark.parametrize("order", ["pytorch", "deferred", "by-time"])
def test_pytorchs_runtime_reads_the_file_and_runs_its_actions_in_the_plans_order(tmp_path, order):
    pytest.importorskip("torch")
    from conformance.recording import RUNTIME, on_recorders, run_on_recorders

    plan = schedules["zbv"](2, 4).plan()
    path = lower(plan, order=order, cost=Cost(latency=0.1)).to_csv(tmp_path / "plan.csv")
    for rank in range(2):
        record = []
        stages = [[0, 3], [1, 2]]
        schedule = on_recorders(RUNTIME, stages, rank, 4, record, plan.rows)
        schedule._load_csv(str(path), format="compute_comms")
        run_on_recorders(schedule, 4)
        assert tuple(record) == plan.rows[rank]


def test_comparisons_name_the_transfers():
    plan = schedules["zb-h1"](2, 4).plan()
    both = compare(simulate(plan), simulate(plan, Cost(first_stage="as-run"), transport="edge", order="by-time"))
    assert both.names[1].endswith("simulated, stage 0 as run, order by-time, transport edge")
    (row,) = compare(schedules["interleaved-1f1b"](8, 16), transport="rank", order="pytorch").rows
    assert row.makespan == 84


@pytest.mark.parametrize("wrong", ["", "nccl", None, 1])
def test_unknown_transfers_are_refused(wrong):
    for function in (simulate, lower, compare, check):
        for words, told in (({"order": wrong}, "by-time"), ({"transport": wrong}, "holding")):
            with pytest.raises(UsageError, match=told):
                function(schedules["1f1b"](2, 4), **words)
    with pytest.raises(UsageError, match="max_outstanding_sends"):
        simulate(schedules["1f1b"](2, 4), max_outstanding_sends=0)


DOCUMENT = Path(__file__).parents[2] / "docs" / "wire.md"


def rows_of_the_table(*head):
    """Return the rows of the page's table whose head begins so, each as a list of its cells."""
    lines = DOCUMENT.read_text(encoding="utf-8").partition(f"| {' | '.join(head)} |")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines.splitlines()[2:]]


def test_the_pages_makespans_are_simulated():
    rows = rows_of_the_table("schedule", "ranks x micro-batches", "buffered", "rank", "holding")
    assert len(rows) == 4
    for name, size, *cells in rows:
        plan = schedules[name](*map(int, size.split(" x "))).plan()
        buffered, rank, holding = map(float, cells)
        for transport, makespan in {"buffered": buffered, "rank": rank, "holding": holding}.items():
            assert simulate(plan, transport=transport).makespan == makespan
        for wire in ("pair", "pytorch"), ("edge", "pytorch"), ("rank", "by-time"), ("holding", "at-use"):
            assert simulate(plan, transport=wire[0], order=wire[1]).makespan == buffered


def test_the_page_counts_the_schedules_that_hang():
    counts = {}
    for orders, *cells in rows_of_the_table("order", "`rank`", "`pair`", "`edge`", "`buffered`, `holding`"):
        for transports, cell in zip(("rank", "pair", "edge", "buffered holding"), cells, strict=True):
            counts |= dict.fromkeys(product(orders.replace("`", "").split(", "), transports.split()), int(cell))
    assert len(counts) == 20
    for order, transport in sampled(counts):
        hanging = [kind for kind in schedules.values() if check(kind(4, 8), order=order, transport=transport)]
        assert len(hanging) == counts[order, transport]
    assert f"the {len(schedules)} schedules" in DOCUMENT.read_text(encoding="utf-8")


def test_the_page_lists_the_schedules_that_lose_time_in_one_queue():
    listed = {name: cells for name, *cells in rows_of_the_table("schedule", "`pytorch`", "`pytorch`, latency 0.1")}
    assert len(listed) == 13
    for name in sampled(schedules):
        plan, longer = schedules[name](8, 32).plan(), []
        for latency, order in ((0, "pytorch"), (0.1, "pytorch"), (0.1, "by-time")):
            times = [
                simulate(plan, Cost(latency=latency), order=order, transport=transport).makespan
                for transport in ("rank", "buffered")
            ]
            longer.append(100 * (times[0] / times[1] - 1))
        assert (name in listed) == (longer[0] >= 5)
        if name in listed:
            assert listed[name] == [f"{each:.1f} %" for each in longer]
        else:
            assert longer[0] < 1
            others = {"gpipe": "10.5", "v-min": "7.3", "v-half": "6.4"}
            assert longer[1] < 1.25 or f"{longer[1]:.1f}" == others[name]
        assert longer[2] < 1.55 or any(isinstance(item, pipelab.Pair) for row in plan.rows for item in row)


def under_way(trace, rank):
    """Return the most transfers of a rank that are under way together."""
    mine = [each for each in trace.transfers if each.source == rank]
    return max((sum(each.start <= moment.start < each.end for each in mine) for moment in mine), default=0)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved-1f1b", "zbv", "chimera", "seq1f1b"])
@pytest.mark.parametrize("most", [1, 2, 4])
def test_a_bound_on_sends_is_kept_and_costs_time_or_none(name, most):
    plan = schedules[name](4, 8).plan()
    low, cost = lower(plan), Cost(latency=2)
    assert all(held <= most for held in low.held_sends(most))
    free, bounded = simulate(plan, cost), simulate(plan, cost, max_outstanding_sends=most)
    assert max(under_way(bounded, rank) for rank in range(4)) <= most < max(map(len, plan.rows))
    assert bounded.makespan >= free.makespan
    assert simulate(plan, cost, max_outstanding_sends=1000).makespan == free.makespan


def test_a_rank_waits_for_a_send_before_one_that_is_too_many():
    # With one at a time, sends leave every 3: four outputs, then four gradients. With two, F3 starts one unit later,
    # when the first output has arrived; gradients leave every 2 and so are never too many.
    makespans = [
        simulate(schedules["gpipe"](2, 4), Cost(latency=3), max_outstanding_sends=n).makespan for n in (1, 2, 3)
    ]
    assert makespans == [(1 + 4 * 3 + 1) + (2 + 4 * 3 + 2), 22, 21]


@pytest.mark.parametrize("bound", [None, 3])
@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-h1"])
def test_what_is_held_is_what_pytorchs_words_have_not_waited_for(name, bound):
    low = lower(schedules[name](4, 8))
    for row, held in zip(low.for_runtime("2.15", max_outstanding_sends=bound), low.held_sends(bound), strict=True):
        pending, most = set(), 0
        for word in row:
            if "WAIT_SEND" in word:
                pending.remove(word.replace("WAIT_", ""))
            elif "SEND" in word:
                pending.add(word)
            most = max(most, len(pending))
        assert held == most
        assert not pending


def test_the_pages_held_sends_are_what_simulate_gives():
    plan = schedules["1f1b"](4, 16).plan()
    times = [simulate(plan, Cost(latency=2), max_outstanding_sends=most).makespan for most in (None, 2, 1)]
    assert (times, lower(plan).held_sends()) == ([113, 113, 114], (4, 16, 16, 16))
    said = " ".join(DOCUMENT.read_text(encoding="utf-8").split())
    assert "1F1B takes 113 units with any number and with 2, and 114 with 1" in said
    assert "16 of them on a rank of 1F1B with 16 micro-batches" in said
