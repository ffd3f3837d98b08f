"""Pipelines times replicas: one mini-batch on many devices, beside the same work on one.

Examples:
    >>> job = Hybrid(stages=2, replicas=2, microbatches=8, forward=50, backward=80, ring_step=20)
    >>> job.response_time, job.alone.makespan, round(job.speed_up, 2), round(job.communication_cost, 3)
    (1210.0, 4160.0, 3.44, 0.033)
    >>> print(job.work)
    16 micro-batches through 2 stages of 50 + 80 ms
    >>> print(timeline(Hybrid(stages=2, replicas=2, microbatches=1, forward=50, backward=80, ring_step=20)))
    t =    0 ms: device (0, 0) does F0, (0, 1) F1
    t =   50 ms: device (1, 0) does F0, (1, 1) F1
    t =  100 ms: device (1, 0) does B0, (1, 1) B1
    t =  180 ms: device (0, 0) does B0, (0, 1) B1
    t =  180 ms: device (1, 0) does R, (1, 1) R
    t =  260 ms: device (0, 0) does R, (0, 1) R
    t =  300 ms: done
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pipelab.catalogue import Interleaved1F1B, OneFOneB
from pipelab.draw import wording
from pipelab.errors import UsageError, counted, require_size
from pipelab.plan.plan import Plan
from pipelab.schedule import Schedule, replicate
from pipelab.simulation.clock import simulate
from pipelab.simulation.cost import Cost
from pipelab.table import Column, Table
from pipelab.trace.trace import Trace

if TYPE_CHECKING:
    from pipelab.cli.running import Job


@dataclass(frozen=True, kw_only=True)
class Hybrid:
    """One mini-batch on stages x replicas devices, simulated, beside the same work on one device.

    Each replica is a pipeline with one stage on each of its devices, and runs its own micro-batches. At the end each
    stage's gradients are all-reduced around a ring of its replicas.
    """

    stages: int
    replicas: int
    microbatches: int
    forward: float
    backward: float
    ring_step: float = 0.0
    schedule: type[Schedule] = OneFOneB
    rows: int = 1
    weights: float = 0.0
    activation: float = 0.0

    def __post_init__(self) -> None:
        """Refuse sizes and times that cannot be."""
        for name in ("stages", "replicas", "microbatches", "rows"):
            require_size(name, getattr(self, name))
        if not self.cost.forward + self.cost.backward > 0:  # type: ignore[operator]  # both are numbers
            raise UsageError("forward=0 and backward=0: a job without any time has nothing to compare")
        on = set(map(len, self.plan.replicas.values()))
        if self.plan.stages != self.stages or on != {self.replicas}:
            raise UsageError(
                f"{self.schedule.__name__} has {self.plan.stages} stages on {self.stages} ranks, each on "
                f"{', '.join(map(str, sorted(on)))} of {self.devices} devices: choose one with one stage on each rank"
            )

    @property
    def devices(self) -> int:
        """How many devices there are: stages x replicas."""
        return self.stages * self.replicas

    @property
    def all_microbatches(self) -> int:
        """How many micro-batches the mini-batch has, in all replicas."""
        return self.microbatches * self.replicas

    @property
    def work(self) -> str:
        """What is computed, in words, stage by stage."""
        return f"{self._batch} through {counted(self.stages, 'stage')} of {self.forward:g} + {self.backward:g} ms"

    @property
    def whole_work(self) -> str:
        """What is computed, in words. Times of two jobs can be compared only if this is the same."""
        whole = f"{self.stages * self.forward:g} + {self.stages * self.backward:g} ms"
        return f"{self._batch} through the whole model, {whole} for each"

    @property
    def _batch(self) -> str:
        rows = f" of {self.rows} rows" if self.rows > 1 else ""
        return f"{counted(self.all_microbatches, 'micro-batch')}{rows}"

    @property
    def cost(self) -> Cost:
        """The times of all actions; transfers between stages are free."""
        ring = 2 * (self.replicas - 1) * self.ring_step
        return Cost(forward=self.forward, backward=self.backward, all_reduce=ring, per="stage", unit="ms")

    @cached_property
    def plan(self) -> Plan:
        """The plan of all devices; device `(stage, replica)` is rank `replica * stages + stage`."""
        return replicate(self.schedule(self.stages, self.microbatches), self.replicas).plan()

    @cached_property
    def alone_plan(self) -> Plan:
        """The plan of one device that does the same work: all stages, all micro-batches, one after another."""
        return Interleaved1F1B(1, self.all_microbatches, stages_per_rank=self.stages).plan()

    @cached_property
    def trace(self) -> Trace:
        """The simulated mini-batch."""
        return simulate(self.plan, self.cost)

    @cached_property
    def alone(self) -> Trace:
        """The baseline: one device does the same work, simulated."""
        return simulate(self.alone_plan, self.cost)

    @cached_property
    def pipeline(self) -> Trace:
        """The mini-batch with free all-reduces: what the pipelines alone take."""
        return simulate(self.plan, replace(self.cost, all_reduce=0))

    @property
    def response_time(self) -> float:
        """Milliseconds from the start of a mini-batch until all devices have the sums of its gradients."""
        return self.trace.makespan

    @property
    def throughput(self) -> float:
        """Rows per second: the rows of the mini-batch divided by its response time."""
        return 1e3 * self.all_microbatches * self.rows / self.response_time

    @property
    def speed_up(self) -> float:
        """T1 / Tp: the time in which one device does the same work, divided by the response time."""
        return self.alone.makespan / self.response_time

    @property
    def efficiency(self) -> float:
        """The speed-up divided by the number of devices; 1 is the most that there can be."""
        return self.speed_up / self.devices

    @property
    def communication_cost(self) -> float:
        """T_comm / T_total: the part of the response time by which free all-reduces would make it shorter."""
        return (self.response_time - self.pipeline.makespan) / self.response_time

    @property
    def peak_memory(self) -> float:
        """M_peak: the most that one device holds: its weights, as much for their gradients, and kept activations."""
        return max(self._memory)

    @property
    def memory_efficiency(self) -> float | None:
        """M_model / M_peak: the weights' part of the memory of the fullest device; none if weights have no size."""
        return self.weights / self.peak_memory if self.weights else None

    @property
    def _memory(self) -> list[float]:
        return [2 * self.weights + peak * self.activation for peak in self.trace.peak_activations]

    def job(self, *, alone: bool = False) -> Job:
        """Return what runs the work for real on emulated devices, or on one of them."""
        from pipelab.cli.running import Job
        from pipelab.engine.emulation import emulated

        plan = self.alone_plan if alone else self.plan
        reduce = self.cost.times(plan)["R"]
        model = emulated(self.stages, self.forward, self.backward, all_reduce_ms=reduce)
        return Job(plan, model, (self.all_microbatches, 1))


