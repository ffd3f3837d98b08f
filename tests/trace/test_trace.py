"""Traces: times beside a plan, and what is derived from them."""

from __future__ import annotations

import json

import pytest
from fuzz.files import fuzz_injection, fuzz_trace_file
from hypothesis import given
from hypothesis import strategies as st
from strategies import costs, legal_cases

import pipelab
from pipelab import B, Cost, F, Plan, R, Trace, simulate
from pipelab.errors import FormatError
from pipelab.trace.events import Transfer

ROWS = Plan.parse(["0F0 0B0", "1F0 1B0"])


def measured(starts=((10, 14), (11, 12.5)), ends=((11, 16), (12, 13.5)), **more):
    return Trace(ROWS, starts, ends, unit="ms", source="measured", **more)


# What is derived


def test_events_are_every_action_with_its_times_rank_by_rank():
    trace = measured()
    assert [(event.rank, event.action, event.start, event.end) for event in trace.events] == [
        (0, F(0, 0), 10, 11),
        (0, B(0, 0), 14, 16),
        (1, F(0, 1), 11, 12),
        (1, B(0, 1), 12.5, 13.5),
    ]
    assert trace.events_of(1) == trace.events[2:]
    assert trace.events[1].duration == 2


def test_makespan_and_bubble_count_from_the_first_start():
    trace = measured()
    assert (trace.start, trace.end, trace.makespan) == (10, 16, 6)
    assert trace.busy == (3, 2)
    assert trace.bubble == pytest.approx(1 - 5 / 12)


@given(legal_cases(), costs(), costs())
def test_the_bubble_is_the_idle_share_of_all_ranks_time(case, forward, backward):
    trace = simulate(case.plan, Cost(forward=forward, backward=backward, per="stage"))
    work = sum(event.duration for event in trace.events)
    assert sum(trace.busy) == pytest.approx(work)
    assert trace.bubble == pytest.approx(1 - work / (trace.ranks * trace.makespan))
    assert 0 <= trace.bubble < 1


def test_each_ranks_own_span_is_from_its_first_start_to_its_last_end_and_overlaps_count_once():
    assert measured().spans == (6, 2.5)
    alone = Trace(Plan([[F(0, 0), B(0, 0)], []]), [[3, 4], []], [[4, 6], []])
    assert (alone.spans, alone.busy, alone.bubble) == ((3, 0), (3, 0), 0.5)
    assert Trace(Plan.parse(["0F0 0F1 0B0 0B1"]), [[0, 1, 1.5, 6]], [[4, 3, 5, 7]]).busy == (6,)


@given(legal_cases(), st.sampled_from([0, 0.5, 2]))
def test_transfers_are_the_data_edges_between_ranks(case, latency):
    plan = case.plan
    trace = simulate(plan, Cost(latency=latency))
    ended = {event.action: event.end for event in trace.events}
    rank_of = {event.action: event.rank for event in trace.events}
    expected = {
        Transfer(rank_of[giver], rank_of[needer], giver, needer, ended[giver], ended[giver] + latency)
        for giver, needer, edge in plan.graph().edges(data=True)
        if edge["kind"] == "data" and needer.kind != "R" and rank_of[giver] != rank_of[needer]
    }
    assert set(trace.transfers) == expected
    assert len(trace.transfers) == len(expected)


def test_a_trace_of_nothing_has_no_length():
    trace = Trace(Plan([[], []], 1, 1), [[], []], [[], []])
    assert (trace.start, trace.end, trace.makespan, trace.bubble) == (0, 0, 0, 0)
    assert trace.peak_activations == trace.busy == (0, 0)
    assert trace.events == trace.transfers == ()


