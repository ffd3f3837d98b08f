"""`check`: legal plans pass, every mistake is told, and nothing that a student writes makes it raise or hang."""

from __future__ import annotations

from collections import Counter
from itertools import count, repeat

import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import JUNK, ODD_ACTIONS, Case, catalogue_plans, legal_cases, random_cases, shuffled_cases, written

import pipelab
from pipelab import LOAD, OFFLOAD, Action, B, F, GPipe, I, Pair, Plan, R, ScheduleError, W, check, simulate
from pipelab.errors import UsageError


def codes(plan, **options):
    return [fault.code for fault in check(plan, **options)]


def by_stage(microbatch, stage):
    return stage


def placement(plan):
    return lambda microbatch, stage: plan.bound.route(microbatch)[stage]


def unpaired(plan):
    """The plan with every overlapped pair as a forward, then a backward."""
    rows = [[half for item in row for half in oracle.halves(item)] for row in plan.rows]
    return Plan(rows, plan.stages, plan.microbatches, placement(plan))


def assert_refused(plan, code):
    """The plan has a fault of this kind, told with its place, by `check` and by `simulate` alike."""
    faults = check(plan)
    assert code in [fault.code for fault in faults], faults
    for fault in faults:
        assert fault.message
        assert fault.hint
        if fault.position is not None:
            assert f"rank {fault.rank}" in fault.message
            assert "^" in fault.excerpt
            assert plan.written[fault.rank][fault.position] is not None or fault.code == "not-an-action"
    with pytest.raises(ScheduleError) as refusal:
        simulate(plan)
    assert list(map(repr, refusal.value.faults)) == list(map(repr, faults))  # one may hold NaN, equal to nothing
    assert str(refusal.value).startswith(f"{len(faults)} fault")


# The verdict


@given(legal_cases())
def test_a_plan_that_can_run_has_no_fault(case):
    assert case.legal
    assert check(case.plan) == []


@given(legal_cases(reduces=False))
def test_a_plan_that_can_run_has_no_fault_when_its_placement_is_inferred(case):
    assert check(Plan(case.rows, case.stages, case.microbatches)) == []


def without_a_placement(case):
    return Case(case.rows, case.stages, case.microbatches)


@settings(max_examples=3 * settings.default.max_examples)
@given(random_cases() | shuffled_cases() | shuffled_cases().map(without_a_placement))
def test_the_verdict_on_random_and_shuffled_rows_is_the_oracles_and_can_be_printed(case):
    faults = check(case.plan)
    assert (faults == []) == case.legal
    for fault in faults:
        assert str(fault).startswith(f"{fault.code}: ")
        assert max(map(len, fault.excerpt.splitlines()), default=0) <= 120
    assert str(case.plan)


# Mutations: one mistake in a plan that was right


def places(plan):
    """A (rank, position) of a plan; all-reduces, which several ranks share, have tests of their own."""
    items = [(rank, at, item) for rank, row in enumerate(plan.rows) for at, item in enumerate(row)]
    return st.sampled_from([(rank, at) for rank, at, item in items if getattr(item, "kind", "") != "R"])


def rows_at(plan, data):
    """Draw a place of a plan; return its rank, its position, and rows that may be changed."""
    return *data.draw(places(plan)), [list(row) for row in plan.rows]


@given(catalogue_plans().map(unpaired), st.data())
def test_a_dropped_action_is_missing(plan, data):
    rank, at, rows = rows_at(plan, data)
    dropped = rows[rank].pop(at)
    broken = Plan(rows, plan.stages, plan.microbatches, placement(plan))
    assert_refused(broken, "missing")
    (fault,) = check(broken)
    assert (fault.rank, fault.position) == (rank, None)
    letter = f" ({dropped.kind})" if dropped.kind in "IW" else ""
    assert f"micro-batch {dropped.microbatch} has no {dropped.word}{letter} on stage {dropped.stage}" in fault.message


@given(catalogue_plans(), st.data())
def test_a_repeated_action_is_a_duplicate(plan, data):
    rank, at, rows = rows_at(plan, data)
    rows[data.draw(st.integers(0, plan.ranks - 1))].append(rows[rank][at])
    assert_refused(Plan(rows, plan.stages, plan.microbatches), "duplicate")


@given(catalogue_plans().map(unpaired), st.data())
def test_a_backward_before_its_own_forward_is_unordered(plan, data):
    rank, at = data.draw(places(plan))
    row = list(plan.rows[rank])
    m, s = row[at].microbatch, row[at].stage
    forward = row.index(F(m, s))
    backward = next(at for at, each in enumerate(row) if each in (B(m, s), I(m, s)))
    row[forward], row[backward] = row[backward], row[forward]
    broken = Plan([*plan.rows[:rank], row, *plan.rows[rank + 1 :]], plan.stages, plan.microbatches)
    assert_refused(broken, "unordered")
    assert (rank, forward) in [(fault.rank, fault.position) for fault in check(broken) if fault.code == "unordered"]


