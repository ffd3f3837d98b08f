"""What travels: the links between ranks, and how long an all-reduce takes on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, log2
from typing import Literal

from pipelab.errors import CostError, require_size
from pipelab.plan.actions import FINITE, finite
from pipelab.plan.fault import shorten

Link = tuple[float, float | None]
"""Latency, and bytes per unit of time; without the second, size does not matter."""


@dataclass(frozen=True, slots=True)
class Links:
    """How long a value travels between two ranks of one node, and between two nodes.

    Ranks `0 … ranks_per_node - 1` are the first node, and so on. A value takes `latency + bytes / bandwidth`: the
    model of Hockney 1994 (Parallel Computing 20), also called alpha-beta.

    Attributes:
        ranks_per_node: how many ranks a node has.
        inside: latency and bandwidth between ranks of one node, in the unit of time of the `Cost`, and in bytes per
            that unit; `None` as the bandwidth if size does not matter.
        between: the same between ranks of two nodes.

    Example:
        >>> import pipelab
        >>> links = Links(ranks_per_node=2, inside=(0.25, None), between=(1, None))
        >>> links.time(0, 1, bytes=0), links.time(1, 2, bytes=0)
        (0.25, 1.0)
        >>> pipelab.simulate(pipelab.GPipe(4, 8), pipelab.Cost(links=links)).makespan
        36.0

    Raises:
        UsageError: if `ranks_per_node` is not a positive whole number.
        CostError: if a link is not two numbers, 0 or more, or its bandwidth is 0.
    """

    ranks_per_node: int
    inside: Link
    between: Link

    def __post_init__(self) -> None:
        """Refuse what cannot be a link."""
        object.__setattr__(self, "ranks_per_node", require_size("ranks_per_node", self.ranks_per_node))
        for name in ("inside", "between"):
            link = getattr(self, name)
            pair = tuple(link) if isinstance(link, (tuple, list)) else ()
            numbers = tuple(None if each is None else finite(each) for each in pair)
            if len(pair) != 2 or numbers[0] is None or (numbers[1] is None) != (pair[1] is None):
                raise CostError(
                    f"{name}={shorten(link)}: expected (latency, bandwidth), two numbers, {FINITE}; the "
                    "bandwidth None if size does not matter"
                )
            if numbers[1] == 0:
                raise CostError(f"{name}={shorten(link)}: with a bandwidth of 0 nothing would ever arrive")
            object.__setattr__(self, name, numbers)

    def time(self, source: int, target: int, bytes: float) -> float:  # noqa: A002 - what it is
        """Return how long so many bytes travel from one rank to another; 0 if both are the same."""
        if source == target:
            return 0.0
        near = source // self.ranks_per_node == target // self.ranks_per_node
        latency, bandwidth = self.inside if near else self.between
        return latency + (0.0 if bandwidth is None else bytes / bandwidth)


_ALL_REDUCES: dict[str, Callable[[int, float, float], float]] = {
    "ring": lambda n, alpha, whole_way: 2 * (n - 1) * (alpha + whole_way / n),
    "tree": lambda n, alpha, whole_way: 2 * ceil(log2(n)) * (alpha + whole_way),
    "parameter-server": lambda n, alpha, whole_way: 2 * n * (alpha + whole_way),
}


def all_reduce_time(
    algorithm: Literal["ring", "tree", "parameter-server"],
    bytes: float,  # noqa: A002 - what it is
    replicas: int,
    latency: float,
    bandwidth: float | None = None,
) -> float:
    """Return how long an all-reduce takes among `n` replicas, if a message of `b` bytes takes `a + b / bandwidth`.

    For a gradient of `bytes` in all, and `a` the latency:

    - `"ring"`: reduce-scatter and all-gather, `n - 1` steps each, with chunks of `bytes / n`:
      `2 (n - 1) (a + bytes / (n bandwidth))`. Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms
      (J. Parallel Distrib. Comput. 69).
    - `"tree"`: all is reduced along a binomial tree to one replica and broadcast along it:
      `2 ceil(log2 n) (a + bytes / bandwidth)`. Thakur, Rabenseifner, Gropp 2005, Optimization of Collective
      Communication Operations in MPICH (Int. J. High Perform. Comput. Appl. 19). Trees that cut the gradient into
      chunks and pipeline them, as NCCL's do, are faster.
    - `"parameter-server"`: a server that is none of the replicas, with one link: `n` gradients come in one after the
      other, and `n` results go out: `2 n (a + bytes / bandwidth)`. Li et al. 2014, Scaling Distributed Machine
      Learning with the Parameter Server (OSDI), with a single server.

    The arithmetic of the sums is not counted. One replica needs no all-reduce: 0.

    Args:
        algorithm: one of the three.
        bytes: size of the gradient.
        replicas: how many replicas there are.
        latency: time that any message takes, however small.
        bandwidth: bytes per unit of time; if left out, size does not matter.

    Example:
        >>> for algorithm in ("ring", "tree", "parameter-server"):
        ...     print(algorithm, all_reduce_time(algorithm, bytes=480, replicas=4, latency=1, bandwidth=120))
        ring 12.0
        tree 20.0
        parameter-server 40.0
        >>> import pipelab
        >>> plan = pipelab.replicate(pipelab.GPipe(2, 4), 4)
        >>> reduce = [all_reduce_time("ring", bytes, 4, latency=1, bandwidth=120) for bytes in (480, 240)]
        >>> pipelab.simulate(plan, pipelab.Cost(all_reduce=reduce)).makespan
        27.0

    Raises:
        UsageError: if `replicas` is not a positive whole number.
        CostError: if the algorithm is not known, or if a number is negative or not finite, or the bandwidth is 0.
    """
    replicas = require_size("replicas", replicas)
    if algorithm not in _ALL_REDUCES:
        raise CostError(f"algorithm={shorten(algorithm)}: expected one of {', '.join(map(repr, _ALL_REDUCES))}")
    given = {"bytes": bytes, "latency": latency, "bandwidth": 1 if bandwidth is None else bandwidth}
    size, alpha, speed = map(finite, given.values())
    if size is None or alpha is None or not speed:
        names = ", ".join(f"{name}={shorten(value)}" for name, value in given.items())
        raise CostError(f"{names}: expected numbers, {FINITE}, and a bandwidth above 0")
    if replicas == 1:
        return 0.0
    return float(_ALL_REDUCES[algorithm](replicas, alpha, 0.0 if bandwidth is None else size / speed))
