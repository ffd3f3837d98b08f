"""Plans: every rank's ordered actions, bound to stages."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence, Sized
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pipelab.display import show
from pipelab.errors import FormatError, UsageError, require_size, require_slots
from pipelab.files import read_text
from pipelab.plan.actions import EVERY_KIND, Action, Item, Pair, Posting, halves_of
from pipelab.plan.all_reduce import with_reduces
from pipelab.plan.binding import After, Place
from pipelab.plan.bound import MOST_ACTIONS, BoundPlan, endless_limit, is_endless, named_sizes, read
from pipelab.plan.csv_notation import lines_of, parse_row, read_rows, write_rows
from pipelab.plan.fault import readable, shorten

if TYPE_CHECKING:
    import networkx

    from pipelab.plan.actions import Kind

_ACTIONS = {Action, Pair}
_LONGEST_ROW = 1 << 17
"""Where a generator is cut off when the plan's size, and so `endless_limit`, is not known yet."""


class Costs(Protocol):
    """What actions cost: a `pipelab.Cost`."""

    def times(self, plan: Plan) -> dict[Kind, list[float]]:
        """Return, for each kind of action, its time on every stage of a plan."""


@dataclass(frozen=True, eq=False, init=False)
class Plan:
    """Every rank's ordered actions, bound to stages. A plan is immutable. Making one raises no error for faults.

    `pipelab.check` returns its faults; `pipelab.simulate` and `pipelab.Pipeline` refuse a plan with faults.

    Args:
        rows: for each rank, its actions in order. An action without a stage gets the rank's only stage for its
            micro-batch.
        stages: how many stages there are; by default, as many as the rows name.
        microbatches: how many micro-batches there are; by default, as many as the rows name.
        place: which rank runs a stage, as `place(microbatch, stage)`; by default, the rank of each forward.
        name: what messages and drawings call the plan.
        after: which micro-batches come before one on a stage, because they are earlier slices of its sequence, as
            `after(microbatch, stage)`; by default, none.
        forwards_only: whether it is for evaluation, without backwards: then the rows drop what only training needs. See
            `forwards`.

    Example:
        >>> from pipelab import B, F, Plan
        >>> plan = Plan([[F(0), F(1), B(0), B(1)], [F(0), B(0), F(1), B(1)]])
        >>> plan
        Plan(ranks=2, stages=2, microbatches=2)
        >>> plan.rows[1]
        (1F0, 1B0, 1F1, 1B1)
        >>> plan == Plan.parse(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"])
        True

    Raises:
        UsageError: if `stages` or `microbatches` is given and is not a positive whole number, or if the plan is too
            large: at most 4,194,304 stages times micro-batches, and 16,777,216 actions.
        FormatError: if the rows are texts; `Plan.parse` reads those.
    """

    written: tuple[tuple[object, ...], ...]
    """The rows as the author wrote them, mistakes included, without the stages and all-reduces that pipelab adds."""
    stages: int
    """How many stages there are."""
    microbatches: int
    """How many micro-batches there are."""
    place: Place | None
    """The argument `place`: which rank runs a stage, as `place(microbatch, stage)`."""
    name: str
    """What messages call the plan."""
    after: After | None
    """The argument `after`: which micro-batches come before one on a stage, as `after(microbatch, stage)`."""
    forwards_only: bool
    """Whether it is for evaluation, without backwards."""
    postings: tuple[tuple[tuple[int, Posting], ...], ...]
    """By rank, the sends and receives that its row lists, each with the number of actions before it; mostly empty."""

    def __init__(
        self,
        rows: Iterable[Iterable[object]],
        stages: int | None = None,
        microbatches: int | None = None,
        place: Place | None = None,
        name: str | None = None,
        after: After | None = None,
        forwards_only: bool = False,
    ) -> None:
        """Read the rows without checking them; endless ones are cut off."""
        stages = None if stages is None else require_size("stages", stages)
        microbatches = None if microbatches is None else require_size("microbatches", microbatches)
        limit = _LONGEST_ROW
        if stages is not None and microbatches is not None:
            limit = endless_limit(stages, microbatches)
        taken = _all_taken(rows, limit)
        if stages is None or microbatches is None:
            whole_rows = [row for row, whole in taken if whole]
            stages, microbatches = named_sizes(whole_rows, len(taken), stages, microbatches)
        require_slots(stages, microbatches)
        written = tuple(_forwards(row) if forwards_only else row for row, _ in taken)
        vars(self).update(written=written, stages=stages, microbatches=microbatches, place=place, after=after)
        vars(self).update(forwards_only=bool(forwards_only), postings=())
        vars(self).update(name=str(name or repr(self)))

    @classmethod
    def parse(cls, rows: str | Iterable[str], name: str | None = None, after: After | None = None) -> Plan:
        """Read a plan in PyTorch's notation, from one text per rank, or from one text as `print(plan)` shows it.

        Blanks or commas separate actions. In one text, line ends or semicolons separate ranks. The notation has no word
        for slices of sequences: `after` says which they are, as for `Plan`.

        If rows list sends and receives, such as `0SEND_F0` and `1RECV_F0`, the plan keeps them: `check` says if one is
        missing, and with which transports they hang. The order `"pytorch"` then means theirs.

        Example:
            >>> Plan.parse(["0F0 0B0", "1F0 1B0"]).stages
            2
            >>> Plan.parse("rank 0 | 0F0 0B0; rank 1 | 1F0 1B0") == Plan.parse("0F0 0B0; 1F0 1B0")
            True

        Raises:
            FormatError: if a word is not an action, with its rank and position; or if a row names another rank.
        """
        lines = lines_of(rows) if isinstance(rows, str) else list(rows) if isinstance(rows, Iterable) else [rows]
        return cls.of_words([parse_row(line, rank) for rank, line in enumerate(lines)], name, after)

    @classmethod
    def of_words(
        cls, rows: Sequence[Sequence[Item | Posting]], name: str | None = None, after: After | None = None
    ) -> Plan:
        """Make a plan of rows that were read, which may list sends and receives between the actions."""
        plan = cls([[each for each in row if not isinstance(each, Posting)] for row in rows], name=name, after=after)
        places = [[(at, each) for at, each in enumerate(row) if isinstance(each, Posting)] for row in rows]
        found = tuple(tuple((at - before, each) for before, (at, each) in enumerate(row)) for row in places)
        vars(plan).update(postings=found if any(found) else ())
        return plan

    @classmethod
    def from_csv(cls, path: str | os.PathLike[str], after: After | None = None) -> Plan:
        """Read a file in PyTorch's CSV notation (`compute_only` or `compute_comms`, see `parse`), one line per rank.

        Empty cells are idle. A rank without actions is a line of them, or `""`; empty lines at the end of the file are
        ignored. Blanks may replace commas, and `rank 0 |` before the first action, as in what `print(plan)` shows.
        `after` says which micro-batches are slices, as for `Plan`: the notation has no word for it.

        Raises:
            FormatError: if a cell is not an action, with its line and column; if a line between others is empty; or
                if the file is not text in UTF-8.
        """
        return cls.of_words(read_rows(read_text(path), str(path)), Path(path).name, after)

    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """Write the plan in PyTorch's CSV notation (`compute_only`), which `from_csv` reads back; return the path.

        PyTorch's runtime runs such a file if every stage is on one rank, every rank has a stage, only `F`, `B`, `I`,
        `W` and pairs are listed, and the last of several stages runs its forwards in ascending order. Only pipelab runs
        a plan with replicated stages: PyTorch has a word for their all-reduces, `2REDUCE_GRAD`, but its runtime refuses
        a stage on two ranks.

        Warns:
            UserWarning: if the last stage's forwards are not in ascending order. PyTorch's runtime numbers losses in
                the order of the forwards, so it would start backwards from the wrong losses. Or if the plan has slices
                of sequences, which the file does not say.
        """
        if self.after is not None and self.bound.codes.more_needs:
            warnings.warn(
                "the file does not say which micro-batches are slices of one sequence: PyTorch's notation has no word "
                "for it\n  try: Plan.from_csv(path, after=plan.after); or save a trace as .json, which says it",
                stacklevel=2,
            )
        write_rows(path, self.rows)
        return Path(path)

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.written)

    @cached_property
    def rows(self) -> tuple[tuple[Item, ...], ...]:
        """Every rank's actions, bound to stages, with every all-reduce that a replicated stage needs.

        If no rank lists a replicated stage's `R`, pipelab inserts it right after the stage's last gradient on each of
        its ranks; if that would be a deadlock, at the ends of the rows, the last stage first. Items that cannot be
        bound are left as they are.
        """
        bound = self.bound
        rows: list[tuple[Item, ...]] = []
        for rank, row in enumerate(self.written):
            items = bound.items(rank)
            if bound.faults:
                places = dict.fromkeys(bound.placed(rank).values())
                mixed = list(row)
                for position, item in zip(places, items, strict=True):
                    if isinstance(item, Pair) or not isinstance(row[position], Pair):  # else: half of a pair
                        mixed[position] = item
                items = tuple(mixed)  # type: ignore[arg-type]  # a faulty plan shows the items as written
            rows.append(items)
        return tuple(rows)

    @cached_property
    def bound(self) -> BoundPlan:
        """The plan as codes, for checking, simulation and the engines. Made when first read."""
        sizes = self.stages, self.microbatches, self.place, self.after
        bound = with_reduces(BoundPlan.bind(self.written, *sizes, forwards_only=self.forwards_only))
        bound.postings = self.postings
        return bound

    def with_rows(self, rows: Iterable[Iterable[object]], name: str | None = None) -> Plan:
        """Return the same stages and micro-batches, in the same places, with other rows, which the name says.

        Example:
            >>> Plan.parse("0F0 0F1 0B0 0B1").with_rows([[Action.parse("0F0")]])
            Plan(ranks=1, stages=1, microbatches=2)
        """
        sizes = self.stages, self.microbatches, self.place
        return Plan(rows, *sizes, name or f"{self.name}, other rows", self.after, self.forwards_only)

    def forwards(self) -> Plan:
        """Return the plan of an evaluation: its forwards alone, in their order, with the gathers that they need.

        `check` asks for no backwards in it, no forward holds an activation, and a `Pipeline` of it can only evaluate.

        Example:
            >>> import pipelab
            >>> plan = pipelab.OneFOneB(ranks=2, microbatches=3).plan().forwards()
            >>> print(plan)
            rank 0 | 0F0 0F1 0F2
            rank 1 | 1F0 1F1 1F2
            >>> pipelab.simulate(plan).bubble == (2 - 1) / (3 + 2 - 1)
            True
        """
        sizes = self.stages, self.microbatches, self.place, f"{self.name}, forwards", self.after
        return self if self.forwards_only else Plan(self.rows, *sizes, forwards_only=True)

    def reducing(self, beside: bool) -> Plan:
        """Return the plan, which is legal, with its all-reduces beside computing, or each in its rank's row."""
        if beside == self.bound.beside:
            return self
        if not beside:
            return self.with_rows(self.written, self.name)
        plan = copy(self)
        vars(plan)["bound"] = self.bound.with_reduces_beside()
        return plan

    @property
    def replicas(self) -> dict[int, tuple[int, ...]]:
        """For each stage, the ranks that hold it: more than one if it is replicated."""
        return self.bound.replicas

    def graph(self) -> networkx.DiGraph[Action]:
        """Return the dependency graph.

        Nodes are actions, with the attribute `rank` (an `R`: one node, with `ranks`), and with `moves` if gathers,
        offloads and others surround it in its row. An edge from an action to one that needs its value has `kind="data"`
        and `value`, such as `"out(0, 1)"`. An edge along a rank's row has `kind="order"`. If an action needs the value
        of the one right before it, one edge stands for both: `kind="data"`, `order=True`.

        Example:
            >>> graph = Plan.parse(["0F0 0B0", "1F0 1B0"]).graph()
            >>> for producer, consumer, edge in graph.edges(data=True):
            ...     print(producer, "gives", edge["value"], "to", consumer)
            0F0 gives out(0, 0) to 0B0
            0F0 gives out(0, 0) to 1F0
            1F0 gives out(0, 1) to 1B0
            1B0 gives gin(0, 1) to 0B0
        """
        import networkx

        bound, codes = self.bound, self.bound.codes
        graph: networkx.DiGraph[Action] = networkx.DiGraph()
        names = {code: codes.action(code) for row in bound.computing for code in row}
        for code, action in names.items():
            where = {"ranks": tuple(bound.reduces[code])} if codes.collective[code] else {"rank": bound.rank_of[code]}
            graph.add_node(action, **where)
        for rank in range(self.ranks if bound.moves else 0):
            for code, listed in bound.with_moves(rank).items():
                if moves := tuple(codes.action(each) for each in listed if each != code):
                    graph.add_node(names[code], moves=moves)
        for code, action in names.items():
            given = ((giver, value) for value in codes.all_needs(code) for giver in codes.givers(value))
            for giver, value in given:
                if giver in names:
                    graph.add_edge(names[giver], action, kind="data", value=codes.value_name(value))
        for row in bound.computing:
            for before, after in pairwise(row):
                if graph.has_edge(names[before], names[after]):
                    graph.edges[names[before], names[after]]["order"] = True
                else:
                    graph.add_edge(names[before], names[after], kind="order")
        return graph

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Draw the rows; if the plan has faults, draw how far it runs, and why not further.

        The suffix is the format: `html`, `svg`, `png`, `pdf`, `txt`, or `csv` in PyTorch's notation.

        Example:
            >>> import tempfile
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     print(Plan.parse("0F0 0B0").save(Path(folder) / "plan.txt").read_text(encoding="utf-8"), end="")
            rank 0 | 0F0 0B0

        Returns:
            The path.

        Raises:
            FormatError: if the suffix is another one.
        """
        return show(self, "save", path)

    def save_graph(self, path: str | os.PathLike[str], cost: Costs | None = None) -> Path:
        """Draw the dependency graph with Graphviz: stages as rows, ranks as colours, the critical path bold.

        Args:
            path: the file to write; its suffix is the format: `dot`, `svg`, `png` or `pdf`.
            cost: what the actions cost, for the critical path; by default forward 1, backward 2.

        Returns:
            The path.

        Raises:
            FormatError: if the suffix is another one, or if Graphviz's program `dot` is not installed (the DOT text
                is still written).
            ScheduleError: if the plan has faults.
        """
        return show(self, "graph", path, cost)

    def __eq__(self, other: object) -> bool:
        """Compare sizes, rows, placement and slices; the name does not matter."""
        if not isinstance(other, Plan):
            return NotImplemented
        mine, theirs = (
            (each.forwards_only, each.rows, each.bound.rank_of_slot, each.bound.codes.more_needs, each.stages)
            for each in (self, other)
        )
        return mine == theirs

    def __hash__(self) -> int:
        return hash((self.stages, self.microbatches, self.rows))

    def __repr__(self) -> str:
        only = ", forwards_only=True" * self.forwards_only
        return f"Plan(ranks={self.ranks}, stages={self.stages}, microbatches={self.microbatches}{only})"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the name, and the rows in the colours of drawings."""
        return show(self, "html")

    def __str__(self) -> str:
        """Return the rows, one line per rank, with the middle of long ones left out."""
        return "\n".join(f"rank {rank} | {_elided(row)}" for rank, row in enumerate(self.rows))


