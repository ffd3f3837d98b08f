"""Slices of a sequence: what must come before what on a stage, checked and simulated, against the oracle."""

from __future__ import annotations

from itertools import product
from random import Random

import oracle
import pytest

import pipelab
from pipelab import B, Cost, F, I, Plan, W, check, simulate
from pipelab.trace.events import Event


class Sliced(pipelab.Schedule):
    """All forwards, then all backwards: of a sequence, the last slice's first."""

    slices = 3

    def actions(self, rank):
        """Yield a rank's row."""
        yield from (F(m) for m in range(self.microbatches))
        yield from (B(m) for m in reversed(range(self.microbatches)))


def random_case(random, slips):
    """Return a plan with slices in any order that the oracle allows, but for some slips; and its `after`.

    Sequences are chains, or any micro-batches before any later ones; all slices of one are on one rank, but for a slip.
    """
    ranks, stages, microbatches = random.randint(1, 3), random.randint(1, 3), random.randint(1, 6)
    if random.random() < 0.5:
        slices = random.randint(1, microbatches)
        before = {m: [m - 1] if m % slices else [] for m in range(microbatches)}
    else:
        before = {m: [e for e in range(m) if random.random() < 0.3] for m in range(microbatches)}
    home = [random.randrange(ranks) for _ in range(stages)]
    if random.random() < 0.1 * slips:
        before[random.randrange(microbatches)] = [random.randrange(microbatches)]
    moved = random.random() < 0.1 * slips

    def after(m, s):
        return before[m] if s != 1 or microbatches % 2 else []

    def place(m, s):
        return (home[s] + (moved and m % 2)) % ranks

    todo = [F(m, s) for m in range(microbatches) for s in range(stages)]
    for m in range(microbatches):
        for s in range(stages):
            todo += [B(m, s)] if random.random() < 0.6 else [I(m, s), W(m, s)]
    rows, done = [[] for _ in range(ranks)], set()
    while todo:
        ready = [each for each in todo if oracle.needs(each, stages, microbatches, after) <= done] or todo
        action = random.choice(ready)
        todo.remove(action)
        done |= oracle.gives(action)
        rows[place(action.microbatch, action.stage)].append(action)
    for _ in range(slips):
        row = random.choice(rows)
        if row:
            row.insert(random.randrange(len(row)), row.pop(random.randrange(len(row))))
    return Plan(rows, stages, microbatches, place, after=after)


def compare(random, slips):
    """Hold a random plan with slices against the oracle: what is legal, and when everything starts."""
    plan = random_case(random, slips)
    size = (plan.stages, plan.microbatches)
    legal = oracle.legal(plan.written, *size, plan.place, plan.after)
    assert (not check(plan)) == legal
    if legal:
        forward, backward = [random.randint(1, 9) for _ in range(plan.stages)], random.randint(1, 9)
        cost = Cost(forward=forward, backward=backward, latency=random.randint(0, 3), per="stage")
        trace = simulate(plan, cost)
        lasts = {"B": backward, "I": backward / 2, "W": backward / 2, "R": 0}
        spans = oracle.clock(
            plan.rows,
            *size,
            lasts=lambda action: forward[action.stage] if action.kind == "F" else lasts[action.kind],
            lag=lambda _: cost.latency,
            after=plan.after,
        )
        assert set(trace.events) == {Event(*span) for span in spans}
        assert pipelab.lower_bound(plan, cost) <= trace.makespan
    return legal


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_check_and_simulate_agree_with_the_oracle_on_random_slices(first):
    legal = [compare(Random(seed), seed % 3) for seed in range(first, first + 100)]  # noqa: S311 - for tests
    assert 20 < sum(legal) < 90


def test_a_slice_before_the_one_that_it_reads_is_refused_and_explained():
    forwards = [F(0), F(2), F(1), F(3)]
    swapped = Plan([[*forwards, B(3), B(2), B(1), B(0)]], 1, 4, after=Sliced(1, 4).after)
    (fault,) = check(swapped)
    assert (fault.code, str(fault.action)) == ("unordered", "0F2")
    assert "0F1" in fault.message
    assert "slices of one sequence" in fault.message


