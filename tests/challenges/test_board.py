"""The page's board: what it lets a player place is what `check` allows, when `simulate` says, and no choice is lost."""

from __future__ import annotations

import json
import random
import runpy
from pathlib import Path

import pytest

import pipelab
from pipelab.challenges.levels import judge, levels

DOCS = Path(__file__).resolve().parents[2] / "docs"
GIVEN = runpy.run_path(str(DOCS / "pyodide.py"))["_levels"]()
LEVELS = list(levels().values())
STATE = "(moves) => ((b) => [b.ready, b.forced, b.complete, b.makespan, b.rows])(new pipelabBoard(level, moves))"


@pytest.fixture(scope="module")
def play(browser):
    """Return a function that plays moves in a level, and returns the board's state."""
    tab = browser.new_page()
    tab.add_script_tag(content=(DOCS / "playground" / "board.js").read_text(encoding="utf-8"))

    def state(level, moves):
        tab.evaluate(f"level = {json.dumps(GIVEN[level.name])}")
        return tab.evaluate(STATE, moves)

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
            return room and (stage == 0 or f"{stage - 1}F{m}" in done)
        if kind == "W":
            return f"{stage}I{m}" in done
        back = stage == level.stages - 1 or f"{stage + 1}B{m}" in done or f"{stage + 1}I{m}" in done
        return f"{stage}F{m}" in done and back

    found = set()
    for kind in level.kinds:
        for stage in range(level.stages):
            found |= {f"{stage}{kind}{m}" for m in [m for m in range(level.microbatches) if may(stage, kind, m)][:1]}
    return found


@pytest.mark.parametrize("each", LEVELS, ids=lambda each: each.name)
def test_a_random_game_never_gets_where_check_and_simulate_judge_otherwise(play, each):
    draw, moves, said = random.Random(each.name), [], {}  # noqa: S311 - a test
    while True:
        ready, forced, complete, makespan, rows = play(each, moves)
        offered = {word: start for choices in ready for word, start, _ in choices}
        assert set(offered) == placeable(each, moves)
        if not offered:
            break
        assert forced is None or forced in offered
        word = forced or draw.choice(sorted(offered))
        said[word] = offered[word]
        moves.append(word)
        assert wrong(each, moves) == []
    found = judge(each, pipelab.Plan.parse(rows))
    assert complete == (found.trace is not None)  # with a cap, there are dead ends
    if complete:
        assert found.makespan == pytest.approx(makespan)
        assert {str(event.action): event.start for event in found.trace.events} == pytest.approx(said)


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
    assert play(each, moves)[2:4] == [True, each.par]