def _all_taken(rows: Iterable[Iterable[object]], limit: int) -> list[tuple[tuple[object, ...], bool]]:
    """Return the rows as `_take` does; refuse texts, and more actions than a plan may have."""
    if isinstance(rows, str) or (isinstance(rows, Sequence) and any(isinstance(row, str) for row in rows)):
        text = shorten(rows if isinstance(rows, str) else list(rows))
        raise FormatError(f"Plan takes lists of actions, got text: Plan.parse({text}) reads it")
    taken: list[tuple[tuple[object, ...], bool]] = []
    room = MOST_ACTIONS
    for row in rows:
        taken.append(_take(row, limit, room))
        room -= max(1, len(taken[-1][0]))
        if room < 0:
            raise UsageError(
                f"rows 0 to {len(taken) - 1} list more than {MOST_ACTIONS} actions, the most that a plan may have\n"
                "  try: end every loop after the last backward"
            )
    return taken


def _take(row: Iterable[object], limit: int, room: int) -> tuple[tuple[object, ...], bool]:
    """Return a row, cut off at `limit` if it may not end, and one past `room`; and whether that is the whole row."""
    ends = isinstance(row, Sized)
    taken = tuple(islice(row, room + 1) if ends else islice(read([], row, limit), room + 1))
    if not set(map(type, taken)) <= _ACTIONS:
        taken = tuple(item if type(item) in _ACTIONS else readable(item) for item in taken)
    return taken, ends or not is_endless(taken, limit)


def _forwards(row: Sequence[object]) -> tuple[object, ...]:
    """Return a row's forwards, and each gather, with its free, between which there is one; and what is no action."""
    kept = dict[int, object]()
    gathers = dict[int | None, int]()
    for at, (item, *_) in enumerate(map(halves_of, row)):
        if not isinstance(item, Action) or item.kind not in EVERY_KIND:
            kept[at] = item
        elif item.traits.gathers:
            gathers[item.stage] = at
        elif item.traits.releases == "gathered" and gathers.pop(item.stage, None) in kept:
            kept[at] = item
        elif item.traits.forward:
            kept[at] = item
            if item.stage in gathers:
                kept[gathers[item.stage]] = row[gathers[item.stage]]
    return tuple(item for _, item in sorted(kept.items(), key=itemgetter(0)))


def _elided(row: Sequence[object], most: int = 24) -> str:
    """Return a row as text, with its middle left out if it is long."""
    words = [str(item) for item in row]
    if len(words) <= most:
        return " ".join(words)
    half = most // 2
    return f"{' '.join(words[:half])} … {len(words) - 2 * half} more … {' '.join(words[-half:])}"
