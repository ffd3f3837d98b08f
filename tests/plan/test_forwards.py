"""Plans of forwards alone, for evaluation: of every schedule, checked, simulated, drawn, saved and read again."""

import pickle
import re
from collections import Counter
from pathlib import Path

import oracle
import pytest
from strategies import EVERY_SCHEDULE

import pipelab
from pipelab import B, Cost, F, LoopedBFS, Memory, OneFOneB, Plan, Schedule, Trace, check, simulate

WORK = Cost(forward=3, backward=5)


class Inference(Schedule):
    """What a student writes who wants forwards alone."""

    def actions(self, rank):
        return [F(m) for m in range(self.microbatches)]


@pytest.mark.parametrize(("kind", "ranks", "microbatches"), EVERY_SCHEDULE)
def test_the_forwards_of_every_schedule_are_legal_and_are_the_plans_own_in_its_order(kind, ranks, microbatches):
    plan = kind(ranks, microbatches).plan()
    alone = plan.forwards()
    assert check(alone) == []
    listed = [action for row in alone.rows for action in row]
    assert Counter(listed) == Counter(F(m, s) for m in range(plan.microbatches) for s in range(plan.stages))
    halves = ([half for item in row for half in oracle.halves(item)] for row in plan.rows)
    assert [list(row) for row in alone.rows] == [[half for half in row if half.kind == "F"] for row in halves]
    assert alone.replicas == plan.replicas
    assert alone.forwards() is alone


@pytest.mark.parametrize(("kind", "ranks", "microbatches"), EVERY_SCHEDULE)
def test_the_forwards_of_every_schedule_take_the_plans_time_for_forwards_and_hold_no_activation(
    kind, ranks, microbatches
):
    plan = kind(ranks, microbatches).plan()
    trace, whole = (simulate(each, WORK) for each in (plan.forwards(), plan))
    forwards = [(each.rank, str(each.action)) for each in whole.events if each.action.kind == "F"]
    ends = {(each.rank, str(each.action)): each.end for each in trace.events}
    assert sorted(ends) == sorted(forwards)
    assert sum(each.duration for each in trace.events) == pytest.approx(3 * ranks * plan.microbatches)
    for each in trace.events:  # no forward begins before the one that it needs has ended
        before = F(each.action.microbatch, each.action.stage - 1)
        given = [end for (_, name), end in ends.items() if name == str(before)]
        assert each.start >= max(given, default=0.0) - 1e-9
    assert set(trace.peak_activations) == {0}


@pytest.mark.parametrize(("kind", "per_rank"), [(pipelab.GPipe, 1), (OneFOneB, 1), (LoopedBFS, 2), (LoopedBFS, 3)])
def test_the_bubble_of_an_evaluation_shrinks_with_the_stages_per_rank(kind, per_rank):
    plan = kind(4, 8, per_rank).forwards()
    assert simulate(plan).bubble == pytest.approx((4 - 1) / (8 * per_rank + 4 - 1))
    assert simulate(plan).makespan == pytest.approx(pipelab.lower_bound(plan))


def test_a_plan_without_any_backward_is_told_how_to_be_one_of_forwards():
    for plan in (Inference(2, 4), Plan.parse("0F0 0F1; 1F0 1F1")):
        faults = check(plan)
        assert [fault.code for fault in faults] == ["missing", "missing"]
        assert "or, for evaluation, use its .forwards()" in faults[0].hint
        assert check(plan.forwards()) == []
    one_is_there = check(Plan.parse("0F0 0F1 0B0; 1F0 1F1"))
    assert one_is_there
    assert not any(".forwards()" in fault.hint for fault in one_is_there)


def test_the_faults_of_forwards_are_found_as_in_any_plan():
    def codes(text):
        return [fault.code for fault in check(Plan.parse(text).forwards())]

    assert codes("0F0 0F1 0F0; 1F0 1F1") == ["duplicate"]
    assert codes("0F0 0F1; 1F0") == ["missing"]
    assert codes("1F0 0F0") == ["unordered"]
    assert codes("2F0 0F0; 1F0") == ["deadlock"]
    with pytest.raises(pipelab.ScheduleError, match="micro-batch 0 has no forward"):
        type("Late", (Schedule,), {"actions": lambda _, rank: [F(1)] if rank else [F(0), F(1)]})(2, 2).forwards()


