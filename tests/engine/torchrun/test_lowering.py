"""Lowering: PyTorch's runtime runs the plan's order, and its sends and receives meet."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from types import SimpleNamespace

import networkx
import pytest
import torch
from hypothesis import given
from strategies import legal_cases

import pipelab
from pipelab import Action, B, EngineError, F, I, OneFOneB, Plan, R, StageError, W, replicate, schedules
from pipelab.engine.torchrun import runtime
from pipelab.engine.torchrun.runtime import HaltError, lowered, routes_of
from pipelab.engine.torchrun.stage import ProcessStage
from pipelab.engine.torchrun.start import start


@dataclass
class Recorder:
    """What PyTorch's runtime takes for a stage: it writes down what it is asked for, and gives nothing to send."""

    stage_index: int
    num_stages: int
    group_rank: int
    group_size: int
    computed: list = field(default_factory=list)
    moved: list = field(default_factory=list)
    has_backward: bool = True
    submod: torch.nn.Module = field(default_factory=torch.nn.Identity)
    output_chunks: list = field(default_factory=list)
    stage_index_to_group_rank: dict = field(default_factory=dict)
    first: int = 0

    @property
    def stage(self):
        return self.stage_index - self.first

    @property
    def is_first(self):
        return self.stage == 0

    @property
    def is_last(self):
        return self.stage == self.num_stages - 1

    def forward_one_chunk(self, microbatch, *_, **__):
        self.computed.append(F(microbatch, self.stage))

    def backward_one_chunk(self, microbatch, loss=None, full_backward=True, **_):
        self.computed.append((B if full_backward else I)(microbatch, self.stage))

    def backward_weight_one_chunk(self, microbatch, **_):
        self.computed.append(W(microbatch, self.stage))

    def perform_reduce_grad(self):
        self.computed.append(R(self.stage))

    def set_local_fwd_input(self, *_): ...

    def set_local_bwd_input(self, *_): ...

    def get_local_bwd_output(self, *_): ...

    def release_fwd_send_outputs(self, _): ...

    def get_fwd_send_ops(self, microbatch):
        return self._move("out", microbatch, self.stage_index, self.stage_index + 1)

    def get_fwd_recv_ops(self, microbatch):
        return self._move("out", microbatch, self.stage_index - 1, self.stage_index)

    def get_bwd_send_ops(self, microbatch):
        return self._move("gin", microbatch, self.stage_index, self.stage_index - 1)

    def get_bwd_recv_ops(self, microbatch):
        return self._move("gin", microbatch, self.stage_index + 1, self.stage_index)

    def _move(self, what, microbatch, source, target):
        ranks = self.stage_index_to_group_rank
        self.moved.append((ranks[source], ranks[target], what, microbatch, source))
        return []


def ran(plan: Plan, rank: int) -> tuple[list[Action], list[tuple]]:
    """Return what one rank computed, and what it sent or received, in order."""
    computed, moved = [], []
    stages = [
        Recorder(first + stage, plan.stages, rank, plan.ranks, computed, moved, first=first)
        for route, first in routes_of(plan).items()
        for stage, home in enumerate(route)
        if home == rank
    ]
    lowered(plan, rank, stages)([(None,)] * plan.microbatches)
    return computed, moved


def with_all_ranks_busy(case) -> Plan:
    """Return a legal plan with every stage on one rank, every rank with a stage, in an order that the case allows."""
    homes = sorted(set(case.table[: case.stages]))
    rank_of = {stage: homes.index(case.table[stage]) for stage in range(case.stages)}
    rows: list[list[Action]] = [[] for _ in homes]
    for action in networkx.topological_sort(case.plan.graph()):
        rows[rank_of[action.stage]].append(action)
    return Plan(rows, case.stages, case.microbatches)


def assert_runs(plan):
    """Assert that every rank computes in the plan's order, and that all ranks make the same transfers in one order."""
    both = [ran(plan, rank) for rank in range(plan.ranks)]
    action = plan.bound.codes.action
    for (computed, _), row in zip(both, plan.bound.computing, strict=True):
        assert computed == list(map(action, row))
    for one in range(plan.ranks):
        for other in range(one):
            ours, theirs = ([move for move in both[rank][1] if {*move[:2]} == {one, other}] for rank in (one, other))
            assert ours == theirs  # so that no backend can get stuck


