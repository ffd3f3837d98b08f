"""pipelab beside PyTorch: every order is the one that PyTorch executes, every gradient and loss the same bits."""

from __future__ import annotations

import re
from inspect import signature
from pathlib import Path

import pytest
import torch
from strategies import ONE_COPY
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as native

from pipelab import B, F, GPipe, Pipeline, Plan, Schedule, lower, schedules

from . import recording, report
from .__main__ import main
from .recording import NATIVE, RUNTIME
from .report import Grid, conformance, first_difference, flat, references, table
from .steps import Outcome, Task, fixed_model, fixed_task, group_of_one, step_of_class

SMALL = Grid(ranks=(1, 2, 3), microbatches=(2, 3, 4, 6), stages_per_rank=(2,), most_work=8)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ONE_COPY)
def test_every_order_is_pytorchs_and_every_gradient_has_the_same_bits(name):
    for line in conformance([name], Grid((1, 2, 3, 4, 6), (1, 2, 3, 4, 5, 6, 8, 12), (1, 2, 3), most_work=8)):
        assert [str(difference) for difference in line.differences + line.transfers] == []
        assert [run for run in line.numbers if not (run.same_gradients and run.same_loss)] == []
        assert line.not_ours == 0
        assert line.sizes >= 8
        assert len(line.numbers) >= 5
        assert line.same


def test_schedules_are_compared_with_pytorchs_classes_or_else_its_runtime():
    kinds = {name: [reference.kind for reference in references(name)] for name in schedules}
    two = {"naive": ["ScheduleGPipe", RUNTIME], "zb-h1": ["ScheduleInterleavedZeroBubble", RUNTIME]}
    assert kinds == {name: two.get(name, [NATIVE.get(name, RUNTIME)]) for name in schedules}


def test_a_size_that_one_side_refuses_is_counted_with_its_words():
    (line,) = conformance(["1f1b"], SMALL)
    assert (line.sizes, len(line.refused)) == (11, 1)
    assert "greater than or equal to the number of stages (3)" in line.refused[0]
    (line,) = lines = conformance(["dualpipe"], Grid(ranks=(2,), microbatches=(2, 3, 4)))
    assert (line.sizes, len(line.refused), len(line.refused_here), line.not_ours) == (0, 1, 2, 0)
    words = "dualpipe: pipelab refuses 2 sizes: ranks=2, microbatches=2: DualPipe needs"
    assert words in " ".join(table(lines).text().split())


class BothWays(Schedule):
    """The second half of the micro-batches goes through the ranks the other way round: every stage is on two ranks."""

    def place(self, microbatch, stage):
        return stage if microbatch < self.microbatches // 2 else self.ranks - 1 - stage

    def actions(self, rank):
        for make in (F, B):
            for m in range(self.microbatches):
                yield from (make(m, stage) for stage in range(self.stages) if self.place(m, stage) == rank)


def test_a_schedule_that_pytorch_cannot_run_is_shown_with_the_reason_and_no_figures(monkeypatch):
    monkeypatch.setitem(schedules, "both-ways", BothWays)
    (line,) = lines = conformance(["both-ways"], Grid(ranks=(2,), microbatches=(4,)), processes=(2,))
    assert (line.sizes, line.numbers) == (0, [])
    assert line.refused == ["stage 0 is on ranks 0, 1: PyTorch's runtime holds each stage on one rank"]
    assert table(lines).rows == [{"schedule": "both-ways", "reference": "runtime, our plan", "sizes": 0}]


def test_a_receive_elsewhere_is_a_difference(monkeypatch):
    def deferred(rows, ranks_of_stages):
        return [list(row) for row in lower(Plan(rows, stages=len(ranks_of_stages)), order="at-use").rows]

    monkeypatch.setattr(recording, "add_send_recv", deferred)
    (line,) = conformance(["1f1b"], Grid(ranks=(2,), microbatches=(4,)))
    (difference,) = line.transfers
    assert (line.same, line.differences) == (False, [])
    assert (difference.rank, difference.position) == (1, 2)
    assert (difference.pipelab[2], difference.pytorch[2]) == ("1RECV_F1", "1B0")


