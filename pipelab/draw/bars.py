"""A trace as lanes of bars, one lane per rank: shared by text, figures and pages."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from pipelab.draw import colours, wording
from pipelab.plan.actions import KINDS, PER_MICROBATCH, TRAITS, Action, Kind
from pipelab.trace.ledger import WAITS
from pipelab.trace.waits import Half, half

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from pipelab.trace.ledger import Idle
    from pipelab.trace.trace import Trace

_NEXT_TO_NOTHING = 0.05
"""Actions shorter than this fraction of the median do not set the scale."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One action in its lane; times count from the trace's start.

    Attributes:
        action: the action.
        label: its name in the lane.
        colour: its colour, which also tells the stages of a rank apart.
        start: when it starts.
        end: when it ends.
        half: which part of the lane's height it fills; two actions that share a slot lie one above the other.
    """

    action: Action
    label: str
    colour: str
    start: float
    end: float
    half: Half


@dataclass(frozen=True, slots=True)
class Gap:
    """One idle time in its lane; times count from the trace's start.

    Attributes:
        idle: the idle time.
        start: when it begins.
        end: when it ends.
        words: what it is, in words; the first that fit are written into it, never a bare number.
    """

    idle: Idle
    start: float
    end: float
    words: tuple[str, ...]


class Lanes:
    """The bars of a trace, made only for the drawn part."""

    def __init__(
        self, trace: Trace, own: Mapping[Kind, str] | None = None, label: Callable[[Action], str] | None = None
    ) -> None:
        """Find out whether a rank has several stages: then labels name the stage. Looks may be one's own."""
        self.trace, self.own, self.label = trace, own or {}, label
        stage = trace.plan.bound.codes.stage
        stages = [sorted({stage[code] for code in row}) for row in trace.plan.bound.computing]
        self.most_stages = max(map(len, stages), default=0)
        self.names_stages = self.most_stages > 1
        self._chunks = [{each: at for at, each in enumerate(row)} for row in stages]
        self.strips = list(dict.fromkeys(strip(event.action) for event in trace.moves))
        self._labels: dict[int, tuple[Action, str]] = {}
        self._gaps: list[list[Gap]] = []

    @property
    def span(self) -> float:
        """How long the trace lasts."""
        return self.trace.makespan

    def count(self, rank: int) -> int:
        """Return how many actions a rank has."""
        return len(self.trace.plan.bound.computing[rank])

    def bars(self, rank: int, first: int = 0, last: int | None = None) -> Iterator[Bar]:
        """Yield the bars of one rank's actions from `first` up to, not including, `last`, in order."""
        trace, begin = self.trace, self.trace.start
        row, starts, ends = trace.plan.bound.computing[rank], trace.starts[rank], trace.ends[rank]
        for index in range(first, len(row) if last is None else last):
            action, label = self._named(row[index])
            chunk = self._chunks[rank][trace.plan.bound.codes.stage[row[index]]]
            colour = self.own.get(action.kind) or colours.of(action, chunk)
            yield Bar(action, label, colour, starts[index] - begin, ends[index] - begin, half(trace, rank, index))

    def moves(self, rank: int, strip_of: str) -> Iterator[Bar]:
        """Yield what one rank ran beside computing in one of its `strips`, in order."""
        for event in self.trace.moves:
            if event.rank == rank and strip(event.action) == strip_of:
                times = event.start - self.trace.start, event.end - self.trace.start
                colour = self.own.get(event.action.kind) or colours.of(event.action)
                yield Bar(event.action, str(event.action), colour, *times, "whole")

    def gaps(self, rank: int) -> list[Gap]:
        """Return the idle times of one rank, in order."""
        if not self._gaps:
            begin, self._gaps = self.trace.start, [[] for _ in range(self.trace.ranks)]
            for idle in self.trace.idle:
                gap = Gap(idle, idle.start - begin, idle.end - begin, self._words(idle))
                self._gaps[idle.rank].append(gap)
        return self._gaps[rank]

    def longest_wait(self) -> tuple[Gap, Bar] | None:
        """Return the longest idle time that waits for another rank's value, and the action that gives it.

        Of equally long ones, the first: a picture points at it with its only arrow.
        """
        waiting = (
            gap
            for rank in range(self.trace.ranks)
            for gap in self.gaps(rank)
            if gap.idle.giver is not None and gap.idle.reason in WAITS
        )
        longest = max(waiting, key=lambda gap: (gap.idle.duration, -gap.idle.rank, -gap.start), default=None)
        if longest is None:
            return None
        bound = self.trace.plan.bound
        assert longest.idle.giver is not None
        code = bound.codes.code(longest.idle.giver)
        rank = bound.rank_of[code]
        at = bound.index_of(rank)[code]
        return longest, next(self.bars(rank, at, at + 1))

    def _words(self, idle: Idle) -> tuple[str, ...]:
        long = f"{idle.reason} {wording.number(idle.duration)}"
        if idle.giver is None or idle.reason in ("fill", "order"):
            return (long, idle.reason)
        if idle.reason == "channel":
            return (f"{long} for {idle.giver}", long, idle.reason)
        code = self.trace.plan.bound.codes.code(idle.giver)
        giver, rank = self._named(code)[1], self.trace.plan.bound.rank_of[code]
        whose = f"for {giver} of rank {rank}"
        return (f"{long} {whose}", f"{idle.reason} {whose}", whose, f"for rank {rank}", f"r{rank}")

    def until(self, rank: int, time: float) -> int:
        """Return how many of a rank's actions start before a time."""
        return bisect_left(self.trace.starts[rank], time + self.trace.start)

    def since(self, rank: int, time: float) -> int:
        """Return the first of a rank's actions that ends after a time."""
        return bisect_right(self.trace.ends[rank], time + self.trace.start)

    def longest_label(self, kind: Kind) -> int:
        """Return how many characters the longest label of a kind has."""
        plan = self.trace.plan
        stage = len(str(plan.stages - 1)) if self.names_stages else 0
        return stage + 1 + (0 if TRAITS[kind].collective else len(str(plan.microbatches - 1)))

    def typical(self, ranks: Iterable[int]) -> dict[Kind, float]:
        """Return, for each kind, the lower quartile of its actions' times.

        A label that fits there fits nearly everywhere, and one odd reading does not set the scale. Actions that take
        nearly no time, such as the first stage's input gradients, are not counted.
        """
        bound = self.trace.plan.bound
        lasting: dict[Kind, list[float]] = {kind: [] for kind in KINDS}
        for rank in ranks:
            for code, start, end in self.trace.computed(rank):
                lasting[bound.codes.kind[code]].append(end - start)
        every = [time for kind, times in lasting.items() for time in times if time > 0 and kind in PER_MICROBATCH]
        least = median(every or [0.0]) * _NEXT_TO_NOTHING
        counted = {kind: sorted(time for time in times if time > least) for kind, times in lasting.items()}
        return {kind: times[len(times) // 4] for kind, times in counted.items() if times}

    def _named(self, code: int) -> tuple[Action, str]:
        if code not in self._labels:
            action = self.trace.plan.bound.codes.action(code)
            named = action if self.names_stages else Action(action.kind, action.microbatch)
            self._labels[code] = (action, self.label(action) if self.label else str(named))
        return self._labels[code]


def strip(action: Action) -> str:
    """Return in which strip a move is drawn, its channel's; a free, which takes no time, among gathers."""
    channel = action.traits.channel or action.word
    return "gather" if channel == "now" else channel


def shapes(trace: Trace, scale: float, lane: float, words: bool = True) -> str:
    """Return the idle times and bars of a timeline as SVG, a path for each colour: a tenth of what a figure has.

    Without words, idle times have no ground: they show the page's.
    """
    lanes, paths, texts = Lanes(trace), defaultdict[str, str](str), defaultdict[str, str](str)
    for rank in range(trace.ranks):
        boxes: list[Bar | Gap] = [*lanes.bars(rank), *lanes.gaps(rank)]
        for each in boxes:
            left, width = each.start * scale, max((each.end - each.start) * scale - 0.6, 0.4)
            high, top = lane - 2, rank * lane + 1
            if isinstance(each, Gap):
                (fill, _, border, ink), said = colours.ground(each.idle.reason), each.words
                look = f'fill="{fill if words else "none"}" stroke="{border}" vector-effect="non-scaling-stroke"'
                paths[look] += f"M{left:.4g} {top:g}h{width:.4g}v{high:g}h-{width:.4g}z"
            else:  # a bar is a line as thick as it is high: half as many letters
                fill, ink, said = each.colour, colours.ink(each.colour), (each.label,)
                high /= 1 if each.half == "whole" else 2
                top += high if each.half == "lower" else 0
                paths[f'stroke="{fill}" stroke-width="{high:g}"'] += f"M{left:.4g} {top + high / 2:g}h{width:.4g}"
            if words and (word := next((word for word in said if 7 * len(word) < width and high > 11), "")):
                texts[ink] += f'<text x="{left + width / 2:.4g}" y="{top + high / 2 + 4:g}">{word}</text>'
    return "".join(
        [f'<path {look} d="{path}"/>' for look, path in paths.items()]
        + [f'<g text-anchor="middle" fill="{ink}">{text}</g>' for ink, text in texts.items()]
    )
