"""One step of PyTorch's own pipelining; pipelab's gradients and loss are compared with its."""

from __future__ import annotations

import io
import multiprocessing
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import networkx
import torch
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage

from pipelab.conformance import native
from pipelab.conformance.recording import native_place, watch
from pipelab.engine.torchrun import runtime
from pipelab.errors import EngineError
from pipelab.plan.actions import Action
from pipelab.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Outcome:
    """The numbers of one step.

    Attributes:
        gradients: every parameter's gradient, stage by stage.
        loss: the loss of the whole batch.
    """

    gradients: list[torch.Tensor]
    loss: torch.Tensor

    def same_gradients(self, other: Outcome) -> bool:
        """Return whether all gradients are equal bit for bit."""
        return len(self.gradients) == len(other.gradients) and all(map(torch.equal, self.gradients, other.gradients))

    def difference(self, other: Outcome) -> float:
        """Return the largest relative difference of a parameter's gradient, in the 2-norm."""
        return max(
            float((ours - theirs).norm() / theirs.norm())
            for ours, theirs in zip(self.gradients, other.gradients, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Task:
    """The batch and the loss of a step; all micro-batches have the same number of rows.

    Attributes:
        x: the batch, `[rows, ...]`.
        y: its targets, `[rows, ...]`.
        loss_fn: the mean loss of a micro-batch.
        microbatches: how many there are.
    """

    x: torch.Tensor
    y: torch.Tensor
    loss_fn: Callable[[Any, Any], torch.Tensor]
    microbatches: int

    def weighed(self, output: Any, target: Any) -> torch.Tensor:
        """Return a micro-batch's share of the batch's loss."""
        return self.loss_fn(output, target) * (1 / self.microbatches)


@contextmanager
def group_of_one() -> Iterator[None]:
    """Make this process a process group of one, so that it runs PyTorch's pipelining without other processes."""
    if distributed.is_initialized():
        raise EngineError(
            "this process is in a process group already, and the comparison with PyTorch needs its own group: "
            "run it without torchrun"
        )
    store = distributed.HashStore()  # type: ignore[attr-defined]  # public, and listed nowhere
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def step_of_class(kind: str, modules: Sequence[nn.Module], task: Task, *, one_at_a_time: bool = False) -> Outcome:
    """Run one step of PyTorch's class `kind`, whose only rank, this process, holds all stages. Needs `group_of_one`.

    With `one_at_a_time`, the schedule gets one micro-batch after the other. Gradients are added to the modules'.
    """
    stages = [PipelineStage(module, index, len(modules), torch.device("cpu")) for index, module in enumerate(modules)]
    schedule = make_schedule(kind, stages, task, one_at_a_time=one_at_a_time)
    return _outcome(modules, take_step(schedule, stages, task, one_at_a_time=one_at_a_time))


def step_of_plan(plan: Plan, modules: Sequence[nn.Module], task: Task) -> Outcome:
    """Let PyTorch's runtime run a plan on one rank, this process: each stage's actions in the plan's order.

    All rows become one, in an order that the dependencies allow. Needs `group_of_one`. Gradients are added to the
    modules'.
    """
    stages = [PipelineStage(module, index, len(modules), torch.device("cpu")) for index, module in enumerate(modules)]
    schedule = make_schedule("_PipelineScheduleRuntime", stages, task)
    native.lower(schedule, [networkx.topological_sort(plan.graph())])
    return _outcome(modules, take_step(schedule, stages, task))


def make_schedule(kind: str, stages: Sequence[Any], task: Task, *, one_at_a_time: bool = False) -> Any:
    """Return a native schedule on this rank's stages; it scales gradients as pipelab does."""
    cls = native.schedule_class(kind)
    single = issubclass(cls, runtime.load().schedules.PipelineScheduleSingle)
    microbatches = 1 if one_at_a_time else task.microbatches
    return cls(stages[0] if single else list(stages), microbatches, loss_fn=task.weighed, scale_grads=False)


def take_step(schedule: Any, stages: Sequence[Any], task: Task, *, one_at_a_time: bool = False) -> torch.Tensor | None:
    """Run one step on this rank's stages; return the batch's loss if the last stage is among them."""
    portions = task.microbatches if one_at_a_time else 1
    losses: list[torch.Tensor] = []
    for x, y in zip(task.x.chunk(portions), task.y.chunk(portions), strict=True):
        arguments = (x,) if any(stage.is_first for stage in stages) else ()
        found: list[torch.Tensor] = []
        named = {"target": y, "losses": found} if any(stage.is_last for stage in stages) else {}
        schedule.step(*arguments, **named)
        losses += found
    return torch.stack([loss.detach() for loss in losses]).sum() if losses else None


def _outcome(modules: Sequence[nn.Module], loss: torch.Tensor | None) -> Outcome:
    assert loss is not None
    gradients = [parameter.grad for module in modules for parameter in module.parameters()]
    return Outcome([gradient for gradient in gradients if gradient is not None], loss)


_WIDTH = 16
_ROWS = 2


def fixed_model(stages: int) -> nn.Sequential:
    """Return a small model with one layer per stage and the same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _WIDTH), nn.Tanh()) for _ in range(stages)]
        return nn.Sequential(*layers)


def fixed_task(microbatches: int) -> Task:
    """Return a batch with a few rows in every micro-batch, the same every time."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, _ROWS * microbatches, _WIDTH, generator=generator)
    return Task(x, y, nn.functional.mse_loss, microbatches)


@contextmanager
def one_thread() -> Iterator[int]:
    """Let operations of this thread use one core, and yield how many cores they used before.

    The last bits of a number may depend on the number of cores, so both sides of a comparison run inside.
    """
    cores = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield cores
    finally:
        torch.set_num_threads(cores)


# ── In several processes, one for each rank, connected by gloo ────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Job:
    """One step of PyTorch's pipelining.

    Attributes:
        kind: the name of PyTorch's class.
        microbatches: how many there are.
        stages_per_rank: how many stages each rank holds.
        one_at_a_time: whether the schedule gets one micro-batch after the other.
        rows: the plan, as text, for the runtime, which has no order.
    """

    kind: str
    microbatches: int
    stages_per_rank: int = 1
    one_at_a_time: bool = False
    rows: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class JobResult:
    """The result of a job: the plan that the schedule executed on real stages, and the numbers."""

    executed: Plan
    outcome: Outcome


def run_in_processes(jobs: Sequence[Job], ranks: int, timeout: float = 120.0) -> list[JobResult]:
    """Start `ranks` processes and run jobs in them, one after the other."""
    context = multiprocessing.get_context("spawn")
    processes, pipes = [], []
    with tempfile.TemporaryDirectory() as folder:
        meeting = (Path(folder) / "meeting").as_uri()
        try:
            for rank in range(ranks):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=_serve, args=(rank, ranks, meeting, list(jobs), timeout, theirs), daemon=True
                )
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            answers = _answers(pipes, time.monotonic() + timeout, timeout)
        finally:
            for process in processes:
                process.terminate()
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()
            for pipe in pipes:
                pipe.close()
    return [_merged([answer[number] for answer in answers]) for number in range(len(jobs))]


def _answers(pipes: Sequence[Connection], deadline: float, timeout: float) -> list[list[dict[str, Any]]]:
    """Return what every rank sends before the deadline."""
    waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(pipes)}
    found: dict[int, list[dict[str, Any]]] = {}
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            late = ", ".join(map(str, waiting.values()))
            raise EngineError(f"rank {late} of {len(pipes)} processes of PyTorch did not answer within {timeout:g} s")
        for pipe in cast(list[Connection], ready):
            rank = waiting.pop(pipe)
            try:
                answer = pipe.recv()
            except EOFError:
                raise EngineError(f"rank {rank} of {len(pipes)} processes of PyTorch ended without an answer") from None
            if isinstance(answer, str):
                raise EngineError(f"rank {rank} of {len(pipes)} processes of PyTorch failed:\n{answer}")
            found[rank] = torch.load(io.BytesIO(answer))
    return [found[rank] for rank in range(len(pipes))]