@pytest.fixture
def reversed_backwards(monkeypatch):
    """Give PyTorch another GPipe: backwards in descending order, as in the paper."""

    def loop(self, arg_mbs=None, kwarg_mbs=None, target_mbs=None, losses=None, *_args, **_kwargs):
        arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        first = (arg_mbs[0], kwarg_mbs[0], target_mbs[0], None)
        self._initialize_stage(*first[: len(signature(self._initialize_stage).parameters)])  # torch 2.12 takes three
        for m in range(self._n_microbatches):
            output = self._stage.forward_one_chunk(m, arg_mbs[m], kwarg_mbs[m])
            self._maybe_compute_loss(self._stage, output, target_mbs, m)
        for m in reversed(range(self._n_microbatches)):
            self._stage.backward_one_chunk(m, loss=self._maybe_get_loss(self._stage, m), last_backward=m == 0)
        self._update_losses(self._stage, losses)

    monkeypatch.setattr(native.ScheduleGPipe, "_step_microbatches", loop)


@pytest.mark.usefixtures("reversed_backwards")
def test_another_order_is_a_difference_and_so_are_the_last_bits_of_its_gradients():
    (line,) = conformance(["gpipe"], SMALL)
    assert not line.same
    assert len(line.differences) == line.sizes == 12
    assert str(line.differences[1]) == (
        "GPipe(ranks=1, microbatches=3): rank 0 differs at position 3\n"
        "  PyTorch | 0F0 0F1 0F2 0B2 0B1 0B0\n"
        "  pipelab | 0F0 0F1 0F2 0B0 0B1 0B2"
    )
    apart = [run for run in line.numbers if not run.same_gradients]
    assert apart
    assert all(0 < run.difference < 1e-6 for run in apart)


def test_a_wrong_weight_of_the_losses_is_a_difference(monkeypatch):
    monkeypatch.setattr(Task, "weighed", lambda self, output, target: self.loss_fn(output, target))
    (line,) = conformance(["gpipe"], SMALL)
    assert not line.same
    assert max(run.difference for run in line.numbers) > 0.5
    assert not any(run.same_loss for run in line.numbers)


def test_the_place_of_a_difference_is_shown_with_what_is_around_it():
    ours = [[f"0F{m}" for m in range(12)] + [f"0B{m}" for m in range(12)]]
    (found,) = first_difference("ours", ours, [[*ours[0][:9], "0F10", "0F9", *ours[0][11:]]])
    assert (found.rank, found.position) == (0, 9)
    assert "PyTorch | 0F4 0F5 0F6 0F7 0F8 0F10 0F9 0F11" in str(found)
    (shorter,) = first_difference("ours", ours, [ours[0][:-1]])
    assert shorter.position == 23
    assert first_difference("ours", ours, ours) == []
    paired = flat(Plan.parse(["0F0 (0F1;0B0)OVERLAP_F_B 0B1"]))  # a pair counts as its forward, then its backward
    assert paired == flat(Plan.parse(["0F0 0F1 0B0 0B1"])) != flat(Plan.parse(["0F0 0B0 0F1 0B1"]))


def test_one_class_alone_adds_to_the_gradients_that_are_there():
    model, task = fixed_model(1), fixed_task(4)
    with group_of_one():
        once = [gradient.clone() for gradient in step_of_class("ScheduleGPipe", [model], task).gradients]
        twice = step_of_class("ScheduleGPipe", [model], task).gradients
    torch.testing.assert_close(twice, [2 * gradient for gradient in once])


@pytest.mark.parametrize("microbatches", range(1, 17))
def test_with_pytorchs_defaults_bits_are_equal_where_dividing_does_not_round(microbatches):
    task = fixed_task(microbatches)
    theirs, ours = fixed_model(1), fixed_model(1)
    with group_of_one():
        stage = PipelineStage(theirs, 0, 1, torch.device("cpu"))
        native.ScheduleGPipe(stage, microbatches, loss_fn=task.loss_fn).step(task.x, target=task.y)
        with Pipeline([ours], GPipe(1, microbatches), task.loss_fn) as pipe:
            pipe.step(task.x, task.y)
    one, other = (Outcome([each.grad for each in model.parameters()], torch.zeros(())) for model in (ours, theirs))
    assert one.same_gradients(other) == (microbatches in (1, 2, 4, 8, 16))
    assert one.difference(other) < 1e-6


