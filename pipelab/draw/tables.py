"""Idle times, memory, frontiers and comparisons as tables."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import TYPE_CHECKING

from pipelab.draw import wording
from pipelab.draw.wording import number
from pipelab.errors import counted
from pipelab.simulation.memory import Held
from pipelab.table import Column, Table
from pipelab.trace.ledger import REASONS

if TYPE_CHECKING:
    from pipelab.catalogue.frontier import Frontier
    from pipelab.simulation.comparison import Comparison
    from pipelab.simulation.memory import MemoryUse
    from pipelab.trace.ledger import Ledger


def memory(use: MemoryUse) -> Table:
    """Return what each rank holds at its peak, part by part."""
    parts = [part.name for part in fields(Held) if part.name not in ("time", "action")]
    rows = [
        {"rank": rank, "peak": held.total, **{part: getattr(held, part) for part in parts}}
        for rank, held in enumerate(use.at_peak)
    ]
    show = "{:,}".format
    columns = [Column("rank"), Column("peak", "peak, bytes", show), *(Column(part, show=show) for part in parts)]
    return Table(rows, columns)


def frontier(found: Frontier) -> Table:
    """Return all blocks and schedules, from the least memory on."""
    best, keys = found.best, ("name", "held", "makespan", "bubble")
    rows = [
        {key: getattr(point, key) for key in keys} | {"marked": ["bubble"] * (point in best)}
        for point in sorted([*found.schedules, *found.points], key=lambda point: (point.held, point.makespan))
    ]
    columns = [
        Column("name", "schedule"),
        Column("held", "most micro-batches held", number),
        Column("makespan", "step time", number),
        Column("bubble", show=wording.percent),
    ]
    return Table(rows, columns, notes=["* nothing here that holds as little waits less"])


def in_full(comparison: Comparison) -> Table:
    """Return all values of a comparison, one line per trace."""
    return Table(
        [{key: value for key, value in asdict(row).items() if value is not None} for row in comparison.rows], []
    )


def readable(comparison: Comparison) -> Table:
    """Return a comparison's figures as readers see them."""
    heads, *lines = wording.table(comparison)
    return Table([dict(zip(heads, line, strict=True)) for line in lines], list(map(Column, heads)))


def ledger(found: Ledger) -> Table:
    """Return a ledger as a table, with a row for each rank and one for all, and the sum in a sentence."""
    total = found.total
    everyone = found.makespan * len(found)
    parts = [
        *zip(map(str, range(len(found))), found.work, found.idle, strict=True),
        ("all", sum(found.work), total),
    ]
    rows: list[dict[str, object]] = []
    for rank, work, idle in parts:
        lost, whole = sum(idle.values()), everyone if rank == "all" else found.makespan
        rows.append(
            {
                "rank": rank,
                "work": work,
                **{str(key): idle[key] for key in idle},
                "idle": lost,
                "share": lost / whole if whole else 0.0,
            }
        )
    reasons = [reason for reason in REASONS if reason in total]
    numbers = [Column(key, show=number) for key in ("work", *reasons, "idle")]
    unit = f" {found.unit}" if found.unit else ""
    terms = " + ".join(["work " + number(sum(found.work)), *(f"{key} {number(total[key])}" for key in reasons)])
    note = f"{counted(len(found), 'rank')} x {number(found.makespan)}{unit} = {number(everyone)}{unit} = {terms}"
    return Table(rows, [Column("rank"), *numbers, Column("share", "idle share", wording.percent)], notes=[note])
