"""Practical 9: its table, its numbers, and the scripts that a student starts from."""

from __future__ import annotations

import csv
import runpy
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

import pipelab
from pipelab.cli import measuring
from pipelab.cli.believing import BUSY, LEGEND
from pipelab.errors import BatchError, UsageError
from pipelab_course import commands, practical9
from pipelab_course.figures import quoted
from pipelab_course.practical9 import GPIPE, LOOP, METHODS, ONE_BY_ONE, TRUE, WHOLE

SCRIPTS = Path(__file__).parents[2] / "tutorials" / "practical9"


def rows_as_predicted(ranks: int = 4, counts: tuple[int, ...] = (2, 4, 8)) -> list[dict[str, object]]:
    """Return the rows of a machine on which every step takes exactly the predicted time."""
    measured = practical9.measurements(ranks, counts, emulate=(0.001, 0.001), batch=8, steps=1)
    rows = []
    for row in measured:
        kind = {WHOLE: pipelab.Naive, GPIPE: pipelab.GPipe, LOOP: pipelab.DelayedBackward, TRUE: pipelab.OneFOneB}
        pieces = 1 if row["method"] == WHOLE else row["microbatches"]
        plan = kind.get(row["method"], pipelab.Naive)(ranks, pieces)
        trace = pipelab.simulate(plan, pipelab.Cost(forward=80 / pieces, backward=160 / pieces))
        rows.append(row | {"bubble": trace.bubble, "predicted_bubble": trace.bubble})
        rows[-1] |= {"step_time_ms": trace.makespan, "predicted_step_time_ms": trace.makespan, "marked": ()}
        rows[-1] |= dict.fromkeys(("utilisation", "predicted_utilisation"), (0.25,) * ranks)
    return rows


def test_every_method_is_measured_with_every_number_and_the_whole_batch_once():
    rows = list(practical9.measurements(2, (2, 4), emulate=(8, 16), batch=8, steps=1))
    assert [(row["method"], row["microbatches"]) for row in rows] == [
        (WHOLE, 2), (WHOLE, 4), *((method, count) for count in (2, 4) for method in METHODS[1:])
    ]  # fmt: skip
    assert len({row["step_time_ms"] for row in rows}) == len(rows) - 1
    assert all(row["step_time_ms"] >= row["predicted_step_time_ms"] for row in rows)
    assert len({round(row["loss"], 5) for row in rows}) == 1
    assert all(row["gradients_exact"] for row in rows)
    at = {(row["method"], row["microbatches"]): row for row in rows}
    assert [at[method, 4]["predicted_step_time_ms"] for method in METHODS] == [48, 48, 30, 42, 30]
    assert [at[method, 4]["peak_activations"] for method in METHODS] == [(1, 1), (1, 1), (4, 4), (2, 2), (2, 1)]
    assert [at[method, 4]["peak_share"] for method in METHODS] == [1, 0.25, 1, 0.5, 0.5]
    assert at[GPIPE, 4]["first_backward_ms"] >= 5 * 2  # five forwards of 2 ms, then the last rank turns around
    assert at[TRUE, 4]["first_backward_ms"] >= 2 * 2


def test_real_layers_are_predicted_from_the_naive_actions_where_no_rank_disturbs_another():
    _, one, gpipe, loop, true = practical9.measurements(2, (2,), width=8, depth=4, batch=8, steps=1)
    name = "predicted_step_time_ms"
    assert one[name] > max(gpipe[name], true[name])
    assert loop[name] == gpipe[name]  # with two micro-batches, C is GPipe but for its last actions
    assert len({row["loss"] for row in (one, gpipe, loop, true)}) == 1


@pytest.mark.parametrize(
    ("counts", "emulate", "error", "told"),
    [((2, 8), (1, 1), BatchError, "8 micro-batches"), ((2,), (0, 0), UsageError, "without any time")],
)
def test_what_cannot_be_measured_is_refused_before_any_work(counts, emulate, error, told):
    with pytest.raises(error, match=told):
        next(practical9.measurements(2, counts, emulate=emulate, batch=4))


def test_the_numbers_that_answer_the_questions_are_those_of_the_table():
    found = practical9.numbers(rows_as_predicted())
    assert found["gpipe_bubble"] == found["true_bubble"] == "27.3 % (predicted 27.3 %)"
    assert (found["bubble_of_many"], found["bubble_of_more"], found["more"]) == ("27.3 %", "8.6 %", "32")
    gained = ("2.91 (predicted 2.91)", "2.91 (predicted 2.91)", "1.10 (predicted 1.10)")
    assert (found["gpipe_faster"], found["true_faster"], found["loop_faster"]) == gained
    assert found["loop_of_one"] == "90.6 %"
    assert (found["gpipe_peaks"], found["true_peaks"]) == ("8 8 8 8", "4 3 2 1")
    assert (found["gpipe_share"], found["true_share"]) == ("100.0 %", "50.0 %")
    assert (found["gpipe_late"], found["true_late"]) == ("36", "41")


