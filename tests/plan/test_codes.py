"""Codes: tables that say what a number means, laid out in one module only."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import catalogue_plans

import pipelab
from pipelab import B, F, I, Plan, W
from pipelab.plan.actions import KINDS, OPTIONAL, PER_MICROBATCH, TRAITS, Action
from pipelab.plan.codes import Codes

ROOT = Path(pipelab.__file__).parent
GRAPH_SLOTS = "engine/stage/split_backward.py"
"""Where `slots` are inputs of a node in autograd's graph."""

sizes = st.tuples(st.integers(1, 5), st.integers(1, 5))


def every_action(stages, microbatches):
    """Return all actions of a size in the order of their codes."""
    kinds = [kind for kind in PER_MICROBATCH if kind not in OPTIONAL]
    per_microbatch = [Action(kind, m, s) for kind in kinds for m in range(microbatches) for s in range(stages)]
    return per_microbatch + [Action("R", None, s) for s in range(stages)]


@given(sizes)
def test_the_tables_say_what_the_actions_are(size):
    codes = Codes(*size)
    actions = every_action(*size)
    assert len(codes.kind) == len(codes.stage) == len(codes.microbatch) == len(codes.releases) == len(actions)
    for code, action in enumerate(actions):
        assert codes.action(code) == action
        assert codes.code(action) == code
        assert (codes.kind[code], codes.stage[code]) == (action.kind, action.stage)
        assert codes.microbatch[code] == (-1 if action.microbatch is None else action.microbatch)
        assert bool(codes.releases[code]) == (action.kind in "BW")
    assert [code for kind in codes.kinds for code in codes.of_kind[kind]] == list(range(len(actions)))


@given(sizes)
def test_the_four_actions_of_a_micro_batch_and_stage_share_a_slot(size):
    codes = Codes(*size)
    for code in codes.of_kind["F"]:
        place = (codes.microbatch[code], codes.stage[code])
        for kind in "FBIW":
            other = codes.sibling(code, kind)
            assert other == codes.table[kind][place[0]][place[1]]
            assert codes.slot[other] == codes.slot[code]


@given(sizes)
def test_givers_and_needers_are_the_two_ends_of_a_need(size):
    codes = Codes(*size)
    for code in range(len(codes.gives)):
        for value in codes.needs(code):
            assert code in codes.needers(value)
            word = codes.value_name(value).partition("(")[0]
            for giver in codes.givers(value):
                assert word in {each.partition("(")[0] for each in TRAITS[codes.kind[giver]].gives}
        for needer in codes.needers(codes.gives[code]):
            assert codes.gives[code] in codes.needs(needer)


def test_numbers_by_kind_and_stage_become_numbers_by_code_and_value():
    codes = Codes(stages=2, microbatches=2)
    times = codes.by_code({kind: [10 * at, 10 * at + 1] for at, kind in enumerate(KINDS)})
    for code, time in enumerate(times):
        assert time == 10 * KINDS.index(codes.kind[code]) + codes.stage[code]
    delays = codes.by_value([1, 2], [3, 4])
    named = {codes.value_name(value): delays[value] for value in range(codes.always)}
    assert [named["out(1, 0)"], named["out(1, 1)"], named["gin(0, 0)"], named["gin(0, 1)"]] == [1, 2, 3, 4]
    assert named["gw(0, 1)"] == delays[codes.always] == 0


def test_a_forward_takes_up_an_activation_that_its_backward_releases():
    plan = Plan([[F(0), F(1), B(0), I(1), F(2), W(1), B(2)]])
    assert plan.bound.in_flight(0) == [1, 2, 1, 1, 2, 1, 0]


@given(catalogue_plans())
def test_a_route_names_the_ranks_that_a_micro_batch_visits(plan):
    for rank, row in enumerate(plan.bound.computing):
        for action in map(plan.bound.codes.action, row):
            if action.microbatch is not None:
                assert plan.bound.route(action.microbatch)[action.stage] == rank


def test_only_the_tables_know_how_codes_are_laid_out():
    knowing = set()
    for path in ROOT.rglob("*.py"):
        text = path.read_text()
        if "slots" in text.replace("slots=True", ""):
            words = [each.string for each in tokenize.generate_tokens(io.StringIO(text).readline)]
            at = [index for index, word in enumerate(words) if word == "slots"]
            if any(words[index + 1 : index + 3] != ["=", "True"] for index in at):
                knowing.add(str(path.relative_to(ROOT)))
    assert knowing == {"plan/codes.py", GRAPH_SLOTS}


def test_the_page_does_not_know_how_codes_are_laid_out():
    for path in sorted((ROOT / "draw" / "page").glob("*.js")):
        assert not {"slots", "codes", "stages"} & set(re.findall(r"\w+", path.read_text()))


FURTHER = [("F", 1, "out(m,s)", 0), ("B", 0, "gin(m,s)", 1), ("F", 2, "gin(m,s)", 0)]
"""What may be needed beside a kind's own values: by which action of micro-batch m, which value of another one."""


@pytest.mark.parametrize(("kind", "microbatch", "value", "of"), FURTHER)
def test_a_further_need_is_a_need_for_every_reader_of_the_plan(kind, microbatch, value, of):
    plan = pipelab.OneFOneB(2, 4).plan()
    plan = Plan(plan.rows, 2, 4)
    codes = plan.bound.codes
    needer, needed = codes.table[kind][microbatch][0], codes.of_value(value)[codes.slot[codes.table["F"][of][0]]]
    codes.require(needer, needed)
    assert codes.needs(needer)[-1] == needed
    assert needer in codes.needers(needed)
    (giver,) = set(codes.givers(needed)) & set(plan.bound.computing[0])
    assert plan.graph().has_edge(codes.action(giver), codes.action(needer))
    row = plan.bound.computing[0]
    right = row.index(giver) < row.index(needer)
    found = pipelab.check(plan)
    assert (not found) == right
    assert right or [(fault.code, str(fault.action)) for fault in found] == [("unordered", f"0{kind}{microbatch}")]


@pytest.mark.parametrize("half", ["F", "B"])
@pytest.mark.parametrize("pair", [None, 2.5])
def test_a_further_need_delays_an_action_and_its_pair(pair, half):
    other = [F(2, 1), B(1, 1), B(2, 1)]
    plan = Plan([[F(0, 0), B(0, 0)], [F(0, 1), F(1, 1) & B(0, 1), *other], [F(1, 0), F(2, 0), B(1, 0), B(2, 0)]])
    codes = plan.bound.codes
    needer = codes.table[half][1 if half == "F" else 0][1]
    codes.require(needer, codes.of_value("out(m,s)")[codes.slot[codes.table["F"][2][0]]])
    starts = {
        str(event.action): event.start
        for event in pipelab.simulate(plan, pipelab.Cost(forward=[4, 1], pair=pair)).events
    }
    assert starts["1F1"] == (8 if pair or half == "F" else 5)
    assert starts["1B0"] == (8 if pair or half == "B" else 9)
