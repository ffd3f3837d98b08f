"""The published format of traces: what pipelab writes fits its schema, and what another simulator writes is read."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import jsonschema
import oracle
import pytest

import pipelab
from pipelab import Action, Cost, Trace, simulate
from pipelab.trace.diff import in_unit_of

SCHEMA = json.loads((Path(pipelab.__file__).parent / "trace" / "trace.schema.json").read_text())
FITS = jsonschema.Draft202012Validator(SCHEMA).validate
PAGE = (Path(__file__).parents[2] / "docs" / "how_to" / "other_tools.md").read_text(encoding="utf-8")
EXAMPLE = json.loads(re.search(r"```json\n(.*?)```", PAGE, re.DOTALL)[1])


def simulated_elsewhere(data):
    """Return the starts and ends of a file's actions, by the oracle: each rank goes on when it can."""
    took, rows = data["costs"], [list(map(Action.parse, row.split())) for row in data["rows"]]
    lasts = {"lasts": lambda action: took[action.kind][action.stage], "lag": lambda value: took[value[0]][value[2]]}
    spans = oracle.clock(rows, data["stages"], data["microbatches"], **lasts)
    both = [[(start, end) for at, _, start, end in spans if at == rank] for rank in range(len(rows))]
    return [[start for start, _ in row] for row in both], [[end for _, end in row] for row in both]


def written_elsewhere(data, **more):
    starts, ends = simulated_elsewhere(data)
    return {"format": "pipelab-trace", "version": 1, "rows": data["rows"], "starts": starts, "ends": ends} | more


@pytest.mark.parametrize("name", pipelab.schedules)
def test_every_schedules_trace_fits_the_schema(name):
    trace = simulate(pipelab.schedules[name](4, 8), Cost(latency=0.5, all_reduce=1, unit="ms"))
    FITS(trace.to_dict())
    assert set(trace.costs()) == {"out", "gin"} | {event.action.kind for event in trace.events}


def test_what_is_rare_in_a_trace_fits_the_schema_too():
    moves = simulate(pipelab.with_gathers(pipelab.OneFOneB(2, 4)), Cost(gather=0.5))
    queued = simulate(pipelab.Interleaved1F1B(2, 4), Cost(latency=1), transport="rank")
    pairs = simulate(pipelab.DualPipeV(2, 4), Cost(pair=2.5))
    updates = simulate(pipelab.PipeDream(2, 4), Cost(update=0.25))
    beside = simulate(pipelab.OneFOneB(2, 4), Cost(all_reduce=1, all_reduce_runs="beside"), replicas=2)
    for trace in (moves, queued, pairs, updates, beside):
        FITS(trace.to_dict())
    assert moves.costs()["UNSHARD"] == [0.5, 0.5]
    assert pairs.costs()["pair"] == [1.25] * 4
    assert updates.costs()["U"] == [0.25, 0.25]
    links = simulate(pipelab.GPipe(2, 3), Cost(links={"ranks_per_node": 1, "inside": (0, None), "between": (1, None)}))
    assert links.costs()["out"] == [1.0, 0.0] * 3
    assert max(len(each) for each in queued.to_dict()["transfers"]) == 9


@pytest.mark.parametrize(
    "fields",
    [
        {"format": "other"},
        {"rows": ["0f0"]},
        {"rows": 3},
        {"starts": [["0"]]},
        {"transfers": [[1]]},
        {"costs": {"F": 1}},
        {"source": "guessed"},
        {"all_reduce_runs": "aside"},
    ],
    ids=str,
)
def test_the_schema_and_pipelab_refuse_the_same(fields):
    with pytest.raises(jsonschema.ValidationError):
        FITS(EXAMPLE | fields)
    with pytest.raises(pipelab.FormatError):
        Trace.from_dict(EXAMPLE | fields)


@pytest.mark.parametrize("key", SCHEMA["required"])
def test_five_keys_are_required_and_the_others_are_not(key):
    least = {name: EXAMPLE[name] for name in SCHEMA["required"]}
    FITS(least)
    assert Trace.from_dict(least).starts == Trace.from_dict(EXAMPLE).starts
    with pytest.raises(jsonschema.ValidationError):
        FITS({name: value for name, value in least.items() if name != key})
    with pytest.raises(pipelab.FormatError):
        Trace.from_dict({name: value for name, value in least.items() if name != key})


def test_the_pages_example_is_what_pipelab_writes():
    FITS(EXAMPLE)
    written = simulate(pipelab.OneFOneB(2, 2), Cost(forward=10, backward=20, latency=1, unit="ms")).to_dict()
    assert {name: written[name] for name in EXAMPLE if name != "name"} == {
        name: value for name, value in EXAMPLE.items() if name != "name"
    }


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zbv"])
def test_a_simulator_that_knows_nothing_of_pipelab_gives_the_same_times(name):
    ours = simulate(pipelab.schedules[name](4, 8), Cost(forward=3, backward=5, latency=0.75))
    theirs = Trace.from_dict(written_elsewhere(json.loads(json.dumps(ours.to_dict()))))
    assert pipelab.diff(ours, theirs).first is None
    assert theirs.ends == tuple(map(pytest.approx, ours.ends))


