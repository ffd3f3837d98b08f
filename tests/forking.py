"""Start Python scripts in processes forked from one that has imported PyTorch: a short script does little else.

A script that was forked has its own environment, arguments and files to write to, and ends as any other does: its
threads are waited for, what it registered with `atexit` runs, and Python is taken down. Random numbers are drawn from
seeds of its own. One thing all that are forked share: the hash of a text, and so the order of a set of texts.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

__all__ = ["CAN_FORK", "fork"]

CAN_FORK = sys.platform == "linux"
"""Elsewhere it is not safe once libraries have been loaded, or not there."""

_PRELOADED = ["torch", "torch.distributed.pipelining.schedules", "torch.distributed.pipelining.stage"]


def fork(script: Path, arguments: Sequence[str], env: Mapping[str, str], out: Path, err: Path) -> Any:
    """Start a script; return its `multiprocessing` process.

    Args:
        script: its file.
        arguments: what it finds in `sys.argv`.
        env: its environment.
        out: the file for what it prints.
        err: the file for what it prints to standard error.
    """
    process = _server().Process(target=_run, args=(str(script), list(arguments), dict(env), str(out), str(err)))
    process.start()
    return process


@cache
def _server() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    kept = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # with more, libraries start threads, which a forked process would lack
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        del os.environ["OMP_NUM_THREADS"]
        if kept is not None:
            os.environ["OMP_NUM_THREADS"] = kept
    return context


def _run(script: str, arguments: list[str], env: dict[str, str], out: str, err: str) -> NoReturn:
    """Become a script."""
    import numpy as np
    import torch

    gc.freeze()  # what was there before stays out of collections, which would copy all of its memory
    torch.seed()
    np.random.seed()  # noqa: NPY002 - it is the old, global state that is shared
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    for number, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=False)  # a test reads them while the script runs
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [script, *arguments]
    installed = [path for path in sys.path if path.endswith("-packages") or path.startswith(sys.base_prefix)]
    sys.path[:] = [str(Path(script).parent), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *installed]
    sys.modules["__main__"] = main = ModuleType("__main__")
    main.__file__ = script
    try:
        exec(compile(Path(script).read_bytes(), script, "exec"), main.__dict__)  # noqa: S102 - it is a test's own
    except BaseException as error:  # noqa: BLE001 - whatever it is
        last = error  # as in any script, what its frames hold is there until Python is taken down
        code = _code(last)
    else:
        code = 0
    ctypes.pythonapi.Py_Exit(code)  # multiprocessing would leave at once, without taking Python down
    raise AssertionError


def _code(error: BaseException) -> int:
    """Return with what a script exits that ends with this error, and say it as Python does."""
    if not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
        return 1
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    sys.stderr.write(f"{error.code}\n")
    return 1