@given(catalogue_plans(), st.data())
def test_swapped_actions_are_refused_exactly_if_they_cannot_run(plan, data):
    rank, one, rows = rows_at(plan, data)
    other = data.draw(st.integers(0, len(plan.rows[rank]) - 1))
    rows[rank][one], rows[rank][other] = rows[rank][other], rows[rank][one]
    found = codes(Plan(rows, plan.stages, plan.microbatches))
    assert (found == []) == oracle.legal(rows, plan.stages, plan.microbatches, None)
    assert set(found) <= {"unordered", "deadlock"}


@given(catalogue_plans().filter(lambda plan: plan.ranks > 1).map(unpaired), st.data())
def test_an_action_on_another_rank_is_told_with_its_right_one(plan, data):
    rank, at, rows = rows_at(plan, data)
    target = data.draw(st.integers(0, plan.ranks - 1).filter(lambda other: other != rank))
    moved = rows[rank].pop(at)
    rows[target].insert(data.draw(st.integers(0, len(rows[target]))), moved)
    broken = Plan(rows, plan.stages, plan.microbatches, placement(plan))
    assert_refused(broken, "wrong-rank")
    fault = next(fault for fault in check(broken) if fault.code == "wrong-rank")
    assert (fault.rank, fault.action) == (target, moved)
    assert fault.hint.startswith(f"move {moved} to rank {rank}")


@given(catalogue_plans().map(unpaired), st.data(), st.booleans(), st.integers(-3, 10**9))
def test_a_number_that_does_not_exist_is_out_of_range(plan, data, which, number):
    limit = plan.stages if which else plan.microbatches
    number = number if number < 0 else limit + number
    rank, at, rows = rows_at(plan, data)
    right = rows[rank][at]
    rows[rank][at] = Action(right.kind, *((right.microbatch, number) if which else (number, right.stage)))
    broken = Plan(rows, plan.stages, plan.microbatches)
    assert_refused(broken, "out-of-range")
    fault = next(fault for fault in check(broken) if fault.code == "out-of-range")
    assert (fault.rank, fault.position) == (rank, at)
    assert f"numbered 0 to {limit - 1}" in fault.message


@given(catalogue_plans(), st.data(), st.sampled_from(JUNK))
def test_an_item_that_is_no_action_is_told_with_its_type(plan, data, junk):
    rank, at, rows = rows_at(plan, data)
    rows[rank].insert(at, junk)
    broken = Plan(rows, plan.stages, plan.microbatches)
    assert_refused(broken, "not-an-action")
    (fault,) = check(broken)
    assert (fault.rank, fault.position) == (rank, at)
    assert ("the function F itself" if junk is F else type(junk).__name__) in fault.message


@given(catalogue_plans(), st.data(), st.sampled_from(ODD_ACTIONS), st.booleans())
def test_an_action_with_an_impossible_field_is_told(plan, data, odd, sized):
    rank, at, rows = rows_at(plan, data)
    rows[rank].insert(at, odd)
    sizes = (plan.stages, plan.microbatches) if sized else ()
    assert_refused(Plan(rows, *sizes), "out-of-range" if odd.kind in list("FBIWR") else "not-an-action")


@given(st.sampled_from(ODD_ACTIONS), st.sampled_from(ODD_ACTIONS))
def test_impossible_actions_alone_are_told(one, other):
    assert "out-of-range" in (found := codes(Plan([[one, R(), F(0)], [other, R()]]))) or "not-an-action" in found


@pytest.mark.parametrize("half", [Action("F", [1], 0), Action("F", None, 0), Action("F", 5, 0), Action("F", 0, 7)])
def test_a_pair_with_an_impossible_half_is_told(half):
    plan = Plan([[F(0), Pair(half, B(0))]], 1, 1)
    assert codes(plan) == ["out-of-range"]
    assert plan.rows == ((F(0, 0), Pair(half, B(0))),)


OTHERWISE = "yield F(m) or B(m); I(m), W(m), R() and F(m) & B(n) if the schedule splits or overlaps"


