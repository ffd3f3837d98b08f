"""The claims of the report, and how each right value is computed.

`CLAIMS` is a table: what the report says, and two small functions of a job: the right figure, by simulation, and in one
line how it follows.

Examples:
    >>> from pipelab.labs.report.claim import rows, verdict
    >>> for row in rows(CLAIMS[1]):
    ...     print(row["reading"], "|", row["value"], "|", row["verdict"], "|", row["how"])
    per stage, 8 per replica | 1210 ms | right | (8 + 2 - 1) x 130 + 2 x (2 - 1) x 20 = 1210
    per stage, 8 in all | 690 ms | wrong | (4 + 2 - 1) x 130 + 2 x (2 - 1) x 20 = 690
    split, 8 per replica | 625 ms | wrong | (8 + 2 - 1) x 65 + 2 x (2 - 1) x 20 = 625
    split, 8 in all | 365 ms | wrong | (4 + 2 - 1) x 65 + 2 x (2 - 1) x 20 = 365
    >>> verdict(CLAIMS[1])
    'right under one reading'
"""

from __future__ import annotations

from dataclasses import replace
from math import log2

import torch

from pipelab.catalogue import GPipe, OneFOneB
from pipelab.engine.collectives.ring import ring_all_reduce
from pipelab.labs.hybrid import Hybrid
from pipelab.labs.report.claim import READINGS, Claim, Reading

_COUNTS = (Reading(name="8 per replica"), Reading(in_all=True, name="8 in all"))
_TIMES = (Reading(name="per stage"), Reading(split=True, name="split"))
_ANY = (Reading(name="every reading"),)
_STEPS = (Reading(ring_step=10, name="10 ms for a step"), Reading(name="20 ms for a step"))
_TEN = tuple(Reading(each.split, each.in_all, 10, f"{each}, 10 ms") for each in READINGS)
_MANY = tuple(Reading(each.split, each.in_all, name=str(each).replace("8", "M")) for each in READINGS)

_MICROBATCHES = [{"microbatches": count} for count in (2, 4, 8, 16)]
_STAGES = [{"stages": count, "replicas": 1} for count in (1, 2, 4, 8)]
_REPLICAS = [{"replicas": count} for count in (1, 2, 4, 8)]
"""The columns of Tables 1, 2 and 3."""


def _each(job: Hybrid) -> float:
    return job.forward + job.backward


def _ring_time(job: Hybrid) -> float:
    return job.response_time - job.pipeline.makespan


def _pipeline(job: Hybrid) -> str:
    return f"({job.microbatches} + {job.stages} - 1) x {_each(job):g}"


def _ring(job: Hybrid) -> str:
    return f"2 x ({job.replicas} - 1) x {job.ring_step:g} = {_ring_time(job):g}"


def _total(job: Hybrid) -> str:
    return f"{_pipeline(job)} + {_ring(job).partition(' =')[0]} = {job.response_time:g}"


def _alone(job: Hybrid) -> str:
    return f"{job.all_microbatches} x {job.stages} x {_each(job):g} = {job.alone.makespan:g}"


def _speed_up(job: Hybrid) -> str:
    return f"{_alone(job)} on one device, {job.alone.makespan:g} / {job.response_time:g} = {job.speed_up:.2f}"


def _communication(job: Hybrid) -> str:
    return f"{_ring(job)}, {_ring_time(job):g} / {job.response_time:g} = {100 * job.communication_cost:.1f} %"


def _bubble(job: Hybrid) -> str:
    bubble, others = job.pipeline.bubble, job.stages - 1
    return (
        f"({job.stages} - 1) / ({job.microbatches} + {others}) = {100 * bubble:.1f} % of the time, "
        f"({job.stages} - 1) / {job.microbatches} = {100 * bubble / (1 - bubble):.1f} % of the ideal time"
    )