def test_an_order_of_1f1b_is_no_order_for_slices():
    class Wrong(pipelab.OneFOneB):
        slices = 2

    assert {fault.code for fault in check(Wrong(3, 6))} == {"unordered"}
    assert not check(pipelab.OneFOneB(3, 6))


@pytest.mark.parametrize(
    ("after", "place", "code"),
    [
        (lambda m, _: [m - 1], lambda _, s: s, "out-of-range"),
        (lambda m, _: [m - 1] if m else [], lambda m, s: (m + s) % 2, "wrong-rank"),
        (lambda _: [], lambda _, s: s, "exception"),
        (lambda _, __: 7, lambda _, s: s, "exception"),
        (lambda _, __: ["0"], lambda _, s: s, "out-of-range"),
    ],
)
def test_an_after_that_cannot_be_is_explained(after, place, code):
    rows = [[F(m, s) for m in range(2)] for s in range(2)]
    assert code in [fault.code for fault in check(Plan(rows, 2, 2, place, after=after))]


def test_replicas_rerouting_policies_and_repairs_keep_the_slices_together():
    both = pipelab.replicate(Sliced(2, 6), 2)
    assert not check(both)
    assert list(both.after(4, 0)) == [2]

    class Policy(pipelab.Greedy):
        slices = 2

    assert not check(Policy(3, 8))
    assert not check(Policy(3, 8, split=True))
    assert check(pipelab.OneFOneB(3, 8).plan().with_rows(Policy(3, 8).plan().rows)) == []


def test_a_plan_with_slices_differs_from_one_without():
    sliced = Sliced(2, 3).plan()
    assert sliced != Plan(sliced.rows, 2, 3, sliced.place)
    assert sliced == sliced.with_rows(sliced.rows)


@pytest.mark.parametrize("kind", [pipelab.Seq1F1B, pipelab.SlimPipe])
def test_the_catalogues_slices_are_legal_and_take_what_their_formulas_say_for_any_number_of_slices(kind):
    tried = 0
    for ranks, sequences, slices in product(range(1, 6), range(1, 5), range(1, 8)):
        if kind is pipelab.SlimPipe and slices < ranks:
            with pytest.raises(pipelab.UsageError, match=f"slices={slices}: at least one slice"):
                kind(ranks, sequences * slices, slices=slices)
            continue
        schedule = kind(ranks, sequences * slices, slices=slices)
        plan, per_rank = schedule.plan(), schedule.stages_per_rank
        assert oracle.legal(plan.rows, plan.stages, plan.microbatches, plan.place, plan.after)
        letters = {"P": ranks, "M": plan.microbatches, "v": per_rank, "k": slices, "F": 2, "B": 3, "min": min}
        trace = simulate(plan, Cost(forward=2, backward=3))
        makespan = next(formula for key, formula in kind.closed_forms.items() if key.startswith("makespan"))
        assert trace.makespan == pytest.approx(eval(makespan, letters))  # noqa: S307 - pipelab's own formulas
        peaks = [eval(kind.closed_forms["peak"], letters | {"r": rank}) for rank in range(ranks)]  # noqa: S307
        assert list(trace.peak_activations) == peaks
        tried += 1
    assert tried >= 80


def test_a_file_that_cannot_name_slices_says_so_and_takes_them_back_from_its_reader(tmp_path):
    plan = pipelab.Seq1F1B(2, 4).plan()
    with pytest.warns(UserWarning, match=r"slices of one sequence.*\n  try: .*after=plan\.after"):
        path = plan.to_csv(tmp_path / "plan.csv")
    assert Plan.from_csv(path) != plan
    assert Plan.from_csv(path, after=plan.after) == plan
    assert Plan.parse([" ".join(map(str, row)) for row in plan.rows], after=plan.after) == plan
