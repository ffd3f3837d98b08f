"""The schedules that come with pipelab: one file each. `schedules` finds them by name."""

from __future__ import annotations

from pipelab.catalogue.delayed import DelayedBackward
from pipelab.catalogue.dualpipe import DualPipe
from pipelab.catalogue.gpipe import GPipe
from pipelab.catalogue.greedy import Greedy
from pipelab.catalogue.naive import Naive
from pipelab.catalogue.one_f_one_b import OneFOneB
from pipelab.schedule import Schedule

__all__ = ["DelayedBackward", "DualPipe", "GPipe", "Greedy", "Naive", "OneFOneB", "schedules"]

schedules: dict[str, type[Schedule]] = {
    "naive": Naive,
    "gpipe": GPipe,
    "1f1b": OneFOneB,
    "delayed": DelayedBackward,
    "dualpipe": DualPipe,
    "greedy": Greedy,
}
"""Every schedule by the name that the command line uses."""
