"""Homework 1: data parallelism, measured."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import pipelab
from pipelab_course import ddp, hw1


def row(processes, step_ms, **more):
    """Return a measured row."""
    figures = {"p10_ms": step_ms, "p90_ms": step_ms, "stdev_ms": 1.0, "speed_up": 100 / step_ms, "loss": 1.0}
    return {"run": "m, DDP", "model": "m", "processes": processes, "step_ms": step_ms, **figures, **more}


SHOWN = {
    "efficiency": 0.8,
    "communication": 0.5,
    "utilisation": (0.9,),
    "memory_mb": 50,
    "each_mb": (50,),
    "delay_ms": 0,
    "data_parallel": False,
    "batch": 64,
    "others": 0.0,
    "usual_step_off_ms": 1.0,
    "alone_ms": 1,
    "width": 8,
    "depth": 2,
    "gpus": False,
    "threads": 1,
}


@pytest.mark.parametrize("serial", [0.0, 0.25, 1.0, 1.5])
def test_the_fit_finds_the_serial_fraction_of_times_that_follow_the_law(serial):
    fit = ddp.fit_amdahl({n: 80 * (serial + (1 - serial) / n) for n in (1, 2, 4, 8)})
    assert fit.serial == pytest.approx(serial)
    assert fit.residual == pytest.approx(0, abs=1e-12)
    assert fit.speed_up(4) == pytest.approx(1 / (serial + (1 - serial) / 4))


def test_the_fit_is_the_best_of_all_and_its_residual_is_what_it_misses():
    times = {1: 100.0, 2: 70.0, 4: 40.0}

    def miss(serial):
        return (sum((serial + (1 - serial) / n - times[n] / 100) ** 2 for n in (2, 4)) / 2) ** 0.5

    fit = ddp.fit_amdahl(times)
    assert fit.residual == pytest.approx(miss(fit.serial))
    assert all(fit.residual <= miss(fit.serial + step) for step in (-0.01, 0.01))


def test_one_point_is_no_fit_and_two_have_no_residual():
    assert ddp.fit_amdahl({1: 3.0}) is None
    assert ddp.fit_amdahl({2: 3.0, 4: 2.0}) is None
    assert ddp.fit_amdahl({1: 4.0, 2: 3.0}).residual is None


def test_both_plots_have_room_where_a_run_has_no_efficiency():
    rows = [row(1, 100, **SHOWN), row(2, 60, **SHOWN), row(1, 90, **SHOWN | {"run": "m, DataParallel"})]
    drawing = hw1.table(rows).plot()
    drawing.draw_without_rendering()
    assert all(ax.get_position().width > 0.3 for ax in drawing.axes)


def test_models_are_presets_or_a_width_and_a_depth(monkeypatch):
    assert hw1.shape_of("large") == (8192, 8)
    assert hw1.shape_of("64x3") == (64, 3)
    for wrong in ("huge", "64", "0x3", "64x"):
        with pytest.raises(pipelab.UsageError, match="width x depth"):
            hw1.shape_of(wrong)
    monkeypatch.setattr(hw1, "free_memory", lambda: 20e9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(pipelab.UsageError, match=r"large needs 35\.\d GB in 4 processes.*--processes 1,2"):
        hw1.runs(["large"], [1, 2, 4])
    with pytest.raises(pipelab.UsageError, match="3"):
        hw1.runs(["8x2"], [1, 3], batch=64)


@pytest.fixture
def computed(monkeypatch):
    """Jobs do not run: each step takes 1 ms for 8 rows, divided by the processes, and the delay."""

    def found(job, timeout):
        step_ms, each = job.batch / 8 / job.processes + job.delay_ms, range(job.processes)
        return {
            "times_ms": [step_ms - 1, step_ms, step_ms + 3],
            "alone_ms": [step_ms / 2] if job.processes > 1 else [],
            "loss": 1.0,
            "rank_ms": [step_ms for _ in each],
            "utilisation": [0.5 for _ in each] + [0.25] * (job.devices - 1),
            "memory_mb": [1 + rank for rank in each] + [0.5] * (job.devices - 1),
            "others": 0.0,
        }

    monkeypatch.setattr(hw1, "run_job", found)


def test_a_row_is_compared_with_one_process_of_the_same_delay(computed):
    rows = list(hw1.measurements(hw1.runs(["16x2"], [1, 2], experiment="delay")))
    assert [(each["processes"], each["step_ms"]) for each in rows] == [(1, 8), (2, 4), (1, 18), (2, 14)]
    assert [each["speed_up"] for each in rows] == [1, 2, 1, 18 / 14]
    assert [each["efficiency"] for each in rows] == [1, 1, 1, 9 / 14]
    assert all(each["p10_ms"] < each["step_ms"] < each["p90_ms"] for each in rows)
    assert [(each["communication"], each["memory_mb"]) for each in rows] == [(None, 1), (0.5, 2)] * 2


def test_data_parallel_without_gpus_is_emulated_and_said_to_be(computed):
    rows = list(hw1.measurements(hw1.runs(["16x2"], [1, 2])))
    assert [(each["run"], each["devices"]) for each in rows] == [
        ("16x2, DDP", 1),
        ("16x2, DDP", 1),
        ("16x2, DataParallel", 2),
    ]
    note = hw1.table(rows).notes[-1]
    assert "emulated" in note
    assert "Device 0 works 50.0 % of the step and holds 1 MB, the others 25.0 % and 0 MB" in note


def test_emulated_data_parallel_trains_as_one_model_and_device_0_has_more_to_do(monkeypatch):
    ticks = SimpleNamespace(perf_counter=count().__next__, sleep=lambda _: None)  # each part of a step is one tick
    monkeypatch.setattr(ddp, "time", ticks)
    job = ddp.Job(1, 16, 2, batch=8, steps=9, data_parallel=True, devices=4)
    torch.manual_seed(0)
    split = ddp._train(job, 0)
    torch.manual_seed(0)
    whole = ddp._train(replace(job, devices=1), 0)
    assert split["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    first, *others = split["memory_mb"]
    parameters, rows = 2 * (16 * 16 + 16), 8 * 16
    assert others == [pytest.approx(4e-6 * (2 * parameters + 3 * rows / 4))] * 3  # its rows, and what two ReLUs keep
    assert first == pytest.approx(
        4e-6 * (3 * parameters + 2 * rows / 4 + 4 * rows)
    )  # momentum; x, y, outputs, gradient
    # Of 5 ticks device 0 has all: it scatters and copies, goes forward, gathers, goes backward, and adds up.
    assert split["utilisation"] == [1.0, 0.4, 0.4, 0.4]


@pytest.mark.parametrize(("stdev", "believed"), [(1.0, True), (39.0, True), (41.0, False)])
def test_a_fit_of_runs_that_differ_less_than_their_steps_is_doubted(stdev, believed):
    rows = [row(1, 100, **SHOWN), row(2, 60, **SHOWN | {"stdev_ms": stdev})]
    fit, *_ = hw1.table(rows).notes
    assert ("do not trust the fit" in fit) != believed


@pytest.mark.parametrize(
    ("figures", "marked"), [({}, False), ({"usual_step_off_ms": 9.6}, True), ({"others": 0.2}, True)]
)
def test_a_time_is_marked_if_its_steps_differ_or_other_programs_ran(figures, marked):
    rows = [row(1, 60, **SHOWN | figures), row(2, 40, **SHOWN)]
    table = hw1.table(rows)
    one, two = table.rows
    assert ("step_ms" in one["marked"], "step_ms" in two["marked"]) == (marked, False)
    assert ("speed_up" in two["marked"]) == marked  # it divides the time of one process
    assert any("60*" in line for line in table.text(120).splitlines()) == marked
    assert any(note.startswith("*: ") for note in table.notes) == marked


def test_a_delayed_time_is_marked_if_it_is_off_what_the_delay_predicts(computed):
    planned = hw1.runs(["16x2"], [1, 2], experiment="straggler")
    plain, late = hw1.table(list(hw1.measurements(planned)), "straggler").rows
    assert (plain["predicted_step_ms"], late["predicted_step_ms"]) == (None, 24)
    assert "step_ms" not in late["marked"]
    off = hw1.table([plain, late | {"step_ms": 30}], "straggler")
    assert "step_ms" in off.rows[1]["marked"]
    (found,) = hw1.numbers(off.rows, "straggler")
    assert found["straggler_longer"] == "predicted 20 ms (measured 26 ms*)"
    assert (found["straggler_others"], found["straggler_least"]) == ("1 other rank", "20 ms")


def test_a_speed_up_is_marked_if_it_is_off_what_the_delay_predicts(computed):
    planned = hw1.runs(["16x2"], [1, 2], experiment="delay")
    rows = [each | {"usual_step_off_ms": 0, "others": 0} for each in hw1.measurements(planned)]
    assert not any(each["marked"] for each in hw1.table(rows, "delay").rows)
    rows[2:] = rows[2] | {"step_ms": 16}, rows[3] | {"step_ms": 15.5, "speed_up": 16 / 15.5}  # each within 15 %
    assert [each["marked"] for each in hw1.table(rows, "delay").rows] == [(), (), (), ("speed_up", "efficiency")]


def test_where_more_processes_are_not_faster_there_is_no_serial_fraction():
    plain = [row(1, 10, **SHOWN), row(2, 20, **SHOWN)]
    slow = [each | {"run": "m, DDP + 10 ms", "delay_ms": 10, "step_ms": each["step_ms"] + 10} for each in plain]
    slow[1]["speed_up"], plain[1]["speed_up"] = 20 / 30, 10 / 20
    assert "serial fraction of" not in " ".join(hw1.table(plain + slow, "delay").notes)
    (found,) = hw1.numbers(plain + slow, "delay")
    assert not {"serial", "delay_law", "delay_after"} & set(found)
    assert (found["delay_without"], found["delay_with"]) == ("0.50", "0.67 (predicted 0.67)")
    assert (found["slow_one"], found["slow_last"]) == ("10 ms", "20 ms")


def test_answers_keep_the_marks_of_the_table_and_say_where_processes_take_turns(monkeypatch):
    monkeypatch.setattr(hw1, "cores", lambda: 2)
    few, many = (
        [row(1, 100, **SHOWN), row(count, 80, **SHOWN | {"others": others})] for count, others in ((2, 0), (4, 0.5))
    )
    (found,), (marked,) = hw1.numbers(few), hw1.numbers(many)
    assert (found["efficiency"], marked["efficiency"], marked["drop_to"]) == ("80.0 %", "80.0 %*", "80.0 %*")
    assert (found["all_reduce_share"], marked["all_reduce_share"], marked["alone_ms"]) == ("50.0 %", "50.0 %*", "1 ms*")
    assert ("turns" in found, marked["turns"]) == (False, "4 processes take turns on 2 cores")


def test_a_delay_raises_the_serial_fraction_where_more_processes_are_faster():
    plain = [row(1, 100, **SHOWN), row(2, 60, **SHOWN)]
    slow = [each | {"run": "m, DDP + 10 ms", "delay_ms": 10, "step_ms": each["step_ms"] + 10} for each in plain]
    slow[1]["speed_up"] = 110 / 70
    (found,) = hw1.numbers(plain + slow, "delay")
    assert [found[f"delay_{name}"] for name in ("before", "law", "after")] == ["20.0 %", "27.3 %", "27.3 %"]
    assert (found["serial"], found["limit"], found["drop_at"]) == ("20.0 %", "5", "2")


def test_a_larger_batch_is_not_called_slower_than_a_smaller_one(computed):
    rows = list(hw1.measurements(hw1.runs(["16x2"], [1], experiment="batch")))
    assert [row["batch"] for row in rows] == [32, 64, 128, 256]
    assert [row["speed_up"] for row in rows] == [1, 1, 1, 1]


@pytest.mark.parametrize("experiment", [None, *hw1.EXPERIMENTS])
@pytest.mark.parametrize("processes", [[1], [1, 2], [1, 2, 4]], ids=str)
def test_whatever_rows_are_done_have_a_table_and_a_plot(computed, experiment, processes):
    rows = list(hw1.measurements(hw1.runs(["16x2", "8x1"], processes, experiment=experiment)))
    for done in range(len(rows) + 1):
        table = hw1.table(rows[:done], experiment)
        assert table.text().count("\n") >= done
        assert len(hw1.numbers(rows[:done], experiment)) == len({row["model"] for row in rows[:done]})
        if done:
            table.plot()


@pytest.mark.dist
def test_two_processes_train_as_one_and_both_wait_for_the_one_that_sleeps():
    sizes = {"models": ["16x2"], "processes": [1, 2], "batch": 8, "steps": 9}
    planned = [hw1.runs(**sizes)[-1], hw1.runs(**sizes, experiment="straggler")[-1]]
    alone, late = hw1.measurements(planned, timeout=60)
    assert (alone["run"], alone["processes"]) == ("16x2, DataParallel", 1)
    assert (late["run"], late["processes"]) == ("16x2, rank 0 + 20 ms", 2)
    assert late["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert len(late["rank_ms"]) == 2
    assert min(late["p10_ms"], *late["rank_ms"]) >= 20


def children(pid):
    """Return the processes that a process has started."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # a thread that has ended since the folder was listed
            found += [int(word) for word in (task / "children").read_text().split()]
    return found


