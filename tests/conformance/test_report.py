"""pipelab beside PyTorch: every order is the one that PyTorch executes, every gradient and loss the same bits."""

from __future__ import annotations

import io
import re
from inspect import signature
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from rich.console import Console
from torch import distributed
from torch.distributed.pipelining import PipelineStage

from pipelab import B, F, GPipe, Pipeline, Plan, Schedule, lower, schedules
from pipelab.cli import showing
from pipelab.conformance import native
from pipelab.conformance.recording import NATIVE
from pipelab.conformance.report import Grid, conformance, count, first_difference, references
from pipelab.conformance.steps import (
    Job,
    Outcome,
    Task,
    fixed_model,
    fixed_task,
    group_of_one,
    one_thread,
    run_in_processes,
    step_of_class,
)
from pipelab.engine.torchrun import runtime
from pipelab.errors import EngineError

WHOLE = [name for name, kind in schedules.items() if all(len(on) == 1 for on in kind(2, 4).plan().replicas.values())]
"""The schedules that keep each stage on one rank, which is what PyTorch can run."""

GRID = Grid(ranks=(1, 2, 3, 4), microbatches=(1, 2, 3, 4, 6, 8), stages_per_rank=(2,))
"""Enough for the numbers; orders are compared at every size by a test of their own."""
SMALL = Grid(ranks=(1, 2, 3), microbatches=(2, 3, 4, 6), stages_per_rank=(2,), most_work=8)


@pytest.mark.parametrize("name", WHOLE)
def test_every_order_is_pytorchs_and_every_gradient_has_the_same_bits(name: str) -> None:
    report = conformance([name], GRID)
    assert report.torch == torch.__version__
    for line in report.lines:
        assert [str(difference) for difference in line.differences + line.transfers] == []
        assert [each for each in line.numbers if not (each.same_gradients and each.same_loss)] == []
        assert line.not_ours == 0
        assert line.sizes >= 8
        assert len(line.numbers) >= 5
    assert report.same


def test_schedules_are_compared_with_pytorchs_classes_or_else_its_runtime() -> None:
    for name in schedules:
        kinds = [reference.kind for reference in references(name)]
        if name in NATIVE:
            assert kinds == [NATIVE[name]]
        else:
            assert kinds[-1] == "_PipelineScheduleRuntime"
    assert [reference.name for reference in references("naive")] == ["GPipe, 1 at a time", "runtime, our plan"]


def test_it_tells_its_progress() -> None:
    calls = []
    conformance(["naive", "1f1b"], SMALL, advance=lambda: calls.append(1))
    assert len(calls) == count(["naive", "1f1b"], SMALL) == 3 * 12


def test_a_size_that_only_pipelab_accepts_is_counted_with_pytorchs_words() -> None:
    (line,) = conformance(["1f1b"], SMALL).lines
    assert (line.sizes, line.refused) == (11, 1)
    assert "greater than or equal to the number of stages (3)" in line.refusal


def test_a_size_that_pipelab_refuses_is_counted_and_told_with_its_reason() -> None:
    text, same = shown(["dualpipe"], Grid(ranks=(3,), microbatches=(3, 4)))
    assert same
    words = "dualpipe: pipelab refuses 2 sizes: ranks=3, microbatches=3: DualPipe needs"
    assert words in " ".join(text.split())
    (line,) = conformance(["dualpipe"], Grid(ranks=(2,), microbatches=(2, 3, 4))).lines
    assert (line.sizes, line.refused, line.refused_here, line.not_ours) == (0, 1, 2, 0)
    assert line.refusal_here.startswith("ranks=2, microbatches=2: ")


class BothWays(Schedule):
    """The second half of the micro-batches goes through the ranks the other way round: every stage is on two ranks."""

    def place(self, microbatch, stage):
        return stage if microbatch < self.microbatches // 2 else self.ranks - 1 - stage

    def actions(self, rank):
        for make in (F, B):
            for m in range(self.microbatches):
                yield from (make(m, stage) for stage in range(self.stages) if self.place(m, stage) == rank)


def test_a_schedule_that_pytorch_cannot_run_is_shown_with_the_reason_and_no_figures(monkeypatch) -> None:
    monkeypatch.setitem(schedules, "both-ways", BothWays)
    (line,) = conformance(["both-ways"], Grid(ranks=(2,), microbatches=(4,)), processes=(2,)).lines
    assert (line.sizes, line.refused, line.numbers) == (0, 1, ())
    assert line.refusal.endswith("stage 0 is on ranks 0, 1: PyTorch's runtime holds each stage on one rank")
    assert showing._row(line) == {"schedule": "both-ways", "reference": "runtime, our plan", "sizes": 0}


def test_a_receive_elsewhere_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    def deferred(rows, ranks_of_stages):
        plan = Plan(rows, stages=len(ranks_of_stages))
        return [list(row) for row in lower(plan, order="at-use").rows]

    monkeypatch.setattr(native, "add_send_recv", deferred)
    report = conformance(["1f1b"], Grid(ranks=(2,), microbatches=(4,)))
    (line,) = report.lines
    assert not report.same
    assert line.differences == ()
    (difference,) = line.transfers
    assert (difference.rank, difference.position) == (1, 2)
    assert (difference.pipelab[2], difference.pytorch[2]) == ("1RECV_F1", "1B0")