# The page of the documentation

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "conformance.md").read_text(encoding="utf-8")


def test_what_the_documentation_prints_is_what_its_code_prints(capsys):
    code, printed = re.search(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL).groups()
    exec(code, {})  # noqa: S102 - the page's own lines
    assert capsys.readouterr().out == printed


def test_the_documentation_names_the_grids_sizes_and_what_has_no_class():
    page, grid = " ".join(PAGE.split()), Grid()
    for sizes, what in ((grid.ranks, "ranks"), (grid.microbatches, "micro-batches")):
        *most, last = map(str, sizes)
        assert f"{', '.join(most)} and {last} {what}" in page
    assert f"ranks times micro-batches is at most {grid.most_work}" in page
    *most, last = [f"`{name}`" for name in ONE_COPY if name not in NATIVE]
    assert f"{', '.join(most)} and {last}. Two of them" in page


# The tool


def test_the_table_fits_into_80_columns_and_says_which_torch_and_when(tmp_path, capsys):
    names = ["gpipe", "interleaved-1f1b", "zb-h1"]  # of each kind of reference, with the longest name
    assert main([*names, "-r", "1,2", "-m", "2,4", "--stages-per-rank", "2", "-o", str(tmp_path / "table.md")]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert f"torch {torch.__version__}, 20" in text
    rows = [line.split() for line in text.splitlines() if line.split()[:1] and line.split()[0] in names]
    assert [(row[0], *row[-5:]) for row in rows] == [
        (name, "4", "equal", "equal", "4", "bit-equal") for name in ("gpipe", "interleaved-1f1b", "zb-h1", "zb-h1")
    ]
    assert (tmp_path / "table.md").read_text().count("| 4 | equal | equal | 4 | bit-equal |") == 4


@pytest.mark.usefixtures("reversed_backwards")
def test_both_orders_of_the_first_sizes_that_differ_are_printed_and_the_exit_code_is_1(capsys):
    assert main(["gpipe", "-r", "1,2", "-m", "2,3,4"]) == 1
    text = capsys.readouterr().out
    assert "6 differ" in text
    assert text.count("PyTorch |") == text.count("pipelab |") == 3
    assert main(["dualpipe", "-r", "3", "-m", "4"]) == 1
    assert "Nothing could be compared." in capsys.readouterr().out


# PyTorch in processes of its own


def test_what_this_pytorch_refuses_is_not_sent_to_its_processes(monkeypatch):
    made, sent = native.ScheduleGPipe.__init__, []

    def as_in_another_torch(schedule, stage, n_microbatches, **options):
        if n_microbatches < stage.num_stages:
            raise ValueError(f"Number of microbatches ({n_microbatches}) is less than {stage.num_stages} stages")
        made(schedule, stage, n_microbatches, **options)

    monkeypatch.setattr(native.ScheduleGPipe, "__init__", as_in_another_torch)
    monkeypatch.setattr(report, "run_in_processes", lambda jobs, _: sent.extend(jobs) or [])
    with pytest.raises(ValueError, match="zip"):
        conformance(["naive"], Grid(ranks=(1, 2), microbatches=(2,)), processes=(2,))
    assert [(job.kind, job.one_at_a_time) for job in sent] == [(RUNTIME, False)]


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_pytorch_in_processes_executes_what_was_recorded_and_has_the_same_bits(ranks):
    """What real stages are asked to do, in processes that talk through gloo, is what the recorder says and we plan."""
    for line in conformance(ONE_COPY, Grid(ranks=(ranks,), microbatches=(2 * ranks,), most_work=0), (ranks,)):
        assert [str(difference) for difference in line.differences + line.transfers] == []
        assert [(run.processes, run.same_gradients, run.same_loss) for run in line.numbers] == [(ranks, True, True)]
