"""Plans for torchtitan, which trains language models with PyTorch's pipelining.

torchtitan reads a plan in PyTorch's CSV notation, and gives it to PyTorch's runtime. But it makes each rank's stages
before, and the name of a schedule says where they are (`_get_pp_rank_to_stage_indices_mapping`, commit b5bcd76):

    any other name                     loop   stage s is on rank s % ranks
    ZBVZeroBubble, DualPipeV           V      two stages per rank; the second half goes back from the last rank
"""

from __future__ import annotations

import os

from pipelab.checking.checker import ScheduleLike, as_plan, require_legal
from pipelab.errors import UsageError, counted
from pipelab.plan.actions import Action, halves_of
from pipelab.plan.fault import ranges
from pipelab.plan.plan import Plan

_READ = ("F", "B", "I", "W")
"""The kinds of action that PyTorch's runtime reads in a file without transfers (`_Action.is_compute_op`)."""


def export(plan: Plan | ScheduleLike, path: str | os.PathLike[str]) -> str:
    """Write a plan as the CSV file that torchtitan loads; return the options that torchtitan needs beside it.

    Args:
        plan: the plan or schedule.
        path: the file.

    Example:
        >>> import pipelab, tempfile
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     options = export(pipelab.ZBV(ranks=4, microbatches=8), Path(folder) / "zbv.csv")
        >>> print(options.splitlines()[1])
        --parallelism.pipeline_parallel_schedule ZBVZeroBubble

    Raises:
        UsageError: if torchtitan would not build these stages, or PyTorch's runtime would not run the file.
        ScheduleError: if the plan has faults.
    """
    plan = as_plan(plan)
    require_legal(plan)
    _require_readable(plan)
    name, per_rank = _placed(plan), plan.stages // plan.ranks
    plan.to_csv(path)
    usual = f"{per_rank} per rank, as torchtitan makes them if pipeline_parallel_layers_per_stage is not set"
    other = (
        f"{per_rank} per rank: set --parallelism.pipeline_parallel_layers_per_stage to an L with which (layers + 2) / "
        f"L, rounded up, is {plan.stages}; or name each stage's modules in module_fqns_per_model_part"
    )
    return "\n".join(
        (
            f"--parallelism.pipeline_parallel_degree {plan.ranks}",
            f"--parallelism.pipeline_parallel_schedule {name}",
            f"--parallelism.pipeline_parallel_schedule_csv {os.fspath(path)}",
            "# torchtitan 0.3.0 counts in sequences: local_batch_size / pipeline_parallel_microbatch_size must be "
            f"{plan.microbatches}",
            "--parallelism.pipeline_parallel_microbatch_size 1",
            f"--training.local_batch_size {plan.microbatches}",
            f"# main since August 2026, instead of both: --parallelism.num_pp_microbatches {plan.microbatches}",
            f"# {counted(plan.stages, 'stage')}, {usual if per_rank <= 2 else other}",
        )
    )


def _require_readable(plan: Plan) -> None:
    """Refuse a plan that PyTorch's runtime would not read, or would run otherwise."""
    items = [(rank, item) for rank, row in enumerate(plan.rows) for item in row]
    shared = [stage for stage, ranks in plan.replicas.items() if len(ranks) > 1]
    other = [(rank, each) for rank, each in items if isinstance(each, Action) and each.kind not in _READ]
    if shared:
        raise UsageError(
            f"PyTorch's runtime runs a stage on one rank only; on several ranks: {ranges(shared)}\n"
            "  try: for replicas, torchtitan's data_parallel_replicate_degree; if micro-batches enter at both ends, "
            "a schedule in a V, such as dualpipev"
        )
    if other:
        raise UsageError(
            f"rank {other[0][0]} has {other[0][1]}, and PyTorch's runtime reads {', '.join(_READ)} and pairs of F and "
            f"B only\n  try: a plan without {other[0][1].kind}"
        )
    if plan.after is not None:
        raise UsageError(
            "its micro-batches are slices of sequences, which PyTorch's notation cannot say: torchtitan would train "
            "each slice as a sequence\n  try: pipelab.Pipeline(..., sequence_dim=1)"
        )
    actions = [halves_of(item)[0] for _, item in items]
    last = [each.microbatch or 0 for each in actions if each.traits.forward and each.stage == plan.stages - 1]
    if last != sorted(last):
        raise UsageError(
            f"the last stage runs its forwards in the order {', '.join(map(str, last[:8]))}, and PyTorch's runtime "
            "numbers losses in ascending order: backwards would start from the wrong losses\n"
            "  try: these forwards in ascending order"
        )


def _placed(plan: Plan) -> str:
    """Return the name of a schedule for which torchtitan builds each stage on the rank that the plan runs it on."""
    ranks, stages = plan.ranks, plan.stages
    if ranks < 2:
        raise UsageError(
            "the plan has 1 rank, and torchtitan makes no pipeline of one\n  try: a schedule for --ranks 2"
        )
    held = [rank for _, (rank,) in sorted(plan.replicas.items())]
    loop = [stage % ranks for stage in range(stages)]
    if held == loop and stages % ranks == 0:
        return "PipelineScheduleSingle" if stages == ranks else "PipelineScheduleMulti"
    if held == [*range(ranks), *reversed(range(ranks))]:
        return "ZBVZeroBubble"  # and not DualPipeV: torchtitan looks for this name to find the rank with the loss
    stage = next((at for at, (is_on, builds) in enumerate(zip(held, loop, strict=True)) if is_on != builds), None)
    where = f"stage {stage} is on rank {held[stage]}" if stage is not None else f"{stages} stages are on {ranks} ranks"
    raise UsageError(
        f"{where}, and torchtitan builds as many stages on every rank: stage s on rank s % {ranks}, or two per rank in "
        "a V\n  try: a schedule with stages_per_rank and without place; or zbv and its like, which are in a V"
    )