def _phases(job: Hybrid) -> tuple[float, float, float]:
    """Return the warm-up, the steady state and the cooldown: before, while and after the last stage works."""
    last = job.trace.events_of(job.stages - 1)
    return last[0].start, last[-1].end - last[0].start, job.trace.end - last[-1].end


def _steps(replicas: int) -> int:
    """Return how many steps a ring of replicas takes: it runs, and they are counted."""
    return len(ring_all_reduce([torch.zeros(replicas)] * replicas).steps)


CLAIMS = (
    Claim(
        about="The batch",
        says='"global batch 256, micro-batches of 32"',
        reported=(256,),
        figure=lambda job: job.all_microbatches * job.rows,
        how=lambda job: f"{job.all_microbatches} x 32 = {job.all_microbatches * 32}",
        readings=_COUNTS,
        unit="rows",
        remark="256 rows are 8 micro-batches of 32 in all, so 4 for each replica. The total of 1210 ms needs 8 for "
        "each replica: a batch of 512 rows. Either is a good setting; the two together are not one.",
    ),
    Claim(
        about="Total time",
        says="1040 + 40 + 130 = 1210 ms",
        reported=(1210,),
        figure=lambda job: job.response_time,
        how=_total,
        unit="ms",
        remark="Well computed: 8 x 130 of work, 130 of bubble, 40 of all-reduce. But this job is 16 micro-batches "
        "through two stages, which takes one device 4160 ms.",
    ),
    Claim(
        about="Speed-up on 4 GPUs",
        says="0.86x (1040 / 1210)",
        reported=(0.86,),
        figure=lambda job: job.speed_up,
        how=_speed_up,
        unit="x",
        off=0.005,
        remark="1040 ms is 8 micro-batches through one stage, a quarter of the work that the 4 GPUs do in 1210 ms. A "
        "baseline must do the same work.",
    ),
    Claim(
        about="Speed-up, elsewhere",
        says="6 to 8x",
        reported=((6, 8),),
        figure=lambda job: job.speed_up,
        how=_speed_up,
        unit="x",
        remark="4 devices of the same kind are at most 4 times as fast as one; bubble and all-reduce take their part.",
    ),
    Claim(
        about="Bubble of GPipe",
        says="30 to 40 %",
        reported=((30, 40),),
        jobs=[{"schedule": GPipe}],
        figure=lambda job: 100 * job.pipeline.bubble,
        how=_bubble,
        readings=_COUNTS,
        unit="%",
        digits=1,
        remark="The bubble of P stages and M micro-batches is (P - 1) / (M + P - 1) of the time. Some papers divide by "
        "the ideal time, without the bubble; neither is 30 %.",
    ),
    Claim(
        about="Bubble of 1F1B",
        says="2 to 5 %",
        reported=((2, 5),),
        jobs=[{"schedule": OneFOneB}],
        figure=lambda job: 100 * job.pipeline.bubble,
        how=_bubble,
        readings=_COUNTS,
        unit="%",
        digits=1,
        remark="GPipe and 1F1B have the same bubble if stages are equal and transfers free. What 1F1B saves is memory "
        "(claim 8); that room allows a larger batch of more micro-batches, and they make the bubble smaller.",
    ),
    Claim(
        about="Communication",
        says="about 5 % (60 / 1210)",
        reported=((4.5, 5.5),),
        figure=lambda job: 100 * job.communication_cost,
        how=_communication,
        unit="%",
        digits=1,
        remark="2 replicas need 2 steps of 20 ms. The 60 ms are 4 replicas at 10 ms a step, from Table 3.",
    ),
    Claim(
        about="Peak memory",
        says="20 units against 80",
        reported=(20, 80),
        jobs=[{}, {"schedule": GPipe}],
        figure=lambda job: job.peak_memory,
        how=lambda job: (
            f"min({job.microbatches}, 2) x 10 = {replace(job, schedule=OneFOneB).peak_memory:g}, "
            f"{job.microbatches} x 10 = {job.peak_memory:g}"
        ),
        readings=_COUNTS,
        unit="units",
        remark="Read as 1F1B against GPipe, 10 units for what one stage keeps of one micro-batch, on the first device "
        "and without weights or recomputation. This is where 1F1B wins.",
    ),
    Claim(
        about="Ring all-reduce, from 2 to 4, 8, 16 replicas",
        says="O(log N), that is 2, 3, 4 times as many steps",
        reported=tuple(log2(replicas) for replicas in (4, 8, 16)),
        jobs=[{"replicas": count} for count in (4, 8, 16)],
        figure=lambda job: _steps(job.replicas) / _steps(2),
        how=lambda _: f"2 x (16 - 1) = {_steps(16)}, 2 x (2 - 1) = {_steps(2)}, 30 / 2 = {_steps(16) / _steps(2):g}",
        readings=_ANY,
        unit="times",
        off=0.005,
        remark="A ring takes 2 (N - 1) steps: O(N); a tree takes O(log N). What hardly grows with N is what each "
        "replica sends, 2 (N - 1) / N of its gradient, so large gradients take nearly the same time on any ring.",
    ),
    Claim(
        about="Table 1, compute for 2, 4, 8, 16 micro-batches",
        says="260 520 1040 2080 ms",
        reported=(260, 520, 1040, 2080),
        jobs=_MICROBATCHES,
        figure=lambda job: job.pipeline.busy[0],
        how=lambda job: f"for 16: {job.microbatches} x {_each(job):g} = {job.pipeline.busy[0]:g}",
        readings=_MANY,
        unit="ms",
        remark="What each device computes, without the bubble.",
    ),
    Claim(
        about="Table 1, communication",
        says="20 40 40 40 ms",
        reported=(20, 40, 40, 40),
        jobs=_MICROBATCHES,
        figure=_ring_time,
        how=lambda job: f"{_ring(job)} for any number",
        readings=_ANY,
        unit="ms",
        remark="Gradients are added up over the micro-batches first, and sent once: their number does not matter.",
    ),
    Claim(
        about="Table 1, total",
        says="300 600 1210 2160 ms",
        reported=(300, 600, 1210, 2160),
        jobs=_MICROBATCHES,
        figure=lambda job: job.response_time,
        how=lambda job: f"for 16: {_total(job)}",
        readings=_MANY,
        unit="ms",
        remark="Every total has a bubble of 130 ms (65 ms if split). The report's third one has it; the first has "
        "20 ms in its place, the second and the fourth 40 ms.",
    ),
    Claim(
        about="Table 1, speed-up",
        says="3.47 1.73 0.86 0.48x",
        reported=(3.47, 1.73, 0.86, 0.48),
        jobs=_MICROBATCHES,
        figure=lambda job: job.speed_up,
        how=lambda job: f"for 16: {_speed_up(job)}",
        readings=_MANY,
        unit="x",
        off=0.005,
        remark="The report divides the same 1040 ms by every total, so more work looks slower. More micro-batches make "
        "the bubble's part smaller: the speed-up grows towards 4.",
    ),
    Claim(
        about="Table 2, warm-up for depth 1, 2, 4, 8",
        says="0 50 150 350 ms",
        reported=(0, 50, 150, 350),
        jobs=_STAGES,
        figure=lambda job: _phases(job)[0],
        how=lambda job: f"for 8: (8 - 1) x {job.forward:g} = {_phases(job)[0]:g}",
        readings=_TIMES,
        unit="ms",
    ),
    Claim(
        about="Table 2, steady state",
        says="1040 520 260 130 ms",
        reported=(1040, 520, 260, 130),
        jobs=_STAGES,
        figure=lambda job: _phases(job)[1],
        how=lambda job: f"for 8: 8 x {_each(job):g} = {_phases(job)[1]:g}",
        readings=_TIMES,
        unit="ms",
    ),
    Claim(
        about="Table 2, cooldown",
        says="0 80 240 560 ms",
        reported=(0, 80, 240, 560),
        jobs=_STAGES,
        figure=lambda job: _phases(job)[2],
        how=lambda job: f"for 8: (8 - 1) x {job.backward:g} = {_phases(job)[2]:g}",
        readings=_TIMES,
        unit="ms",
    ),
    Claim(
        about="Table 2, total",
        says="1040 650 650 1040 ms",
        reported=(1040, 650, 650, 1040),
        jobs=_STAGES,
        figure=lambda job: job.response_time,
        how=lambda job: f"for 8: {_pipeline(job)} = {job.response_time:g}",
        readings=_TIMES,
        unit="ms",
        remark="Each row is right under one reading, but not the same: warm-up and cooldown are per stage, the steady "
        "state is split. A deeper pipeline runs a larger model in more time (per stage), or the same one in less "
        "(split); the minimum at depth 2 to 4 comes from the mixture.",
    ),
    Claim(
        about="Table 3, steps for 1, 2, 4, 8 replicas",
        says="0 2 6 14",
        reported=(0, 2, 6, 14),
        jobs=_REPLICAS,
        figure=lambda job: _steps(job.replicas),
        how=lambda _: f"for 8: 2 x (8 - 1) = {_steps(8)}",
        readings=_ANY,
        unit="steps",
        remark="This row is O(N), as it should be.",
    ),
    Claim(
        about="Table 3, time",
        says="0 20 60 140 ms",
        reported=(0, 20, 60, 140),
        jobs=_REPLICAS,
        figure=_ring_time,
        how=lambda job: f"for 8: {_ring(job)}",
        readings=_STEPS,
        unit="ms",
        remark="Table 3 counts 10 ms for a step, the setting 20 ms. A step also becomes shorter where more replicas "
        "share the gradient in smaller chunks, which neither of them counts.",
    ),
    Claim(
        about="Table 3, share",
        says="0 1.7 4.9 11.5 %",
        reported=(0, 1.7, 4.9, 11.5),
        jobs=_REPLICAS,
        figure=lambda job: 100 * job.communication_cost,
        how=lambda job: f"for 8: {_communication(job)}",
        readings=(*_TEN, Reading(name=f"{READINGS[0]}, 20 ms")),
        unit="%",
        digits=1,
        off=0.05,
        remark="The report divides each time by 1210, which has the 40 ms of two replicas in it already. The share is "
        "of the total with its own all-reduce: 140 / (1170 + 140).",
    ),
    Claim(
        about="Measured, one GPU",
        says="1045 ms",
        reported=((0.98 * 1045, 1.02 * 1045),),
        figure=lambda job: job.alone.makespan,
        how=_alone,
        unit="ms",
        remark="Measured figures count as right within 2 %. 1045 ms is the whole model split, with 8 micro-batches in "
        "all …",
    ),
    Claim(
        about="Measured, four GPUs",
        says="1234 ms",
        reported=((0.98 * 1234, 1.02 * 1234),),
        figure=lambda job: job.response_time,
        how=_total,
        unit="ms",
        remark="… and 1234 ms is per stage, with 8 for each replica: four times the work. Both measurements agree with "
        "the model; their ratio is no speed-up.",
    ),
    Claim(
        about="Measured, communication",
        says="4.2 %",
        reported=((0.98 * 4.2, 1.02 * 4.2),),
        figure=lambda job: 100 * job.communication_cost,
        how=_communication,
        unit="%",
        digits=1,
        remark="4.2 % of 1234 ms are 52 ms, 12 more than two steps of 20 ms: perhaps waiting for the slower replica.",
    ),
    Claim(
        about="Measured, peak memory",
        says="22 units",
        reported=((0.98 * 22, 1.02 * 22),),
        figure=lambda job: job.peak_memory,
        how=lambda _: "min(8, 2) x 10 = 20",
        readings=_ANY,
        unit="units",
        remark="2 units, 10 %, above what 1F1B keeps: weights, gradients or buffers, which the report does not count.",
    ),
)
