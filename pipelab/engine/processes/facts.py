"""What a process tells the others of itself: where it runs, and what must be the same in all of them."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pipelab.errors import EngineError
from pipelab.plan.plan import Plan

__all__ = ["describe_model", "describe_plan", "facts_of_this_process"]


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
        "pipelab": vars(sys.modules["pipelab"])["__version__"],  # an import would point up
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
