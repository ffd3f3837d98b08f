"""PyTorch's own pipelining in several processes, one for each rank, connected by gloo.

A native schedule runs on real stages. Each process returns the calls of its stages, their gradients and the loss.
"""

from __future__ import annotations

import io
import multiprocessing
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch
from torch import distributed
from torch.distributed.pipelining import PipelineStage

from pipelab.conformance import native
from pipelab.conformance.recording import native_place, watch
from pipelab.conformance.steps import Outcome, make_schedule, take_step
from pipelab.conformance.workload import fixed_model, fixed_task
from pipelab.errors import EngineError
from pipelab.plan.actions import Action
from pipelab.plan.plan import Plan


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
    """Start `ranks` processes and run jobs in them, one after the other.

    Raises:
        EngineError: if a process fails, with its traceback, or does not answer within `timeout` seconds.
    """
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