@pytest.mark.parametrize(
    ("item", "hint"),
    [
        ("F3", "yield F(3), an action, not its text"),
        (" 2B1 ", "yield B(1, stage=2), an action, not its text"),
        ("forward 3", OTHERWISE),
        ("F0, B0", "yield F(0), then B(0): actions, not their text"),
        ("F0 F1 B0 B1", "yield F(0), then F(1) and so on: actions, not their text"),
        (("F", 3), "yield F(3), not a tuple of its parts"),
        ((F, 3), "yield F(3), not a tuple of its parts"),
        ((B, 3, 0), "yield B(3, stage=0), not a tuple of its parts"),
        (["I", 3], "yield I(3), not a list of its parts"),
        ([F(0), F(1)], "use yield from, which yields one action at a time"),
        ((F(0), B(0)), "use yield from, which yields one action at a time"),
        ((each for each in ()), "use yield from, which yields one action at a time"),
        ((), OTHERWISE),
        (("F", "three"), OTHERWISE),
        ((F, 1, 2, 3), OTHERWISE),
        (None, OTHERWISE),
        (b"F0", OTHERWISE),
    ],
)
def test_what_was_meant_for_an_action_is_told_as_one(item, hint):
    fault = check(Plan([[item, F(0), B(0)]], 1, 1))[0]
    assert (fault.code, fault.hint) == ("not-an-action", hint)


def test_an_item_whose_text_raises_or_has_line_breaks_is_told_on_one_line():
    class Rude:
        def __repr__(self):
            raise RuntimeError("no")

    for item, named in ((Rude(), "<Rude whose repr raises RuntimeError>"), ("one\ntwo", r"'one\ntwo'")):
        (fault,) = check(Plan([[F(0), item, B(0)]]))
        assert fault.code == "not-an-action"
        assert named in fault.message
        line, mark = fault.excerpt.splitlines()
        assert line[mark.index("^") : mark.rindex("^")] == named[: mark.count("^") - 1]


@pytest.mark.parametrize("number", [10**5000, "x" * 5000], ids=["digits", "letters"])
def test_an_enormous_field_keeps_the_message_short(number):
    (fault,) = check(Plan([[F(0), Action("B", number, 0), B(0)]], 1, 1))
    assert fault.code == "out-of-range"
    assert max(map(len, str(fault).splitlines())) <= 200


# Arguments the wrong way round


def swapped(plan, place=by_stage):
    """Return a plan whose every action has its stage where its micro-batch belongs."""
    rows = [[Action(each.kind, each.stage, each.microbatch) for each in row] for row in plan.rows]
    return Plan(rows, plan.stages, plan.microbatches, place)


@pytest.mark.parametrize("size", [(2, 8), (4, 8), (8, 2), (4, 4)])
def test_swapped_arguments_are_the_one_fault_with_the_right_ones(size):
    right = GPipe(*size).plan()
    (told,) = check(swapped(right))
    assert told.code in ("out-of-range", "wrong-rank")
    assert "micro-batch and stage of F and B are swapped; the first: " in told.message
    kind, stage, microbatch = told.action.kind, told.action.microbatch, told.action.stage
    assert f"did you swap them? {kind}({microbatch}, {stage}), in text {stage}{kind}{microbatch}" in told.hint
    assert f"is right on rank {told.rank}; then the schedule is right" in told.hint
    assert Action(kind, microbatch, stage) in right.rows[told.rank]
    assert "^" in told.excerpt


@given(catalogue_plans().map(unpaired).filter(lambda plan: plan.ranks > 1 and not plan.bound.reduces))
def test_swapped_arguments_of_any_schedule_are_one_fault_at_most(plan):
    assert len(check(swapped(plan, placement(plan)))) <= 1


def all_then_back(numbers, lacking=0, **members):
    """Return a class with all forwards, then all backwards but for the last ones, of these numbers."""

    def actions(self, rank):
        given = numbers(self, rank)
        return [F(*each) for each in given] + [B(*each) for each in given[: len(given) - lacking]]

    return written(actions, **members)


def test_what_a_swap_does_not_explain_is_told_after_it():
    forgets = all_then_back(lambda self, rank: [(rank, m) for m in range(self.microbatches)], lacking=1)
    swap, *others = check(forgets(ranks=2, microbatches=4))
    assert swap.hint.endswith("; what would still be wrong follows")
    assert [(fault.code, fault.rank, "micro-batch 3" in fault.message) for fault in others] == [
        ("missing", rank, True) for rank in range(2)
    ]


def test_one_swap_among_right_actions_is_told_without_its_consequences():
    rows = [[F(0, 0), F(0, 1), B(0, 0), B(1, 0)], [F(0, 1), B(0, 1), F(1, 1), B(1, 1)]]
    (fault,) = check(Plan(rows, 2, 2, by_stage))
    assert (fault.code, fault.rank, fault.position) == ("wrong-rank", 0, 1)
    assert "F(1, 0), in text 0F1, is right on rank 0; then the schedule is right" in fault.hint


