"""Say over a file store that this process is rank 1 of a pipeline, and end without closing it."""

from __future__ import annotations

import os
import sys

import torch.distributed as dist

from pipelab.engine.torchrun.supervisor import Failures, Supervisor

info = {"pid": os.getpid(), "host": "node-a", "processes": "pid:[1]"}
failures = Failures(dist.FileStore(sys.argv[1], 2), 1, [info, info])
supervisor = Supervisor(1, failures, timeout=1, threads=1)
