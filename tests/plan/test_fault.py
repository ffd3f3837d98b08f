"""What a student reads: every kind of fault says a fact, its cause with numbers, and the next move."""

from __future__ import annotations

from typing import get_args

import pytest

import pipelab
from pipelab import B, F, Plan, check
from pipelab.plan.csv_notation import is_plan, lines_of
from pipelab.plan.fault import Code, excerpt, misfit, ranges, shorten


def forever():
    while True:
        yield F(0)


def by_stage(microbatch, stage):
    return stage


class Interleaved(pipelab.Schedule):
    """Names no stage where a rank has two."""

    def actions(self, rank):
        return [F(0)] if rank == 0 else []


class OnlyEven(pipelab.Schedule):
    @classmethod
    def refusal(cls, ranks, microbatches):  # noqa: ARG003 - pipelab calls it with both
        return f"{microbatches} micro-batches are odd: take {microbatches + 1}" if microbatches % 2 else None

    def actions(self, rank):
        return []


class Raises(pipelab.Schedule):
    def actions(self, rank):
        yield F(0)
        yield F(1 // (1 - rank))


MESSAGES = {
    "missing": (
        Plan.parse(["0F0 0B0 0F1 0B1 0F2 0F3", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"]),
        "missing: micro-batches 2, 3 have no backward on stage 0 (rank 0)\n  try: on rank 0, yield B(2) and so on",
    ),
    "duplicate": (
        Plan.parse(["0F0 0F1 0B0 0B1 0F0", "1F0 1B0 1F1 1B1"]),
        "duplicate: 0F0 appears again on rank 0, position 4; it was first on rank 0\n"
        "  try: remove one of the two: every action runs exactly once\n"
        "    rank 0 | 0F0 0F1 0B0 0B1 0F0\n"
        "                             ^^^",
    ),
    "out-of-range": (
        Plan([[F(0), F(1), F(2), B(0), B(1)]], 1, 2),
        "out-of-range: F2 on rank 0 names micro-batch 2; there are 2, numbered 0 to 1\n"
        "  try: use a whole number from 0 to 1\n"
        "    rank 0 | F0 F1 F2 B0 B1\n"
        "                   ^^",
    ),
    "wrong-rank": (
        Plan([[F(0), B(0), B(0, 1)], [F(0)]], 2, 1, by_stage),
        "wrong-rank: 1B0 is on rank 0, but micro-batch 0 of stage 1 is placed on rank 1\n"
        "  try: move 1B0 to rank 1, or override place(microbatch, stage)\n"
        "    rank 0 | F0 B0 1B0\n"
        "                   ^^^",
    ),
    "ambiguous-stage": (
        Interleaved(ranks=2, microbatches=1, stages_per_rank=2),
        "ambiguous-stage: F0 on rank 0 could mean stage 0 or 2\n"
        "  try: name the stage: F(0, stage=0) or F(0, stage=2) in Python, 0F0 or 2F0 in text\n"
        "    rank 0 | F0\n"
        "             ^^",
    ),
    "not-an-action": (
        Plan([[F(0), "B0", B(0)]]),
        "not-an-action: rank 0, position 1 holds 'B0', a str, not an action\n"
        "  try: yield B(0), an action, not its text\n"
        "    rank 0 | F0 'B0' B0\n"
        "                ^^^^",
    ),
    "unordered": (
        Plan.parse(["0B0 0F0"]),
        "unordered: 0B0 on rank 0, position 0 comes before its own forward 0F0 at position 1, "
        "which gives it the output of micro-batch 0 from stage 0\n"
        "  try: yield F(0) before B(0) on rank 0\n"
        "    rank 0 | 0B0 0F0\n"
        "             ^^^",
    ),
    "deadlock": (
        Plan.parse(["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"]),
        "deadlock: rank 0 waits for rank 1, which waits for rank 0\n"
        "  0B0 (rank 0, position 1) needs the gradient of micro-batch 0 from stage 1, given by 1B0\n"
        "  1B0 (rank 1, position 2) comes after 1F1, which needs the output of micro-batch 1 from stage 0, "
        "given by 0F1\n"
        "  0F1 comes after 0B0 on rank 0\n"
        "  try: yield F(1) before B(0) on rank 0\n"
        "    rank 0 | 0F0 0B0 0F1 0B1\n"
        "                 ^^^",
    ),
    "endless": (
        Plan([forever()], 1, 1),
        "endless: rank 0 lists more than 72 actions, where 2 per stage are enough; pipelab cut the row off\n"
        "  try: end the loop after the last backward, so that the generator stops\n"
        "    rank 0 | … F0 F0 F0 F0 F0\n"
        "                           ^^",
    ),
    "missing, an all-reduce": (
        Plan.parse(["0F0 0B0 0R", "0F1 0B1"]),
        "missing: 0R is on rank 0 but not on rank 1, which holds stage 0 too\n"
        "  try: on rank 1, yield R(stage=0) after the stage's last gradient; or on no rank",
    ),
    "wrong-rank, an all-reduce": (
        Plan.parse(["0F0 0B0", "1F0 1B0 0R"]),
        "wrong-rank: 0R is on rank 1, which does not hold stage 0: rank 0 does\n"
        "  try: remove 0R from rank 1\n"
        "    rank 1 | 1F0 1B0 0R\n"
        "                     ^^",
    ),
    "memory-cap": (
        Plan.parse(["0F0 0F1 0B0 0B1"]),
        "memory-cap: 0F1 would be activation 2 in flight on rank 0 (cap 1)\n"
        "  try: let a backward come before 0F1 on rank 0, or begin with fewer forwards\n"
        "    rank 0 | 0F0 0F1 0B0 0B1\n"
        "                 ^^^",
    ),
    "refused": (OnlyEven(2, 3), "refused: 3 micro-batches are odd: take 4"),
    "exception": (
        Raises(ranks=2, microbatches=2),
        "exception: actions(1) raised ZeroDivisionError after 1 action, the last one F0: integer division or modulo "
        "by zero\n"
        f"  at {__file__}, line {Raises.actions.__code__.co_firstlineno + 2}, in actions: yield F(1 // (1 - rank))\n"
        "  try: fix that line; the schedule itself was not checked yet",
    ),
}


@pytest.mark.parametrize("code", MESSAGES)
def test_every_kind_of_fault_explains_itself(code):
    thing, message = MESSAGES[code]
    code, _, _ = code.partition(",")
    (fault,) = [fault for fault in check(thing, memory_cap=1 if code == "memory-cap" else None) if fault.code == code]
    assert str(fault) == message


def test_a_memory_cap_names_the_weight_gradient_that_still_holds_an_activation():
    (fault,) = check(Plan.parse(["0F0 0I0 0F1 0W0 0I1 0W1"]), memory_cap=1)
    assert fault.hint == "run 0W0 before 0F1 on rank 0: an activation is held until its weight gradient is made"
    assert check(Plan.parse(["0F0 0I0 0W0 0F1 0I1 0W1"]), memory_cap=1) == []


def test_no_kind_of_fault_is_left_without_a_test_of_its_message():
    elsewhere = {"transfer-deadlock", "residency"}  # they have their own tests
    assert {code.partition(",")[0] for code in MESSAGES} | elsewhere == set(get_args(Code))


@pytest.mark.parametrize(
    ("microbatches", "run", "lacking"),
    [
        (20, (3, 7, 8, 9, 19), "0…2, 4…6, 10…18"),
        (12, range(1, 12, 2), "0, 2, 4, 6, 8, 10"),
        (14, range(1, 14, 2), "0, 2, 4, 6, 8, 10, … (7 in all)"),
        (40, range(1, 40, 2), "0, 2, 4, 6, 8, 10, … (20 in all)"),
    ],
)
def test_missing_micro_batches_are_told_as_runs_and_counted_beyond_six(microbatches, run, lacking):
    (fault,) = check(Plan([[*map(F, range(microbatches)), *map(B, run)]]))
    assert fault.message == f"micro-batches {lacking} have no backward on stage 0 (rank 0)"


def test_an_action_of_a_micro_batch_that_is_not_placed_there_is_told():
    class OnRank0(pipelab.GPipe):
        def place(self, microbatch, stage):
            return 0

    faults = check(OnRank0(2, 1))
    assert faults[0].code == "ambiguous-stage"
    first = next(fault for fault in faults if fault.rank == 1)
    assert first.message == "F0 on rank 1: no stage of micro-batch 0 is placed there"


@pytest.mark.parametrize("position", range(10))
def test_the_excerpt_marks_the_place(position):
    row = [F(m, 3) for m in range(10)]
    line, mark = excerpt(7, row, position).splitlines()
    assert line.startswith("rank 7 | ")
    assert line[mark.index("^") :].split()[0] == f"3F{position}"
    assert mark.count("^") == 3
    assert len(line.removeprefix("rank 7 | ").replace("…", "").split()) <= 9
    assert ("| …" in line, line.endswith("…")) == (position > 4, position < 5)


def test_a_long_thing_is_shortened_and_one_of_several_lines_is_told_on_one():
    class Matrix:
        def __repr__(self):
            return "matrix([1],\n       [2])"

    assert shorten("x" * 100) == "'" + "x" * 58 + "…"
    assert len(shorten(list(range(1000)), width=20)) == 20
    assert shorten("x" * 58) == "'" + "x" * 58 + "'"
    assert shorten(Matrix()) == "matrix([1], [2])"


def test_numbers_that_follow_each_other_are_a_range():
    assert ranges([0, 1, 2, 5, 7, 8]) == "0…2, 5, 7, 8"


def test_a_function_with_other_parameters_is_told_how_to_write_it():
    def of_stage(stage): ...

    assert misfit("place", of_stage, "microbatch", "stage").hint == "write def place(microbatch, stage)"


def test_a_text_is_a_plan_if_one_of_several_words_is_an_action():
    texts = ("0F0 0B0; 1F0 1B0", "0F0 oops", "W1 homework/mine.py", "gpipe")
    assert [is_plan(text) for text in texts] == [True, True, False, False]
    halves = "0F0 (0F1;0B0)OVERLAP_F_B 0B1; 1F0 1B0 1F1 1B1"
    assert lines_of(halves) == ["0F0 (0F1;0B0)OVERLAP_F_B 0B1", " 1F0 1B0 1F1 1B1"]
