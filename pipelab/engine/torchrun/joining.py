"""What a process tells the others of itself: where it runs, and what must be the same in all of them."""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from pipelab._version import __version__
from pipelab.engine.torchrun.failures import Notices
from pipelab.engine.torchrun.store import Store
from pipelab.engine.torchrun.supervisor import told_before_the_end
from pipelab.errors import EngineError, RankError
from pipelab.plan.plan import Plan

__all__ = ["decline", "describe_model", "describe_plan", "facts_of_this_process", "identify", "introduce", "started_as"]


def describe_plan(plan: Plan) -> dict[str, Any]:
    """Return what must be the same about the plan on every process."""
    rows = [" ".join(map(str, row)) for row in plan.rows]
    return {"sizes": [plan.ranks, plan.stages, plan.microbatches], "rows": rows}


def describe_model(modules: Sequence[nn.Module]) -> list[str]:
    """Return what must be the same about the model on every process: its parameters and buffers, stage by stage.

    Raises:
        EngineError: if a parameter has no shape yet.
    """
    for stage, module in enumerate(modules):
        name = next((name for name, parameter in module.named_parameters() if is_lazy(parameter)), None)
        if name is not None:
            raise EngineError(
                f"{name} of stage {stage} has no shape yet: each process would find its own stages' only\n"
                "  try: run the model forward once before, as every process builds all of it"
            )
    return [
        f"{name} of stage {stage}: {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        for stage, module in enumerate(modules)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    ]


def facts_of_this_process() -> dict[str, Any]:
    """Return what the others should know of this process."""
    return {
        "pipelab": __version__,
        "torch": torch.__version__.partition("+")[0],
        "host": socket.gethostname(),
        "processes": _processes(),
        "address": _address(),
        "networks": [name for _, name in socket.if_nameindex() if name != "lo"],
        "pid": os.getpid(),
    }


def _processes() -> str:
    """Return which numbering of processes this one's number belongs to: a machine's, or a container's on it."""
    found = ""
    with contextlib.suppress(OSError):
        found = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        found += f" {os.readlink('/proc/self/ns/pid')}"
    return found


def _address() -> str:
    """Return the address that gloo offers to other hosts: what this host's own name stands for; "" if it is told."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return ""
    try:
        return str(socket.getaddrinfo(socket.gethostname(), None)[0][4][0])
    except OSError:
        return "127.0.0.1"  # gloo's own way out


def identify(ranks: int) -> tuple[int, int]:
    """Return this process's rank and the number of processes, if there is one for each of the plan's ranks.

    Raises:
        EngineError: if there is not, with the line that starts as many.
    """
    found = started_as()
    if found is None:
        raise EngineError(
            "engine='torch' runs one process per rank, and this process was started alone\n"
            f"  try: pipelab launch {_script()} --ranks {ranks}\n"
            f"  which runs: torchrun --standalone --nproc-per-node {ranks} {_script()}"
        )
    rank, size = found
    if size != ranks:
        raise EngineError(
            f"the plan has {ranks} rank{'s' if ranks != 1 else ''} and torchrun started {size} "
            f"process{'es' if size != 1 else ''}: there must be one process per rank\n"
            f"  try: torchrun --standalone --nproc-per-node {ranks} {_script()}\n"
            f"  or on several machines: --nnodes times --nproc-per-node must be {ranks}"
        )
    return rank, size


def started_as() -> tuple[int, int] | None:
    """Return this process's rank and the number of processes; `None` if it was started alone."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return None


def decline(store: Store, rank: int, error: Exception) -> None:
    """Tell those who wait for this process why it makes no pipeline."""
    store.compare_set(_DECLINED, "", json.dumps([rank, str(error)]))


def introduce(store: Store, rank: int, size: int, facts: dict[str, Any], timeout: float | None) -> list[dict[str, Any]]:
    """Tell all processes what this one has, and return what each of them has.

    Args:
        store: where to tell it.
        rank: this process.
        size: how many there are.
        facts: what this process has. `"plan"` and `"model"` are compared by a digest first; those in `_SAME`
            must be the same everywhere.
        timeout: seconds to wait for the others.

    Raises:
        RankError: if a process does not come or declines, if one has something else, or if one cannot be reached from
            another host; every process raises it.
    """
    brief = {key: _digest(value) if key in _LONG else value for key, value in facts.items()}
    try:
        for key in _LONG:
            store.set(f"{key}/{rank}", json.dumps(facts[key]))
        store.set(f"hello/{rank}", json.dumps(brief))
    except RuntimeError as error:
        raise RankError(_STORE_GONE, 0) from error
    keys = [f"hello/{each}" for each in range(size)]
    with told_before_the_end(lambda: f"rank {rank} waits for rank {_missing(store, keys)} to make a Pipeline"):
        _await(store, keys, timeout)
    everyone = [json.loads(store.get(f"hello/{each}")) for each in range(size)]
    for key in _SAME:
        others = [each for each in range(size) if everyone[each][key] != everyone[0][key]]
        if others:
            told = _difference(store, key, others, everyone)
            Notices(store, rank, everyone).tell(others[0], told, alive=True)
            raise RankError(told, others[0])
    _require_addresses(everyone)
    return everyone


_DECLINED = "declined"
"""The key under which the first process that declines says why."""
_STORE_GONE = "rank 0, or torchrun, which holds the store of this job, is gone"
_LONG = ("plan", "model")
_SAME = ("pipelab", "torch", "plan", "model", "reduction", "replicated_buffers")


def _await(store: Store, keys: list[str], timeout: float | None) -> None:
    """Wait until all keys are there.

    Raises:
        RankError: naming a process that declines, or those that did not come.
    """
    began = time.monotonic()
    pause = 0.005
    while not _there(store, keys):
        if _there(store, [_DECLINED]):
            rank, told = json.loads(store.get(_DECLINED))
            raise RankError(f"rank {rank} made no Pipeline: {told}", rank)
        waited = time.monotonic() - began
        if timeout is not None and waited > timeout and (missing := _missing(store, keys)):
            raise RankError(
                f"rank {missing} made no Pipeline within {waited:.3g} s, for which the others wait\n"
                "  it failed before, or it makes none: look at its own output",
                int(missing.partition(",")[0]),
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def _there(store: Store, keys: list[str]) -> bool:
    """Tell whether all keys are there.

    Raises:
        RankError: if the store is gone.
    """
    try:
        return store.check(keys)
    except RuntimeError as error:
        raise RankError(_STORE_GONE, 0) from error


def _missing(store: Store, keys: list[str]) -> str:
    return ", ".join(str(each) for each, key in enumerate(keys) if not store.check([key]))


def _difference(store: Store, key: str, others: list[int], everyone: list[dict[str, Any]]) -> str:
    """Say what the processes do not agree on."""
    ranks = f"rank {', '.join(map(str, others))}"
    verb = "has" if len(others) == 1 else "have"
    if key not in _LONG:
        return (
            f"{ranks} {verb} {key} {everyone[others[0]][key]}, rank 0 has {key} {everyone[0][key]}: "
            "every process must have the same"
        )
    ours, theirs = (json.loads(store.get(f"{key}/{each}")) for each in (0, others[0]))
    if key == "model":
        pairs = [(mine, yours) for mine, yours in zip(ours, theirs, strict=False) if mine != yours]
        mine, yours = pairs[0] if pairs else (f"{len(ours)} parameters and buffers", str(len(theirs)))
        return f"{ranks} {verb} another model than rank 0: {yours} there, {mine} on rank 0"
    if ours["sizes"] != theirs["sizes"]:
        what = "{} ranks, {} stages, {} micro-batches"
        return (
            f"{ranks} {verb} another plan than rank 0: {what.format(*theirs['sizes'])} in rank {others[0]}'s, "
            f"{what.format(*ours['sizes'])} in rank 0's"
        )
    for row, (mine, yours) in enumerate(zip(ours["rows"], theirs["rows"], strict=True)):
        if mine != yours:
            both = list(zip(mine.split(), yours.split(), strict=False))
            at = next((index for index, (one, other) in enumerate(both) if one != other), len(both))
            first, other = ([*text.split(), "the end"][at] for text in (mine, yours))
            return (
                f"{ranks} {verb} another plan than rank 0: position {at} of rank {row}'s row is {other} in rank "
                f"{others[0]}'s plan, and {first} in rank 0's"
            )
    return f"{ranks} {verb} another plan than rank 0"


def _require_addresses(everyone: Sequence[dict[str, Any]]) -> None:
    """Refuse several hosts of which one would offer the others an address that leads back to themselves.

    Raises:
        RankError: naming the first such rank, and what to set.
    """
    if len({each["host"] for each in everyone}) == 1:
        return
    for rank, each in enumerate(everyone):
        if each["address"] and ipaddress.ip_address(each["address"].partition("%")[0]).is_loopback:
            raise RankError(
                f"rank {rank} cannot be reached from other hosts: the name of its host, {each['host']}, stands for "
                f"{each['address']} there, which gloo would offer them\n"
                f"  try: GLOO_SOCKET_IFNAME=NAME torchrun ..., on each host with its network device's name: "
                f"{', '.join(each['networks']) or 'see ip address'} on {each['host']}",
                rank,
            )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _script() -> str:
    name = Path(sys.argv[0]).name
    return shlex.join([name, *sys.argv[1:]]) if name.endswith(".py") else "train.py"