def alive(pid):
    """Return whether a process runs: one that nobody has asked for its exit code has ended too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(there, seconds=40):
    """Wait until something is there; return it."""
    deadline = time.monotonic() + seconds
    while not (found := there()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


@pytest.mark.dist
def test_a_killed_process_is_named_and_leaves_no_other():
    known = set(children(os.getpid()))
    seen = []

    def kill():
        workers = wait_for(lambda: len(new := sorted(set(children(os.getpid())) - known)) == 2 and new)
        seen.extend(workers)
        os.kill(workers[1], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(pipelab.EngineError, match=r"rank \d"):
        ddp.run_job(ddp.Job(2, 16, 2, batch=8, steps=8, delay_ms=1000), timeout=60)
    killer.join()
    assert not set(seen) & set(children(os.getpid()))


@pytest.mark.dist
def test_a_run_that_takes_too_long_is_ended():
    with pytest.raises(pipelab.EngineError, match="did not end within 1 s"):
        ddp.run_job(ddp.Job(2, 16, 2, batch=8, steps=100, delay_ms=1000), timeout=1)


@pytest.mark.dist
@pytest.mark.parametrize(("number", "code", "done"), [(signal.SIGINT, 1, 1), (signal.SIGKILL, -9, 0)])
def test_a_command_that_is_ended_keeps_its_rows_and_leaves_no_process(tmp_path, number, code, done):
    command = [sys.executable, "-m", "pipelab", "lab", "hw1", "--model", "16x2", "--processes", "1,2", "--steps", "8"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*command, "--save", "t.csv"], cwd=tmp_path, **pipes, text=True) as process:
        if done:
            assert any(line.startswith("measuring: 1 of 3") for line in process.stderr)  # PyTorch may warn before
        workers = wait_for(lambda: children(process.pid))
        process.send_signal(number)
        process.communicate(timeout=40)
    assert process.returncode == code
    if done:
        assert len((tmp_path / "t.csv").read_text().splitlines()) == 1 + done
    wait_for(lambda: not any(map(alive, workers)))
