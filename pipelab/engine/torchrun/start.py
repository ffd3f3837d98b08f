"""Start this process's part of a pipeline: compare with the other processes, and connect to them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import socket
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipelab._version import __version__
from pipelab.engine.device import RankDevice, rank_devices
from pipelab.engine.engine import Settings
from pipelab.engine.model.split import Stages
from pipelab.engine.stage.pytree import described
from pipelab.engine.stage.replicas import require_replicable, ties_of
from pipelab.engine.torchrun import runtime
from pipelab.engine.torchrun.engine import TorchEngine, holders_of
from pipelab.engine.torchrun.exchange import few_numbers
from pipelab.engine.torchrun.messages import Connections, copy_from
from pipelab.engine.torchrun.stage import fsdp_modules
from pipelab.engine.torchrun.supervisor import (
    AnsweringStore,
    Failures,
    Status,
    Supervisor,
    answer,
    communication_thread,
    end_with,
    torchrun_holds_the_store,
)
from pipelab.errors import EngineError, RankError, counted
from pipelab.plan.plan import Plan
from pipelab.plan.transfers import Transport
from pipelab.simulation.clock import simulate

_MARGIN_SECONDS = 30.0
"""How much longer PyTorch's own timeouts are: pipelab's come first, and say more."""
_CONNECTING_SECONDS = 2.0
"""How much longer than PyTorch's timeout a connection may take: that one does not cover everything."""
_NO_TIMEOUT = timedelta(days=30)
"""PyTorch needs a number."""
_SAME = ("pipelab", "torch", "plan", "model", "reduction", "replicated_buffers")

_made = 0
"""How many pipelines this process has made: each uses a part of the store."""


