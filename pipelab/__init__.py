"""pipelab: pipeline-parallel schedules, written once, then checked, simulated, drawn and executed.

A schedule is ten lines of Python that say in which order each rank runs forwards and backwards. That one object is
checked (with an explanation), simulated, drawn, and executed on real tensors.

Example:
    >>> import pipelab
    >>> plan = pipelab.OneFOneB(ranks=4, microbatches=8).plan()
    >>> pipelab.simulate(plan, pipelab.Cost(forward=1, backward=2))
    <simulated trace of OneFOneB(ranks=4, microbatches=8): makespan 33, bubble 27.3%>

The parts, in reading order:

- `schedule`: what a student writes: a schedule in ten lines
- `plan`: what a schedule says: every rank's actions
- `checking`: every fault of a plan, explained
- `trace`: what happened, or would happen
- `simulation`: when everything would happen
- `catalogue`: the schedules that come with pipelab
- `draw`: timelines as text, figures and pages
- `challenges`: levels with pars, for learners
- `layouts`: which layout a transformer's training should have
- `engine`: a plan on real tensors
- `hub`: what other programs know about a plan: PyTorch's recorder and profiles, torchtitan, Chakra, Megatron
- `cli`: the command `pipelab`
- `table`: tables of results
- `display`: the door to `draw` for whatever can be shown
- `files`: files written whole or not at all
- `errors`: one class for each kind of mistake
"""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pipelab import display
from pipelab._version import __version__
from pipelab.errors import NO_TORCH

if TYPE_CHECKING:
    from pipelab.catalogue import (
        GEMS,
        V1F1B,
        ZBH1,
        ZBH2,
        ZBV,
        BitPipe,
        Chimera,
        DelayedBackward,
        DualPipe,
        DualPipeV,
        Eager1F1B,
        GPipe,
        Greedy,
        Hanayo,
        Interleaved1F1B,
        InterleavedZeroBubble,
        LoopedBFS,
        Naive,
        OneFOneB,
        Overlapped1F1B,
        Seq1F1B,
        SlimPipe,
        VHalf,
        VMin,
        ZeroPP,
        schedules,
    )
    from pipelab.catalogue.asynchronous import PipeDream, TwoBW
    from pipelab.catalogue.building_block import building_block
    from pipelab.catalogue.frontier import frontier
    from pipelab.catalogue.offloading import BPipe, PipeOffload
    from pipelab.catalogue.recomputation import with_recompute
    from pipelab.checking.checker import check
    from pipelab.checking.memory import Memory
    from pipelab.engine.device import devices
    from pipelab.engine.emulation import emulated
    from pipelab.engine.engine import Step
    from pipelab.engine.model.split import split
    from pipelab.engine.pipeline import Pipeline
    from pipelab.engine.stage.inputs import microbatches, rows, whole
    from pipelab.engine.stage.slices import cached
    from pipelab.engine.verify.diagnose import diagnose
    from pipelab.errors import (
        BatchError,
        CostError,
        DeviceError,
        EngineError,
        FormatError,
        LossError,
        PipelabError,
        RankError,
        SplitError,
        StageError,
        StepTimeoutError,
        UsageError,
        VerificationError,
    )
    from pipelab.layouts.search import layout
    from pipelab.plan.actions import LOAD, OFFLOAD, RESHARD, UNSHARD, Action, B, C, F, I, Pair, R, U, W
    from pipelab.plan.fault import Fault, ScheduleError
    from pipelab.plan.plan import Plan
    from pipelab.schedule import Schedule, replicate, with_gathers
    from pipelab.simulation.bounds import lower_bound
    from pipelab.simulation.clock import simulate
    from pipelab.simulation.comparison import Comparison, compare
    from pipelab.simulation.cost import Cost, Links, all_reduce_time
    from pipelab.simulation.memory import MemoryUse, memory_use
    from pipelab.simulation.optimum import optimum
    from pipelab.simulation.what_if import what_if
    from pipelab.simulation.wire import lower
    from pipelab.table import Column, Table
    from pipelab.trace.diff import Diff, diff
    from pipelab.trace.trace import Trace

__all__ = [
    "GEMS", "LOAD", "OFFLOAD", "RESHARD", "UNSHARD", "V1F1B", "ZBH1", "ZBH2", "ZBV", "Action", "B", "BPipe",
    "BatchError", "BitPipe", "C", "Chimera", "Column", "Comparison", "Cost", "CostError", "DelayedBackward",
    "DeviceError", "Diff", "DualPipe", "DualPipeV", "Eager1F1B", "EngineError", "F", "Fault", "FormatError", "GPipe",
    "Greedy", "Hanayo", "I", "Interleaved1F1B", "InterleavedZeroBubble", "Links", "LoopedBFS", "LossError", "Memory",
    "MemoryUse", "Naive", "OneFOneB", "Overlapped1F1B", "Pair", "PipeDream", "PipeOffload", "PipelabError", "Pipeline",
    "Plan", "R", "RankError", "Schedule", "ScheduleError", "Seq1F1B", "SlimPipe", "SplitError", "StageError", "Step",
    "StepTimeoutError", "Table", "Trace", "TwoBW", "U", "UsageError", "VHalf", "VMin", "VerificationError", "W",
    "ZeroPP", "__version__", "all_reduce_time", "building_block", "cached", "check", "compare",
    "devices", "diagnose", "diff", "emulated", "frontier", "layout", "lower", "lower_bound", "memory_use",
    "microbatches", "optimum", "replicate", "rows", "schedules", "simulate", "split", "what_if", "whole",
    "with_gathers", "with_recompute",
]  # fmt: skip

display.FILL.append(partial(import_module, "pipelab.draw"))

_PARTS = "catalogue", "checking", "draw", "files", "plan", "schedule", "simulation", "trace"


@cache
def _modules() -> dict[str, str | None]:
    """Return which module has each name: the imports above, which only type checkers run."""
    lines = ast.walk(ast.parse(inspect.getsource(sys.modules[__name__])))
    return {name.name: line.module for line in lines if isinstance(line, ast.ImportFrom) for name in line.names}


def __getattr__(name: str) -> Any:
    """Import what has a name when it is first asked for, so that `import pipelab` is quick."""
    if name in _PARTS:
        return import_module(f"pipelab.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'pipelab' has no attribute {name!r}")
    try:
        value = getattr(import_module(str(_modules()[name])), name)
    except ModuleNotFoundError as error:
        if error.name == "torch":
            raise ModuleNotFoundError(f"pipelab.{name}: {NO_TORCH}", name="torch") from None
        raise
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List what has not been asked for too."""
    return [*__all__, *_PARTS, "__doc__", "errors"]
