"""Homework 1: a benchmark of data parallelism, run in two processes, by a clock that shows what is in a step's time.

The clock stands still but when something runs: a batch is made (1000 ms), a forward (100 + step ms), a backward
(10 ms), an optimizer's step (1 ms). So a logged time says what was timed, on any machine.
"""

from __future__ import annotations

import csv
import io
import json
import os
import random
import socket
import sys
import time
import timeit
from collections.abc import Callable, Hashable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from statistics import fmean, median
from types import ModuleType
from typing import Any, NoReturn
from unittest.mock import patch

import torch
import torch._dynamo  # DistributedDataParallel imports it: here, so that each process need not
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from pipelab_course.grading.tasks import Found, function_of, raised

_RANKS, _STEPS, _DROPPED, _ROWS = 2, 30, 5, 64
_BATCH, _FORWARD, _BACKWARD, _OPTIMIZER = 1000.0, 100.0, 10.0, 1.0

Data = dict[str, Any]


def record(load: Callable[[], ModuleType], seed: int, at: Callable[[str], None]) -> Data:
    """Import a submission with `load`, and run it twice in two processes; return what happened, for `judge`."""
    module = load()
    function_of(module, "benchmark", ("rank", "processes"))
    runs: list[list[Data]] = []
    for run in range(2):
        at(f"in 2 processes, run {run + 1} of 2")
        folders = [Path(f"run{run}", f"rank{rank}") for rank in range(_RANKS)]
        for rank, folder in enumerate(folders):
            folder.mkdir(parents=True)
            if os.fork() == 0:
                _process(module, rank, folder, seed + 2 * run + rank)
        for _ in folders:
            os.wait()
        runs.append([json.loads((folder / "found.json").read_text()) for folder in folders])
    return {"runs": runs}


def _process(module: ModuleType, rank: int, folder: Path, seed: int) -> NoReturn:
    """Run the benchmark as one rank, write what happened into the folder, and end this process."""
    found: Data = {"rows": [], "batches": [], "weights": 0.0, "result": None, "log": "", "printed": "", "error": ""}
    random.seed(seed)
    torch.manual_seed(seed)
    now, made = [0.0], module.make_batch

    def make_batch(*args: Any, **kwargs: Any) -> Any:
        now[0] += _BATCH
        x, y = made(*args, **kwargs)
        found["batches"].append(x[:, 0].tolist())
        return x, y

    def forward(model: Any, given: Any, _: Any) -> None:
        if isinstance(model, DistributedDataParallel):
            found["weights"] = found["weights"] or sum(each.double().sum().item() for each in model.parameters())
            now[0] += _FORWARD + len(found["rows"])
            found["rows"].append(given[0][:, 0].tolist())

    def backward(*args: Any, original: Any = torch.autograd.backward, **kwargs: Any) -> None:
        original(*args, **kwargs)
        now[0] += _BACKWARD

    def optimized(*_: Any) -> None:
        now[0] += _OPTIMIZER

    clocks: Data = {name: lambda: now[0] / 1e3 for name in ("perf_counter", "time", "monotonic")}
    clocks |= {f"{name}_ns": lambda: int(now[0] * 1e6) for name in clocks}
    printed, own, folder = io.StringIO(), vars(module), folder.resolve()
    imported = {getattr(time, name): clock for name, clock in clocks.items()} | {torch.autograd.backward: backward}
    own |= {name: imported[each] for name, each in own.items() if isinstance(each, Hashable) and each in imported}
    try:
        make: Any = dist.FileStore  # type: ignore[attr-defined]  # PyTorch's stubs leave it out
        store = make(str(folder.parent / "store"), _RANKS)
        os.environ["GLOO_SOCKET_IFNAME"] = next(iter({"lo", "lo0"} & {name for _, name in socket.if_nameindex()}))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=_RANKS, timeout=timedelta(seconds=30))
        os.chdir(folder)
        torch.nn.modules.module.register_module_forward_hook(forward)
        register_optimizer_step_post_hook(optimized)
        with (
            patch.multiple(time, **clocks),
            patch.object(timeit, "default_timer", clocks["perf_counter"]),
            patch.object(torch.autograd, "backward", backward),  # Tensor.backward calls it too
            patch.object(module, "make_batch", make_batch),
            patch.object(sys, "stdout", printed),
        ):
            result = module.benchmark(rank, _RANKS)
        found["result"] = float(result)
    except BaseException as error:  # noqa: BLE001 - whatever a submission raises is a finding
        found["error"] = raised(error, module.benchmark)
    log = folder / "steps.csv"
    found |= {"printed": printed.getvalue()[:1000], "log": log.read_text()[:100_000] if log.exists() else ""}
    (folder / "found.json").write_text(json.dumps(found))
    os._exit(0)


