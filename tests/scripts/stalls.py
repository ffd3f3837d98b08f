"""Run a plan in plain PyTorch, with an action that never ends; write what NCCL's Flight Recorder would have kept."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

path, folder, count, microbatches, stalled = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:5]), sys.argv[5]
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
posted: list[str] = []


def recorded(ops, desc=None, original=schedules._batch_p2p):
    for op in ops:
        send = op.op is dist.isend
        posted.append(f"gloo:{'send' if send else 'recv'} {rank}{'->' if send else '<-'}{op.group_peer}")
    return original(ops, desc)


schedules._batch_p2p = recorded


def forever(*_):
    while True:
        time.sleep(1)


class Stalling(nn.Linear):
    """A stage that never ends the action which is to stall: the n-th forward or backward of its stage."""

    def __init__(self, stage: int) -> None:
        super().__init__(4, 4)
        self.stage, self.at = stage, {"F": -1, "B": -1}

    def came(self, kind: str) -> None:
        self.at[kind] += 1
        if orders[self.stage][kind][self.at[kind]] == stalled:
            (folder / "stalled").touch()
            forever()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.came("F")
        y = super().forward(x)
        y.register_hook(lambda _: self.came("B"))
        return y


rows = [line.split(",") for line in Path(path).read_text().splitlines()]
held = sorted({int(word[: word.index(next(c for c in word if c.isalpha()))]) for word in rows[rank] if word})
orders = {stage: {kind: [w for w in rows[rank] if w.startswith(f"{stage}{kind}")] for kind in "FB"} for stage in held}
shapes = [torch.empty(2, 4, requires_grad=each > 0) for each in range(count + 1)]  # known: no forward infers them
stages = [PipelineStage(Stalling(at), at, count, torch.device("cpu"), shapes[at], shapes[at + 1]) for at in held]
schedule = schedules._PipelineScheduleRuntime(stages, microbatches, loss_fn=nn.functional.mse_loss)
schedule._load_csv(path, format="compute_only")
batch = torch.randn(2 * microbatches, 4)
first, last = ([batch] if 0 in held else []), ({"target": batch} if count - 1 in held else {})
threading.Thread(target=lambda: schedule.step(*first, **last), daemon=True).start()
known, begun = -1, folder / "stalled"
while known != len(posted) or not begun.exists():
    known = len(posted)
    time.sleep(3)
entries = [{"record_id": at, "p2p_seq_id": at + 1, "profiling_name": name} for at, name in enumerate(posted)]
(folder / f"trace_rank_{rank}").write_text(json.dumps({"version": "2.10", "entries": entries}))
time.sleep(1)  # the others write too, before a connection to this process is lost
sys.stdout.flush()
os._exit(0)
