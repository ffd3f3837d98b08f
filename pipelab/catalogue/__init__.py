"""The schedules that come with pipelab, one file each; `schedules` finds them by name.

- `naive`: one micro-batch at a time
- `gpipe`: all forwards, then all backwards
- `one_f_one_b`: one backward for every new forward
- `eager_1f1b`: 1F1B with a longer warm-up, which hides the time of transfers
- `delayed`: the single loop that is often taught as 1F1B
- `interleaved_1f1b`: 1F1B over several smaller stages per rank
- `overlapped_1f1b`: interleaved 1F1B whose forwards overlap backwards
- `looped_bfs`: GPipe over several smaller stages per rank
- `zb_h1`: the backward split in two, in 1F1B's memory
- `zb_h2`: no rank ever waits, for twice the memory
- `interleaved_zb`: ZB-H1 over several smaller stages per rank
- `zeropp`: looped breadth-first in units, whose weight gradients fill the gaps between them
- `zbv`: zero bubble in a V, in 1F1B's memory
- `v_1f1b`: whole backwards in a V, in two thirds of 1F1B's activations
- `v_half`: a V that holds half of 1F1B's activations
- `v_min`: a V that holds a third
- `dualpipev`: DualPipe cut in half and folded into a V
- `dualpipe`: micro-batches enter at both ends
- `chimera`: two 1F1B pipelines in opposite directions
- `gems`: opposite directions in turn, in the memory of one activation
- `hanayo`: micro-batches run through the ranks in waves
- `bitpipe`: V shapes in both directions
- `seq1f1b`: 1F1B on slices of sequences
- `slimpipe`: the same over several stages per rank, which holds about one sequence
- `asynchronous`: 1F1B with updates and without a flush: PipeDream and PipeDream-2BW
- `bpipe`: 1F1B whose first ranks keep activations on the last ones
- `pipe_offload`: interleaved 1F1B that sends activations to the host
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
from pipelab.catalogue.bitpipe import BitPipe
from pipelab.catalogue.bpipe import BPipe
from pipelab.catalogue.chimera import Chimera
from pipelab.catalogue.delayed import DelayedBackward
from pipelab.catalogue.dualpipe import DualPipe
from pipelab.catalogue.dualpipev import DualPipeV
from pipelab.catalogue.eager_1f1b import Eager1F1B
from pipelab.catalogue.gems import GEMS
from pipelab.catalogue.gpipe import GPipe
from pipelab.catalogue.greedy import Greedy
from pipelab.catalogue.hanayo import Hanayo
from pipelab.catalogue.interleaved_1f1b import Interleaved1F1B
from pipelab.catalogue.interleaved_zb import InterleavedZeroBubble
from pipelab.catalogue.looped_bfs import LoopedBFS
from pipelab.catalogue.naive import Naive
from pipelab.catalogue.one_f_one_b import OneFOneB
from pipelab.catalogue.overlapped_1f1b import Overlapped1F1B
from pipelab.catalogue.pipe_offload import PipeOffload
from pipelab.catalogue.seq1f1b import Seq1F1B
from pipelab.catalogue.slimpipe import SlimPipe
from pipelab.catalogue.v_1f1b import V1F1B
from pipelab.catalogue.v_half import VHalf
from pipelab.catalogue.v_min import VMin
from pipelab.catalogue.zb_h1 import ZBH1
from pipelab.catalogue.zb_h2 import ZBH2
from pipelab.catalogue.zbv import ZBV
from pipelab.catalogue.zeropp import ZeroPP
from pipelab.errors import UsageError
from pipelab.schedule import Schedule

__all__ = [
    "GEMS",
    "V1F1B",
    "ZBH1",
    "ZBH2",
    "ZBV",
    "BitPipe",
    "Chimera",
    "DelayedBackward",
    "DualPipe",
    "DualPipeV",
    "Eager1F1B",
    "GPipe",
    "Greedy",
    "Hanayo",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "LoopedBFS",
    "Naive",
    "OneFOneB",
    "Overlapped1F1B",
    "Seq1F1B",
    "SlimPipe",
    "VHalf",
    "VMin",
    "ZeroPP",
    "schedules",
]


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
"""Schedules that send activations away: engines move none, and `simulate` has moves beside buffered transfers only."""

beside: dict[str, type[Schedule]] = {**moving, "pipedream": PipeDream, "2bw": TwoBW}
"""Every schedule that the command line finds by name although it is not among `schedules`."""