def judge(data: Data, seed: int) -> tuple[dict[str, Found], str]:
    """Return what each task's check found in what `record` returned, and the first error."""
    del seed  # it is not what the submission draws
    (zero, one), (again, _) = data["runs"]
    rows = [*csv.reader(io.StringIO(zero["log"]))]
    log = [(int(row[0]), _seconds(row)) for row in rows if row and row[0].strip().isdigit()]
    found = _trained(zero, one, again, [step for step, _ in log]) | _timed(log, zero["result"])
    odd = [f"rank 1 {does}" for does, key in (("prints", "printed"), ("writes steps.csv", "log")) if one[key]]
    odd += [f"rank 0 {does} nothing" for does, key in (("prints", "printed"), ("writes", "log")) if not zero[key]]
    found["rank 0"] = Found(not odd, reached=bool(zero["rows"]), facts={"odd": ", ".join(odd) or "rank 0 alone"})
    lost = "Connection" in zero["error"]  # as the other process ended: its error is the reason
    return found, (lost and one["error"]) or zero["error"] or one["error"]


def _seconds(row: list[str]) -> float:
    """Return the second column; 0 if there is no number."""
    with suppress(ValueError, IndexError):
        return float(row[1])
    return 0.0


def _trained(zero: Data, one: Data, again: Data, logged: list[int]) -> dict[str, Found]:
    """Judge what both ranks trained on, and rank 0 in another run."""
    ran = len(zero["rows"])
    same = {
        "data": zero["batches"] == one["batches"] == again["batches"],
        "weights": zero["weights"] == again["weights"],
    }
    differ = " and ".join(name for name, alike in same.items() if not alike)
    steps = zip(zero["rows"], one["rows"], zero["batches"], strict=False)
    right = sum(sorted(a + b) == sorted(batch) and len(a) == len(b) for a, b, batch in steps)
    shares = " and ".join(str(len(each["rows"][0])) for each in (zero, one) if each["rows"])
    facts = {"differ": differ, "shares": shares, "right": right, "ran": ran, "lines": len(logged)}
    return {
        "seeds": Found(not differ, reached=ran > 0, facts=facts),
        "shares": Found(0 < ran == right, reached=ran > 0 and not differ, facts=facts),
        "steps": Found(ran >= _STEPS and logged == [*range(ran)], facts=facts),
    }


def _timed(log: list[tuple[int, float]], result: float | None) -> dict[str, Found]:
    """Judge rank 0's times by what was on the clock in each step."""
    late = [(step, ms - (_FORWARD + step + _BACKWARD + _OPTIMIZER)) for step, ms in log]
    step, off = max(late, key=lambda each: abs(each[1]), default=(0, 0.0))
    kept = [ms for _, ms in log[_DROPPED:]] or [0.0]
    dropped = bool(log) and result is not None and min(abs(result - median(kept)), abs(result - fmean(kept))) < 0.5
    facts = {"step": step, "off": f"{abs(off):.0f} ms {'more' if off > 0 else 'less'}", "part": _of(off)}
    facts |= {"median": f"{median(kept):.1f}", "result": result}
    return {
        "clock": Found(bool(log) and abs(off) < 0.5, reached=bool(log), facts=facts),
        "warm-up": Found(dropped, reached=bool(log), facts=facts),
    }


def _of(off: float) -> str:
    """Return what is in a step's time, or is not in it."""
    parts = {_BATCH: "the batch is made in it", -_OPTIMIZER: "the optimizer is not in it"}
    parts[-_BACKWARD - _OPTIMIZER] = "backward and optimizer are not in it"
    return next((said for ms, said in parts.items() if abs(off - ms) < 0.5), "is it in ms, and is the forward in it?")