AsPlaced = all_then_back(lambda self, rank: [(m,) for m in range(self.microbatches)])


class Valley(pipelab.Schedule):
    """Down the ranks and back up, every stage named."""

    stages_per_rank = 2

    def actions(self, rank):
        down, up = rank, self.stages - 1 - rank
        for m in range(self.microbatches):
            yield from (F(m, down), F(m, up), B(m, up), B(m, down))


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        (AsPlaced, lambda self, stage, microbatch: stage % self.ranks),
        (AsPlaced, lambda self, stage, microbatch: stage),  # with 8 micro-batches, a rank that does not exist
        (Valley, lambda self, stage, microbatch: min(stage, self.stages - 1 - stage)),
    ],
)
def test_a_place_with_its_parameters_swapped_is_the_one_fault(kind, place):
    (fault,) = check(type("Mine", (kind,), {"place": place})(ranks=4, microbatches=8))
    assert (fault.code, fault.rank) == ("wrong-rank", None)
    assert fault.message.startswith("the two parameters of place are swapped: pipelab calls place(microbatch, stage)")
    assert f"\n  at {__file__}, line {place.__code__.co_firstlineno}" in fault.message
    assert fault.hint == "write def place(self, microbatch, stage); then the schedule is right"


def test_a_plans_place_with_its_parameters_swapped_is_told_as_a_function():
    fault = check(Plan(AsPlaced(2, 4).draft().written, 2, 4, lambda stage, microbatch: stage))[0]
    assert fault.hint.startswith("write def place(microbatch, stage);")


def test_pipelabs_own_placement_is_never_taken_for_swapped():
    """Every rank runs whole micro-batches: right, if the placement were turned round."""

    def actions(self, rank):
        for m in range(rank, self.microbatches, self.ranks):
            yield from [F(m, s) for s in range(self.stages)]
            yield from [B(m, s) for s in reversed(range(self.stages))]

    faults = check(written(actions)(2, 4))
    assert {fault.code for fault in faults} == {"wrong-rank"}
    assert not any("swapped" in fault.message for fault in faults)


def two_each(self, rank):
    """List the stages of a rank and of the one `ranks` later, though each has one."""
    for m in range(self.microbatches):
        yield from (F(m, rank), F(m, rank + self.ranks))
    for m in reversed(range(self.microbatches)):
        yield from (B(m, rank + self.ranks), B(m, rank))


FROM_ONE = all_then_back(lambda self, rank: [(m,) for m in range(1, self.microbatches + 1)])
STAGES_FROM_ONE = all_then_back(lambda self, rank: [(m, rank + 1) for m in range(self.microbatches)])


@pytest.mark.parametrize(
    ("kind", "what", "hint"),
    [
        (FROM_ONE, "micro-batches are counted from 1", "range(4), not range(1, 5)"),
        (STAGES_FROM_ONE, "stages are counted from 1", "range(3), not range(1, 4)"),
        (written(two_each, Valley, stages_per_rank=1), "one stage on each of 3 ranks", "stages_per_rank = 2 in the"),
    ],
)
def test_counting_from_1_and_forgotten_stages_are_the_one_fault(kind, what, hint):
    (fault,) = check(kind(ranks=3, microbatches=4))
    assert fault.code == "out-of-range"
    assert what in fault.message
    assert hint in fault.hint
    assert fault.hint.endswith("; then the schedule is right")
    assert "^" in fault.excerpt


# Loops that run too far; every rank with the actions of all; one backward twice and one never; stages of each rank.
TOO_FAR = all_then_back(lambda self, rank: [(m,) for m in range(self.microbatches + rank)])
EVERYBODYS = written(
    lambda *_: [F(m, s) for s in range(3) for m in range(4)] + [B(m, 2 - s) for s in range(3) for m in range(4)]
)
TWICE = written(lambda self, rank: [*map(F, range(4)), *(B(m if m != 1 or rank else 2) for m in range(4))])
CHUNKS = [(m, chunk) for m in range(4) for chunk in range(2)]
OF_CHUNKS = written(lambda *_: [F(*each) for each in CHUNKS] + [B(*each) for each in CHUNKS[::-1]], stages_per_rank=2)


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (TOO_FAR, {"out-of-range": 6}),
        (EVERYBODYS, {"wrong-rank": 16, "duplicate": 48}),
        (TWICE, {"duplicate": 1, "missing": 1}),
        (OF_CHUNKS, {"wrong-rank": 8, "duplicate": 32, "missing": 8}),
    ],
)
def test_other_mistakes_get_the_ordinary_list_of_faults(kind, found):
    assert Counter(codes(kind(ranks=3, microbatches=4))) == found


