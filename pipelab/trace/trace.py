"""Traces: what happened, or would happen, each action with its start and end.

A simulated and a measured trace are the same type, so drawing, measuring and grading exist once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipelab.errors import FormatError, clean
from pipelab.files import read_text, write
from pipelab.plan.plan import Plan
from pipelab.trace.events import Event, Transfer, union
from pipelab.trace.reading import FORMAT, VERSION, read
from pipelab.trace.waits import crossings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Event", "Trace", "Transfer"]


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
        delay: how long a value travels between ranks, as a function of the value's number.
        transfers: the transfers, if they were measured.
        lanes: what each rank ran on, such as `"cpu, thread 140…"`.
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
    _delay: Callable[[int], float] | None
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
        lanes: Sequence[str] = (),
        name: str | None = None,
        note: str = "",
    ) -> None:
        """Keep the plan and its times; everything else is derived from them when first read."""
        vars(self).update(plan=plan, starts=tuple(map(tuple, starts)), ends=tuple(map(tuple, ends)))
        vars(self).update(unit=unit, source=source, lanes=tuple(lanes), name=name or plan.name, note=note)
        vars(self).update(_delay=delay, _transfers=None if transfers is None else tuple(transfers))

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
        return tuple(
            Event(rank, action(code), start, end)
            for rank, (row, starts, ends) in enumerate(zip(self.plan.bound.rows, self.starts, self.ends, strict=True))
            for code, start, end in zip(row, starts, ends, strict=True)
        )

    def events_of(self, rank: int) -> tuple[Event, ...]:
        """Return one rank's events, in order."""
        return tuple(event for event in self.events if event.rank == rank)

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """Every value that crosses from one rank to another, in the order of the plan's rows."""
        if self._transfers is not None:
            return self._transfers
        return crossings(self.plan.bound, self.ends, self._delay)

    @cached_property
    def start(self) -> float:
        """When the first action started."""
        return min((starts[0] for starts in self.starts if starts), default=0.0)

    @cached_property
    def end(self) -> float:
        """When the last action ended."""
        return max((max(ends) for ends in self.ends if ends), default=0.0)

    @property
    def makespan(self) -> float:
        """From the first start to the last end, in `unit`."""
        return self.end - self.start

    @cached_property
    def spans(self) -> tuple[float, ...]:
        """For each rank, the time from its first start to its last end, in `unit`."""
        rows = zip(self.starts, self.ends, strict=True)
        return tuple(max(ends, default=0.0) - min(starts, default=0.0) for starts, ends in rows)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """For each rank, how long it was working, in `unit`; actions that share a slot count once."""
        return tuple(union(starts, ends) for starts, ends in zip(self.starts, self.ends, strict=True))

    @property
    def bubble(self) -> float:
        """The idle share of all rank time: `1 - busy / (ranks * makespan)`, from 0 to 1.

        Some papers divide by something else: `bubbles` has the four in use.
        """
        whole = self.ranks * self.makespan
        return 1 - sum(self.busy) / whole if whole else 0.0

    @property
    def bubbles(self) -> dict[str, float]:
        """The idle time divided by what four sources divide it by, under the name of that.

        - `"ideal"`: idle over busy time; may be more than 1. Megatron-LM (Narayanan et al. 2021, arXiv:2104.04473,
          section 2.2). For GPipe and 1F1B `(P - 1) / M`.
        - `"total"`: the idle share of the makespan, which is `bubble`. GPipe (Huang et al. 2019, arXiv:1811.06965,
          section 2.3). For GPipe and 1F1B `(P - 1) / (M + P - 1)`.
        - `"span"`: the idle share of the longest time that a rank has from its first start to its last end. Zero bubble
          (Qi et al. 2024, arXiv:2401.10241), whose optimizers need not wait for one another.
        - `"internal"`: the idle share of each rank's own such time: what remains if its start and its end are filled by
          other steps. For GPipe and 1F1B `(P - 1) / (2 M + P - 1)`.

        Numbers of two sources compare only if both are of one name.

        Example:
            >>> import pipelab
            >>> bubbles = pipelab.simulate(pipelab.OneFOneB(ranks=4, microbatches=8)).bubbles
            >>> {name: round(value, 3) for name, value in bubbles.items()}
            {'ideal': 0.375, 'total': 0.273, 'span': 0.273, 'internal': 0.158}
        """
        busy, own = sum(self.busy), sum(self.spans)
        longest = self.ranks * max(self.spans, default=0.0)
        return {
            "ideal": (self.ranks * self.makespan - busy) / busy if busy else 0.0,
            "total": self.bubble,
            "span": 1 - busy / longest if longest else 0.0,
            "internal": 1 - busy / own if own else 0.0,
        }

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """For each rank, the most stage activations held at once.

        Each forward adds one. The full backward releases it, or the weight gradient if the backward is split.
        """
        return tuple(max([0, *self.plan.bound.in_flight(rank)]) for rank in range(self.ranks))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the trace; the suffix is the format: `html`, `svg`, `png`, `pdf`, `json` or `txt`.

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
        """
        path = Path(path)
        if path.suffix.lower() == ".json":
            return write(path, json.dumps(self.to_dict()) + "\n")
        from pipelab import draw

        return draw.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read a trace from a `json` file that `save` wrote.

        Raises:
            FormatError: if the file does not hold a trace; the message says what is wrong and where.
        """
        text = read_text(path)
        try:
            return cls.from_dict(json.loads(text))
        except RecursionError:
            raise FormatError(f"{path} is not a trace saved by pipelab: its lists are nested too deeply") from None
        except (ValueError, FormatError) as error:  # the former: not JSON
            raise FormatError(f"{path} is not a trace saved by pipelab: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Return the trace as plain data, as in `json` files."""
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
                for each in self.transfers
            ],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Trace:
        """Return the trace from the data that `to_dict` made.

        Raises:
            FormatError: if the data are anything else.
        """
        return cls(**read(data))

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the trace with matplotlib, on `ax` or on a new figure; return the axes."""
        from pipelab.draw import figure

        return figure.plot(self, ax)

    def show(self) -> None:
        """Show the trace: in a notebook as a figure, elsewhere in the web browser."""
        from pipelab import draw

        draw.show(self)

    def __eq__(self, other: object) -> bool:
        """Compare plan, times and unit."""
        if not isinstance(other, Trace):
            return NotImplemented
        mine, theirs = ((each.plan, each.unit, each.source, each.events, each.transfers) for each in (self, other))
        return mine == theirs

    def __hash__(self) -> int:
        return hash((self.plan, self.unit, self.events))

    def __str__(self) -> str:
        """Return a text timeline, without colour because a text may go to a file."""
        from pipelab.draw import text

        return text.timeline(self, colour=False)

    def __repr__(self) -> str:
        unit = f" {clean(self.unit)}" if self.unit else ""
        return (
            f"<{self.source} trace of {clean(self.name)}: makespan {self.makespan:g}{unit}, bubble {self.bubble:.1%}>"
        )

    def _repr_svg_(self) -> str:
        """Return the figure that a notebook shows."""
        from pipelab.draw import figure

        return figure.svg(self)
