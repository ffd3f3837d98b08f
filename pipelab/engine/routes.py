"""Which values travel between traced stages: a value that skips stages is carried through them."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from pipelab.errors import SplitError

__all__ = ["Route", "routes_of"]


@dataclass(slots=True)
class Route:
    """How one traced stage is fed.

    Attributes:
        takes: the values that arrive, in order: the model's arguments, or what the stage before gives.
        arguments: those that the traced stage is called with.
        makes: the values it makes, and their places in its result; `None` where the result is the value.
        gives: the values that later stages need; none on the last stage, which gives its result.
    """

    takes: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    makes: dict[str, int | None] = field(default_factory=dict)
    gives: list[str] = field(default_factory=list)


def routes_of(graph: fx.Graph) -> list[Route]:
    """Return the route of every stage, from the graph that calls one stage after the other.

    Raises:
        SplitError: if the model returns a value of an earlier stage than the last.
    """
    arriving = [node.name for node in graph.nodes if node.op == "placeholder"]
    stages: dict[str, Route] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            stages[node.name] = Route(arguments=[each.name for each in node.args], makes={node.name: None})
        elif node.op == "call_function":  # one part of a stage's result
            result, place = node.args
            stages[result.name].makes[node.name] = place
        elif node.op == "output":
            last = list(stages.values())[-1]
            outside = [each.name for each in node.all_input_nodes if each.name not in last.makes]
            if outside:
                raise SplitError(
                    f"the model returns {', '.join(outside)}, which an earlier stage than the last makes: return what "
                    "the last layers make, or give a list of stage modules"
                )
    routes = list(stages.values())
    for index, route in enumerate(routes):
        later = {name for each in routes[index + 1 :] for name in each.arguments}
        route.takes = arriving
        arriving = route.gives = [name for name in (*arriving, *route.makes) if name in later]
    return routes
