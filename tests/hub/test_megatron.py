"""Megatron-Core's strings of stages: read as Megatron reads them, and the best one against all strings."""

from __future__ import annotations

import random
import re
from itertools import combinations, pairwise

import pytest

import pipelab
from pipelab.checking.checker import as_plan
from pipelab.errors import FormatError, UsageError
from pipelab.hub.megatron import best_layout, layout_cost, read_layout, simulate_layout, write_layout

TIMES = {"E": 0.2, "t": 1, "m": 1.4, "L": (0.9, 1.5)}


def megatrons_stages(text: str) -> list[str]:
    """Read a layout as Megatron-Core says: repeated groups first, then repeated letters, then bars.

    Restated from `PipelineParallelLayerLayout` of github.com/NVIDIA/Megatron-LM, commit d98e8a6.
    """
    text = "".join(text.split(","))
    while group := re.search(r"\(([^)]+)\)\*(\d+)", text):
        text = text[: group.start()] + group[1] * int(group[2]) + text[group.end() :]
    letters = ""
    while text:
        repeated = re.match(r"(.)\*(\d+)", text)
        letters += repeated[1] * int(repeated[2]) if repeated else text[0]
        text = text[repeated.end() if repeated else 1 :]
    return letters.split("|")


def written(draw: random.Random) -> str:
    """Return a random layout, with groups, repeated letters and bars, and commas."""

    def some(letters: str) -> str:
        return "".join(
            draw.choice(letters) + draw.choice(["", "", "*2", "*3", "*12", ","]) for _ in range(draw.randrange(4))
        )

    groups = "".join(f"({some('t|') or 't'}){f'*{draw.randrange(1, 5)}'}{some('t|')}" for _ in range(draw.randrange(4)))
    return f"E{some('t|')}{groups}{draw.choice(['', 'm', '|m*2', ',m'])}{draw.choice(['', '|', '|*2'])}L"


def test_layouts_are_read_as_megatron_reads_them():
    draw = random.Random(1)  # noqa: S311 - no secret
    for _ in range(200):
        text = written(draw)
        assert read_layout(text) == megatrons_stages(text), text


def test_what_is_written_is_read_again():
    draw = random.Random(2)  # noqa: S311 - no secret
    for _ in range(50):
        stages = read_layout(written(draw))
        assert read_layout(write_layout(stages)) == stages


@pytest.mark.parametrize("text", ["", "ttL", "Ett", "EtxL", "Et(tL", "Et|E|L", "EtmtL", "Em|mL", "Et*L", "E()*2L"])
def test_what_is_no_layout_is_refused(text):
    with pytest.raises(FormatError, match="is not a layout"):
        read_layout(text)


@pytest.mark.parametrize(
    "text",
    [
        *("E|t*" + "9" * 5000 + "|L", "Et*1000000000L", "E((t*999)*999)*999L", "E" + "t*9999" * 999 + "L"),
        *("E" + "(" * 5000 + "t" + ")*1" * 5000 + "L", "E" + "|" * 20_000 + "L", [["decoder"] * 4] * 4000),
    ],
    ids=range(7),
)
def test_a_layout_of_more_layers_than_any_model_has_is_refused_in_few_words(text):
    with pytest.raises(FormatError, match="more than 10000 letters and bars") as error:
        read_layout(text)
    assert len(str(error.value)) < 200


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("'Et|t|(tt|)*2tL'", ["Et", "t", "tt", "tt", "tL"]),
        ('"Et*2 | tL"', ["Ett", "tL"]),
        (r"Et*1\|t*2\|tL", ["Et", "tt", "tL"]),
        ("E||t|L", ["E", "", "t", "L"]),
        ("Et|(tt|)*2L|", ["Et", "tt", "tt", "L", ""]),
        ([["embedding", "decoder"], [], [" Decoder", "mtp", "loss"]], ["Et", "", "tmL"]),
        ("[['embedding', 'decoder'], ['decoder', 'loss']]", ["Et", "tL"]),
        ("[[embedding], [decoder, loss], []]", ["E", "tL", ""]),
    ],
)
def test_every_form_of_megatrons_documentation_is_read(text, stages):
    assert read_layout(text) == stages
    assert layout_cost(read_layout(text), TIMES).forward[1] == pytest.approx(
        sum({"t": 1, "L": 0.9}[x] for x in stages[1])
    )


