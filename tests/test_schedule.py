"""A schedule is a student's ten lines: whatever happens inside them is told with their file and line."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import textwrap
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import written

import pipelab
from pipelab import B, F, ScheduleError, check, simulate
from pipelab.errors import UsageError


class Interleaved(pipelab.Schedule):
    """Two stages per rank, one micro-batch after the other."""

    def __init__(self, ranks, microbatches, stages_per_rank=2):
        super().__init__(ranks, microbatches, stages_per_rank)

    def actions(self, rank):
        for m in range(self.microbatches):
            for s in range(rank, self.stages, self.ranks):
                yield F(m, s)
            for s in reversed(range(rank, self.stages, self.ranks)):
                yield B(m, s)


def forever():
    """What a student may return instead of calling it."""


def imported(tmp_path, body):
    """Write a student's file and import its schedule `Mine`."""
    path = tmp_path / "homework.py"
    path.write_text("import pipelab\nfrom pipelab import B, F\n\n" + textwrap.dedent(body))
    spec = importlib.util.spec_from_file_location("homework", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Mine, path


def the_fault(schedule):
    """The one fault of a schedule, which `plan`, `check` and `simulate` all tell."""
    (fault,) = check(schedule)
    for refuse in (schedule.plan, lambda: simulate(schedule)):
        with pytest.raises(ScheduleError) as refusal:
            refuse()
        assert refusal.value.faults == [fault]
        assert repr(schedule) in str(refusal.value)
    return fault


def test_an_error_inside_actions_is_told_with_the_students_file_and_line(tmp_path):
    mine, path = imported(
        tmp_path,
        """
        class Mine(pipelab.Schedule):
            def actions(self, rank):
                yield F(0)
                order = [B(0)]
                yield order[rank + 1]
        """,
    )
    faults = check(mine(ranks=2, microbatches=1))
    assert [(fault.code, fault.rank, fault.position) for fault in faults] == [("exception", 0, 1)]
    assert faults[0].message == (
        "actions(0) raised IndexError after 1 action, the last one F0: list index out of range (and so on rank 1)\n"
        f"  at {path}, line 9, in actions: yield order[rank + 1]"
    )
    with pytest.raises(ScheduleError) as refusal:
        mine(ranks=2, microbatches=1).plan()
    assert refusal.value.faults == faults
    assert isinstance(refusal.value.__cause__, IndexError)


@pytest.mark.parametrize(
    ("base", "lines", "words", "line"),
    [
        ("Schedule", "def actions(self, rank):\n  F(0)", "did you mean to yield the actions", "def actions"),
        ("Schedule", "def actions(self, rank):\n  return 3", "returned 3, which is not a sequence", "def actions"),
        ("Schedule", "def actions(self, rank):\n  return 'F0'", "'F0', which is not a sequence", "def actions"),
        ("Schedule", "def actions(self, rank):\n  return helper()", "RuntimeError: not yet", 'raise RuntimeError("not'),
        ("Schedule", "def actions(self, rank):\n  yield B(0) & F(0)", "FormatError", "yield B(0) & F(0)"),
        ("Schedule", "def actions(self, rank):\n  yield random.choice([])", "IndexError", "yield random.choice([])"),
        (
            "Schedule",
            "def actions(self, rank):\n  if rank == 0:\n    return [F(0), B(0)]\n  yield from (F(0), B(0))",
            "returned [F0, B0]",
            "def actions",
        ),
        (
            "GPipe",
            "def place(self, microbatch, stage):\n  return [0][stage]",
            "place(microbatch, stage) raised IndexError: list index out of range",
            "return [0][stage]",
        ),
        ("GPipe", "def stages(self):\n  return self.ranks", "stages is a method, not a number", "def stages(self):"),
        ("GPipe", "@property\ndef stages(self):\n  return 2.0", "stages=2.0: expected a whole number", ""),
        ("GPipe", "@property\ndef stages(self):\n  return 1 // 0", "ZeroDivisionError", "return 1 // 0"),
        ("GPipe", "@classmethod\ndef refusal(cls, r, m):\n  return r > 1", "refusal(2, 1) returned True", ""),
        (
            "GPipe",
            "@classmethod\ndef refusal(cls, r, m):\n  return r % 0",
            "refusal(2, 1) raised ZeroDiv",
            "return r % 0",
        ),
    ],
)
def test_a_mistake_in_a_students_class_is_told_once_at_its_line(tmp_path, base, lines, words, line):
    helper = 'import random\n\ndef helper():\n    raise RuntimeError("not yet")\n\n'
    body = textwrap.indent(lines, "    ")
    mine, path = imported(tmp_path, f"{helper}class Mine(pipelab.{base}):\n{body}\n")
    fault = the_fault(mine(2, 1))
    assert fault.code == "exception"
    assert words in fault.message
    at = fault.message.partition(f"\n  at {path}, line ")[2]
    assert at
    assert line in at


def test_actions_that_never_end_are_cut_off():
    faults = check(written(lambda *_: itertools.repeat(F(0)))(ranks=2, microbatches=3))
    assert [fault.rank for fault in faults if fault.code == "endless"] == [0, 1]
    assert {fault.code for fault in faults} == {"endless", "missing"}


@pytest.mark.parametrize(
    ("base", "written", "expected"),
    [
        ("GPipe", "def place(self, stage)", "place(self, microbatch, stage)"),
        ("GPipe", "def place(microbatch, stage)", "place(self, microbatch, stage)"),
        ("GPipe", "def place(self)", "place(self, microbatch, stage)"),
        ("GPipe", "def place(self, microbatch, stage, rank)", "place(self, microbatch, stage)"),
        ("Schedule", "def actions(self)", "actions(self, rank)"),
        ("GPipe", "def actions(self, rank, m)", "actions(self, rank)"),
        ("GPipe", "def refusal(self, ranks)", "refusal(self, ranks, microbatches)"),
    ],
)
def test_a_method_with_other_parameters_is_told_at_the_students_line(tmp_path, base, written, expected):
    mine, path = imported(tmp_path, f"class Mine(pipelab.{base}):\n    {written}:\n        return 0\n")
    name = expected.partition("(")[0]
    assert str(the_fault(mine(2, 2))) == (
        f"exception: pipelab calls {expected}, but it is written {written.replace('def ', 'Mine.')}\n"
        f"  at {path}, line 5, in {name}: {written}:\n"
        f"  try: write def {expected}"
    )


def test_a_place_with_other_parameters_hides_no_other_reason_and_makes_up_none():
    place = {"place": lambda self, stage: stage % self.ranks}
    mine = written(lambda *_: (F(0), "F0"), stages_per_rank=2, **place)
    assert [fault.code for fault in check(mine(2, 2))] == ["exception", "not-an-action", "not-an-action"]
    mine = type("Mine", (pipelab.GPipe,), {"place": (0, 1)})
    assert the_fault(mine(2, 2)).message == "place is (0, 1), not a method"


def test_sizes_that_an_init_forgets_are_told_at_that_init():
    class Mine(pipelab.GPipe):
        def __init__(self, ranks, microbatches):
            self.extra = ranks * microbatches

    (fault,) = check(Mine(2, 2))
    assert fault.message.startswith("Mine has no sizes: its __init__ does not call the one of Schedule\n  at ")
    assert f"{__file__}, line {Mine.__init__.__code__.co_firstlineno}, in __init__" in fault.message
    assert fault.hint == "call super().__init__(ranks, microbatches) there, first"


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ([[F(0), B(0)], [F(0), B(0)]], "returned 2 lists within a list, [[F0, B0], [F0, B0]]"),
        ({0: [F(0), B(0)]}, "is not a sequence of actions: a dict has no order; return the list of one rank's"),
        ({F(0)}, "is not a sequence of actions: a set has no order"),
        (F(0), "returned F0, which is not a sequence of actions: did you mean to yield the actions, or to return a"),
        (forever, "is not a sequence of actions: did you mean to call it?"),
    ],
)
def test_what_actions_should_not_return_is_told_with_what_they_should(returned, words):
    message = the_fault(written(lambda *_: returned)(2, 1)).message
    assert words in message
    assert " at 0x" not in message


