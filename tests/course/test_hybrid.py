"""Pipelines times replicas: figures beside the same work on one device, the timeline, and real runs."""

from __future__ import annotations

import pytest

import pipelab
from pipelab.errors import CostError, UsageError
from pipelab_course import hybrid
from pipelab_course.hybrid import Hybrid, same_work

REPORT = Hybrid(stages=2, replicas=2, microbatches=8, forward=50, backward=80, ring_step=20, rows=32)


def test_the_reports_job_takes_1210_ms_and_the_same_work_4160_ms_on_one_device():
    assert REPORT.response_time == 8 * 130 + (2 - 1) * 130 + 2 * (2 - 1) * 20 == 1210
    assert REPORT.alone.makespan == 16 * 2 * 130 == 4160
    assert REPORT.speed_up == pytest.approx(4160 / 1210)
    assert REPORT.efficiency == pytest.approx(4160 / 1210 / 4)
    assert REPORT.communication_cost == pytest.approx(40 / 1210)
    assert REPORT.throughput == pytest.approx(16 * 32 / 1.210)


def test_the_baseline_runs_every_forward_and_backward_of_the_job_on_one_device():
    for job in (REPORT, Hybrid(stages=3, replicas=4, microbatches=6, forward=1, backward=2)):
        ours, alone = (
            sorted(str(item) for row in plan.rows for item in row if item.kind != "R")
            for plan in (job.plan, job.alone_plan)
        )
        assert ours == alone
        assert job.alone_plan.ranks == 1


def test_layouts_that_do_the_same_work_have_the_same_baseline():
    jobs = same_work([(1, 1), (2, 1), (1, 4), (3, 4)], microbatches=24, forward=30, backward=60, ring_step=1)
    assert {job.alone.makespan for job in jobs} == {24 * 90}
    assert [job.devices for job in jobs] == [1, 2, 4, 12]
    assert jobs[0].speed_up == jobs[0].efficiency == 1
    assert all(job.efficiency <= 1 for job in jobs)
    with pytest.raises(UsageError, match="use a multiple of 5, such as 25"):
        same_work([(1, 5)], microbatches=24, forward=1, backward=2)


def test_communication_costs_what_free_all_reduces_would_save():
    jobs = [Hybrid(stages=1, replicas=2, microbatches=1, forward=1, backward=2, ring_step=step) for step in (0, 3)]
    assert [job.communication_cost for job in jobs] == [0, 6 / 9]


def test_memory_is_weights_gradients_and_kept_activations_of_the_fullest_device():
    job = Hybrid(stages=3, replicas=2, microbatches=6, forward=1, backward=2, weights=480, activation=40)
    assert job.peak_memory == 2 * 480 + 3 * 40  # 1F1B keeps 3 on the first of 3 ranks
    assert job.memory_efficiency == 480 / (2 * 480 + 3 * 40)
    assert REPORT.memory_efficiency is None
    gpipe = Hybrid(stages=3, replicas=2, microbatches=6, forward=1, backward=2, activation=40, schedule=pipelab.GPipe)
    assert gpipe.peak_memory == 6 * 40


def test_a_table_of_unlike_work_says_so_and_names_it():
    other = Hybrid(stages=2, replicas=1, microbatches=8, forward=50, backward=80)
    shown = str(hybrid.table([REPORT, other]))
    assert "The work differs" in shown
    assert other.work in shown
    assert "The work differs" not in str(hybrid.table([REPORT]))


def test_work_is_the_same_whatever_its_times_are_rounded_to_and_not_by_chance():
    thirds = same_work([(1, 1), (3, 2), (7, 2)], microbatches=16, forward=100, backward=160)
    assert len({job.alone.makespan for job in thirds}) == 3  # sums of rounded numbers
    assert "All do the same work" in str(hybrid.table(thirds))
    sizes = [{"stages": 1, "microbatches": 2}, {"stages": 2, "microbatches": 1}]
    assert "The work differs" in str(
        hybrid.table([Hybrid(**each, replicas=1, forward=1, backward=2) for each in sizes])
    )


def test_the_timeline_has_every_action_of_every_device_once():
    job = Hybrid(stages=3, replicas=4, microbatches=6, forward=50, backward=80, ring_step=20)
    lines = hybrid.timeline(job).splitlines()
    assert lines[0] == "t =      0 ms: device (0, 0) does F0, (0, 1) F1, (0, 2) F2, (0, 3) F3"
    assert lines[-1] == f"t = {job.response_time:>6,g} ms: done"
    assert sum(line.count(", ") for line in lines[:-1]) >= len(job.trace.events)
    assert sum(line.count("(") for line in lines) == len(job.trace.events) == 12 * (6 + 6 + 1)


def test_a_run_on_emulated_devices_takes_the_predicted_time_with_its_all_reduce():
    job = Hybrid(stages=2, replicas=2, microbatches=2, forward=5, backward=8, ring_step=10)
    together, alone = hybrid.measured([job], steps=1)
    assert (together["predicted_ms"], alone["predicted_ms"]) == (59, 104)
    for row in (together, alone):
        assert 0.99 * row["predicted_ms"] <= row["measured_ms"] < 10 * row["predicted_ms"]
    assert together["communication"] > 0 == alone["communication"]
    assert "Measured speed-up of 2 x 2" in str(hybrid.measured_table([together, alone]))
    assert hybrid.measured_table([]).rows == []


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"stages": 0}, UsageError),
        ({"forward": -1}, CostError),
        ({"forward": 0, "backward": 0}, UsageError),
        ({"schedule": pipelab.LoopedBFS}, UsageError),  # two stages on each rank
        ({"schedule": pipelab.DualPipe}, UsageError),  # each stage on two ranks
    ],
)
def test_what_cannot_be_compared_is_refused(wrong, error):
    given = {"stages": 2, "replicas": 2, "microbatches": 4, "forward": 1, "backward": 2} | wrong
    with pytest.raises(error):
        Hybrid(**given)