class Halves:
    """Down the ranks and back up, the backward in halves."""

    def actions(self, rank):
        down, up = rank, self.stages - 1 - rank
        for m in range(self.microbatches):
            yield from (F(m, down), F(m, up), I(m, up), I(m, down), W(m, up), W(m, down))


class Mirrored:
    def place(self, microbatch, stage):
        return min(stage, self.stages - 1 - stage)


class WithoutStages(Halves, Mirrored, pipelab.Schedule):
    """Forgets how many stages each rank has: `down` and `up` are stages of two ranks."""


class WithTables(Halves, pipelab.Schedule):
    """Has a placement that is right for two stages per rank alone."""

    def place(self, microbatch, stage):
        return min(stage, 2 * self.ranks - 1 - stage) + (2 * self.ranks - self.stages)


class Looping(pipelab.Schedule):
    """Three stages on each rank, where the default placement has them."""

    def actions(self, rank):
        stages = [(rank + turn * self.ranks) % self.stages for turn in range(3)]
        yield from [F(m, s) for s in stages for m in range(self.microbatches)]
        yield from [B(m, s) for s in reversed(stages) for m in range(self.microbatches)]


@pytest.mark.parametrize(
    ("kind", "stages_per_rank", "first"),
    [
        (WithoutStages, 2, "that causes 96 faults; the first: 2F0 appears again on rank 2, position 0;"),
        (WithTables, 2, "so place(0, 0) returns 4, and 31 more like it; there are 4 ranks"),
        (Looping, 3, "that causes 128 faults; the first: 0F0 appears again on rank 0, position 8;"),
    ],
)
def test_a_class_that_forgets_how_many_stages_a_rank_has_is_told_so(kind, stages_per_rank, first):
    for each in (kind(ranks=4, microbatches=8), kind(ranks=4, microbatches=8).draft()):
        (fault,) = check(each)
        assert fault.message.startswith(f"{kind.__name__} has one stage on each of 4 ranks, and {first}")
        assert f"stages_per_rank = {stages_per_rank}" in fault.hint
        assert f"stages 0 to {4 * stages_per_rank - 1}; then the schedule is right" in fault.hint


def test_a_class_that_forgets_its_stages_is_told_of_a_cap_after_it():
    forgotten, *others = check(WithoutStages(ranks=4, microbatches=8), memory_cap=1)
    assert forgotten.hint.endswith("stages 0 to 7; what would still be wrong follows")
    assert [fault.code for fault in others] == ["memory-cap"] * 4


def test_a_class_is_told_of_its_stages_only_where_they_explain_all():
    class Raises(WithoutStages):
        def actions(self, rank):
            yield from super().actions(rank)
            if self.stages > self.ranks:
                raise ValueError("too many")

    unfinished = written(lambda self, rank: [*Halves.actions(self, rank)][:-1], WithoutStages)
    says_so = type("SaysSo", (WithoutStages,), {"stages_per_rank": 2})
    for schedule in (Raises(4, 8), unfinished(4, 8), says_so(4, 8, stages_per_rank=1), WithoutStages(64, 66)):
        assert not any("stages_per_rank" in fault.hint for fault in check(schedule))
    (fault,) = check(WithoutStages(64, 64))  # the largest plan for which others are tried
    assert "stages_per_rank = 2" in fault.hint


def test_a_stage_out_of_range_is_no_loop_that_runs_too_far():
    def actions(self, rank):
        """Know the eight stages by heart, and have a fault besides."""
        for m in range(self.microbatches):
            yield from (F(m, rank), F(m, 7 - rank), B(m, rank), B(m, 7 - rank))

    faults = check(written(actions)(ranks=4, microbatches=8))
    assert {fault.code for fault in faults} == {"out-of-range"}
    assert not any("loop" in fault.message or "loop" in fault.hint for fault in faults)


@pytest.mark.parametrize("item", [None, ["F0"], "F0", ("F", 0), F, F("0"), F(0.0)])
def test_what_cannot_be_read_is_not_told_as_missing_too(item):
    plan = Plan([[item, F(1), B(0), B(1)], [F(0), F(1), B(0)]], 2, 2, by_stage)
    unread, missing = check(plan)
    assert (unread.rank, unread.position) == (0, 0)
    assert (missing.code, missing.rank) == ("missing", 1)