def test_a_trace_says_what_it_is():
    trace = simulate(pipelab.OneFOneB(4, 8), Cost(unit="ms"))
    assert repr(trace) == "<simulated trace of OneFOneB(ranks=4, microbatches=8): makespan 33 ms, bubble 27.3%>"
    assert repr(measured(name="mine")) == "<measured trace of mine: makespan 6 ms, bubble 58.3%>"
    assert (trace.source, trace.unit, trace.ranks) == ("simulated", "ms", 4)


def test_traces_are_equal_if_plan_times_unit_and_source_are():
    trace = measured()
    assert trace == measured()
    assert hash(trace) == hash(measured())
    for other in (
        measured(ends=((11, 16), (12, 14))),
        Trace(ROWS, trace.starts, trace.ends, unit="s", source="measured"),
        Trace(ROWS, trace.starts, trace.ends, unit="ms"),
        measured(transfers=[]),
        3,
    ):
        assert trace != other


def test_a_trace_keeps_tuples_and_cannot_be_changed():
    starts = [[10, 14], [11, 12.5]]
    trace = measured(starts)
    starts[0][0] = 3
    assert trace.starts == ((10, 14), (11, 12.5))
    assert trace.makespan == 6
    with pytest.raises(AttributeError):
        trace.name = "other"
    with pytest.raises(AttributeError):
        del trace.name


# Saving and loading


@given(case=legal_cases(), latency=st.sampled_from([0, 0.1]), pair=st.none() | costs())
def test_a_trace_reads_back_from_its_json(tmp_path_factory, case, latency, pair):
    try:
        trace = simulate(case.plan, Cost(forward=0.1, backward=0.7, latency=latency, pair=pair, unit="ms"))
    except pipelab.ScheduleError:
        assert pair is not None
        return
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    assert trace.save(path) == path
    loaded = Trace.load(path)
    assert loaded == trace
    assert loaded.to_dict() == trace.to_dict()
    for figure in ("makespan", "bubble", "busy", "peak_activations", "transfers", "unit", "source", "name"):
        assert getattr(loaded, figure) == getattr(trace, figure)


def test_what_a_measured_trace_ran_on_is_saved(tmp_path):
    trace = measured(lanes=["cpu 0", "cpu 1"], transfers=[Transfer(0, 1, F(0, 0), F(0, 1), 11, 11.0)])
    loaded = Trace.load(trace.save(tmp_path / "trace.json"))
    assert loaded == trace
    assert loaded.lanes == ("cpu 0", "cpu 1")
    assert loaded.source == "measured"


NO_TRACES = [
    *({"format": "other"}, {"version": 2}, {"rows": ["0F0 oops", "1F0 1B0"]}, {"rows": 3}, {"starts": 3}),
    *({"rows": ["0F0 0B0"]}, {"stages": 0}, {"microbatches": "1"}, {"starts": [[1], [2]]}, {"lanes": 3}),
    *({"ends": [[1, 2]]}, {"starts": [["a", "b"], ["c", "d"]]}, {"ends": [[None, None], [1, 2]]}),
    *({"transfers": [[1]]}, {"transfers": [[0, 1, "0F0", "oops", 1, 2]]}, {"transfers": None}),
]


@pytest.mark.parametrize(
    ("data", "error", "told"),
    [
        *((text, FormatError, "is not a trace") for text in (b"", b"no", b"[1, 2]", b"3", b"null", b"{}")),
        *((json.dumps(measured().to_dict() | fields).encode(), FormatError, "is not a trace") for fields in NO_TRACES),
        (b"\xff\xfe\x00", FormatError, "is not text in UTF-8"),
        (b"[" * 100_000, FormatError, "nested too deeply"),
        (None, FileNotFoundError, "trace.json"),
    ],
    ids=range(25),
)
def test_a_file_that_holds_no_trace_is_refused_by_name(tmp_path, data, error, told):
    path = tmp_path / "trace.json"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(error, match=told) as refusal:
        Trace.load(path)
    assert "trace.json" in str(refusal.value)


