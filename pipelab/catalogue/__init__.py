"""The schedules that come with pipelab, one file for each family; `schedules` finds them by name.

- `gpipe`: all forwards before the first backward, on one stage or several per rank; or one micro-batch at a time
- `one_f_one_b`: one backward for every new forward, and the single loop that is often taught as 1F1B
- `interleaved_1f1b`: 1F1B over several smaller stages per rank, overlapped too
- `slices`: 1F1B on slices of sequences
- `zero_bubble`: the backward split in two, so that weight gradients fill the bubble
- `v_shaped`: two stages per rank in a V: zero bubble, and orders that hold less than 1F1B
- `dualpipe`: forwards overlapped with backwards, in both directions or folded into a V
- `both_ways`: micro-batches enter at both ends
- `waves`: micro-batches go down the ranks and back up several times
- `asynchronous`: 1F1B with updates and without a flush: PipeDream and PipeDream-2BW
- `offloading`: 1F1B that sends activations to other ranks, or to the host
- `greedy`: an order from a policy
- `building_block`: one micro-batch's way through the ranks, repeated
- `frontier`: how small a bubble a memory buys, by a search over building blocks
- `recomputation`: forwards that run again for their backwards, when their rank has time
- `bases`: what schedules with one stage per rank, looped, in a V, or in both directions share
- `list_scheduling`: how a policy becomes an order
"""

from __future__ import annotations

from difflib import get_close_matches

from pipelab.catalogue.asynchronous import PipeDream, TwoBW
from pipelab.catalogue.both_ways import GEMS, Chimera
from pipelab.catalogue.dualpipe import DualPipe, DualPipeV
from pipelab.catalogue.gpipe import GPipe, LoopedBFS, Naive
from pipelab.catalogue.greedy import Greedy
from pipelab.catalogue.interleaved_1f1b import Interleaved1F1B, Overlapped1F1B
from pipelab.catalogue.offloading import BPipe, PipeOffload
from pipelab.catalogue.one_f_one_b import DelayedBackward, Eager1F1B, OneFOneB
from pipelab.catalogue.slices import Seq1F1B, SlimPipe
from pipelab.catalogue.v_shaped import V1F1B, ZBV, VHalf, VMin
from pipelab.catalogue.waves import BitPipe, Hanayo
from pipelab.catalogue.zero_bubble import ZBH1, ZBH2, InterleavedZeroBubble, ZeroPP
from pipelab.errors import UsageError
from pipelab.schedule import Schedule

__all__ = [
    "GEMS", "V1F1B", "ZBH1", "ZBH2", "ZBV", "BitPipe", "Chimera", "DelayedBackward", "DualPipe", "DualPipeV",
    "Eager1F1B", "GPipe", "Greedy", "Hanayo", "Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS", "Naive",
    "OneFOneB", "Overlapped1F1B", "Seq1F1B", "SlimPipe", "VHalf", "VMin", "ZeroPP", "schedules",
]  # fmt: skip


class Catalogue(dict[str, type[Schedule]]):
    """Schedules by name; an unknown name raises an error that lists the names and the nearest one."""

    def __missing__(self, name: str) -> type[Schedule]:
        """Refuse a name."""
        close = self.nearest(name)
        guess = f"; did you mean {close}?" if close else ""
        raise UsageError(f"{name!r} is not a registered schedule{guess}\n  registered: {', '.join(self)}")

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
        "eager-1f1b": Eager1F1B,
        "delayed": DelayedBackward,
        "interleaved-1f1b": Interleaved1F1B,
        "overlapped-1f1b": Overlapped1F1B,
        "looped-bfs": LoopedBFS,
        "zb-h1": ZBH1,
        "zb-h2": ZBH2,
        "interleaved-zb": InterleavedZeroBubble,
        "zeropp": ZeroPP,
        "zbv": ZBV,
        "v-1f1b": V1F1B,
        "v-half": VHalf,
        "v-min": VMin,
        "dualpipev": DualPipeV,
        "dualpipe": DualPipe,
        "chimera": Chimera,
        "gems": GEMS,
        "hanayo": Hanayo,
        "bitpipe": BitPipe,
        "seq1f1b": Seq1F1B,
        "slimpipe": SlimPipe,
        "greedy": Greedy,
    }
)
"""Every schedule by the name that the command line uses."""

moving: dict[str, type[Schedule]] = {"bpipe": BPipe, "pipe-offload": PipeOffload}
"""Schedules that send activations away: `Pipeline` refuses them; `simulate` takes buffered transfers only."""

beside: dict[str, type[Schedule]] = {**moving, "pipedream": PipeDream, "2bw": TwoBW}
"""Every schedule that the command line finds by name although it is not among `schedules`."""