def test_a_hint_to_swap_is_given_only_where_swapped_is_right():
    rows = [[F(0), F(1), B(0), B(1)], [F(0), F(1), B(0), B(1)]]
    there_already = Plan([rows[0], [*rows[1], F(1, 0)]], 2, 2, by_stage)
    elsewhere = Plan([rows[0], [*rows[1], F(0, 2)], rows[0]], 3, 2, by_stage)
    out_of_range_too = Plan([[*rows[0], F(7, 9)], rows[1]], 2, 2, by_stage)
    one_further = written(lambda self, rank: [make(m, rank + 1) for make in (F, B) for m in range(3)])(2, 3)
    for thing in (there_already, elsewhere, out_of_range_too, one_further):
        assert not any("swap" in fault.hint for fault in check(thing))


def test_a_stage_out_of_range_is_best_left_out_where_the_rank_has_one():
    one = check(Plan([[F(0, 5), B(0)], [F(0), B(0)]], 2, 1, by_stage))[0]
    assert one.hint == "leave the stage out, as rank 0 has only stage 0; or use a whole number from 0 to 1"
    several = check(Plan([[F(0, 5)]], 2, 1, lambda microbatch, stage: 0))[0]
    assert several.hint == "use a whole number from 0 to 1"


def test_a_missing_action_is_named_as_the_rank_would_write_it():
    forgets = written(lambda self, rank: [F(0, stage=rank)])
    assert check(forgets(ranks=2, microbatches=1))[0].hint.startswith("on rank 0, yield B(0); or, for evaluation")
    assert check(written(lambda self, rank: [])(1, 1))[0].hint == "on rank 0, yield B(0)"
    several = check(forgets(ranks=2, microbatches=1, stages_per_rank=2))
    assert several[0].hint == "on rank 0, yield B(0, stage=0)"


def test_without_a_placement_a_swap_is_right_where_nobody_else_runs_it():
    plan = Plan([[F(0), F(1), F(2), B(0), B(1), B(2)], [F(0), F(1), F(1, 2), B(0), B(1), B(2)]], 2, 3)
    fault = check(plan)[0]
    assert fault.code == "out-of-range"
    assert "F(2, 1), in text 1F2, is right on rank 1" in fault.hint


# All-reduces, and what else a plan may hold or lack


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ("0F0 0F1 0B0 0B1 0R", []),
        ("0R 0F0 0B0", [("unordered", 0, 0)]),
        ("0F0 0R 0B0", [("unordered", 0, 1)]),
        ("0F0 0I0 0R 0W0", [("unordered", 0, 2)]),
        ("0F0 0B0 0R 0F1 0B1", [("unordered", 0, 2)]),
        ("0F0 0B0 0R; 0F1 0B1", [("missing", 1, None)]),
        ("0F0 0B0; 1F0 1B0 0R 1R", [("wrong-rank", 1, 2)]),
        ("0F0 0B0 0R 0R", [("duplicate", 0, 3)]),
        ("0F0 0B0 0R 0R; 0F1 0B1 0R", [("duplicate", 0, 3)]),
        ("0F0 0B0 0I0 0W0", [("duplicate", 0, 2)]),
        ("0F0 0B0 0W0", [("duplicate", 0, 2)]),
    ],
)
def test_a_plan_has_one_fault_and_its_place(rows, found):
    plan = Plan.parse(rows)
    assert [(fault.code, fault.rank, fault.position) for fault in check(plan)] == found
    for code, *_ in found:
        assert_refused(plan, code)


@pytest.mark.parametrize(
    ("row", "lacking"),
    [("0F0 0I0", "weight gradient (W)"), ("0F0 0W0", "input gradient (I)"), ("0F0", "backward"), ("0B0", "forward")],
)
def test_what_is_missing_is_named(row, lacking):
    (fault,) = check(Plan.parse([row]))
    assert fault.code == "missing"
    assert fault.message == f"micro-batch 0 has no {lacking} on stage 0 (rank 0)"


