"""What holds of every measured trace."""

from __future__ import annotations

import re
from itertools import product


def assert_obeys(trace, plan, slack=0.0):
    """Every action once, an all-reduce once on each of its ranks; nothing before what it needs or what precedes it.

    The clocks of two ranks may be apart by `slack`.
    """
    graph = plan.graph()
    at = {(event.action, event.rank): event for event in trace.events}
    ranks = {action: each["ranks"] if action.kind == "R" else (each["rank"],) for action, each in graph.nodes.items()}
    assert len(at) == len(trace.events)
    assert set(at) == {(action, rank) for action in ranks for rank in ranks[action]}
    assert all(event.start <= event.end for event in trace.events)
    for before, after, edge in graph.edges(data=True):
        for one, other in product(ranks[before], ranks[after]):
            # An all-reduce starts when all its ranks have come; it may end on one of them sooner than on another.
            if one == other or edge["kind"] == "data" or (after.kind == "R" and one in ranks[after]):
                apart = slack if one != other else 0.0
                assert at[before, one].end <= at[after, other].start + apart, f"{after} started before {before} ended"
    assert trace.start == 0
    assert trace.unit == "ms"
    assert trace.source == "measured"


def threads_of(trace):
    """Return the thread that each lane names."""
    return [re.fullmatch(r"cpu, thread (\d+)", lane).group(1) for lane in trace.lanes]
