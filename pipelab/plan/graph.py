"""The dependency graph of a plan, for those who want to walk it with networkx."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from pipelab.plan.actions import Action
from pipelab.plan.bound import BoundPlan

if TYPE_CHECKING:
    import networkx

__all__ = ["dependency_graph"]


def dependency_graph(bound: BoundPlan) -> networkx.DiGraph[Action]:
    """Return the graph that `Plan.graph` describes."""
    import networkx

    codes = bound.codes
    graph: networkx.DiGraph[Action] = networkx.DiGraph()
    names = {code: codes.action(code) for row in bound.rows for code in row}
    _add_nodes(graph, bound, names)
    for code, action in names.items():
        for value in codes.all_needs(code):
            for giver in codes.givers(value):
                if giver in names:
                    graph.add_edge(names[giver], action, kind="data", value=codes.value_name(value))
    for row in bound.rows:
        for before, after in pairwise(row):
            if graph.has_edge(names[before], names[after]):
                graph.edges[names[before], names[after]]["order"] = True
            else:
                graph.add_edge(names[before], names[after], kind="order")
    return graph


def _add_nodes(graph: networkx.DiGraph[Action], bound: BoundPlan, names: dict[int, Action]) -> None:
    """Add every action once, with its rank; an `R`, which several ranks share, with all of them."""
    for rank, row in enumerate(bound.rows):
        for code in row:
            if names[code].kind != "R":
                graph.add_node(names[code], rank=rank)
            elif names[code] in graph:
                graph.nodes[names[code]]["ranks"] += (rank,)
            else:
                graph.add_node(names[code], ranks=(rank,))