def test_a_trace_of_slices_can_be_pickled_also_after_it_was_read():
    made = simulate(pipelab.Seq1F1B(2, 4, slices=2))
    read = Trace.from_dict(json.loads(json.dumps(made.to_dict())))
    read = pickle.loads(pickle.dumps(read))  # noqa: S301 - our own
    assert pipelab.diff(made, read).first is None
    assert [*read.plan.after(3, 1)] == [2]


def test_the_first_action_that_differs_is_named_with_its_difference(pipelab_command, succeeds, folder):
    made = ("simulate", "1f1b", "-r", "2", "-m", "2", "-f", "10", "-b", "20", "--latency", "1", "--unit", "ms")
    succeeds(*made, "-o", "ours.json")
    ours = json.loads(Path("ours.json").read_text())
    ours["costs"] |= {"out": [1.5, 1.5]}
    Path("theirs.json").write_text(json.dumps(written_elsewhere(ours, unit="ms")))
    code, output, _ = pipelab_command("compare", "ours.json", "--with", "theirs.json")
    sentence = re.search(r"\$ pipelab compare ours.json --with theirs.json\n(.*)\n", PAGE)[1]
    assert (code, output.splitlines()[0]) == (0, sentence)
    assert "theirs.json" in output.partition("\n")[2]
    code, output, _ = pipelab_command("compare", "ours.json", "--with", "theirs.json", "--diff")
    assert "transfers" in output or "late starts" in output
    ours["rows"][0] = "0F0 0B0 0F1 0B1"
    Path("theirs.json").write_text(json.dumps(written_elsewhere(ours, unit="ms")))
    Path("theirs.json").write_text(json.dumps(written_elsewhere(ours, unit="us")))
    output = succeeds("compare", "ours.json", "--with", "theirs.json")
    assert "times of the file x 0.001)" in " ".join(output.split())
    Path("theirs.json").write_text(json.dumps(written_elsewhere(ours, unit="ms")))
    assert "0F1 on rank 0: it starts at" in succeeds("compare", "ours.json", "--with", "theirs.json")
    assert "try --unit" not in succeeds("compare", "ours.json", "--with", "theirs.json")
    plan = ("compare", "1f1b", "-r", "2", "-m", "2", "-f", "10", "-b", "20", "--with", "theirs.json")
    assert "try --unit ms" in " ".join(succeeds(*plan).split())
    assert "try --unit" not in succeeds(*plan, "--unit", "ms")


def test_all_reduces_beside_computing_are_shown_beside_another_simulators(succeeds, folder):
    cost = Cost(all_reduce=3, all_reduce_runs="beside")
    simulate(pipelab.replicate(pipelab.OneFOneB(2, 2), 2), cost).save("beside.json")
    output = succeeds("compare", "beside.json", "--with", "beside.json", "--save", "both.html")
    assert "at the same time" in output.splitlines()[0]
    assert output.count("rank 3") == 2
    succeeds("compare", "beside.json", "--with", "beside.json", "--diff")


@pytest.mark.parametrize(("unit", "factor"), [("us", 1000), ("s", 0.001), ("ticks", 7), ("", 3)])
def test_times_in_another_unit_are_converted_by_name_or_by_the_work(unit, factor):
    ours = simulate(pipelab.OneFOneB(2, 4), Cost(latency=1, unit="ms"), transport="rank")
    theirs = simulate(ours.plan, Cost(forward=factor, backward=2 * factor, latency=factor, unit=unit), transport="rank")
    same = in_unit_of(theirs, ours)
    assert same.unit == "ms"
    assert [each.end for each in same.transfers] == pytest.approx([each.end for each in ours.transfers])
    assert same.ends == tuple(map(pytest.approx, ours.ends))
    slower = simulate(ours.plan, Cost(forward=1.5 * factor, backward=2 * factor, latency=factor, unit=unit))
    known = unit in ("us", "s")
    assert in_unit_of(slower, ours).ends[0][0] == pytest.approx(1.5 if known else 1.5 * 3 / 3.5)


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        (["1f1b", "--with", "two.json"], "4 stages x 8 micro-batches and 2 stages x 2 micro-batches"),
        (["1f1b", "gpipe", "--with", "two.json"], "--with needs one plan"),
        (["1f1b", "-m", "2,4", "--with", "two.json"], "--with needs one plan"),
        (["1f1b", "--with", "none.json"], "none.json: No such file"),
        (["1f1b", "--with", "other.json"], "expected format 'pipelab-trace', version 1\n  try: pipelab simulate"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_the_reason(refused, folder, words, fact):
    Path("two.json").write_text(json.dumps(EXAMPLE))
    Path("other.json").write_text('{"actions": 3}')
    assert fact in refused("compare", *words)