@pytest.mark.parametrize(
    ("rows", "hint"),
    [
        (["0F0 0F1 0I1 0W1", "1F0 1F1 1B0 1B1"], "on rank 0, yield I(0) and W(0)"),
        (["0F0 0F1 0F2 0I2 0W2", "1F0 1B0 1F1 1B1 1F2 1B2"], "on rank 0, yield I(0) and W(0), and so on"),
        (["0F0 0F1", "1F0 1F1 1I0 1I1 1W0 1W1"], "on rank 0, yield I(0) and W(0), and so on"),
        (["0F0 1F0 0F1 1F1 1I0 0I1 1W0 0W1 1I1 1W1"], "on rank 0, yield I(0, stage=0) and W(0, stage=0)"),
        (["0F0 0F1", "1F0 1F1 1B0 1I1 1W1"], "on rank 0, yield B(0) and so on"),
        (["0F0 0F1 0F2 0B1 0I2 0W2", "1F0 1I0 1W0 1F1 1I1 1W1 1F2 1I2 1W2"], "on rank 0, yield B(0)"),
        (["0F0 0F1 0B1", "1F0 1F1 1I0 1W0 1I1 1W1"], "on rank 0, yield B(0)"),
        (["0F0"], "on rank 0, yield B(0); or, for evaluation, use its .forwards()"),
    ],
)
def test_a_missing_backward_is_named_in_halves_where_the_others_are(rows, hint):
    fault = check(Plan.parse(rows))[0]
    assert " no backward on stage 0 (rank 0)" in fault.message
    assert fault.hint == hint


def test_two_ranks_that_wait_for_one_value_are_both_woken():
    # out(0, 0) is awaited by rank 0 and, wrongly, by rank 1; what comes after it on rank 2 needs rank 1
    plan = Plan([[F(0, 1), B(0, 1)], [B(0, 0), F(1, 0), B(1, 0)], [F(0, 0), F(1, 1), B(1, 1)]])
    assert codes(plan) == ["wrong-rank"]


def test_a_plan_without_any_action_lacks_everything():
    assert codes(Plan([[], []], 2, 1)) == ["missing"] * 4


def test_all_faults_are_told_at_once_worst_kind_first():
    plan = Plan([[F(0), "F1", B(5), F(0), B(0)], [B(0), F(0), F(1)]], 2, 2, by_stage)
    assert codes(plan) == [
        "not-an-action", "out-of-range", "duplicate", "missing", "unordered",
    ]  # fmt: skip


# The memory cap


@given(catalogue_plans(), st.data())
def test_a_cap_below_the_peak_is_exceeded_and_the_peak_itself_is_not(plan, data):
    peaks = simulate(plan).peak_activations
    assert check(plan, memory_cap=peaks) == []
    assert check(plan, memory_cap=max(peaks)) == []
    rank = data.draw(st.sampled_from([rank for rank, peak in enumerate(peaks) if peak > 1] or [None]))
    if rank is not None:
        caps = [peak - (each == rank) for each, peak in enumerate(peaks)]
        (fault,) = check(plan, memory_cap=caps)
        assert (fault.code, fault.rank) == ("memory-cap", rank)
        assert f"(cap {caps[rank]})" in fault.message


def test_a_split_backward_holds_its_activation_until_the_weight_gradient():
    plan = Plan.parse(["0F0 0I0 0F1 0I1 0W0 0W1"])
    assert codes(plan, memory_cap=1) == ["memory-cap"]
    assert check(plan, memory_cap=2) == []


@pytest.mark.parametrize("cap", [0, -1, 1.5, "2", [1], [1, 2, 3], [1, "2"], [1, None], True, object()])
def test_a_cap_that_is_no_number_is_refused(cap):
    with pytest.raises(UsageError, match="memory_cap"):
        check(pipelab.GPipe(2, 2), memory_cap=cap)


# What `check` takes


def test_a_schedule_is_checked_as_its_plan_is():
    forward_only = written(lambda self, rank: [F(m) for m in range(2)])(2, 2)
    assert check(forward_only) == check(forward_only.draft())
    assert codes(forward_only) == ["missing", "missing"]


class Forgot:
    """Has no base class."""

    def actions(self, rank):
        return [F(0), B(0)]


@pytest.mark.parametrize(
    ("thing", "told"),
    [
        (None, "got None$"),
        ("1f1b", r"make a schedule with pipelab\.schedules\['1f1b'\]\(ranks=4, microbatches=8\)$"),
        (3, "got 3$"),
        ([[F(0), B(0)], [F(0), B(0)]], r"make a plan with Plan\(rows\)$"),
        (Forgot(), r": write class Forgot\(pipelab\.Schedule\)$"),
        (pipelab.GPipe, r"make a schedule with GPipe\(ranks=4, microbatches=8\)"),
        ("0F0 0B0; 1F0 1B0", r"make a plan with Plan\.parse\('0F0 0B0; 1F0 1B0'\)"),
    ],
)
def test_anything_but_a_plan_or_a_schedule_is_a_type_error_that_says_what_to_make(thing, told):
    with pytest.raises(TypeError, match=f"expected a plan or a schedule.*{told}"):
        check(thing)


# Endless rows


def forever():
    while True:
        yield F(0)