def test_a_plan_says_that_it_has_forwards_alone_in_all_that_is_made_of_it():
    plan = OneFOneB(2, 3).forwards()
    bare = Plan.parse("0F0 0F1 0F2; 1F0 1F1 1F2")
    assert plan != bare
    assert plan == bare.forwards() == Plan.parse(str(plan)).forwards()
    assert plan == Plan([[F(0), F(1), B(0), F(2)], [F(0), F(1), F(2), B(0)]], forwards_only=True)
    assert repr(plan) == "Plan(ranks=2, stages=2, microbatches=3, forwards_only=True)"
    assert plan.with_rows([[F(0), B(0), F(2), F(1)], plan.rows[1]]).rows[0] == tuple(F(m, 0) for m in (0, 2, 1))
    assert pickle.loads(pickle.dumps(plan)) == plan  # noqa: S301
    assert pipelab.replicate(plan, 2).plan() == pipelab.replicate(OneFOneB(2, 3), 2).forwards()
    trace = simulate(plan)
    assert Trace.from_dict(trace.to_dict()) == trace
    assert pickle.loads(pickle.dumps(trace)) == trace  # noqa: S301


def test_forwards_keep_the_gathers_around_them():
    def rows(plan):
        return str(plan).replace("rank 0 | ", "").splitlines()

    sharded = pipelab.with_gathers(LoopedBFS(1, 2), max_active_stages=1)
    assert rows(sharded.forwards()) == ["0UNSHARD 0F0 0F1 0RESHARD 1UNSHARD 1F0 1F1 1RESHARD"]
    assert check(sharded.forwards(), gather_cap=1) == []
    assert rows(pipelab.with_gathers(LoopedBFS(1, 2).forwards(), 1)) == rows(sharded.forwards())
    assert rows(pipelab.with_recompute(LoopedBFS(1, 2)).forwards()) == ["0F0 0F1 1F0 1F1"]
    assert rows(Plan.parse("0F0 0F1 0OFFLOAD0 0B1 0R 0LOAD0 0B0").forwards()) == ["0F0 0F1"]


def test_nothing_is_kept_for_a_backward_in_bytes():
    memory = Memory(weights=100, gradients=50, optimizer=200, activations=10, inputs=3, outputs=7)
    plan = OneFOneB(2, 4).forwards()
    assert pipelab.memory_use(plan, memory).peaks == (300, 300 + 4 * 7)
    (fault,) = check(plan, memory_cap=[300, 310], memory=memory)
    assert fault.hint.startswith("no order holds less")
    assert pipelab.memory_use(pipelab.with_recompute(OneFOneB(2, 4)).forwards(), memory).peaks == (300, 328)


def test_forwards_are_drawn_compared_and_saved_as_any_plan(tmp_path):
    plan = OneFOneB(2, 3).forwards()
    trace = simulate(plan)
    assert "A step takes 4 units" in str(trace)
    assert "activation" not in str(trace)
    assert "F2" in str(pipelab.compare(trace, simulate(OneFOneB(2, 3))))
    for name in ("html", "svg", "json", "txt", "perfetto.json", "events.csv"):
        assert trace.save(tmp_path / f"trace.{name}").stat().st_size
    for name in ("html", "svg", "txt", "csv"):
        assert plan.save(tmp_path / f"plan.{name}").stat().st_size
    assert Plan.from_csv(tmp_path / "plan.csv").forwards() == plan
    assert Trace.load(tmp_path / "trace.json").plan.forwards_only
    assert str(pipelab.lower(plan)).splitlines()[1] == "rank 1 | 1RECV_F0 1F0 1RECV_F1 1F1 1RECV_F2 1F2"


def test_the_documentations_table_of_bubbles_is_what_simulate_gives():
    page = (Path(__file__).parents[2] / "docs" / "questions.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| \d[^|]* \| ([\d.]+) % \|$", page, re.MULTILINE)
    assert len(rows) == 5
    for names, bubble in rows:
        for name in re.findall(r"\w+", names):
            assert f"{simulate(getattr(pipelab, name)(4, 8).forwards()).bubble:.1%}" == f"{bubble}%"
    slow = Cost(latency=0.3)
    spans = [simulate(kind(4, 8).forwards(), slow).makespan for kind in (pipelab.Interleaved1F1B, OneFOneB)]
    assert spans == pytest.approx([12.8, 11.9])