@given(case=legal_cases())
def test_any_legal_order_runs_unchanged_and_ranks_receive_in_the_order_sent(case):
    assert_runs(with_all_ranks_busy(case))


@pytest.mark.parametrize("name", [name for name in schedules if schedules[name].refusal(4, 8) is None])
def test_the_catalogue_runs_in_its_own_order_pairs_one_after_the_other(name):
    assert_runs(schedules[name](4, 8).plan())


@pytest.mark.parametrize("plan", [replicate(OneFOneB(2, 4), 2), pipelab.DualPipe(4, 8), pipelab.BitPipe(4, 4)])
def test_each_way_of_the_micro_batches_has_stages_of_its_own_in_pytorchs_runtime(plan):
    assert len(routes_of(plan.plan())) == 2
    assert_runs(plan.plan())


def test_an_all_reduce_runs_where_the_plan_lists_it():
    plan = Plan([[F(0, 0), F(0, 1), B(0, 1), R(1), B(0, 0), R(0)]], 2, 1)
    assert tuple(ran(plan, 0)[0]) == plan.rows[0]
    early = Plan([[F(0, 0), B(0, 0)]], 1, 1)
    assert ran(early, 0)[0] == [F(0, 0), B(0, 0)]  # and nowhere else


def test_an_error_of_a_stage_is_raised_as_it_is_and_no_send_is_waited_for_first(monkeypatch):
    """A send may never be received; torch 2.15 waits for it before it raises an `Exception`."""
    plan, waited, error = OneFOneB(2, 2).plan(), [], StageError("a bug of mine", 0, 0, "0B0")
    work = SimpleNamespace(wait=lambda: waited.append("a send"))

    class Fails(Recorder):
        def get_fwd_send_ops(self, microbatch):
            return [f"a send of {microbatch}"]

        def backward_one_chunk(self, *_, **__):
            raise HaltError(error)

    monkeypatch.setattr(runtime.load().schedules, "_batch_p2p", lambda operations, **_: [work] * len(operations))
    run = lowered(plan, 0, [Fails(0, 2, 0, 2)])
    with pytest.raises(StageError) as raised:
        run([(None,)] * 2)
    assert raised.value is error
    assert (error.__cause__, error.__context__) == (None, None)
    assert waited == []


def test_a_connection_that_is_lost_while_an_action_waits_is_raised_as_it_is():
    lost = RuntimeError("gloo/transport: connection closed")

    class Waits(Recorder):
        def forward_one_chunk(self, *_, **__):
            receiving = SimpleNamespace(buffers=[], works=[lost])
            ProcessStage._arrived(SimpleNamespace(step=SimpleNamespace(wait=loses)), receiving, None)

    def loses(works, _flags):
        raise works[0]

    with pytest.raises(RuntimeError) as raised:
        lowered(OneFOneB(2, 1).plan(), 1, [Waits(1, 2, 1, 2)])([(None,)])
    assert raised.value is lost


def test_a_runtime_that_asks_a_stage_for_something_new_is_an_error_that_names_it(monkeypatch):
    monkeypatch.setattr(
        runtime.load().runtime, "_step_microbatches", lambda self, *_, **__: self._stages[0].prefetch_everything()
    )
    with pytest.raises(EngineError, match=rf"torch {re.escape(torch.__version__)} .*'prefetch_everything'") as raised:
        lowered(OneFOneB(1, 1).plan(), 0, [Recorder(0, 1, 0, 1)])([(None,)])
    assert f"tested with torch {' to '.join(runtime.TESTED)}" in str(raised.value)


def test_a_rank_with_nothing_to_do_is_refused():
    with pytest.raises(EngineError, match="rank 1 of 2 has no action"):
        start(Plan([[F(0, 0), B(0, 0)], []], 1, 1), None, None)


def test_the_ends_of_two_ways_do_not_follow_each_other():
    plan = pipelab.GEMS(2, 2).plan()
    first, second = routes_of(plan).values()
    assert second - (first + plan.stages - 1) > 1