def test_an_all_reduce_is_an_event_of_every_rank_that_lists_it():
    trace = simulate(Plan.parse(["0F0 0B0 0R", "0F1 0B1 0R"]), Cost(all_reduce=1))
    assert [event.rank for event in trace.events if event.action == R(0)] == [0, 1]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"starts": [[10, float("nan")], [11, 12.5]]}, "'starts', rank 0, position 1 is nan"),
        ({"starts": [[10, 14], [float("-inf"), 12.5]]}, "'starts', rank 1, position 0 is -inf"),
        ({"ends": [[11, 10**400], [12, 13.5]]}, "'ends', rank 0, position 1 is 1000"),
        ({"ends": [[11, 16], [12, 1e308]]}, "'ends', rank 1, position 1 is 1e[+]308"),
        ({"ends": [[11, 16], [12, True]]}, "'ends', rank 1, position 1 is True"),
        ({"ends": [[11, 13], [12, 13.5]]}, "rank 0, position 1 ends at 13.0, before its start at 14"),
        ({"ends": [[11, 16], 5]}, "'ends', rank 1 is 5"),
        ({"name": 5}, "'name' is 5"),
        ({"unit": ["ms"]}, "'unit' is"),
        ({"source": "guessed"}, "'source' is 'guessed'"),
        ({"lanes": ["a", 3]}, "'lanes', rank 1 is 3"),
        ({"stages": 10**9}, "stages=1000000000 and microbatches=1 do not fit 4 actions"),
        ({"microbatches": -1}, "microbatches=-1 do not fit"),
        ({"rows": ["0F0 0F0", "1F0 1B0"]}, "its plan has faults: 0F0 appears again on rank 0"),
        ({"rows": ["0B0 0F0", "1F0 1B0"]}, "its plan has faults: 0B0 on rank 0, position 0 comes before"),
        ({"rows": ["0F0 0B0", 7]}, "'rows', rank 1 is 7"),
        ({"transfers": [[0, -1, "0F0", "1F0", 1, 2]]}, "'transfers', number 0 names 1F0 on rank -1"),
        ({"transfers": [[0, 1, "0F0", "1F9", 1, 2]]}, "names 1F9 on rank 1, which does not list it"),
        ({"transfers": [[0, 1, "0F0", "1F0", 1, None]]}, "'transfers', number 0 is None: expected a time"),
    ],
    ids=str,
)
def test_what_is_wrong_in_a_trace_is_named_with_its_place(fields, words):
    with pytest.raises(FormatError, match=words):
        Trace.from_dict(measured().to_dict() | fields)


def test_broken_traces_are_refused_or_drawn():
    assert [fuzz_trace_file(seed) for seed in range(80)] == [None] * 80


def test_what_a_traces_texts_hide_never_comes_out_raw():
    assert [fuzz_injection(seed) for seed in range(12)] == [None] * 12


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 3), (4, 8), (5, 20)])
def test_the_four_bubbles_of_gpipe_and_1f1b_in_closed_form(ranks, microbatches):
    idle_inside = 3 * ranks * (ranks - 1) / 2  # rank r waits 3 (P - 1 - r) between its first and its last action
    for kind in (pipelab.GPipe, pipelab.OneFOneB):
        assert pipelab.simulate(kind(ranks, microbatches), Cost(forward=1, backward=2)).bubbles == {
            "total": pytest.approx((ranks - 1) / (microbatches + ranks - 1)),
            "ideal": pytest.approx((ranks - 1) / microbatches),
            "longest span": pytest.approx((ranks - 1) / (microbatches + ranks - 1)),
            "own spans": pytest.approx(idle_inside / (3 * ranks * microbatches + idle_inside)),
        }
    shifted = pipelab.simulate(pipelab.ZBH2(4, 8)).bubbles  # it has a bubble by two names only
    assert shifted == {"total": pytest.approx(1 / 9), "ideal": pytest.approx(1 / 8), "longest span": 0, "own spans": 0}
