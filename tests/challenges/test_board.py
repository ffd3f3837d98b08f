"""The page's board: what it lets a player place is what `check` allows, when `simulate` says, and no choice is lost."""

from __future__ import annotations

import itertools
import json
import random
import runpy
from dataclasses import replace
from pathlib import Path

import pytest

import pipelab
from pipelab.challenges.levels import built, judge, levels

DOCS = Path(__file__).resolve().parents[2] / "docs"
GIVEN = runpy.run_path(str(DOCS / "pyodide.py"))["_levels"]()
LEVELS = list(levels().values())
STATE = (
    "(moves) => ((b) => [b.ready, b.forced, b.complete, b.makespan, b.rows, b.score])(new pipelabBoard(level, moves))"
)
SHOWN = "(moves) => ((b) => [b.critical, level.times.map((_, rank) => b.memory(rank))])(new pipelabBoard(level, moves))"


@pytest.fixture(scope="module")
def play(browser):
    """Return a function that plays moves in a level, and returns the board's state."""
    tab = browser.new_page()
    tab.add_script_tag(content=(DOCS / "playground" / "board.js").read_text(encoding="utf-8"))

    def state(level, moves):
        tab.evaluate(f"level = {json.dumps(GIVEN[level.name])}")
        return tab.evaluate(STATE, moves)

    state.tab = tab
    yield state
    tab.close()


def plan_of(level, moves):
    """Return the rows that moves make, as a plan."""
    rows = [[word for word in moves if level.rank_of(int(word[0])) == rank] for rank in range(level.ranks)]
    return pipelab.Plan(
        [[pipelab.plan.actions.Action.parse(word) for word in row] for row in rows],
        level.stages,
        level.microbatches,
        lambda _, stage: level.rank_of(stage),
    )


def wrong(level, moves):
    """Return what `check` says of moves, but that actions are missing."""
    return [fault for fault in pipelab.check(plan_of(level, moves), memory_cap=level.cap) if fault.code != "missing"]


def waiting(level, moves, rank, other):
    """Return the actions of another rank that have not taken yet what a rank has made for them, in order."""
    taken = []
    for word in moves:
        stage, kind, m = int(word[0]), word[1], word[2:]
        needer = stage + (1 if kind == "F" else -1)
        here = level.rank_of(stage) == rank and 0 <= needer < level.stages and level.rank_of(needer) == other
        taken += [f"{needer}{kind}{m}"] * here
    return [word for word in taken if word not in moves]


def placeable(level, moves):
    """Return what may be placed, by rules written apart from pipelab's: of each kind and stage, the first."""
    done = set(moves)
    held = [0] * level.ranks
    for word in moves:
        held[level.rank_of(int(word[0]))] += {"F": 1, "I": 0}.get(word[1], -1)

    def may(stage, kind, m):
        if any(f"{stage}{other}{m}" in done for other in {"F": "F", "B": "BI", "I": "BI", "W": "W"}[kind]):
            return False
        if kind == "F":
            room = level.cap is None or held[level.rank_of(stage)] < level.cap
            return room and (stage == 0 or f"{stage - 1}F{m}" in done) and is_first(stage, stage - 1, f"{stage}F{m}")
        if kind == "W":
            return f"{stage}I{m}" in done
        back = stage == level.stages - 1 or f"{stage + 1}B{m}" in done or f"{stage + 1}I{m}" in done
        return f"{stage}F{m}" in done and back and is_first(stage, stage + 1, f"{stage}B{m}")

    def is_first(stage, giver, word):
        home, other = level.rank_of(stage), level.rank_of(giver) if 0 <= giver < level.stages else None
        return not level.queued or other in (None, home) or waiting(level, moves, other, home)[:1] == [word]

    found = set()
    for kind in level.kinds:
        for stage in range(level.stages):
            found |= {f"{stage}{kind}{m}" for m in [m for m in range(level.microbatches) if may(stage, kind, m)][:1]}
    return found


