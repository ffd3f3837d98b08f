"""The palette of every drawing.

The five hues are from Okabe and Ito ("Color Universal Design", 2008): colour-blind readers can tell them apart. Each
kind also has its own lightness (CIE L*), 15 from the next, so that a grey copy can still be read:

    dark page 6     R 21     F 36     W 52     B 67     I 83     light page 98 to 100

Idle time is as light as a light page, and as dark as a dark one: it has a border, and its reason is a hatch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pipelab.plan.actions import TRAITS

if TYPE_CHECKING:
    from pipelab.plan.actions import Action
    from pipelab.trace.ledger import Reason

PALETTE = {kind: traits.colours for kind, traits in TRAITS.items()}
"""For each kind, the colours on a rank's first, third … stage, and on its second, fourth …"""

HATCHES: dict[Reason, str] = {
    "fill": "/",
    "wait": "",
    "behind another transfer": "|",
    "transfer": "-",
    "channel": "+",
    "order": ".",
    "all-reduce": "x",
    "drain": "\\",
}
"""For each reason of an idle time, matplotlib's letter for its hatch. A rank that waits for none fills or drains."""


class Ground(NamedTuple):
    """The looks of an idle time: its ground, the lines of its hatch, its border, and its words."""

    paper: str
    lines: str
    border: str
    ink: str


REST = Ground("#FFFFFF", "#CFCFCF", "#8A8A8A", "#4A4A4A")
"""Of a rank that has not begun, or is done."""
WAIT = Ground("#FFF8F7", "#EBC1BD", "#B5605A", "#8C1D18")
"""Of a rank that waits."""


def ground(reason: Reason) -> Ground:
    """Return the looks of an idle time."""
    return REST if reason in ("fill", "drain") else WAIT


HUES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#7A7A7A")
"""Eight colours for micro-batches or stages, in turns: Okabe and Ito's, with grey for black."""

DIVERGING = ("#2166AC", "#4393C3", "#92C5DE", "#D1E5F0", "#F7F7F7", "#FDDBC7", "#F4A582", "#D6604D", "#B2182B")
"""From much less, blue, over no change to much more, red: RdBu of ColorBrewer (Harrower and Brewer, "ColorBrewer.org",
2003), which colour-blind readers can tell apart."""

RANKS = ("#BBDDF2", "#FBDFA6", "#B5E3D5", "#EBC9DC", "#F8F2B0", "#F3C6A5", "#D9D9D9", "#CFC9EE")
"""Light tints for drawings in which colour means the rank; they repeat for more ranks."""


def of(action: Action, chunk: int = 0) -> str:
    """Return an action's colour on a rank's stage number `chunk`."""
    return PALETTE[action.kind][chunk % 2]


def ink(background: str) -> str:
    """Return black or white, whichever contrasts more with a colour (WCAG 2.1)."""
    light = luminance(background)
    return "#FFFFFF" if 1.05 / (light + 0.05) > (light + 0.05) / 0.05 else "#000000"


def luminance(colour: str) -> float:
    """Return a colour's relative luminance, from 0 to 1 (WCAG 2.1)."""
    shares = [channel / 255 for channel in channels(colour)]
    red, green, blue = (each / 12.92 if each <= 0.03928 else ((each + 0.055) / 1.055) ** 2.4 for each in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def channels(colour: str) -> tuple[int, int, int]:
    """Return red, green and blue, each from 0 to 255."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def ansi(colour: str) -> int:
    """Return the nearest of the 216 colours that every colour terminal has."""
    steps = (0, 95, 135, 175, 215, 255)
    red, green, blue = (min(range(6), key=lambda at: abs(steps[at] - channel)) for channel in channels(colour))
    return 16 + 36 * red + 6 * green + blue