def test_a_figure_that_is_not_believed_is_marked_in_the_table_and_its_prediction_comes_first():
    rows = rows_as_predicted()
    assert LEGEND not in practical9.table(rows).notes
    rows[-1] |= {"step_time_ms": 200.0, "marked": ("step_time_ms",)}  # 1F1B with 8 micro-batches
    table = practical9.table(rows)
    assert table.notes[0] == LEGEND
    assert next(line for line in table.text(120).splitlines() if "*" in line).split()[-1] == "200*"
    found = practical9.numbers(rows)
    assert found["true_faster"] == "predicted 2.91 (measured 4.80*)"
    assert found["gpipe_faster"] == "2.91 (predicted 2.91)"


def test_on_a_busy_machine_predictions_come_first_and_it_is_said_once():
    rows = [row | {"marked": ("step_time_ms",)} for row in rows_as_predicted(2, (2,))]
    table = practical9.table(rows)
    assert table.notes[0].startswith(BUSY)
    assert "--emulate 200 400" in table.notes[0]
    assert LEGEND not in table.notes
    names = [column.key for column in table.columns]
    assert names.index("predicted_step_time_ms") < names.index("step_time_ms")
    assert names.index("predicted_bubble") < names.index("bubble")


def test_predictions_from_marked_times_of_real_layers_are_doubted_too():
    def notes(method, emulated):
        rows = rows_as_predicted(2, (2,))
        return practical9.table(
            [row | {"emulated": emulated, "marked": ("step_time_ms",) * (row["method"] == method)} for row in rows]
        ).notes

    assert "quiet machine" in " ".join(notes(ONE_BY_ONE, emulated=False))
    assert "quiet machine" not in " ".join(notes(GPIPE, emulated=False))
    assert "--emulate" not in " ".join(notes(ONE_BY_ONE, emulated=True))  # as it is already


def test_only_real_layers_that_are_believed_may_say_that_small_micro_batches_cost_extra():
    rows = rows_as_predicted()
    slower = [row | {"step_time_ms": 1.1 * row["step_time_ms"]} if row["method"] == ONE_BY_ONE else row for row in rows]
    real = [row | {"emulated": False} for row in slower]
    doubted = [row | {"marked": ("step_time_ms",)} for row in real]
    assert ["extra" in practical9.numbers(each) for each in (slower, real, doubted)] == [False, True, False]


@pytest.mark.parametrize(("others", "step_ms", "marked"), [(0.0, 1.0, False), (0.3, 1.0, True), (0.0, 1.2, True)])
def test_a_row_is_marked_if_it_is_off_or_other_programs_ran(monkeypatch, others, step_ms, marked):
    def run(jobs, steps):
        trace = pipelab.simulate(jobs[0].plan, pipelab.Cost(forward=step_ms, backward=step_ms, unit="ms"))
        proof = SimpleNamespace(exact=True, whole_batch_difference=0.0)
        cost = pipelab.Cost(forward=1, backward=1, unit="ms")
        return [SimpleNamespace(measured=trace, cost=cost, loss=1.0, proof=proof, core_share=1.0, others=others)]

    monkeypatch.setattr(practical9, "run_all", run)
    whole, *_ = practical9.measurements(2, (1,), width=8, depth=2, batch=8)
    emulated, *_ = practical9.measurements(2, (1,), emulate=(1, 1), batch=8)
    assert ("step_time_ms" in whole["marked"]) == marked
    assert ("step_time_ms" in emulated["marked"]) == (step_ms > 1)  # its prediction needs no measurement
    assert ("bubble" in whole["marked"]) == (others > 0)  # all actions are longer, and the bubble is as predicted


def test_with_few_micro_batches_only_what_holds_for_them_is_said():
    assert practical9.numbers(rows_as_predicted(2, (1,))) == {}  # nothing is pipelined
    assert "true_late" not in practical9.numbers(rows_as_predicted(2, (2,)))  # both take 10
    found = practical9.numbers(rows_as_predicted(counts=(8,)))
    assert found["before"] == "the whole batch in one piece"
    assert found["gpipe_before"] == found["whole_ms"]