@pytest.mark.parametrize("nonsense", [None, "0", -1, 2, 0.0, True, [0], {}, float("nan")])
def test_a_place_that_is_no_rank_is_told_once(nonsense):
    fault = the_fault(type("Lost", (pipelab.GPipe,), {"place": lambda *_: nonsense})(2, 2))
    assert fault.code == "out-of-range"
    assert fault.message == (
        f"place(0, 0) returns {nonsense!r}, and 3 more like it; there are 2 ranks, numbered 0 to 1"
    )


def test_a_place_that_is_wrong_once_is_told_where():
    place = {"place": lambda _, microbatch, stage: 9 if (microbatch, stage) == (1, 0) else stage}
    fault = the_fault(type("Lost", (pipelab.GPipe,), place)(2, 2))
    assert fault.message == "place(1, 0) returns 9; there are 2 ranks, numbered 0 to 1"


def test_a_refused_size_is_told_with_its_reason():
    odd = classmethod(lambda _, ranks, microbatches: f"{microbatches}: take 4" if microbatches % 2 else None)
    even = type("Even", (pipelab.GPipe,), {"refusal": odd})
    assert even(2, 4).plan().microbatches == 4
    fault = the_fault(even(2, 3))
    assert str(fault) == "refused: 3: take 4"
    assert (fault.rank, fault.position) == (None, None)


@pytest.mark.parametrize(
    ("which", "size"),
    [
        (which, size)
        for which in ("ranks", "microbatches", "stages_per_rank")
        for size in (0, -1, 1.0, "2", None, True)
        if (which, size) != ("stages_per_rank", None)  # what the class says
    ],
)
def test_a_size_that_is_no_positive_whole_number_is_refused(which, size):
    sizes = {"ranks": 2, "microbatches": 2} | {which: size}
    with pytest.raises(UsageError, match=f"{which}={size!r}: expected a whole number, at least 1"):
        pipelab.GPipe(**sizes)