def _merged(answers: Sequence[dict[str, Any]]) -> JobResult:
    gradients = {stage: each for answer in answers for stage, each in answer["gradients"].items()}
    loss = next(answer["loss"] for answer in answers if answer["loss"] is not None)
    outcome = Outcome([gradient for _, each in sorted(gradients.items()) for gradient in each], loss)
    return JobResult(Plan.parse(answer["record"] for answer in answers), outcome)


def _serve(rank: int, ranks: int, meeting: str, jobs: list[Job], timeout: float, answers: Connection) -> None:
    """Run the jobs as one rank, and send the results, or a traceback."""
    try:
        torch.set_num_threads(1)
        distributed.init_process_group(
            "gloo", init_method=meeting, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout)
        )
        done = [_run(job, rank, ranks) for job in jobs]
        distributed.barrier()
        distributed.destroy_process_group()
        written = io.BytesIO()
        torch.save(done, written)
        answers.send(written.getvalue())
    except Exception:  # noqa: BLE001 - the parent reports whatever it is
        answers.send(traceback.format_exc())
    finally:
        answers.close()


def _run(job: Job, rank: int, ranks: int) -> dict[str, Any]:
    """Run one job's part of this rank."""
    count = ranks * job.stages_per_rank
    plan = Plan.parse(job.rows) if job.rows else None
    mine = [
        index
        for index in range(count)
        if (rank in plan.replicas[index] if plan else native_place(job.kind, ranks, index) == rank)
    ]
    modules = list(fixed_model(count))
    task = fixed_task(job.microbatches)
    stages = [PipelineStage(modules[index], index, count, torch.device("cpu")) for index in mine]
    record: list[Action] = []
    for stage in stages:
        watch(stage, record)
    schedule = make_schedule(job.kind, stages, task, one_at_a_time=job.one_at_a_time)
    if plan:
        native.lower(schedule, plan.rows)
    loss = take_step(schedule, stages, task, one_at_a_time=job.one_at_a_time)
    return {
        "gradients": {index: [parameter.grad for parameter in modules[index].parameters()] for index in mine},
        "loss": loss,
        "record": " ".join(map(str, _numbered(record) if job.one_at_a_time else record)),
    }


def _numbered(record: Sequence[Action]) -> list[Action]:
    """Return the actions with their micro-batches counted: given one at a time, each of them has number 0."""
    seen: Counter[tuple[str, int | None]] = Counter()
    numbered = []
    for action in record:
        numbered.append(replace(action, microbatch=seen[action.kind, action.stage]))
        seen[action.kind, action.stage] += 1
    return numbered