def test_an_endless_generator_is_cut_off_and_a_row_as_long_as_it_may_be_is_not():
    (fault,) = [fault for fault in check(Plan([forever()], 1, 2)) if fault.code == "endless"]
    assert (fault.rank, fault.position) == (0, 8 * 1 * 2 + 64)
    assert "more than 80 actions, where 4 per stage are enough" in fault.message
    for row in (forever(), (F(m) for m in count())):  # no size is given
        assert "endless" in codes(Plan([row]))
    longest = [F(0), B(0), *[F(0)] * (8 + 64 - 2)]
    assert "endless" not in codes(Plan([longest], 1, 1))
    assert "endless" in codes(Plan([[*longest, F(0)]], 1, 1))


def test_a_row_may_list_any_number_of_moves():
    class Shuttle(pipelab.Schedule):
        def actions(self, rank):
            return (each for each in row)

    row = [F(0), *[OFFLOAD(0), LOAD(0)] * 200, B(0)]
    for plan in (Shuttle(1, 1), Plan([row]), Plan([iter(row)]), Plan([iter(row)], 1, 1)):
        assert check(plan) == []
        assert pipelab.simulate(plan).makespan == 3
    assert "endless" in codes(Plan([[*row, *[F(0)] * 71]], 1, 1))
    assert "endless" in codes(Plan([repeat(LOAD(0))], 1, 1))


def test_what_an_ambiguous_action_may_be_is_not_missing_on_its_rank():
    assert codes(Plan([[F(0), F(0, 1), B(0, 1), B(0, 0)]], 2, 1, lambda m, s: 0)) == ["ambiguous-stage"]


def test_what_several_ranks_lack_is_told_on_the_lowest_of_them():
    plan = Plan([[F(0, 0), B(0, 0)], [F(1, 0), B(1, 0)]], 1, 4, lambda m, s: m % 2)
    assert [(fault.code, fault.rank) for fault in check(plan)] == [("missing", 0)] * 2


# The drawing of the place


def test_the_excerpt_is_short_in_a_plan_of_4096_microbatches_and_no_fault_is_longer_than_12_lines():
    rows = [[], [Pair(F(4095, 1), B(4095, 1))] * 8191]
    places = [0, 1, 5, 4095, 8190]
    for at in places:
        rows[1][at] = "no action at all, but a long text" * 3
    faults = [fault for fault in check(Plan(rows, 2, 4096)) if fault.code == "not-an-action"]
    assert [fault.position for fault in faults] == places
    for fault in faults:
        line, mark = fault.excerpt.splitlines()
        assert len(line) <= 120
        assert line[mark.index("^") : mark.rindex("^") + 1].startswith("'no action at all")
    broken = Plan([[B(m, s) for m in range(200)] + [F(m, s) for m in range(200)] for s in range(6)], 6, 200)
    assert all(len(str(fault).splitlines()) <= 12 for fault in [*faults, *check(broken)])


def test_what_check_returns_is_a_list_that_explains_itself():
    right, wrong = check(pipelab.GPipe(2, 2)), check(Plan([["<b>"], [F(0, 1)]], name="<mine>"))
    assert right == []
    assert str(right) == "GPipe(ranks=2, microbatches=2) is right: no fault"
    assert right._repr_html_() == f"<pre>{right}</pre>"
    assert isinstance(wrong, list)
    with pytest.raises(ScheduleError) as refusal:
        simulate(Plan([["<b>"], [F(0, 1)]], name="<mine>"))
    assert str(wrong) == str(refusal.value)
    assert "&lt;mine&gt;" in wrong._repr_html_()
    assert "<b>" not in wrong._repr_html_()
    assert str(check(pipelab.DualPipe(3, 2))).startswith("1 fault in DualPipe(ranks=3, microbatches=2)")


def test_b_for_the_inputs_gradient_is_recognised():
    rows = "0F0 0F1 0B0 0W0 0B1 0W1; 1F0 1B0 1F1 1B1 1W0 1W1"
    (fault,) = check(Plan.parse(rows))
    assert fault.message.startswith("B is the input's gradient here, as in papers and in PyTorch before 2.6")
    assert fault.hint == "write I for B; for BW, write B; then the schedule is right"
    assert check(Plan.parse(rows.replace("B", "I"))) == []
    assert [each.code for each in check(Plan.parse("0F0 0B0 0W0 0F1 0I1 0W1"))] == ["duplicate"]
    assert "input's" not in str(check(Plan.parse("0F0 0B0 0W0 0F1 0I1 0W1")))
    paired = Plan([[F(0), F(1) & B(0), W(0), B(1), W(1)]])  # a pair is of today's notation
    assert [each.code for each in check(paired)] == ["duplicate", "duplicate"]