def test_sizes_may_be_another_librarys_whole_numbers():
    ranks, microbatches, stages_per_rank = np.arange(2, 5)
    schedule = pipelab.LoopedBFS(ranks, microbatches, stages_per_rank)
    assert repr(schedule) == "LoopedBFS(ranks=2, microbatches=3, stages_per_rank=4)"
    assert schedule.plan() == pipelab.LoopedBFS(2, 3, 4).plan()


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_a_schedule_with_several_stages_per_rank_places_them_round_robin(ranks, microbatches, stages_per_rank):
    plan = Interleaved(ranks, microbatches, stages_per_rank).plan()
    assert (plan.ranks, plan.stages) == (ranks, ranks * stages_per_rank)
    assert all(item.stage % ranks == rank for rank, row in enumerate(plan.rows) for item in row)


def test_an_action_without_a_stage_gets_the_only_stage_of_its_micro_batch():
    class Bidirectional(pipelab.Naive):
        """Micro-batch 1 goes the other way round."""

        def place(self, microbatch, stage):
            return stage if microbatch == 0 else self.ranks - 1 - stage

    plan = Bidirectional(2, 2).plan()
    assert " ".join(map(str, plan.rows[0])) == "0F0 0B0 1F1 1B1 1R 0R"
    assert plan.replicas == {0: (0, 1), 1: (0, 1)}


def test_a_schedule_shows_its_name_and_sizes_and_a_faulty_one_can_be_drafted():
    assert repr(Interleaved(2, 3)) == "Interleaved(ranks=2, microbatches=3, stages_per_rank=2)"
    assert repr(pipelab.GPipe(2, 3)) == pipelab.GPipe(2, 3).plan().name == "GPipe(ranks=2, microbatches=3)"
    assert written(lambda *_: [F(0), "B0"])(1, 1).draft().rows == ((F(0, 0), "B0"),)
    with pytest.raises(TypeError, match="abstract"):
        type("Empty", (pipelab.Schedule,), {})(2, 2)


def test_drafting_leaves_the_garbage_collector_as_it_was_also_after_an_error():
    seen = []

    def actions(self, rank):
        seen.append(gc.isenabled())
        yield F(0)
        raise RuntimeError("no backward")

    with pytest.raises(ScheduleError, match="no backward"):
        written(actions)(1, 1).draft()
    assert (seen, gc.isenabled()) == ([False], True)
    gc.disable()
    try:
        pipelab.GPipe(2, 2).draft()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_two_threads_that_draft_at_once_leave_the_garbage_collector_on():
    first, second = threading.Event(), threading.Event()

    def actions(self, rank):
        first.set()
        assert second.wait(10)
        yield from (F(0), B(0))

    def later(self, rank):
        yield from (F(0), B(0))
        second.set()
        thread.join(10)

    thread = threading.Thread(target=written(actions)(1, 1).draft)
    thread.start()
    assert first.wait(10)
    written(later)(1, 1).draft()
    assert gc.isenabled()


class Lagged(pipelab.GPipe):
    """A schedule with parameters of its own, each kept in another way."""

    def __init__(self, ranks, microbatches, lag=1, *, order=(0, 1), how=max, unused=None):
        super().__init__(ranks, microbatches)
        self.lag = lag
        self._order = np.array(order)
        self.how = how


def test_a_schedule_shows_its_own_parameters_that_differ_from_their_defaults():
    assert repr(Lagged(2, 3, how=min, lag=3)) == (
        "Lagged(ranks=2, microbatches=3, lag=3, order=array([0, 1]), how=min)"
    )
    both = pipelab.compare(pipelab.Interleaved1F1B(4, 8), pipelab.Interleaved1F1B(4, 8, stages_per_rank=4))
    first, second = both.names
    assert first != second
    assert "stages_per_rank=4" in second


def test_a_notebook_shows_a_schedules_plan_or_why_there_is_none():
    shown = pipelab.OneFOneB(2, 2)._repr_html_()
    assert shown == pipelab.OneFOneB(2, 2).plan()._repr_html_()
    assert "<b>1F1B · 2 ranks, 2 micro-batches</b>\nrank 0 | <span" in shown
    assert "1 fault in DualPipe(ranks=3, microbatches=2)" in pipelab.DualPipe(3, 2)._repr_html_()
    plan = pipelab.Plan([["<b>", F(0), B(0), F("<i>"), F(1) & B(1)], [F(0)] * 1000], name="<img>")
    shown = plan._repr_html_()
    assert not [tag for tag in ("<img>", "<i>") if tag in shown]
    assert all(text in shown for text in ("&lt;img&gt;", "&#x27;&lt;b&gt;&#x27;", "… 800 more …"))


def test_a_class_says_how_many_stages_its_ranks_hold_and_a_caller_may_say_otherwise():
    class Looping(pipelab.Interleaved1F1B):
        stages_per_rank = 3

        def __init__(self, ranks, microbatches, stages_per_rank=None):
            pipelab.Schedule.__init__(self, ranks, microbatches, stages_per_rank)

    assert Looping(2, 4).plan().stages == 6
    assert Looping(2, 4, stages_per_rank=2).plan().stages == 4
