"""The schedules that come with pipelab: one file each. `schedules` finds them by name."""

from __future__ import annotations

from pipelab.catalogue.delayed import DelayedBackward
from pipelab.catalogue.dualpipe import DualPipe
from pipelab.catalogue.dualpipev import DualPipeV
from pipelab.catalogue.gpipe import GPipe
from pipelab.catalogue.greedy import Greedy
from pipelab.catalogue.interleaved_1f1b import Interleaved1F1B
from pipelab.catalogue.interleaved_zb import InterleavedZeroBubble
from pipelab.catalogue.looped_bfs import LoopedBFS
from pipelab.catalogue.naive import Naive
from pipelab.catalogue.one_f_one_b import OneFOneB
from pipelab.catalogue.zb_h1 import ZBH1
from pipelab.catalogue.zb_h2 import ZBH2
from pipelab.catalogue.zbv import ZBV
from pipelab.schedule import Schedule

__all__ = [
    "ZBH1",
    "ZBH2",
    "ZBV",
    "DelayedBackward",
    "DualPipe",
    "DualPipeV",
    "GPipe",
    "Greedy",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "LoopedBFS",
    "Naive",
    "OneFOneB",
    "schedules",
]

schedules: dict[str, type[Schedule]] = {
    "naive": Naive,
    "gpipe": GPipe,
    "1f1b": OneFOneB,
    "delayed": DelayedBackward,
    "interleaved-1f1b": Interleaved1F1B,
    "looped-bfs": LoopedBFS,
    "zb-h1": ZBH1,
    "zb-h2": ZBH2,
    "interleaved-zb": InterleavedZeroBubble,
    "zbv": ZBV,
    "dualpipev": DualPipeV,
    "dualpipe": DualPipe,
    "greedy": Greedy,
}
"""Every schedule by the name that the command line uses."""