@pytest.mark.parametrize(
    ("text", "told", "tried"),
    [
        ("E|(t|)*10m|m|m|LL|LL", "L has to be its last layer, once, all m have to be in one", "E|(t|)*10||m*3||L"),
        ("Ett|tt", "L has to be its last layer, once", "Ett|ttL"),
        ("tt|ttL", "E has to be its first layer, once", "Ett|ttL"),
        ("Etm|tL", "every t has to come before every m", "Et|tmL"),
        ("Et(tt|L", r"'\(' is neither E, t, m, L nor \|", "Et*3|L"),
        ([["embedding", "encoder"], ["decoder", "loss"]], r"'\?' is neither", "E|tL"),
    ],
)
def test_the_advice_is_about_the_layout_that_was_given(text, told, tried):
    with pytest.raises(FormatError, match=told) as error:
        read_layout(text)
    assert str(error.value).endswith(f"\n  try: {tried}")
    assert write_layout(read_layout(tried)) == tried


def every_layout(stages: int, ranks: int, decoders: int, mtp: int) -> list[str]:
    """Return all layouts: bars among the decoders, and all `m` behind them in one of each rank's last stages."""
    found = []
    for bars in combinations(range(decoders + stages - 1), stages - 1):
        ends = [-1, *bars, decoders + stages - 1]
        counts = [later - before - 1 for before, later in pairwise(ends)]
        for at in range(stages - ranks, stages) if mtp else [stages - 1]:
            if not mtp or not any(counts[at + 1 :]):
                parts = ["t" * count + "m" * mtp * (stage == at) for stage, count in enumerate(counts)]
                found.append(f"E{'|'.join(parts)}L")
    return found


@pytest.mark.parametrize(
    ("schedule", "decoders", "mtp", "cost"),
    [
        (pipelab.OneFOneB(4, 6), 9, 0, {}),
        (pipelab.OneFOneB(3, 4), 8, 2, {"latency": 0.3}),
        (pipelab.ZBH1(3, 5), 7, 1, {}),
        (pipelab.ZBH1(3, 4), 6, 0, {"first_stage": "as-run"}),
        (pipelab.Interleaved1F1B(2, 4), 7, 1, {"latency": 0.1}),
        (pipelab.with_recompute(pipelab.OneFOneB(3, 4)), 7, 0, {"recompute": [3, 1, 1]}),
        (pipelab.with_gathers(pipelab.OneFOneB(3, 4)), 7, 0, {"gather": [9, 1, 1]}),
        (
            pipelab.Plan.parse("0F0 0F1 0B0 0B1 0R; 1F0 1B0 1F1 1B1 1R"),
            7,
            0,
            {"all_reduce": [8, 1], "all_reduce_runs": "beside"},
        ),
    ],
)
def test_no_string_is_quicker_than_the_best_one(schedule, decoders, mtp, cost):
    cost, plan = pipelab.Cost(**cost), as_plan(schedule)
    every = every_layout(plan.stages, plan.ranks, decoders, mtp)
    spans = [pipelab.simulate(plan, layout_cost(text.split("|"), TIMES, cost)).makespan for text in every]
    best = simulate_layout(plan, best_layout(plan, decoders, TIMES, mtp=mtp, cost=cost), TIMES, cost)
    assert best.makespan == pytest.approx(min(spans))
    assert min(spans) < 0.8 * max(spans)
    assert pipelab.lower_bound(best) <= best.makespan * (1 + 1e-9)


def test_the_best_string_beats_the_one_of_megatrons_page():
    schedule, theirs = pipelab.Interleaved1F1B(4, 8), "Et*3|(tt|)*5,m|L"
    ours = best_layout(schedule, 13, TIMES, mtp=1)
    assert "".join(read_layout(ours)) == "".join(read_layout(theirs))
    assert simulate_layout(schedule, ours, TIMES).makespan < simulate_layout(schedule, theirs, TIMES).makespan


def test_what_does_not_fit_the_schedule_is_refused():
    with pytest.raises(UsageError, match="3 stages: expected 2"):
        simulate_layout(pipelab.OneFOneB(2, 4), "Et|t|tL", TIMES)
    with pytest.raises(UsageError, match="m only in the last 2"):
        simulate_layout(pipelab.Interleaved1F1B(2, 4), "Et|tm||L", TIMES)
    with pytest.raises(UsageError, match="stage s on rank"):
        best_layout(pipelab.ZBV(2, 4), 6, TIMES)
    with pytest.raises(UsageError, match="no time is given for L"):
        best_layout(pipelab.OneFOneB(2, 4), 6, {"E": 0, "t": 1})
    for cost in ({"pair": 2.5}, {"sender": "busy"}):
        with pytest.raises(UsageError, match="search for layouts has no"):
            best_layout(pipelab.Overlapped1F1B(4, 8), 24, TIMES, cost=pipelab.Cost(**cost))


@pytest.mark.parametrize(("name", "time"), [("L", "abc"), ("L", None), ("L", (1, 2, 3)), ("t", (1, "x")), ("x", 3)])
def test_a_time_that_is_none_is_refused(name, time):
    with pytest.raises(UsageError, match=rf"time {name}=.*expected E, t, m or L"):
        layout_cost(["Et", "tL"], TIMES | {name: time})