@pytest.fixture
def reversed_backwards(monkeypatch: pytest.MonkeyPatch):
    """Give PyTorch another GPipe: backwards in descending order, as in the paper."""

    def loop(self, arg_mbs=None, kwarg_mbs=None, target_mbs=None, losses=None, *_args, **_kwargs) -> None:
        arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        first = (arg_mbs[0], kwarg_mbs[0], target_mbs[0], None)
        self._initialize_stage(*first[: len(signature(self._initialize_stage).parameters)])  # torch 2.12 takes three
        for m in range(self._n_microbatches):
            output = self._stage.forward_one_chunk(m, arg_mbs[m], kwarg_mbs[m])
            self._maybe_compute_loss(self._stage, output, target_mbs, m)
        for m in reversed(range(self._n_microbatches)):
            self._stage.backward_one_chunk(m, loss=self._maybe_get_loss(self._stage, m), last_backward=m == 0)
        self._update_losses(self._stage, losses)

    monkeypatch.setattr(native.schedule_class("ScheduleGPipe"), "_step_microbatches", loop)


@pytest.mark.usefixtures("reversed_backwards")
def test_another_order_is_a_difference_and_so_are_the_last_bits_of_its_gradients() -> None:
    report = conformance(["gpipe"], SMALL)
    (line,) = report.lines
    assert not report.same
    assert len(line.differences) == line.sizes == 12
    assert str(line.differences[1]) == (
        "GPipe(ranks=1, microbatches=3): rank 0 differs at position 3\n"
        "  PyTorch | 0F0 0F1 0F2 0B2 0B1 0B0\n"
        "  pipelab | 0F0 0F1 0F2 0B0 0B1 0B2\n"
        "                        ^^^"
    )
    apart = [each for each in line.numbers if not each.same_gradients]
    assert apart
    assert all(0 < each.difference < 1e-6 for each in apart)


def test_a_wrong_weight_of_the_losses_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Task, "weighed", lambda self, output, target: self.loss_fn(output, target))
    report = conformance(["gpipe"], SMALL)
    assert not report.same
    assert max(each.difference for each in report.lines[0].numbers) > 0.5
    assert not any(each.same_loss for each in report.lines[0].numbers)


def test_the_place_of_a_difference_is_shown_with_what_is_around_it() -> None:
    rows = " ".join(f"0F{m}" for m in range(12)), " ".join(f"0B{m}" for m in range(12))
    ours = Plan.parse([" ".join(rows)], name="ours")
    theirs = Plan.parse([" ".join(rows).replace("0F9 0F10", "0F10 0F9")])
    assert str(first_difference(ours, theirs)) == (
        "ours: rank 0 differs at position 9\n"
        "  PyTorch | … 0F4  0F5  0F6  0F7  0F8  0F10 0F9  0F11 0B0  0B1  0B2\n"
        "  pipelab | … 0F4  0F5  0F6  0F7  0F8  0F9  0F10 0F11 0B0  0B1  0B2\n"
        "                                       ^^^^"
    )
    shorter = first_difference(ours, Plan.parse([" ".join(rows).removesuffix(" 0B11")]))
    assert shorter is not None
    assert shorter.position == 23
    assert first_difference(ours, ours) is None


def test_a_pair_counts_as_its_forward_then_its_backward() -> None:
    paired = Plan.parse(["0F0 (0F1;0B0)OVERLAP_F_B 0B1"])
    assert first_difference(paired, Plan.parse(["0F0 0F1 0B0 0B1"])) is None
    assert first_difference(paired, Plan.parse(["0F0 0B0 0F1 0B1"])) is not None


def test_a_process_that_is_in_a_group_already_is_told_so() -> None:
    with group_of_one(), pytest.raises(EngineError, match="in a process group already"), group_of_one():
        pass
    assert not distributed.is_initialized()


def test_one_class_alone_adds_to_the_gradients_that_are_there() -> None:
    model, task = fixed_model(1), fixed_task(4)
    with group_of_one():
        once = [each.clone() for each in step_of_class("ScheduleGPipe", [model], task).gradients]
        twice = step_of_class("ScheduleGPipe", [model], task).gradients
    torch.testing.assert_close(twice, [2 * each for each in once])


@pytest.mark.parametrize("microbatches", range(1, 17))
def test_with_pytorchs_defaults_bits_are_equal_where_dividing_does_not_round(
    microbatches: int,
) -> None:
    task = fixed_task(microbatches)
    theirs, ours = fixed_model(1), fixed_model(1)
    with one_thread(), group_of_one():
        stage = PipelineStage(theirs, 0, 1, torch.device("cpu"))
        native.schedule_class("ScheduleGPipe")(stage, microbatches, loss_fn=task.loss_fn).step(task.x, target=task.y)
        with Pipeline([ours], GPipe(1, microbatches), task.loss_fn) as pipe:
            pipe.step(task.x, task.y)
    one, other = (Outcome([each.grad for each in model.parameters()], torch.zeros(())) for model in (ours, theirs))
    assert one.same_gradients(other) == (microbatches in (1, 2, 4, 8, 16))
    assert one.difference(other) < 1e-6