def same_work(
    layouts: Sequence[tuple[int, int]], microbatches: int, forward: float, backward: float, **more: Any
) -> list[Hybrid]:
    """Return one job for each layout, all of which do the same work.

    Example:
        >>> jobs = same_work([(1, 1), (2, 2), (4, 2)], microbatches=16, forward=100, backward=160, ring_step=20)
        >>> [job.response_time for job in jobs], [job.alone.makespan for job in jobs]
        ([4160.0, 1210.0, 755.0], [4160.0, 4160.0, 4160.0])
    """
    jobs = []
    for stages, replicas in layouts:
        if microbatches % replicas:
            raise UsageError(
                f"{microbatches} micro-batches cannot be shared evenly by {replicas} replicas: use a multiple of "
                f"{replicas}, such as {-(-microbatches // replicas) * replicas}"
            )
        parts = {name: more[name] / stages for name in ("weights", "activation") if name in more}
        share = microbatches // replicas
        times = {"forward": forward / stages, "backward": backward / stages}
        jobs.append(Hybrid(stages=stages, replicas=replicas, microbatches=share, **(more | times | parts)))
    return jobs


def metrics(jobs: Sequence[Hybrid]) -> list[dict[str, Any]]:
    """Return one row of figures for each job: plain data."""
    return [
        {
            "layout": f"{job.stages} x {job.replicas}",
            **{name: getattr(job, name) for name in ("devices", *_COLUMNS)},
            "baseline": job.alone.makespan,
            "work": job.work,
        }
        for job in jobs
    ]


_COLUMNS = {
    "response_time": ("response time, ms", wording.number),
    "throughput": ("throughput, rows/s", wording.number),
    "speed_up": ("speed-up", "{:.2f}".format),
    "efficiency": ("efficiency", wording.percent),
    "communication_cost": ("communication", wording.percent),
    "peak_memory": ("peak memory", wording.number),
    "memory_efficiency": ("memory efficiency", wording.percent),
}


