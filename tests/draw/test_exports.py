"""Traces for other tools, and figures at the widths of papers."""

from __future__ import annotations

import csv
import json
import re

import pytest

import pipelab
from pipelab import Cost
from pipelab.draw import figure

SCHEDULES = [pipelab.OneFOneB(4, 8), pipelab.ZBH1(3, 5), pipelab.Interleaved1F1B(2, 4), pipelab.DualPipe(4, 8)]


@pytest.fixture(params=SCHEDULES, ids=lambda each: type(each).__name__)
def trace(request):
    return pipelab.simulate(request.param, Cost(latency=0.25, unit="ms"))


def test_perfetto_has_every_action_arrow_and_counter(trace, tmp_path):
    found = json.loads(trace.save(tmp_path / "x.perfetto.json").read_text())["traceEvents"]
    slices = [each for each in found if each["ph"] == "X"]
    assert len(slices) == len(trace.events)
    for each, event in zip(slices, trace.events, strict=True):
        assert (each["tid"], each["name"]) == (event.rank, str(event.action))
        assert (each["ts"], each["dur"]) == pytest.approx((1e3 * event.start, 1e3 * event.duration))
    spans = {(each["tid"], at) for each in slices for at in (each["ts"], each["ts"] + each["dur"])}
    flows = [each for each in found if each["ph"] in "sf"]
    assert len(flows) == 2 * len(trace.transfers)
    assert all((each["tid"], each["ts"]) in spans for each in flows)  # each joins a slice that is there
    for number in range(len(trace.transfers)):
        start, end = (each for each in flows if each["id"] == number)
        assert (start["ph"], end["ph"]) == ("s", "f")
        assert start["ts"] <= end["ts"]
    for rank in range(trace.ranks):
        held = [each["args"]["held"] for each in found if each["name"] == f"activations of rank {rank}"]
        assert (max(held), held[-1]) == (trace.peak_activations[rank], 0)


def test_events_as_csv_add_up_to_the_ledger(trace, tmp_path):
    path = trace.save(tmp_path / "x.events.csv")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["rank"]) for row in rows] == [event.rank for event in trace.events]
    for rank in range(trace.ranks):
        idle = sum(float(row["idle_before"]) for row in rows if int(row["rank"]) == rank)
        drained = trace.ledger[rank].get("drain", 0)
        assert idle + drained == pytest.approx(sum(trace.ledger[rank].values()))


@pytest.mark.parametrize(("width", "inches"), [(3.25, 3.25), ("page", 6.75), ("beamer", 5.04)])
def test_a_figure_is_as_wide_as_a_paper_wants_it(width, inches, tmp_path):
    pdf = pipelab.simulate(SCHEDULES[0]).save(tmp_path / "x.pdf", width=width).read_bytes()
    box = re.search(rb"/MediaBox \[ 0 0 ([\d.]+) ", pdf)
    assert float(box[1]) == pytest.approx(72 * inches, abs=0.1)
    assert b"/Type3" not in pdf.replace(b" ", b"")
    assert figure.plot(pipelab.simulate(SCHEDULES[0]), width=width).get_title(loc="left") == ""


@pytest.mark.parametrize(("name", "width"), [("x.pdf", 1), ("x.pdf", "slide"), ("x.html", 3.25), ("x.json", 3.25)])
def test_a_width_that_cannot_be_is_refused(name, width, tmp_path):
    with pytest.raises(pipelab.UsageError, match="width"):
        pipelab.simulate(SCHEDULES[0]).save(tmp_path / name, width=width)
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize(
    ("plan", "cost"),
    [
        (pipelab.PipeOffload(2, 4), Cost(offload=1, load=0.5)),
        (pipelab.with_gathers(pipelab.OneFOneB(2, 4), 1), Cost(gather=1)),
        (pipelab.replicate(pipelab.OneFOneB(2, 2), 2), Cost(all_reduce=4, all_reduce_runs="beside")),
    ],
    ids=["offload", "gather", "all-reduce beside"],
)
def test_every_drawing_shows_what_runs_beside_computing(plan, cost, tmp_path):
    trace = pipelab.simulate(plan, cost)
    lasting = [move for move in trace.moves if move.duration]
    found = json.loads(trace.save(tmp_path / "x.perfetto.json").read_text())
    slices = [each for each in found["traceEvents"] if each["ph"] == "X" and each["tid"] >= trace.ranks]
    assert [(each["name"], each["ts"], each["dur"]) for each in slices] == [
        (str(move.action), 1e3 * move.start, 1e3 * move.duration) for move in trace.moves
    ]
    strips = [line.split("│")[1] for line in str(trace).splitlines() if "│" in line and "rank" not in line]
    assert sum(len(re.findall(r"\d?[OLUR][…─]*", strip)) for strip in strips) == len(lasting)
    kinds = {move.action.kind for move in lasting}
    shapes = [each for each in figure.plot(trace).collections if (each.get_gid() or "").split(" ")[0] in kinds]
    assert sum(len(each.get_paths()) for each in shapes) == len(lasting)
    moves = [move for _, moves in trace.plan.graph().nodes(data="moves") for move in moves or ()]
    assert sorted(map(str, moves)) == sorted(str(move.action) for move in trace.moves)
