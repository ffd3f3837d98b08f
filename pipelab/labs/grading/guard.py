"""What a submission may not do in its process: memory, files outside its folder, processes, replaced functions."""

from __future__ import annotations

import builtins
import inspect
import json
import os
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from pipelab.files import kernel_bytes


class RefusedError(PermissionError):
    """A submission did what the grader does not allow."""


_TORCH = Path(torch.__file__).parent
_FORBIDDEN = frozenset({"os.fork", "os.forkpty", "os.exec", "os.kill", "os.killpg", "pty.spawn"})
_PROGRAMS = frozenset({"subprocess.Popen", "os.system", "os.posix_spawn", "os.spawn"})
_WRITES = dict.fromkeys(("os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "os.chown"), 1)
_WRITES |= dict.fromkeys(("os.rename", "os.symlink", "os.link"), 2)
"""Events that change files, and how many of their first arguments are paths."""
_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@dataclass
class Guard:
    """An audit hook: Python calls it before it opens files, starts processes and sends signals.

    Python cannot remove it. Reading is allowed, writing only within the submission's folder.
    """

    folder: str
    programs: int
    refused: str = ""

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        """Refuse what is not allowed."""
        if event in _FORBIDDEN:
            self._refuse(f"calls {event}")
        elif event in _PROGRAMS:
            self.programs -= 1
            if self.programs < 0:
                self._refuse("starts too many programs")
        elif event in _WRITES or (event == "open" and (args[2] or 0) & _TO_WRITE):
            for path in args[: _WRITES.get(event, 1)]:
                real = self.folder if isinstance(path, int) else os.path.realpath(os.fsdecode(path))
                if real != os.devnull and not f"{real}{os.sep}".startswith(self.folder + os.sep):
                    self._refuse(f"writes outside its folder, to {real}")

    def _refuse(self, what: str) -> NoReturn:
        self.refused = self.refused or what
        raise RefusedError(f"the submission {what}, which the grader does not allow")


def watch_functions() -> Callable[[], str]:
    """Return a function that names what has replaced PyTorch's or the grader's functions since now."""
    own = [module for name, module in sys.modules.items() if name.partition(".")[0] == "pipelab"]
    classes = [each for module in own for each in vars(module).values() if inspect.isclass(each)]
    holders: set[Any] = {each for each in classes if each.__module__.startswith("pipelab")} | {*own}
    holders |= {torch, torch.autograd, torch.nn, torch.nn.functional, torch.overrides, builtins, inspect, json, os}
    holders |= {torch.Tensor, torch.nn.Module, torch.nn.Linear}

    def functions() -> dict[tuple[Any, str], Any]:
        kinds = (property, classmethod, staticmethod)
        members = ((holder, name, value) for holder in holders for name, value in vars(holder).items())
        return {(holder, name): value for holder, name, value in members if callable(value) or isinstance(value, kinds)}

    before = functions()

    def replaced() -> str:
        now = functions()
        for holder, name in before | now:
            value = now.get((holder, name))
            inherited = any(name in vars(base) for base in getattr(holder, "__mro__", ())[1:])
            changed = before[holder, name] is not value if (holder, name) in before else inherited
            torchs = getattr(holder, "__module__", holder.__name__).partition(".")[0] == "torch"
            if changed and not (torchs and _is_torchs(value)):
                place = f"{holder.__module__}.{holder.__name__}" if isinstance(holder, type) else holder.__name__
                return f"{place}.{name}"
        return ""

    return replaced


def _is_torchs(value: Any) -> bool:
    """Tell whether PyTorch has put a value there: it replaces a few of its functions when they are first used."""
    if isinstance(value, type):
        return value.__module__.partition(".")[0] == "torch"
    code = getattr(value, "__code__", None)
    return code is not None and Path(code.co_filename).is_relative_to(_TORCH)


def limit_memory(megabytes: int) -> None:
    """Allow so much memory on top of what the imports need, on Linux."""
    used = kernel_bytes("/proc/self/status", "VmData")
    if used is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (used + (megabytes << 20), resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 20, 64 << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def allow_memory() -> None:
    """Lift the limit, so that the grader can report what has filled the memory."""
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
