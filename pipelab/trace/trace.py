"""Traces: what happened, or would happen, each action with its start and end.

A simulated and a measured trace are the same type, so drawing, measuring and grading exist once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipelab.display import show
from pipelab.errors import clean
from pipelab.files import read_data
from pipelab.plan.plan import Plan
from pipelab.trace.events import Event, Transfer, union
from pipelab.trace.ledger import Idle, Ledger, idle_times
from pipelab.trace.reading import FORMAT, VERSION, read, read_saved
from pipelab.trace.waits import critical_path, crossings, waits

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from pipelab.plan.actions import Action, Kind


def _no_time(value: int) -> float:  # noqa: ARG001 - as every `delay`
    return 0.0


@dataclass(frozen=True, eq=False, init=False)
class Trace:
    """When each action of a plan started and ended. Immutable.

    `pipelab.simulate` and `Pipeline.step` make traces; `Trace.load` reads a saved one.

    Args:
        plan: the plan that ran.
        starts: for each rank, when each of its actions started, in the order of the plan's row.
        ends: for each rank, when each of its actions ended.
        unit: the unit of all times, such as `"ms"`; empty for the abstract units of a simulation.
        source: `"simulated"` or `"measured"`.
        delay: how long a value travels between ranks, as a function of the value's number; by default 0.
        transfers: the transfers, if they were measured.
        moves: the gathers, frees, offloads, loads and all-reduces that run beside computing, rank by rank, in order.
        lanes: what each rank ran on, such as `"cpu, thread 140…"`.
        costs: what the simulation was given: a function that returns it as `Cost.table` does; by default, nothing.
        name: what drawings call the trace; by default, the plan's name.
        note: a remark for comparisons, such as that stage 0 was simulated as PyTorch runs it.
    """

    plan: Plan
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    unit: str
    source: Literal["simulated", "measured"]
    lanes: tuple[str, ...]
    name: str
    note: str
    delay: Callable[[int], float]
    moves: tuple[Event, ...]
    costs: Callable[[], dict[str, list[float]]]
    _transfers: tuple[Transfer, ...] | None

    def __init__(
        self,
        plan: Plan,
        starts: Sequence[Sequence[float]],
        ends: Sequence[Sequence[float]],
        unit: str = "",
        source: Literal["simulated", "measured"] = "simulated",
        delay: Callable[[int], float] | None = None,
        transfers: Sequence[Transfer] | None = None,
        moves: Sequence[Event] = (),
        lanes: Sequence[str] = (),
        name: str | None = None,
        note: str = "",
        costs: Callable[[], dict[str, list[float]]] = dict,
    ) -> None:
        """Keep the plan and its times; everything else is derived from them when first read."""
        vars(self).update(plan=plan, starts=tuple(map(tuple, starts)), ends=tuple(map(tuple, ends)))
        vars(self).update(unit=unit, source=source, lanes=tuple(lanes), name=name or plan.name, note=note)
        vars(self).update(delay=delay or _no_time, moves=tuple(moves), costs=costs)
        vars(self).update(_transfers=None if transfers is None else tuple(transfers))

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return self.plan.ranks

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """Every action with its start and end, rank by rank, in order. Made when first read.

        An overlapped pair that was simulated as one slot is two events with the same start and end.
        """
        action = self.plan.bound.codes.action
        ranks = range(self.ranks)
        return tuple(Event(rank, action(code), *times) for rank in ranks for code, *times in self.computed(rank))

    def events_of(self, rank: int) -> tuple[Event, ...]:
        """Return one rank's events, in order."""
        return tuple(event for event in self.events if event.rank == rank)

    def computed(self, rank: int) -> Iterator[tuple[int, float, float]]:
        """Yield what a rank computes as codes, each with its start and end."""
        return zip(self.plan.bound.computing[rank], self.starts[rank], self.ends[rank], strict=True)

    def ran(self, rank: int) -> Iterator[tuple[int, float, float]]:
        """Yield what a rank lists as codes, each with its start and end; a move that was not measured takes no time."""
        bound, free = self.plan.bound, self.start
        computed = self.computed(rank)
        moved = ((event.start, event.end) for event in self.moves if event.rank == rank)
        for code in bound.lists[rank]:
            start, end = next(computed)[1:] if bound.computes(code) else next(moved, (free, free))
            free = end if bound.computes(code) else free
            yield code, start, end

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """Every value that crosses from one rank to another, in the order of the plan's rows."""
        if self._transfers is not None:
            return self._transfers
        return crossings(self.plan.bound, self.ends, self.delay)

    @property
    def recorded(self) -> tuple[Transfer, ...]:
        """The transfers that do not follow from `delay`: measured transfers, and those that waited behind others."""
        return self._transfers or ()

    @cached_property
    def start(self) -> float:
        """When the first action started, or the first gather."""
        first = (starts[0] for starts in self.starts if starts)
        return min(chain(first, (move.start for move in self.moves)), default=0.0)

    @cached_property
    def end(self) -> float:
        """When the last action ended, or the last move."""
        last = (max(ends) for ends in self.ends if ends)
        return max(chain(last, (move.end for move in self.moves)), default=0.0)

    @property
    def makespan(self) -> float:
        """From the first start to the last end, in `unit`."""
        return self.end - self.start

    @cached_property
    def spans(self) -> tuple[float, ...]:
        """For each rank, the time from its first start to its last end, with its moves, in `unit`."""
        starts, ends = ([*map(list, times)] for times in (self.starts, self.ends))
        for move in self.moves:
            starts[move.rank].append(move.start)
            ends[move.rank].append(move.end)
        rows = zip(starts, ends, strict=True)
        return tuple(max(ends, default=0.0) - min(starts, default=0.0) for starts, ends in rows)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """For each rank, how long it was working, in `unit`; actions that share a slot count once."""
        return tuple(union(starts, ends) for starts, ends in zip(self.starts, self.ends, strict=True))

    @property
    def bubble(self) -> float:
        """The idle share of all rank time: `1 - busy / (ranks * makespan)`, from 0 to 1.

        Some papers divide by another time: see `bubbles`.
        """
        whole = self.ranks * self.makespan
        return 1 - sum(self.busy) / whole if whole else 0.0

    @property
    def bubbles(self) -> dict[str, float]:
        """The bubble by the four definitions that papers use.

        With the idle time of all ranks over the time of all ranks:

        - `total`: idle time over the makespan. GPipe (Huang et al., 2019), section 2.3; it is `bubble`.
        - `ideal`: idle time over the work alone, so it may be above 1. Megatron-LM (Narayanan et al., 2021),
          section 2.2.
        - `longest span`: as `total`, with the longest span of a rank in place of the makespan. Zero bubble (Qi et al.,
          2024).
        - `own spans`: the idle time between each rank's first start and last end, over these spans: without fill and
          drain.

        Example:
            >>> import pipelab
            >>> bubbles = pipelab.simulate(pipelab.OneFOneB(ranks=4, microbatches=8)).bubbles
            >>> {name: round(share, 3) for name, share in bubbles.items()}
            {'total': 0.273, 'ideal': 0.375, 'longest span': 0.273, 'own spans': 0.158}
        """
        work, spans = sum(self.busy), sum(self.spans)
        longest = self.ranks * max(self.spans, default=0.0)
        return {
            "total": self.bubble,
            "ideal": (self.ranks * self.makespan - work) / work if work else 0.0,
            "longest span": 1 - work / longest if longest else 0.0,
            "own spans": 1 - work / spans if spans else 0.0,
        }

    @cached_property
    def queued(self) -> tuple[float, ...]:
        """For each rank, how long it was idle because a value that it needed queued behind another transfer, in `unit`.

        Example:
            >>> import pipelab
            >>> plan = pipelab.Interleaved1F1B(ranks=4, microbatches=8)
            >>> pipelab.simulate(plan, transport="rank").queued
            (0.0, 6.0, 2.5, 0.0)
        """
        if not any(each.behind for each in self.recorded):
            return (0.0,) * self.ranks
        return tuple(
            sum(wait.queued(free) for wait, free in zip(row, (self.start, *ends), strict=False) if wait is not None)
            for row, ends in zip(waits(self), self.ends, strict=True)
        )

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """For each rank, the most stage activations held at any time.

        Each forward adds one; if the plan runs it again, `C` adds it instead, and the input that the forward keeps does
        not count: `memory_use` counts its bytes. The full backward releases it, or the weight gradient if the backward
        is split. An activation that is sent away does not count from when it has left until it begins to come back.
        """
        if any(move.action.traits.in_flight for move in self.moves):
            return tuple(map(self._peak_by_time, range(self.ranks)))
        return tuple(max([0, *self.plan.bound.in_flight(rank)]) for rank in range(self.ranks))

    def _peak_by_time(self, rank: int) -> int:
        """Return the most activations that a rank holds, with those that it sends away, by the times of the trace."""
        codes, ran = self.plan.bound.codes, list(self.ran(rank))
        changes = [(end, -1) for code, _, end in ran if codes.releases[code]]
        changes += [(start, 1) for code, start, _ in ran if codes.holds[code]]
        return max(accumulate(more for _, more in sorted(changes)), default=0)

    @cached_property
    def idle(self) -> tuple[Idle, ...]:
        """Every idle time of every rank, with its reason, rank by rank, in order."""
        return idle_times(self)

    @cached_property
    def ledger(self) -> Ledger:
        """Where each rank's time went: work, and idle time by reason, which add up to the makespan.

        Example:
            >>> import pipelab
            >>> pipelab.simulate(pipelab.OneFOneB(ranks=4, microbatches=8)).ledger[2]
            {'fill': 2.0, 'wait': 3.0, 'drain': 4.0}
        """
        return Ledger.of(self)

    @cached_property
    def critical_path(self) -> tuple[Event, ...]:
        """The chain of actions that determines the makespan, first to last.

        From the last action, each step back goes to what the action waited for longest: the action before it on its
        rank, or the giver of a value that it needs, with its transfer. If both were ready together, it goes to the
        former. If the transfer queued behind another one, the step goes to the giver of that one.

        Example:
            >>> import pipelab
            >>> trace = pipelab.simulate(pipelab.OneFOneB(ranks=2, microbatches=2))
            >>> [event.action for event in trace.critical_path]
            [0F0, 1F0, 1B0, 1F1, 1B1, 0B1]
        """
        return critical_path(self)

    def why(self, rank: int, at: float, lines: int = 5) -> str:
        """Return why a rank is idle at a time, followed back to the root; or what it runs then, and why not earlier.

        Args:
            rank: the rank.
            at: the time, in the trace's unit.
            lines: how many steps back to explain, at most.

        Example:
            >>> import pipelab
            >>> print(pipelab.simulate(pipelab.OneFOneB(ranks=2, microbatches=2)).why(rank=0, at=2.5))
            Rank 0 is idle from 2 to 4 (2 units, wait): 0B0 needs 1B0, which ends at 4.
            1B0 begins on rank 1 at 2: until then it runs 1F0.
            1F0 begins on rank 1 at 1: 0F0 on rank 0 ends at 1.
            0F0 begins on rank 0 at 0: it is the rank's first action, and needs nothing.

        Raises:
            UsageError: if there is no such rank, or nothing runs at that time.
        """
        return show(self, "why", rank, at, lines)

    def save(
        self, path: str | os.PathLike[str], *, width: float | Literal["beamer", "column", "page"] | None = None
    ) -> Path:
        """Write the trace; the suffix is the format: `html`, `svg`, `png`, `pdf`, `json` or `txt`.

        `perfetto.json` is for https://ui.perfetto.dev and chrome://tracing, `events.csv` a table of all actions. The
        `width` of a figure is in inches, or `"column"` (3.25), `"page"` (6.75) or `"beamer"`; by default, as wide as
        its labels need.

        Example:
            >>> import pipelab, tempfile, pathlib
            >>> trace = pipelab.simulate(pipelab.OneFOneB(ranks=2, microbatches=2))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     saved = trace.save(pathlib.Path(folder) / "1f1b.json")
            ...     Trace.load(saved) == trace
            True

        Returns:
            The path.

        Raises:
            FormatError: if the suffix is another one.
            UsageError: if the width is not from 2 to 40 inches, or if the format has no width.
        """
        return show(self, "save", path, width)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read a trace that `save` wrote as `json`, packed with gzip or not.

        `pipelab.hub.profiles.load` reads PyTorch's profiles: see [Read a trace of another job](../profiles.md).

        Raises:
            FormatError: if the file does not hold a trace; the message says what is wrong and where.
        """
        return cls(**read_saved(Path(path), read_data(path, "a trace")))

    def to_dict(self) -> dict[str, Any]:
        """Return the trace as plain data, as in `json` files; see [the format](../how_to/other_tools.md)."""
        plan, after = self.plan, self.plan.after
        costs = self.costs()
        slices = after and [[[*after(m, s)] for s in range(plan.stages)] for m in range(plan.microbatches)]
        return {
            "format": FORMAT,
            "version": VERSION,
            "name": self.name,
            "source": self.source,
            "unit": self.unit,
            "note": self.note,
            "stages": self.plan.stages,
            "microbatches": self.plan.microbatches,
            "rows": [" ".join(map(str, row)) for row in self.plan.rows],
            "starts": [list(starts) for starts in self.starts],
            "ends": [list(ends) for ends in self.ends],
            "lanes": list(self.lanes),
            "transfers": [
                [each.source, each.target, str(each.giver), str(each.needer), each.start, each.end]
                + ([] if each.behind is None else [each.queued, *map(str, each.behind)])
                for each in self.transfers
            ],
            **({"moves": [[each.start, each.end] for each in self.moves]} if self.moves else {}),
            **({"all_reduce_runs": "beside"} if plan.bound.beside else {}),
            **({"passes": "forwards"} if plan.forwards_only else {}),
            **({"after": slices} if slices else {}),
            **({"costs": costs} if costs else {}),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Trace:
        """Return the trace from the data that `to_dict` made.

        Raises:
            FormatError: if the data are anything else.
        """
        return cls(**read(data))

    def plot(
        self,
        ax: Axes | None = None,
        *,
        width: float | Literal["beamer", "column", "page"] | None = None,
        colours: Mapping[Kind, str] | None = None,
        label: Callable[[Action], str] | None = None,
    ) -> Axes:
        """Draw the trace with matplotlib, on `ax` or on a new figure; return the axes.

        Args:
            ax: where to draw. A legend that does not fit into its axes is hidden: `ax.get_legend()` has its entries.
            width: of a new figure, as in `save`.
            colours: for each kind that has another colour than ours, its colour as `"#rrggbb"`: `{"F": "#4477aa"}`.
            label: what to write into an action's bar.
        """
        return show(self, "axes", ax, width, colours, label)

    def show(self) -> None:
        """Show the trace: in a notebook as a figure, elsewhere in the web browser."""
        show(self, "screen")

    def __eq__(self, other: object) -> bool:
        """Compare plan, times and unit."""
        if not isinstance(other, Trace):
            return NotImplemented
        mine, theirs = (
            (each.plan, each.unit, each.source, each.events, each.transfers, each.moves) for each in (self, other)
        )
        return mine == theirs

    def __hash__(self) -> int:
        return hash((self.plan, self.unit, self.events))

    def __str__(self) -> str:
        """Return a text timeline, without colour because a text may go to a file."""
        return show(self, "text")

    def __repr__(self) -> str:
        unit = f" {clean(self.unit)}" if self.unit else ""
        return (
            f"<{self.source} trace of {clean(self.name)}: makespan {self.makespan:g}{unit}, bubble {self.bubble:.1%}>"
        )

    def _repr_html_(self) -> str:
        return show(self, "html")

    def _repr_svg_(self) -> str:
        return show(self, "svg")
