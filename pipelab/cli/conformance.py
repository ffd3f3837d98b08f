"""What `pipelab conformance` shows: a table for the installed torch, and both orders if they differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from pipelab.cli.printing import titled, wrote
from pipelab.conformance.references import Grid
from pipelab.conformance.report import Line, Numbers, Report, conformance, count
from pipelab.files import write

_HEADINGS = ("schedule", "PyTorch's Schedule…", "sizes", "orders", "wire", "runs", "numbers")
_LEGEND = (
    "orders: action for action, as PyTorch executes them; an overlapped pair counts as its forward, then its backward. "
    "wire: sends and receives stand where PyTorch's _add_send_recv puts them, and where its runtime runs them. "
    f"runs: steps of both on the same model and batch, where ranks x micro-batches is at most {Grid().most_work}; "
    "their gradients and losses are the numbers. Both weigh each micro-batch's loss by 1/M before its backward "
    "(scale_grads=False); PyTorch's default divides the summed gradients instead, which rounds otherwise unless M is a "
    "power of two."
)
_MOST_SHOWN = 3


def show_conformance(
    names: Sequence[str], grid: Grid, processes: Sequence[int] = (), save: Path | None = None
) -> Report:
    """Compare, print the table and the differences, and write the table to `save` if given."""
    console = Console()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("comparing with PyTorch", total=count(names, grid))
        report = conformance(names, grid, processes, lambda: progress.advance(task))
    table = titled(_title(report))
    for heading in _HEADINGS:
        table.add_column(heading, justify="right" if heading in ("sizes", "runs") else "left")
    for line in report.lines:
        table.add_row(*_cells(line))
    console.print(table)
    for note in [_LEGEND, *_notes(report)]:
        console.print(note, style="dim", highlight=False, markup=False)
    for line in report.lines:
        differences = line.differences + line.transfers
        for difference in differences[:_MOST_SHOWN]:
            console.print(f"\n{difference}", soft_wrap=True, highlight=False, markup=False)
        more = len(differences) - _MOST_SHOWN
        if more > 0:
            console.print(f"… and {more} more sizes of {line.schedule}")
    if save is not None:
        wrote(write(save, markdown(report)))
    return report


def markdown(report: Report) -> str:
    """Return the table as Markdown."""
    rows = [_HEADINGS, ["---"] * len(_HEADINGS), *map(_cells, report.lines)]
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    notes = [f"- {note}" for note in [_LEGEND, *_notes(report)]]
    return "\n".join([f"**{_title(report)}**", "", *lines, "", *notes, ""])


def _title(report: Report) -> str:
    return f"pipelab beside PyTorch: torch {report.torch}, {report.date}"


def _cells(line: Line) -> list[str]:
    if not line.sizes:
        return [line.schedule, line.reference, "0", "", "", "", ""]
    runs = line.numbers
    return [
        line.schedule,
        line.reference,
        str(line.sizes),
        *(f"{len(each)} differ" if each else "equal" for each in (line.differences, line.transfers)),
        str(len(runs)),
        _numbers(runs),
    ]


def _numbers(runs: Sequence[Numbers]) -> str:
    """Return how equal gradients and losses are."""
    if not all(each.same_gradients for each in runs):
        return f"{max(each.difference for each in runs):.1e}"
    return "" if not runs else "bit-equal" if all(each.same_loss for each in runs) else "loss differs"


def _notes(report: Report) -> list[str]:
    """Return sentences on the sizes that one side refuses, and on the processes that PyTorch ran in."""
    notes = []
    for line in report.lines:
        if line.refused:
            words = line.refusal.partition(": ")[2]
            more = f"pipelab accepts {_sizes(line.refused)} more"
            notes.append(f"{line.schedule}: {more}, which PyTorch does not run: {words}")
        if line.refused_here:
            notes.append(f"{line.schedule}: pipelab refuses {_sizes(line.refused_here)}: {line.refusal_here}")
        if line.not_ours:
            notes.append(f"{line.schedule}: PyTorch accepts {_sizes(line.not_ours)} more.")
    processes = sorted({each.processes for line in report.lines for each in line.numbers} - {1})
    where = f", and in {' and '.join(map(str, processes))} processes with gloo" if processes else ""
    ran = f"PyTorch ran in one process{where}." if report.compared else "Nothing could be compared: exit code 1."
    return [ran, *dict.fromkeys(notes)]  # two references may give the same note


def _sizes(number: int) -> str:
    return f"{number} size{'s' if number != 1 else ''}"
