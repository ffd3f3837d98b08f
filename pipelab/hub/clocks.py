"""The clocks of several machines, aligned by the values that went from one to another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

from pipelab.errors import FormatError
from pipelab.plan.bound import BoundPlan

_NOISE = (0.0, 10.0, 100.0)
"""By how many microseconds a value may seem to come before it was sent: each process reads the clock by itself."""


class Times(NamedTuple):
    """When an action ran, and when the value that it received was there, in microseconds of its rank's clock."""

    start: float
    end: float
    arrived: float | None

    def moved(self, by: float) -> Times:
        """Return the same on another clock, in milliseconds."""
        arrived = None if self.arrived is None else (self.arrived + by) / 1e3
        return Times((self.start + by) / 1e3, (self.end + by) / 1e3, arrived)


def offsets_of(
    bound: BoundPlan, hosts: Sequence[str | None], times: Sequence[Sequence[Times]]
) -> tuple[list[float], str]:
    """Return what to add to the clock of each rank so that no value is used before it was made; and a remark.

    Ranks on one machine share a clock. Each value that goes from one machine to another says how far the other's clock
    must be ahead at least, and each that comes back, at most. In between, the middle is taken.
    """
    early = _early(bound, times)
    clocks = [hosts.index(host) for host in hosts]
    if any(clocks[one] == clocks[other] and time > _NOISE[-1] for (one, other), time in early.items()):
        clocks = [*range(len(hosts))]  # the machines have the same name, or none
    if len(set(clocks)) == 1:
        return [0.0] * len(hosts), ""
    edges = defaultdict[tuple[int, int], float](lambda: -inf)
    for (one, other), time in early.items():
        if clocks[one] != clocks[other]:
            edges[clocks[one], clocks[other]] = max(edges[clocks[one], clocks[other]], time)
    for noise in _NOISE:
        slackened = {between: time - noise for between, time in edges.items()}
        least = _longest(slackened, len(hosts))
        most = _longest({(other, one): time for (one, other), time in slackened.items()}, len(hosts))
        if least is not None and most is not None:
            return _between([(least[clock], -most[clock]) for clock in clocks], noise)
    one, other = max(edges, key=lambda between: edges[between] + edges.get(between[::-1], -inf))
    raise FormatError(
        f"no clocks fit: between ranks {one} and {other}, values would be used "
        f"{(edges[one, other] + edges.get((other, one), 0)) / 1e3:.3g} ms before they were made: are the files of one "
        "run, and of the same steps?"
    )


def _early(bound: BoundPlan, times: Sequence[Sequence[Times]]) -> dict[tuple[int, int], float]:
    """Return, by a value's sender and receiver, by how much it was used before it was made, at most."""
    rows = [list(zip(row, ran, strict=True)) for row, ran in zip(bound.rows, times, strict=True)]
    ended = {code: time.end for row in rows for code, time in row}
    early = defaultdict[tuple[int, int], float](lambda: -inf)
    for rank, row in enumerate(rows):
        for code, time in row:
            for _, giver in bound.inputs(code):
                between = bound.rank_of[giver], rank
                early[between] = max(early[between], ended[giver] - time.start)
    return early


def _between(sides: Sequence[tuple[float, float]], noise: float) -> tuple[list[float], str]:
    """Return the middle between the least and the most that may be added to each rank's clock; and a remark."""
    if any(low == -inf for low, _ in sides):
        raise FormatError("no value goes from some ranks to others: are all files of one pipeline?")
    error = max((high - low) / 2 for low, high in sides) + noise
    found = [(low + high) / 2 for low, high in sides]
    far = max(map(abs, found)) / 1e3
    return found, f"clocks moved by up to {far:.3g} ms, aligned within {error / 1e3:.2g} ms"


def _longest(edges: Mapping[tuple[int, int], float], nodes: int) -> list[float] | None:
    """Return the length of the longest way from node 0 to each other one; `None` if there is a way without end."""
    found = [0.0] + [-inf] * (nodes - 1)
    for _ in range(nodes):
        longer = {(one, other): found[one] + length for (one, other), length in edges.items()}
        better = [(other, far) for (_, other), far in longer.items() if far > found[other] + 1e-3]
        if not better:
            return found
        for other, far in better:
            found[other] = max(found[other], far)
    return None
