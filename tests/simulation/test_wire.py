"""The clock of plans whose sends and receives stand in queues, and the order of them that costs least."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from operator import ge
from pathlib import Path

import pytest
from hypothesis import given, settings
from strategies import costs, legal_cases, near

import pipelab
from pipelab import Cost, F, Plan, ScheduleError, Trace, check, compare, critical_path, lower, schedules, simulate
from pipelab.draw import wording
from pipelab.errors import CostError, UsageError
from pipelab.plan.transfers import SEMANTICS
from pipelab.trace.waits import waits

HANGS = None
QUEUED = [name for name in SEMANTICS if name not in ("arrive", "deferred")]

# (schedule, ranks, micro-batches, latency): makespans with F=1, B=2 per rank; the columns are those of `COLUMNS`.
COLUMNS = ("arrive", "pytorch", "deferred", "two-way")
MAKESPANS = {
    ("interleaved-1f1b", 8, 16, 0): (58.5, 84.0, HANGS, 58.5),
    ("interleaved-1f1b", 8, 16, 0.1): (61.5, 94.9, HANGS, 62.3),
    ("interleaved-1f1b", 4, 8, 0): (28.5, 33.5, HANGS, 28.5),
    ("interleaved-1f1b", 8, 32, 0): (106.5, 132.0, HANGS, 106.5),
    ("1f1b", 4, 8, 0.05): (33.8, 33.9, HANGS, 33.8),
    ("gpipe", 4, 8, 0.05): (33.3, 34.7, 34.7, 33.3),
    ("looped-bfs", 4, 8, 0.05): (28.8, 40.6, HANGS, 28.8),
    ("interleaved-zb", 4, 8, 0.05): (26.3, 30.9, HANGS, 26.3),
    ("zbv", 4, 8, 0.05): (26.15, 28.4, HANGS, 28.35),
}


@pytest.mark.parametrize(("name", "ranks", "microbatches", "latency"), MAKESPANS)
def test_makespans_and_hangs_are_those_of_an_independent_model(name, ranks, microbatches, latency):
    plan = schedules[name](ranks, microbatches).plan()
    for transfers, makespan in zip(COLUMNS, MAKESPANS[name, ranks, microbatches, latency], strict=True):
        if makespan is HANGS:
            assert [fault.code for fault in check(plan, transfers=transfers)] == ["transfer-deadlock"]
        else:
            trace = simulate(plan, Cost(latency=latency, transfers=transfers))
            assert trace.makespan == pytest.approx(makespan, abs=1e-9)


def test_pytorchs_runtime_gives_turns_to_its_other_words():
    plan = schedules["interleaved-1f1b"](8, 16).plan()
    assert simulate(plan, Cost(transfers="pytorch-runtime")).makespan == 86


def test_two_transfers_of_a_rank_take_turns():
    # Rank 0 gives at 1 and 2, and a transfer takes 3: the second waits until 4.
    plan = Plan.parse("0F0 0F1 0B0 0B1; 1F0 1F1 1B0 1B1")
    trace = simulate(plan, Cost(latency=3, transfers="pytorch"))
    first, second = (each for each in trace.transfers if each.source == 0)
    assert (first.start, first.end, first.queued, first.behind) == (1, 4, 0, None)
    assert (second.start, second.end, second.queued) == (4, 7, 2)
    assert second.behind == (first.giver, first.needer)
    assert [each.start for each in simulate(plan, Cost(latency=3)).transfers if each.source == 0] == [1, 2]


@settings(max_examples=20)
@given(legal_cases(), costs(), costs(), costs())
def test_queues_only_delay_and_every_value_still_takes_its_time(case, forward, backward, latency):
    plan = case.plan
    cost = Cost(forward=forward, backward=backward, latency=latency, per="stage")
    free = simulate(plan, cost)
    for transfers in SEMANTICS[1:]:
        if check(plan, transfers=transfers):
            with pytest.raises(ScheduleError):
                simulate(plan, replace(cost, transfers=transfers))
            continue
        trace = simulate(plan, replace(cost, transfers=transfers))
        for row, before in zip(trace.starts, free.starts, strict=True):
            assert all(map(ge, row, before))
        assert {each.end - each.start for each in trace.transfers} <= {latency}
        assert all(each.queued >= 0 and (each.behind is None) == (each.queued == 0) for each in trace.transfers)
        if transfers in ("pytorch", "by-time"):  # one queue: a rank has one transfer at a time
            for rank in range(plan.ranks):
                spans = sorted((t.start, t.end) for t in trace.transfers if rank in (t.source, t.target))
                assert all(end <= start for (_, end), (start, _) in pairwise(spans))


@pytest.mark.parametrize("transfers", QUEUED)
def test_in_one_rank_nothing_crosses(transfers):
    plan = schedules["1f1b"](1, 4).plan()
    assert simulate(plan, Cost(transfers=transfers)).starts == simulate(plan).starts


def test_what_a_pair_gives_leaves_after_both_halves():
    plan = Plan([[F(0), F(1) & pipelab.B(0), pipelab.B(1)], [F(0), pipelab.B(0), F(1), pipelab.B(1)]])
    left = {str(each.giver): each.start for each in simulate(plan, Cost(transfers="two-way")).transfers}
    ends = {str(event.action): event.end for event in simulate(plan, Cost(transfers="two-way")).events}
    assert left["0F1"] == ends["0B0"] > ends["0F1"]


def test_a_pair_as_one_slot_waits_for_both_receives():
    plan = schedules["dualpipev"](2, 4).plan()
    trace = simulate(plan, Cost(pair=3, per="stage", transfers="pytorch"))
    codes = plan.bound.codes
    for row, starts in zip(plan.bound.rows, trace.starts, strict=True):
        for at, code in enumerate(row):
            if code in plan.bound.pairs:
                both = {str(codes.action(code)), str(codes.action(row[at + 1]))}
                assert starts[at] == starts[at + 1]
                assert all(each.end <= starts[at] for each in trace.transfers if str(each.needer) in both)


@pytest.mark.parametrize("name", schedules)
def test_the_order_by_time_costs_at_most_one_percent_at_8_by_32(name):
    latency, plan = 0.1, schedules[name](8, 32).plan()
    best = simulate(plan, Cost(latency=latency, transfers="by-time")).makespan
    free = simulate(plan, Cost(latency=latency)).makespan
    if plan.bound.pairs:  # a pair's sends stand after both of its halves: that alone costs more
        rows = [[half for item in row for half in halves(item)] for row in plan.rows]
        apart = Plan(rows, plan.stages, plan.microbatches, plan.place)
        best = simulate(apart, Cost(latency=latency, transfers="by-time")).makespan
    assert free <= best <= 1.01 * free


def halves(item):
    return (item.forward, item.backward) if isinstance(item, pipelab.Pair) else (item,)


@pytest.mark.parametrize("name", schedules)
def test_by_time_is_never_longer_than_pytorchs_order(name):
    plan = near(name, 4, 8)
    for latency in (0, 1):
        makespans = [simulate(plan, Cost(latency=latency, transfers=each)).makespan for each in ("by-time", "pytorch")]
        assert makespans[0] <= makespans[1] + 1e-9


def test_time_behind_another_transfer_is_idle_time_of_its_own():
    plan = schedules["interleaved-1f1b"](4, 8).plan()
    trace = simulate(plan, Cost(transfers="pytorch"))
    assert simulate(plan).queued == (0, 0, 0, 0)
    assert trace.queued == (0, 6, 2.5, 0)
    words = [wording.stood_behind(trace, wait) for row in waits(trace) for wait in row if wait is not None]
    assert "0F1 had given it by 1, but its send stood behind the receive of 4F0" in words
    assert any(text.endswith("but its receive stood behind that of 5B0") for text in words)
    assert wording.figures(trace).endswith(", idle behind other transfers 0 6 2.5 0")
    assert trace.note == "transfers pytorch"


def test_the_critical_path_goes_through_the_transfer_in_front():
    plan = schedules["interleaved-1f1b"](4, 8).plan()
    path = critical_path(simulate(plan, Cost(transfers="pytorch")))
    idle = sum(after.start - before.end for before, after in pairwise(path))
    assert idle == pytest.approx(0)
    assert path[0].start == 0


def test_a_saved_trace_keeps_what_stood_behind_what(tmp_path):
    trace = simulate(schedules["interleaved-1f1b"](2, 4), Cost(latency=0.5, transfers="pytorch"))
    assert any(trace.queued)
    again = Trace.load(trace.save(tmp_path / "trace.json"))
    assert again == trace
    assert again.queued == trace.queued
    assert "stood behind" in trace.save(tmp_path / "trace.html").read_text()


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
    assert critical_path(trace)
    assert len(trace.queued) == 2


def test_lowered_rows_are_written_for_pytorch_with_its_words(tmp_path):
    low = lower(schedules["1f1b"](2, 2), "by-time")
    path = low.to_csv(tmp_path / "plan.csv")
    assert path.read_text().splitlines()[1] == ",".join(low.written[1])
    assert low.written[1][:3] == ("1RECV_F0", "1UNSHARD", "1F0")
    assert low.written[1][-2:] == ("1REDUCE_GRAD", "1RESHARD")
    assert not any("SHARD" in word or "REDUCE" in word for row in low.rows for word in row)


def test_pytorchs_runtime_reads_the_file_and_runs_its_actions_in_the_plans_order(tmp_path):
    pytest.importorskip("torch")
    from pipelab.conformance import native, recording

    plan = schedules["zbv"](2, 4).plan()
    path = lower(plan, "by-time", Cost(latency=0.1)).to_csv(tmp_path / "plan.csv")
    for rank in range(2):
        record = []
        stages = [[0, 3], [1, 2]]
        schedule = recording._schedule("_PipelineScheduleRuntime", stages, rank, 4, record, plan.rows)
        schedule._load_csv(str(path), format="compute_comms")
        native.run_on_recorders(schedule, 4)
        assert tuple(record) == plan.rows[rank]


def test_comparisons_name_the_transfers():
    plan = schedules["zb-h1"](2, 4).plan()
    both = compare(simulate(plan), simulate(plan, Cost(transfers="two-way", first_stage="as-run")))
    assert both.names[1].endswith("simulated, stage 0 as run, transfers two-way")


@pytest.mark.parametrize("wrong", ["", "nccl", None, 1])
def test_unknown_transfers_are_refused(wrong):
    with pytest.raises(CostError, match="by-time"):
        Cost(transfers=wrong)
    with pytest.raises(UsageError, match="by-time"):
        lower(schedules["1f1b"](2, 4), wrong)


DOCUMENT = Path(__file__).parents[2] / "docs" / "wire.md"


def rows_of_the_table(under):
    """Return the table under a heading of the page: its head, and its rows."""
    part = DOCUMENT.read_text(encoding="utf-8").partition(f"## {under}\n")[2].partition("\n## ")[0]
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line[:1] == "|"
    ]
    return head, rows


def test_the_pages_makespans_are_simulated():
    head, rows = rows_of_the_table("What does it cost?")
    assert len(rows) == len(MAKESPANS)
    for name, size, latency, *cells in rows:
        ranks, microbatches = map(int, size.split(" x "))
        plan = schedules[name](ranks, microbatches).plan()
        for transfers, cell in zip(head[3:], cells, strict=True):
            if cell == "hangs":
                assert check(plan, transfers=transfers)
            else:
                trace = simulate(plan, Cost(latency=float(latency), transfers=transfers))
                assert float(cell) == pytest.approx(trace.makespan, abs=1e-9)


def test_the_page_lists_how_much_longer_each_schedule_takes():
    _, rows = rows_of_the_table("Which order costs least?")
    assert [row[0] for row in rows] == list(schedules)
    for name, *cells in rows[3:8]:
        plan = schedules[name](8, 32).plan()
        free = simulate(plan, Cost(latency=0.1)).makespan
        for transfers, cell in zip(("pytorch", "by-time"), cells[4:], strict=True):
            longer = simulate(plan, Cost(latency=0.1, transfers=transfers)).makespan / free - 1
            assert cell == f"{100 * longer:.2f} %"
