"""Numbers of NumPy are numbers; things that raise when they are looked at are faults, not tracebacks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from fuzz.files import fuzz_csv
from strategies import written

import pipelab
from pipelab import Action, B, Cost, CostError, F, Plan, R

ONE = np.int64(1)


def raising(*names: str, base: type = object) -> object:
    """Return an object whose methods of these names raise."""

    def method(self: object, *_: object) -> object:
        raise RuntimeError("do not look")

    kind = type("Shy", (base,), {name: property(method) if name == "__class__" else method for name in names})
    return kind()


SHY = {
    "eq": raising("__eq__"),
    "repr": raising("__repr__"),
    "class": raising("__class__"),
    "getattr": raising("__getattr__"),
    "getattribute": raising("__getattribute__"),
    "iter": raising("__iter__", "__len__", "__getitem__"),
    "hash": raising("__hash__"),
    "bool": raising("__bool__"),
    "index": raising("__index__"),
    "all": raising(
        "__eq__", "__repr__", "__str__", "__class__", "__getattribute__", "__iter__", "__hash__", "__bool__"
    ),
    "tensor": torch.ones(3),
    "array": np.ones(3),
    "in a list": [torch.ones(3), raising("__class__")],
    "in a tuple": ("F", raising("__class__")),
    "list": raising("__iter__", base=list),
}


@pytest.mark.parametrize("name", SHY)
def test_an_item_that_raises_when_looked_at_is_not_an_action(name):
    row = [F(0), SHY[name], B(0)]
    for plan in (Plan([row, [F(0), B(0)]]), written(lambda *_: row)(2, 1)):
        faults = pipelab.check(plan)
        assert [(fault.code, fault.position) for fault in faults if fault.rank == 0] == [("not-an-action", 1)]
        assert all(str(fault) for fault in faults)
        drafted = plan if isinstance(plan, Plan) else plan.draft()
        assert str(drafted)
        assert drafted == drafted  # noqa: PLR0124 - compares the items with themselves
        with pytest.raises(pipelab.ScheduleError, match="not-an-action"):
            pipelab.simulate(plan)


@pytest.mark.parametrize("name", SHY)
def test_a_number_that_raises_when_looked_at_is_out_of_range(name):
    number = SHY[name]
    plan = Plan([[Action("F", number), F(0), B(0), Action("B", 0, number)]])
    faults = pipelab.check(plan)
    assert [fault.position for fault in faults if fault.code == "out-of-range"] == [0, 3]
    assert all(map(str, faults))


def test_numpys_whole_numbers_are_numbers_everywhere():
    class Mine(pipelab.Schedule):
        def place(self, microbatch, stage):
            return np.int64(stage % self.ranks)

        def actions(self, rank):
            for m in np.arange(self.microbatches):
                yield Action("F", m, np.int64(rank))
            for m in range(self.microbatches):
                yield Action("B", torch.tensor(m), np.uint8(rank))

    schedule = Mine(np.int64(2), np.int32(3))
    assert pipelab.check(schedule, memory_cap=np.int64(3)) == []
    assert pipelab.check(schedule, memory_cap=[ONE * 3, ONE * 3]) == []
    assert schedule.plan() == pipelab.GPipe(2, 3).plan()
    assert {type(rank) for rank in schedule.plan().bound.rank_of_slot} == {int}
    assert Action("F", ONE, ONE) == F(1, 1)
    assert R(ONE) == R(1)
    assert pipelab.check(Mine(2, 3).draft()) == []


def test_a_bool_is_no_number():
    assert [fault.code for fault in pipelab.check(Plan([[F(True), F(0), B(0)]], 1, 1))] == ["out-of-range"]
    plan = Plan([[F(0), B(0)]], place=lambda microbatch, stage: False)
    assert [fault.code for fault in pipelab.check(plan)] == ["out-of-range"]


def test_numpys_numbers_are_costs():
    cost = Cost(forward=[ONE, np.float32(2)], backward=np.int64(3), latency=np.float64(0.5), bandwidth=ONE)
    assert cost == Cost(forward=[1, 2.0], backward=3, latency=0.5, bandwidth=1)
    assert [type(number) for number in (*cost.forward, cost.backward, cost.latency)] == [int, float, int, float]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("unit", 5), ("unit", None), ("per", 3), ("per", ["rank"]), ("first_stage", None), ("forward", "12")),
        *(("forward", [[1]]), ("forward", None), ("forward", 10**400), ("latency", [1]), ("bandwidth", "fast")),
        *(("backward", SHY["tensor"]), ("backward", SHY["array"]), ("backward", 1j), ("backward", SHY["all"])),
    ],
    ids=range(15),
)
def test_a_cost_of_a_wrong_type_is_refused_when_it_is_made(field, value):
    with pytest.raises(CostError, match=f"^{field}="):
        Cost(**{field: value})


def test_a_plans_name_becomes_a_text():
    assert pipelab.Plan.parse(["0F0 0B0"], name=Path("plan.csv")).name == "plan.csv"


@pytest.mark.parametrize("rows", [[3], [None], 5, None, [["0F0"]]])
def test_what_is_not_a_list_of_texts_is_not_parsed(rows):
    with pytest.raises(pipelab.FormatError, match="a list with one text per rank"):
        Plan.parse(rows)


def test_many_ranks_and_many_microbatches_take_no_memory_together():
    rows = [*(["0F0"] * 5000), "0F30000"]
    assert len(pipelab.check(Plan.parse(rows))) >= 5000


def test_broken_plans_in_files_are_refused_or_checked():
    assert [fuzz_csv(seed) for seed in range(12)] == [None] * 12
