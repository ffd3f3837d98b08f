"""The schedules that come with pipelab: one file each. `schedules` finds them by name."""

from __future__ import annotations

from difflib import get_close_matches

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
from pipelab.errors import UnknownScheduleError
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


class Catalogue(dict[str, type[Schedule]]):
    """Schedules by name; an unknown name raises an error that lists the names and the nearest one."""

    def __missing__(self, name: str) -> type[Schedule]:
        """Refuse a name.

        Raises:
            UnknownScheduleError: always; it is a `KeyError` too.
        """
        close = self.nearest(name)
        guess = f"; did you mean {close}?" if close else ""
        raise UnknownScheduleError(f"{name!r} is not a registered schedule{guess}\n  registered: {', '.join(self)}")

    def nearest(self, name: object) -> str | None:
        """Return the schedule whose name, or whose class's name, is nearest to this one; `None` if none is near.

        Example:
            >>> schedules.nearest("1F1B"), schedules.nearest("OneFOneB"), schedules.nearest("zb_h1")
            ('1f1b', '1f1b', 'zb-h1')
        """
        names = {each.lower(): key for key, kind in self.items() for each in (kind.__name__, key)}
        close = get_close_matches(str(name).lower(), names, n=1)
        return names[close[0]] if close else None


schedules = Catalogue(
    {
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
)
"""Every schedule by the name that the command line uses."""