def table(jobs: Sequence[Hybrid], memory_unit: str = "units") -> Table:
    """Return the jobs' figures as a table, whose notes define each figure and name the work.

    Example:
        >>> jobs = same_work([(1, 1), (2, 2)], microbatches=16, forward=100, backward=160, ring_step=20)
        >>> print(table(jobs).text(100).split("response time, ms: ")[0])
        stages x  devices  response  throughput,  speed-up  efficiency  communication
        replicas           time, ms       rows/s
        1 x 1           1     4,160         3.85      1.00     100.0 %          0.0 %
        2 x 2           4     1,210         13.2      3.44      86.0 %          3.3 %
        <BLANKLINE>
        All do the same work, which takes one device alone 4,160 ms: 16 micro-batches through the whole
        model, 100 + 160 ms for each.
        <BLANKLINE>
    """
    rows = metrics(jobs)
    shown_as = _COLUMNS | {"peak_memory": (f"peak memory, {memory_unit}", wording.number)}
    left_out = {name for name in _COLUMNS if not any(row[name] for row in rows)} - {"communication_cost"}
    columns = [Column("layout", "stages x replicas"), Column("devices")]
    columns += [Column(name, *shown) for name, shown in shown_as.items() if name not in left_out]
    if len({job.whole_work for job in jobs}) == 1:
        alone = wording.number(rows[0]["baseline"])
        notes = [f"All do the same work, which takes one device alone {alone} ms: {jobs[0].whole_work}."]
    else:
        columns += [Column("baseline", "one device, ms", wording.number), Column("work")]
        notes = ["The work differs, so only figures that are divided by the same work's can be compared."]
    defined = {name: str(getattr(Hybrid, name).__doc__).splitlines()[0] for name in _COLUMNS if name not in left_out}
    notes += [f"{_COLUMNS[name][0]}: {sentence}" for name, sentence in defined.items()]
    if "memory_efficiency" in left_out and "peak_memory" not in left_out:
        notes.append("memory efficiency, M_model / M_peak, is left out: the size of the weights is not given.")
    return Table(rows, columns, axes=("devices", ("speed_up", "efficiency", "communication_cost")), notes=notes)


def timeline(job: Hybrid) -> str:
    """Return what every device begins, step by step: one line for each moment and stage.

    A device is `(stage, replica)`, and micro-batches have their numbers in the whole mini-batch.
    """
    began: dict[tuple[float, int], list[str]] = defaultdict(list)
    for event in job.trace.events:
        replica, stage = divmod(event.rank, job.stages)
        action = event.action
        does = action.kind if action.microbatch is None else f"{action.kind}{action.microbatch}"
        first = "" if began[event.start, stage] else "does "
        began[event.start, stage].append(f"({stage}, {replica}) {first}{does}")
    moments = [*sorted(began.items()), ((job.response_time, 0), ["done"])]
    width = len(wording.number(job.response_time)) + 1
    return "\n".join(
        f"t = {wording.number(start):>{width}} ms: {'device ' * (each != ['done'])}{', '.join(each)}"
        for (start, _), each in moments
    )


def measured(jobs: Sequence[Hybrid], steps: int = 3) -> Iterator[dict[str, Any]]:
    """Run each job for real on emulated devices, then its work on one of them; yield a row for each run.

    The devices are threads that sleep as long as each action takes, the all-reduce included; every run's gradients are
    verified.
    """
    from pipelab.cli.running import run_all

    for job in jobs:
        for alone, predicted in ((False, job.trace), (True, job.alone)):
            (result,) = run_all([job.job(alone=alone)], steps)
            took = result.measured.makespan
            reduces = [event.duration for event in result.measured.events if event.action.kind == "R"]
            yield {
                "layout": "one device" if alone else f"{job.stages} x {job.replicas}",
                "work": job.work,
                "predicted_ms": predicted.makespan,
                "measured_ms": took,
                "off": took / predicted.makespan - 1,
                "communication": max(reduces, default=0.0) / took,
            }


def measured_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the table of measured rows, and the speed-up that was measured."""
    columns = [
        Column("layout", "stages x replicas"),
        Column("predicted_ms", "predicted, ms", wording.number),
        Column("measured_ms", "measured, ms", wording.number),
        Column("off", show="{:+.1%}".format),
        Column("communication", show=wording.percent),
    ]
    notes = [f"All do the same work: {rows[0]['work']}."] if rows else []
    for job, alone in zip(rows[::2], rows[1::2], strict=False):
        times = alone["measured_ms"] / job["measured_ms"]
        notes.append(f"Measured speed-up of {job['layout']}: {times:.2f}.")
    return Table(rows, columns, notes=notes)