def start(plan: Plan, stages: Stages, settings: Settings) -> TorchEngine:
    """Start this process's part."""
    global _made  # noqa: PLW0603 - it counts for the process
    _made += 1
    # [1] checks that need no other process
    _require_runnable(plan, stages, settings)
    rank, size = identify(plan.ranks, settings.group)
    members = list(range(size)) if settings.group is None else dist.get_process_group_ranks(settings.group)
    place = members.index(rank)
    device = device_of(settings.devices, place, plan.ranks)
    # [2] compare with the others
    # A wait for one key of a store blocks all other users of its connection, so the caller and the communication thread
    # each have one.
    callers, meeting = (prefix_store(opened, str(_made)) for opened in open_store(rank, size, settings.timeout))
    store = AnsweringStore(callers, settings.timeout)
    info = process_info() | _part_of_pipeline(plan, stages, settings, device) | {"group": members}
    everyone = introduce(store, rank, size, info, settings.timeout)
    if rank == 0:
        warn_of_other_weights([process["weights"] for process in everyone])
    # [3] connect, supervised
    threads = settings.intra_op_threads or torch.get_num_threads()
    supervisor = Supervisor(rank, Failures(store, rank, everyone), settings.timeout, threads)
    held = [stage for stage, ranks in plan.replicas.items() if place in ranks]
    for stage in held:
        stages.make(stage, everyone[0]["seed"])
        stages.place_stage(stage, device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # as scripts under torchrun do, so that "cuda" means this one
        torch.cuda.current_stream(device).synchronize()
    backend = backend_of(everyone)
    holders = [*plan.replicas.values(), *(holders_of(tied, plan) for tied in ties_of(stages.modules))]
    groups = sorted({tuple(process["group"]) for process in everyone})
    limit = duration(None if settings.timeout is None else settings.timeout + _MARGIN_SECONDS)

    def meet() -> Connections:
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            connections = connect(meeting, rank, size, device, backend, holders, limit, groups)
            for stage in held:
                module, ranks = stages.modules[stage], plan.replicas[stage]
                for tensor in [*module.parameters(), *module.buffers()] if len(ranks) > 1 else ():
                    copy_from(0, tensor, connections.shared[ranks], connections.transport_device)
            dist.barrier(connections.everyone)  # who closes at once would cut off a process that still connects
            return connections

    several = len({process["host"] for process in everyone}) > 1
    hint = " (on several machines GLOO_SOCKET_IFNAME may be needed)" if several else ""
    connections = supervisor.run(meet, Status(lambda: f"waits for all processes to connect{hint}"))
    supervisor.abort = connections.abort
    # [4] the engine
    own = [everyone[member] for member in members]
    devices = [torch.device(process["runs_on"]) for process in own]
    engine = TorchEngine(plan, stages, place, devices, connections, supervisor, settings)
    engine.one_clock = _have_one_clock(own)
    engine.transport = _transport(backend)
    if rank == 0 and engine.transport == "rank":
        warn_of_one_queue(plan)
    engine.labels = [f"{process['runs_on']}, process {process['pid']} on {process['host']}" for process in own]
    return engine


def _have_one_clock(processes: Sequence[dict[str, Any]]) -> bool:
    """Return whether processes read the clock of one machine; if unknown, or if GPUs have others, they do not."""
    machines = {process["processes"] for process in processes}
    return len(machines) == 1 and "" not in machines and not any(process["gpu"] for process in processes)


def _transport(backend: str) -> Transport:
    """Return what waits for what among the values between ranks: see docs/wire.md."""
    if backend == "gloo":
        return "buffered"
    eager = getattr(dist.group.WORLD, "bound_device_id", None) is not None
    return "rank" if eager else "pair"


def _require_runnable(plan: Plan, stages: Stages, settings: Settings) -> None:
    """Refuse what does not run in processes, before any of them waits for another one."""
    for rank, row in enumerate(plan.bound.computing):
        if not row:
            raise EngineError(
                f"rank {rank} of {plan.ranks} has no action, and PyTorch's runtime needs one on every rank\n"
                "  try: fewer ranks; or engine='threads'"
            )
    for stage, ranks in plan.replicas.items():
        if len(ranks) > 1:
            require_replicable(stage, stages.modules[stage], ranks, settings.replicated_buffers)
            _require_one_pipeline(plan, ranks, settings)
    sharded = next((stage for stage, module in enumerate(stages.modules) if fsdp_modules(module)), None)
    split = [action for row in plan.rows for action in row if getattr(action, "kind", "") == "I"]
    if split and sharded is not None:
        raise EngineError(
            f"{plan.name} splits backwards ({split[0]}), and stage {sharded} is sharded by fully_shard: its gradients "
            "would be wrong\n  try: a schedule with whole backwards, such as 1F1B or interleaved 1F1B"
        )


def _require_one_pipeline(plan: Plan, ranks: Sequence[int], settings: Settings) -> None:
    """Refuse replicas beside a mesh's group, and beside a loss that learns, whose gradients would not be summed."""
    if settings.group is not None:
        raise EngineError(
            f"{plan.name} has {len(ranks)} replicas, and group= names the processes of one pipeline\n"
            "  try: a schedule without replicate, and fully_shard(stage, mesh=...) over another dimension of the mesh"
        )
    loss, last = settings.loss_fn, plan.replicas[plan.stages - 1]
    named = loss.named_parameters() if isinstance(loss, nn.Module) else ()
    learning = [name for name, parameter in named if parameter.requires_grad]
    if learning and ranks == last:
        raise EngineError(
            f"the loss has a parameter {learning[0]!r}, and the last stage is on ranks {', '.join(map(str, last))}, "
            "which would train different copies: only the gradients of stages are summed over replicas\n"
            "  try: make the parameter part of the last stage, freeze it, or use engine='threads'"
        )


def identify(ranks: int, group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """Return this process's rank and the number of processes; refuse any number in `group` but one per rank."""
    own = f"pipelab launch {_script()} --ranks {ranks}"
    torchrun = f"torchrun --standalone --nproc-per-node {ranks} {_script()}"
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    else:
        fact = "engine='torch' runs one process per rank, and this process was started alone"
        raise EngineError(f"{fact}\n  try: {own}\n  or: {torchrun}")
    needs = f"the plan has {counted(ranks, 'rank')}"
    hint = 'group=mesh["pp"].get_group(), of the dimension with one process per rank'
    if group is not None and dist.get_world_size(group) != ranks:
        held = counted(max(0, dist.get_world_size(group)), "process")
        raise EngineError(f"{needs} and this process's group= has {held}\n  try: {hint}")
    if group is None and size != ranks:
        by, again = "torchrun", f"{torchrun}\n  or on several machines: --nnodes times --nproc-per-node must be {ranks}"
        if os.environ.get("TORCHELASTIC_RUN_ID", "").startswith("pipelab-"):
            by, again = "pipelab launch", own
        raise EngineError(
            f"{needs} and {by} started {counted(size, 'process')}: there must be one process per rank\n"
            f"  try: {again}\n  or, if stages are spread over processes too: {hint}"
        )
    return rank, size


def _script() -> str:
    """Return the words with which this process's script was started."""
    script = Path(sys.argv[0]).name
    return shlex.join([script, *sys.argv[1:]]) if script.endswith(".py") else "train.py"


# ── Where all processes meet ──────────────────────────────────────────────────────────────────────────────────────────


_opened: list[Any] = []
"""The store, once this process has opened it. It stays open: without torchrun, rank 0's process holds it."""


def open_store(rank: int, size: int, timeout: float | None) -> list[Any]:
    """Return two new connections to the store that all processes share: torchrun's, or the present process group's."""
    present: Any = _opened[0] if _opened else runtime.default_store() if dist.is_initialized() else None
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if present is None and not (host and port.isdecimal()):
        raise EngineError(f"MASTER_ADDR={host!r} and MASTER_PORT={port!r} are not rank 0's address: torchrun sets both")
    make: Any = dist.TCPStore  # type: ignore[attr-defined]  # PyTorch's stubs leave it out
    holds = rank == 0 and not torchrun_holds_the_store()
    limit = duration(timeout)

    def connect() -> list[Any]:
        # PyTorch's own rendezvous would wait here for all processes, and not name the missing ones.
        store = present or make(host, int(port), size, holds, limit, wait_for_workers=False, multi_tenant=True)
        if _opened:  # it has the timeout of an earlier pipeline
            store.set_timeout(limit + timedelta(seconds=_CONNECTING_SECONDS))
        stores = [store, store.clone(), store.clone()]
        for connection in stores if _opened else ():
            connection.set_timeout(limit)
        return stores

    thread = communication_thread("pipelab-connect", threads=1)
    try:
        stores: list[Any] = answer(thread, connect, None if timeout is None else timeout + _CONNECTING_SECONDS)
    except dist.DistError as error:
        verb = "cannot open" if holds else "has not opened"
        hint = "\n  is torchrun, or rank 0, stopped or gone? has another program, or another job, this port?"
        raise RankError(
            f"rank 0 {verb} a store at {host}:{port}, where all processes meet: {error}{hint}", 0
        ) from error
    finally:
        thread.end()
    if present is None:
        _opened.append(stores[0])
        if torchrun_holds_the_store():
            end_with(os.getppid())
    return stores[1:]


def prefix_store(store: Any, name: str) -> Any:
    """Return a `PrefixStore` with a prefix of this job's own, and of torchrun's attempt to start all processes."""
    here = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")  # on several machines each counts alone
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if here else "0"
    job = os.environ.get("TORCHELASTIC_RUN_ID", "")  # one store may serve several jobs
    return dist.PrefixStore(f"pipelab/{job}/{attempt}/{name}", store)  # type: ignore[attr-defined]  # see above


def duration(timeout: float | None) -> timedelta:
    """Return PyTorch's timeout for a number of seconds; `None` is for ever."""
    return _NO_TIMEOUT if timeout is None else timedelta(seconds=timeout)


def connect(
    store: Any,
    rank: int,
    size: int,
    device: torch.device,
    backend: str,
    holders: Iterable[tuple[int, ...]],
    timeout: timedelta,
    groups: Sequence[tuple[int, ...]],
) -> Connections:
    """Connect this process to the others; all of them must call it."""
    if not dist.is_initialized():
        both = "gloo" if backend == "gloo" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(both, store=prefix_store(store, "world"), rank=rank, world_size=size)
    members = next(group for group in groups if rank in group)

    def new_group(places: Iterable[int], backend: str) -> Any:
        made = {group: dist.new_group([group[place] for place in places], timeout, backend) for group in groups}
        return made[members]

    everyone = new_group(range(len(members)), "gloo")
    transport_device = device if backend == "nccl" else torch.device("cpu")
    shared = {ranks: new_group(ranks, backend) for ranks in dict.fromkeys(holders) if len(ranks) > 1}
    values = everyone if backend == "gloo" else new_group(range(len(members)), backend)
    return Connections(everyone, values, shared, transport_device, members)


def device_of(wanted: Sequence[RankDevice | torch.device | str] | None, rank: int, ranks: int) -> torch.device:
    """Return the device of a process: the wanted one, else a GPU, shared if necessary, else the CPU."""
    if wanted is not None:
        return rank_devices(wanted, ranks)[rank].device
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())


def backend_of(everyone: Sequence[dict[str, Any]]) -> str:
    """Return `"nccl"` if every process has a GPU to itself, else `"gloo"`, with a warning for GPUs."""
    gpus = [process["gpu"] for process in everyone]
    if all(gpus) and len(set(gpus)) == len(gpus):
        return "nccl"
    if any(gpus):
        how = "share GPUs" if all(gpus) else "run on GPUs and on CPUs"
        warnings.warn(
            f"the processes {how}, but NCCL needs a GPU for each: values travel through the CPUs' memory, by gloo",
            stacklevel=2,
        )
    return "gloo"


def warn_of_one_queue(plan: Plan) -> None:
    """Warn if a plan takes longer where all sends and receives of a rank wait in one queue."""
    action = plan.bound.codes.action
    apart = plan.with_rows(map(action, row) for row in plan.bound.computing)  # a pair is its forward, then its backward
    one = simulate(apart, transport="rank").makespan
    several = simulate(apart, transport="pair").makespan
    if one > 1.01 * several:
        warnings.warn(
            "init_process_group(device_id=...) puts all of a rank's sends and receives in one queue of NCCL, where "
            f"{plan.name} takes about {one:g} units (forward 1, backward 2); with a queue for each pair of ranks, "
            f"about {several:g}\n  try: init_process_group without device_id, or none: pipelab initialises",
            stacklevel=5,
        )


# ── What processes know of each other ─────────────────────────────────────────────────────────────────────────────────


def process_info() -> dict[str, Any]:
    """Return the versions and the place of this process."""
    numbering = ""
    with contextlib.suppress(OSError):  # where its process number is valid: on a machine, or in a container
        numbering = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    return {
        "pipelab": __version__,
        "torch": torch.__version__.partition("+")[0],
        "host": socket.gethostname(),
        "processes": numbering,
        "pid": os.getpid(),
    }


def _part_of_pipeline(plan: Plan, stages: Stages, settings: Settings, device: torch.device) -> dict[str, Any]:
    """Return what this process was given for the pipeline."""
    return {
        "runs_on": str(device),
        "gpu": str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "",
        "plan": describe_plan(plan),
        "model": describe_model(stages.modules),
        "weights": _digest_of_weights(stages.modules),
        "reduction": settings.reduction,
        "replicated_buffers": settings.replicated_buffers,
        "seed": torch.initial_seed(),
    }


def describe_plan(plan: Plan) -> list[str]:
    """Return the sizes and actions of a plan, which must be the same on every process."""
    sizes = f"ranks={plan.ranks}, stages={plan.stages}, microbatches={plan.microbatches}"
    sizes += ", all-reduces beside" * plan.bound.beside
    rows = enumerate(plan.rows)
    return [sizes, *(f"{item} at position {at} of row {rank}" for rank, row in rows for at, item in enumerate(row))]


def describe_model(modules: Sequence[nn.Module]) -> list[str]:
    """Return the parameters and buffers of all stages, which must be the same on every process."""
    return [
        f"{name} of stage {stage}: {described(tensor)}"
        for stage, module in enumerate(modules)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    ]


def introduce(store: AnsweringStore, rank: int, size: int, info: dict[str, Any], timeout: float | None) -> list[Any]:
    """Exchange every process's info; return all of them, by rank."""
    keys = [f"info/{other}" for other in range(size)]
    try:
        own = json.dumps(info)
        first = store.compare_set(keys[rank], "", own).decode()
        if first != own:
            other = json.loads(first)
            raise RankError(
                f"process {other['pid']} on {other['host']} came as rank {rank} before this one: the address where all "
                "processes meet belongs to another job\n  try: another port for each job, or end the other one",
                rank,
            )
        _wait_for(store, keys, timeout)
        everyone: list[dict[str, Any]] = [json.loads(store.get(key)) for key in keys]
        for key in _SAME:
            others = [other for other in range(size) if everyone[other][key] != everyone[0][key]]
            if others:
                message = _how_they_differ(key, everyone, others)
                Failures(store, rank, everyone).report(others[0], message, alive=True)
                raise RankError(message, others[0])
    except RuntimeError as error:
        raise RankError(f"lost this job's store, which rank 0 or torchrun holds: {error}", 0) from error
    return everyone


def _wait_for(store: AnsweringStore, keys: Sequence[str], timeout: float | None) -> None:
    """Wait until all processes are there; name those that do not come in time."""
    began = time.monotonic()
    while not store.check(keys):
        waited = time.monotonic() - began
        late = timeout is not None and waited > timeout
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])] if late else []
        if missing:
            raise RankError(
                f"rank {', '.join(map(str, missing))} made no Pipeline within {waited:.3g} s, and the others "
                "wait for it\n  it failed earlier, or its script makes none: look at its output",
                missing[0],
            )
        time.sleep(min(0.1, 0.005 + waited / 10))


