"""The dependency graph of a plan, drawn by Graphviz."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelab.draw import colours
from pipelab.errors import FormatError, clean, require_suffix
from pipelab.files import write
from pipelab.plan.actions import KINDS
from pipelab.simulation.clock import simulate
from pipelab.simulation.cost import Cost

if TYPE_CHECKING:
    import os

    from pipelab.plan.actions import Action
    from pipelab.plan.plan import Plan
    from pipelab.trace.trace import Trace

_TEXT = (".dot", ".gv")
_PICTURES = (".svg", ".png", ".pdf")
SUFFIXES = _TEXT + _PICTURES
"""The formats of `save`."""
_MOST = 2_000
"""How many actions a picture may have: dot takes minutes for more, and it could not be read."""

_INSTALL = """  Debian, Ubuntu: apt install graphviz
  macOS:          brew install graphviz
  conda:          conda install graphviz"""


def dot(plan: Plan, cost: Cost | None = None) -> str:
    """Return the dependency graph in Graphviz's DOT language.

    Stages are rows, time goes from left to right, colours are ranks. Solid edges carry a value, dashed ones are the
    order along a rank, and bold ones are the critical path, which decides the makespan.
    """
    import graphviz

    trace = simulate(plan, cost)
    path = [event.action for event in trace.critical_path if event.action.traits.computes]
    drawing = graphviz.Digraph(graphviz.escape(clean(plan.name)))
    drawing.attr(label=graphviz.escape(_caption(trace)) + "\\n ", labelloc="t", labeljust="l", fontname="Helvetica")
    drawing.attr(layout="neato", inputscale="72", splines="true", outputorder="edgesfirst")
    drawing.attr("node", fontname="Helvetica", shape="box", style="filled", margin="0.12,0.06")
    drawing.attr("edge", fontname="Helvetica", fontsize="9", arrowsize="0.7", color="#555555")
    _rows(drawing, plan, trace, set(path))
    _edges(drawing, plan, set(itertools.pairwise(path)))
    return str(drawing.source)


def save(plan: Plan, path: str | os.PathLike[str], cost: Cost | None = None) -> Path:
    """Write the dependency graph to a file; its suffix is `dot`, `gv`, `svg`, `png` or `pdf`."""
    import graphviz

    path = Path(path)
    suffix = require_suffix(path, "a dependency graph", SUFFIXES)
    actions = sum(map(len, plan.bound.computing))
    if suffix in _PICTURES and actions > _MOST:
        raise FormatError(
            f"{path.name}: the graph of {clean(plan.name)} has {actions:,} actions, a picture at most {_MOST:,}: "
            f"draw fewer micro-batches (the pattern repeats), or save {path.stem}.dot for a viewer of large graphs"
        )
    source = dot(plan, cost)
    if suffix in _TEXT:
        return write(path, source)
    try:
        return write(path, graphviz.Source(source).pipe(format=suffix[1:]))
    except graphviz.ExecutableNotFound:
        text = write(path.with_suffix(".dot"), source)
        raise FormatError(
            f"{path.name} needs Graphviz's program dot, which is not installed. Its input is written to {text};\n"
            f"install Graphviz and save again, or run: dot -T{suffix[1:]} {text} -o {path}\n{_INSTALL}"
        ) from None


def _caption(trace: Trace) -> str:
    unit = trace.unit or "units"
    return clean(
        f"{trace.plan.name}: solid = needs the value, dashed = order on a rank, "
        f"bold = critical path ({trace.makespan:g} {unit})"
    )


def _rows(drawing: Any, plan: Plan, trace: Trace, critical: set[Action]) -> None:
    """Add a row per stage: its name, then its actions, with equal starting times in one column.

    Positions are pinned, because dot's own layout places rows by their edges, and a backward's edges point up.
    """
    started: dict[Action, float] = {}
    for event in trace.events:
        started.setdefault(event.action, event.start)
    nodes = plan.graph().nodes
    columns = _columns(started)
    for stage in range(plan.stages):
        ranks = plan.replicas[stage]
        who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        row = sorted((action for action in nodes if action.stage == stage), key=started.__getitem__)
        with drawing.subgraph() as line:
            line.attr(rank="same")
            line.node(f"stage-{stage}", label=f"stage {stage}\\n{who}", shape="plaintext", style="", pos=_at(-1, stage))
            for action in row:
                holders = nodes[action].get("ranks") or (nodes[action]["rank"],)
                tints = ":".join(colours.RANKS[rank % len(colours.RANKS)] for rank in holders)
                where = f"\\nrank {holders[0]}" if len(ranks) > 1 and len(holders) == 1 else ""
                moves = "".join(f"\\n{move}" for move in nodes[action].get("moves", ()))
                line.node(
                    str(action),
                    label=f"{action}{where}{moves}",
                    fillcolor=tints,
                    style="striped" if len(holders) > 1 else "filled",
                    penwidth="2.6" if action in critical else "0.8",
                    pos=_at(columns[action], stage),
                )


def _columns(started: dict[Action, float]) -> dict[Action, int]:
    """Return the column of every action: one per starting time, and more if a row has several actions at one time."""
    columns: dict[Action, int] = {}
    taken: dict[int | None, int] = {}  # stage -> the last column that its row has used
    column, time = -1, float("-inf")
    for action in sorted(started, key=lambda each: (started[each], KINDS.index(each.kind))):
        if started[action] > time or taken.get(action.stage, -1) >= column:
            column, time = column + 1, started[action]
        columns[action] = taken[action.stage] = column
    return columns


def _at(column: int, stage: int) -> str:
    """Return a node's pinned position, in points."""
    return f"{column * 112},{-stage * 105}!"


def _edges(drawing: Any, plan: Plan, critical: set[tuple[Action, Action]]) -> None:
    """Add the dependencies and the order along each rank."""
    for giver, needer, edge in plan.graph().edges(data=True):
        look: dict[str, str] = {}
        if edge["kind"] == "data":
            look["label"] = f" {edge['value']} "
        else:
            look["style"] = "dashed"
        if (giver, needer) in critical:
            look |= {"penwidth": "3", "color": "#000000"}
        drawing.edge(str(giver), str(needer), **look)
