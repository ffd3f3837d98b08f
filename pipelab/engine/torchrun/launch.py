"""Start a script in several processes on this machine, and end with a short report of the first failure.

`python -m pipelab.engine.torchrun.launch script.py …` is what each process runs: the script, inside PyTorch's `record`,
which leaves the error that ends it in a file. torchrun would do the same, but it listens on every network device, and
unpickles whatever is written there.
"""

from __future__ import annotations

import os
import re
import runpy
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from traceback import FrameSummary
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, SignalException, start_processes
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure, record

from pipelab.engine.torchrun.supervisor import end_with
from pipelab.errors import RankError
from pipelab.plan.fault import ScheduleError, line_of, ranges

_HOST = "127.0.0.1"
_LAUNCHER = "PIPELAB_LAUNCHER"


def run_processes(script: str, ranks: int, arguments: Sequence[str]) -> str | None:
    """Run a script in so many processes, and wait for them; forward signals to them. Return a report of failures.

    Only this machine can reach the job: its store and its connections use the loopback device.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    _store, job = loopback_job(ranks)
    words = ("-u", "-m", "pipelab.engine.torchrun.launch", script, *arguments)
    envs = {rank: job | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)}
    with tempfile.TemporaryDirectory() as folder:
        processes = start_processes(script, sys.executable, dict.fromkeys(envs, words), envs, DefaultLogsSpecs(folder))
        processes.close = partial(_end, processes, processes.close)  # type: ignore[method-assign]  # `wait` calls it
        try:
            ended = processes.wait(period=0.1)
        except SignalException as stopped:
            processes.close(stopped.sigval)
            raise SystemExit(128 + stopped.sigval) from None
        return decisive(ended.failures) if ended and ended.failures else None


def _end(processes: PContext, close: Callable[..., None], *how: Any) -> None:
    """Close processes as PyTorch does. It gives a stopped one half a minute to end, which gets no signal meanwhile."""
    for pid in processes.pids().values():
        with suppress(OSError, AttributeError):  # it has ended; on Windows, no process is stopped like this
            os.killpg(pid, signal.SIGCONT)
    close(*how)


def loopback_job(ranks: int) -> tuple[Any, dict[str, str]]:
    """Return a store that only this machine can reach, and what its processes need to know of their job.

    The store is there as long as the returned object.
    """
    # PyTorch itself would listen on every device. A script's own init_process_group uses this store too.
    listener = socket.create_server((_HOST, 0)).detach()
    make: Any = dist.TCPStore  # type: ignore[attr-defined]  # PyTorch's stubs leave it out
    store = make(_HOST, 0, is_master=True, wait_for_workers=False, master_listen_fd=listener)
    job = {
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": f"pipelab-{os.getpid()}",
        _LAUNCHER: str(os.getpid()),
    }
    for device in {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}:
        for kind in ("GLOO", "NCCL"):
            name = f"{kind}_SOCKET_IFNAME"
            job[name] = os.environ.get(name, device)
    return store, job


def end_with_launcher() -> None:
    """End this process soon after its launcher, if `loopback_job` says which it is."""
    if launcher := os.environ.pop(_LAUNCHER, ""):
        end_with(int(launcher))


@record
def run_script() -> None:
    """Run the script that the first argument names, as if Python had been started with it; end with the launcher."""
    end_with_launcher()
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


def decisive(failures: Mapping[int, ProcessFailure]) -> str:
    """Return a short report of the first failure.

    That is an error that ended a process, or else a signal or an exit code. A `RankError` only repeats a failure of
    another process, and the launcher sends SIGTERM to the remaining ones.
    """
    errors = {rank: _error(failure) for rank, failure in failures.items()}

    def order(rank: int) -> tuple[int, int, int]:
        if errors[rank]:
            kind = 2 if errors[rank].startswith("RankError: ") else 0
        else:
            kind = 3 if failures[rank].exitcode == -signal.SIGTERM else 1
        return kind, failures[rank].timestamp, rank

    first = min(failures, key=order)
    error = errors[first]
    if not error:
        return f"pipelab: rank {first} ended first, {_how(failures[first].exitcode)}"
    if error.startswith("StepTimeoutError: "):  # it names the rank that hangs, which is another one than its own
        return f"pipelab: a call timed out:\n{error}"
    ranks = ranges([rank for rank in sorted(errors) if errors[rank] == error])
    return f"pipelab: rank {ranks} {'says' if error.startswith('RankError: ') else 'failed first'}:\n{error}"


def _error(failure: ProcessFailure) -> str:
    """Return the error that `record` stored for a process, with the line that raised it; "" if there is none."""
    found = failure.error_file_data.get("message")
    if not isinstance(found, dict):
        return ""
    words = str(found["message"])
    frames = re.findall(r'^  File "(.+)", line (\d+), in (.+)$', str(found["extraInfo"]["py_callstack"]), re.MULTILINE)
    if not frames or "\n  at " in words:
        return words
    return f"{words}\n  at {line_of([FrameSummary(file, int(line), name) for file, line, name in frames])}"


def _how(code: int) -> str:
    """Return how a process ended, by its exit code: negative for a signal."""
    if code >= 0:
        return f"with exit code {code}: what it printed, if anything, is above"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"killed by {name}{', as the system does where memory runs out' if name == 'SIGKILL' else ''}"


if __name__ == "__main__":
    try:
        run_script()
    except (ScheduleError, RankError):  # in several processes: the launcher prints it once
        sys.exit(1)
    except Exception:
        try:  # one traceback for all processes
            Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[1].joinpath("printed").touch(exist_ok=False)
        except FileExistsError:
            time.sleep(1)  # the launcher ends all processes when the first is over: that one has printed by then
            sys.exit(1)
        raise