@pytest.mark.parametrize("each", LEVELS, ids=lambda each: each.name)
def test_a_random_game_never_gets_where_check_and_simulate_judge_otherwise(play, each):
    draw, moves, said = random.Random(each.name), [], {}  # noqa: S311 - a test
    while True:
        ready, forced, complete, makespan, rows, score = play(each, moves)
        offered = {word: start for choices in ready for word, start, _ in choices}
        assert set(offered) == placeable(each, moves)
        if not offered:
            break
        assert forced is None or forced in offered
        word = forced or draw.choice(sorted(offered))
        said[word] = offered[word]
        moves.append(word)
        assert wrong(each, moves) == []
    found = judge(replace(each, within=None), pipelab.Plan.parse(rows))
    assert complete == (found.trace is not None)  # with a cap or a queue, there are dead ends
    if complete:
        assert found.trace.makespan == pytest.approx(makespan)
        assert each.score(found.trace) == pytest.approx(score)
        assert {str(event.action): event.start for event in found.trace.events} == pytest.approx(said)
        critical, memory = play.tab.evaluate(SHOWN, moves)
        assert [max(held for *_, held in steps) for steps in memory] == list(found.trace.peak_activations)
        assert_is_critical(each, found.trace, critical)


def assert_is_critical(level, trace, words):
    """Check that words lead from the first start to the last end, and that each begins when the one before lets it."""
    events = {str(event.action): event for event in trace.events}
    chain = [events[word] for word in words]
    assert (chain[0].start, chain[-1].end) == (0, pytest.approx(trace.makespan))
    for one, other in itertools.pairwise(chain):
        way = 0 if one.rank == other.rank else level.latency
        assert other.start == pytest.approx(one.end + way) or level.queued


@pytest.mark.parametrize("each", LEVELS, ids=lambda each: each.name)
def test_the_page_names_an_order_as_the_terminal_does(each):
    for _, plan in each.known:
        if name := judge(each, plan).recognised:
            rows = "; ".join(" ".join(map(str, row)) for row in plan.rows)
            assert GIVEN[each.name]["known"][rows] == built(name)


def test_the_name_is_the_first_of_those_with_the_same_rows_and_no_picture_gives_the_answer():
    attempt = judge(levels()["fill"], pipelab.schedules["hanayo"](3, 3, stages_per_rank=1).plan())
    assert (attempt.recognised, attempt.looked_up) == ("eager-1f1b", True)
    circle = GIVEN["circle"]["circle"]
    assert (len(circle["arrows"]), circle["hint"]) == (4, "")


@pytest.mark.teacher
@pytest.mark.parametrize("each", LEVELS, ids=lambda each: each.name)
def test_par_can_be_reached_by_hand_with_what_is_forced(play, each):
    rows = [list(map(str, row)) for row in each.solution.rows]
    moves = []
    while any(rows):
        ready, forced, *_ = play(each, moves)
        offered = [word for choices in ready for word, *_ in choices]
        if forced:
            assert forced in [row[0] for row in rows if row]  # no order of the solution is lost
        word = forced or next(row[0] for row in rows if row and row[0] in offered)
        next(row for row in rows if row and row[0] == word).pop(0)
        moves.append(word)
    state = play(each, moves)
    assert (state[2], state[5], state[3] <= (each.within or state[3])) == (True, each.par, True)


GREEDY = """([kinds, sign]) => {
  const board = new pipelabBoard(level), rank = ([word, start]) => [start, kinds.indexOf(word[1]), sign * word[0]];
  for (let next = true; next; ) {
    const [first] = board.ready.flat().sort((one, other) => {
      const [a, b] = [rank(one), rank(other)];
      return a[0] - b[0] || a[1] - b[1] || a[2] - b[2];
    });
    next = board.forced ?? first?.[0];
    if (next) board.place(next);
  }
  return board.complete && board.makespan <= (level.within ?? Infinity) ? board.score : null;
}"""


def test_the_earliest_first_and_backward_first_solves_two_levels_at_most(play):
    solved = {}
    for each in LEVELS:
        play(each, [])  # the level is now the page's
        for rule in itertools.product(("BIFW", "BIWF", "IBFW", "IBWF"), (1, -1)):
            if play.tab.evaluate(GREEDY, rule) == each.par:
                solved.setdefault(each.name, []).append(rule)
    assert list(solved) == ["fill", "four"]