def test_a_measured_order_against_the_prediction_is_reported():
    rows = rows_as_predicted()
    assert practical9.surprise(rows) == ""
    rows[-1]["step_time_ms"] = 2000  # 1F1B with 8 micro-batches, slower than A
    said = practical9.surprise(rows)
    assert f"{LOOP} was measured faster than {TRUE}" in said
    assert "nor 2 others" in said


def test_the_command_prints_the_table_and_saves_both_kinds(pipelab_command, folder):
    code, output, progress = pipelab_command(
        "lab", "practical9", "-m", "2,4", "--emulate", "2", "4", "--steps", "1", "--batch", "8",
        "-o", "table.csv", "-o", "plot.svg",
    )  # fmt: skip
    assert code == 0
    assert all(output.count(method) >= 9 for method in METHODS)
    title = (
        "A batch of 8 rows in M micro-batches through 2 stages, emulated: 2 ms forward and 4 ms backward of each stage"
    )
    assert title in " ".join(output.split())
    table = list(csv.DictReader(Path("table.csv").read_text().splitlines()))
    assert [row["peak_activations"] for row in table if row["method"] == TRUE] == ["2 1", "2 1"]
    assert Path("plot.svg").read_text().count("<svg") == 1
    assert progress.count("of 10") == 1  # not a terminal


def test_ctrl_c_keeps_and_saves_the_rows_that_are_done(refused, folder, monkeypatch):
    done = list(practical9.measurements(2, (2, 4), emulate=(1, 1), batch=4, steps=1))[:3]

    def stopped(*_: object, **__: object):
        yield from done
        raise KeyboardInterrupt

    monkeypatch.setattr(practical9, "measurements", stopped)
    assert "3 of 10 rows are done" in refused("lab", "practical9", "-m", "2,4", "-o", "table.csv")
    assert len(Path("table.csv").read_text().splitlines()) == 1 + 3


SMALL = ("lab", "practical9", "-r", "3", "-m", "2", "--width", "4", "--batch", "4", "--steps", "1")


@pytest.mark.parametrize(
    ("cores", "turns"),
    [(2, "3 ranks and other programs take turns on 2"), (3, "3 ranks and other programs take turns on 3"), (4, "")],
)
def test_without_a_core_to_spare_devices_are_emulated_and_real_layers_are_warned_of(
    succeeds, monkeypatch, cores, turns
):
    for module in (commands, measuring):
        monkeypatch.setattr(module, "cores", lambda: cores)
    said = " ".join(succeeds(*SMALL).split())
    if not turns:
        assert "8 real layers" in said
        return
    assert said.startswith("The devices are emulated, as with --emulate 20 40")
    assert "pipelab lab practical9 -r 3 -m 2 --real" in said
    assert "20 ms forward and 40 ms backward" in said
    real = " ".join(succeeds(*SMALL, "--real").split())
    assert real.startswith(turns)
    assert "pipelab lab practical9 -r 3 -m 2 --emulate 20 40" in real
    assert "real layers" in real


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-m", "2,x"), "--microbatches 2,x"),
        (("-o", "table.json"), "use one of .csv"),
        (("-o", "nowhere/table.csv"), "there is no folder nowhere"),
        (("--real", "--emulate", "1", "1"), "--real, --emulate and --variant"),
    ],
)
def test_what_cannot_be_done_is_refused_before_any_work(refused, folder, monkeypatch, words, said):
    monkeypatch.setattr(practical9, "measurements", lambda *_, **__: pytest.fail("it worked"))
    assert said in refused("lab", "practical9", *words)


@pytest.mark.filterwarnings("ignore:.* ranks share:UserWarning")  # on a machine with fewer GPUs than ranks
@pytest.mark.parametrize(
    ("script", "kind"),
    [("a_naive", "Naive"), ("b_gpipe", "GPipe"), ("c_single_loop", "DelayedBackward"), ("d_1f1b", "OneFOneB")],
)
def test_a_script_runs_the_order_of_its_method_for_the_same_loss(capsys, monkeypatch, script, kind):
    monkeypatch.setattr(pipelab.Pipeline, "step", cache(pipelab.Pipeline.step))  # all steps are alike: one runs
    schedule = runpy.run_path(str(SCRIPTS / f"{script}.py"))["schedule"]
    assert schedule.plan() == getattr(pipelab, kind)(schedule.ranks, schedule.microbatches).plan()
    assert "loss 1.0016" in capsys.readouterr().out


def test_what_is_not_believed_stands_behind_its_prediction():
    assert quoted("110 ms", "100 ms", True) == "110 ms (predicted 100 ms)"
    assert quoted("120 ms", "100 ms", False) == "predicted 100 ms (measured 120 ms*)"
    assert quoted("120 ms", None, False) == "120 ms*"