# The page of the documentation

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "conformance.md").read_text(encoding="utf-8")


def test_what_the_documentation_prints_is_what_its_code_prints(capsys) -> None:
    code, printed = re.search(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL).groups()
    exec(code, {})  # noqa: S102 - the page's own lines
    assert capsys.readouterr().out == printed


def test_the_documentation_names_the_grids_sizes_and_what_has_no_class() -> None:
    page, grid = " ".join(PAGE.split()), Grid()
    for sizes, what in ((grid.ranks, "ranks"), (grid.microbatches, "micro-batches")):
        *most, last = map(str, sizes)
        assert f"{', '.join(most)} and {last} {what}" in page
    assert f"ranks times micro-batches is at most {grid.most_work}" in page
    *most, last = [f"`{name}`" for name in WHOLE if name not in NATIVE]
    assert f"{', '.join(most)} and {last}. Two of them" in page


# The command's table


def shown(names: list[str], grid: Grid = SMALL, **options: object) -> tuple[str, bool]:
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(showing, "Console", lambda: Console(file=output, width=80))
        report = showing.show_conformance(names, grid, **options)  # type: ignore[arg-type]
    return output.getvalue(), report.same


def test_the_table_fits_into_80_columns_and_says_which_torch_and_when(tmp_path) -> None:
    names = ["gpipe", "interleaved-1f1b", "zb-h1"]  # of each kind of reference, with the longest name
    text, same = shown(names, save=tmp_path / "table.md")
    assert same
    assert max(len(line) for line in text.splitlines() if not line.startswith("wrote ")) <= 80
    assert f"torch {torch.__version__}, 20" in text
    assert "differ" not in text
    for name in names:
        (line, *_) = [line for line in text.splitlines() if line.split()[:1] == [name]]
        cells = line.split()
        assert (cells[-4], cells[-3], cells[-1]) == ("equal", "equal", "bit-equal")  # orders, wire, numbers
    written = (tmp_path / "table.md").read_text()
    assert written.count("\n| ") == 2 + sum(len(references(name)) for name in names)


@pytest.mark.usefixtures("reversed_backwards")
def test_the_table_shows_both_orders_of_the_first_sizes_that_differ() -> None:
    text, same = shown(["gpipe"])
    assert not same
    assert "12 differ" in text
    assert text.count("PyTorch |") == text.count("pipelab |") == 3
    assert "… and 9 more sizes of gpipe" in text


# PyTorch in processes of its own


def test_what_this_pytorch_refuses_is_not_sent_to_its_processes(monkeypatch) -> None:
    gpipe = runtime.load().schedules.ScheduleGPipe
    made = gpipe.__init__

    def as_in_another_torch(schedule, stage, n_microbatches, **options):
        if n_microbatches < stage.num_stages:
            raise ValueError(f"Number of microbatches ({n_microbatches}) is less than {stage.num_stages} stages")
        made(schedule, stage, n_microbatches, **options)

    monkeypatch.setattr(gpipe, "__init__", as_in_another_torch)
    sent = Mock(side_effect=EngineError("no processes here"))
    monkeypatch.setattr("pipelab.conformance.report.run_in_processes", sent)
    with pytest.raises(EngineError, match="no processes here"):
        conformance(["naive"], Grid(ranks=(1, 2), microbatches=(2,)), processes=(2,))
    (jobs, _), _ = sent.call_args
    assert [(job.kind, job.one_at_a_time) for job in jobs] == [("_PipelineScheduleRuntime", False)]


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [2, 4])
def test_pytorch_in_processes_executes_what_was_recorded_and_has_the_same_bits(ranks: int) -> None:
    """What real stages are asked to do, in processes that talk through gloo, is what the recorder says and we plan."""
    report = conformance(WHOLE, Grid(ranks=(ranks,), microbatches=(2 * ranks,), most_work=0), (ranks,))
    for line in report.lines:
        assert [str(difference) for difference in line.differences + line.transfers] == []
        assert [(each.processes, each.same_gradients, each.same_loss) for each in line.numbers] == [(ranks, True, True)]


@pytest.mark.dist
def test_a_process_that_fails_is_told_with_its_rank_and_traceback() -> None:
    with pytest.raises(EngineError, match=r"(?s)rank [01] of 2 processes of PyTorch failed:.*ScheduleOfTomorrow"):
        run_in_processes([Job("ScheduleOfTomorrow", 2)], 2, timeout=60)


@pytest.mark.dist
def test_processes_that_do_not_answer_are_ended() -> None:
    with pytest.raises(EngineError, match=r"rank 0 of 1 processes of PyTorch did not answer within 0\.01 s"):
        run_in_processes([Job("ScheduleGPipe", 2)], 1, timeout=0.01)