def _how_they_differ(what: str, everyone: Sequence[dict[str, Any]], others: Sequence[int]) -> str:
    ours, theirs = everyone[0][what], everyone[others[0]][what]
    if isinstance(ours, list):
        pairs = zip_longest(ours, theirs, fillvalue="nothing more")
        ours, theirs = next(pair for pair in pairs if pair[0] != pair[1])
        what = f"a {what} with"
    verb = "has" if len(others) == 1 else "have"
    return f"rank {', '.join(map(str, others))} {verb} {what} {theirs}, rank 0 has {what} {ours}"


def _digest_of_weights(modules: Sequence[nn.Module]) -> str | None:
    """Return a digest of some numbers of every parameter; `None` if one is not a plain tensor of this process."""
    digest = hashlib.sha256()
    for parameter in (parameter for module in modules for parameter in module.parameters()):
        plain = type(parameter) in (nn.Parameter, torch.Tensor) and parameter.layout is torch.strided
        if parameter.is_meta or not plain:  # another class may be spread over several processes
            return None
        digest.update(few_numbers(parameter))
    return digest.hexdigest()


def warn_of_other_weights(digests: Sequence[str | None]) -> None:
    """Warn if processes begin with other weights than rank 0: the stages would belong to different models."""
    others = [rank for rank, digest in enumerate(digests) if None not in (digests[0], digest) and digest != digests[0]]
    if others:
        warnings.warn(
            f"rank {', '.join(map(str, others))} {'has' if len(others) == 1 else 'have'} other weights than rank 0: "
            "each stage begins with the weights in its own process\n"
            "  try: the same torch.manual_seed in every process before the model is made; load a saved state in every "
            "process; after an earlier pipeline of this model, load its pipe.state_dict()",
            stacklevel=5,
        )
