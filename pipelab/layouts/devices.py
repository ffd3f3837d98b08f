"""Devices, the links between them, and how long collectives take on these."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import Any

from pipelab.errors import UsageError
from pipelab.simulation.cost import Speed, all_reduce_time


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device and its links: seconds, bytes, and one direction; `devices.toml` has each figure with its source.

    Attributes:
        name: what the file calls it.
        peak: floating-point operations a second in 16 bits.
        memory: bytes that it has.
        bandwidth: bytes a second from and to its memory.
        inside: bytes a second between two devices of one node.
        between: bytes a second between devices of two nodes.
        per_node: how many devices a node has.
        matrices: which share of `peak` matrix products reach; the one number that is fitted to a measured step.
        attention: the same for attention's products, counted without the mask.
        experts: the same for the grouped products of routed experts.
        memory_share: which share of `bandwidth` other operations reach.
        link_share: which share of `inside` and `between` collectives reach.
        launch: seconds that each other operation takes, however small.
        inside_latency, between_latency: seconds that each message of a collective takes, however small.
        fitted: the step that `matrices` was fitted to; empty without one.
        source: where the other figures are from.
    """

    name: str
    peak: float
    memory: float
    bandwidth: float
    inside: float
    between: float
    per_node: int
    matrices: float
    attention: float
    experts: float
    memory_share: float
    link_share: float
    launch: float
    inside_latency: float
    between_latency: float
    fitted: str
    source: str

    def link(self, *, inside: bool = True, members: int = 1) -> Speed:
        """Return latency and bandwidth of a message; between nodes, with the network cards of `members` devices."""
        near, far = self.inside * self.link_share, self.between * self.link_share * members
        return (self.inside_latency, near) if inside else (self.between_latency, min(near, far))


@dataclass(frozen=True, slots=True)
class Group:
    """Devices that run collectives together: every `stride`-th of `size * stride` neighbours."""

    device: Device
    size: int
    stride: int = 1

    @property
    def near(self) -> int:
        """How many of them are in one node."""
        return max(1, min(self.size, self.device.per_node // self.stride))

    def ring(self, size: float, rounds: float = 1) -> float:
        """Return the seconds of a ring that passes so many bytes: 1 round for an all-gather, 2 for an all-reduce."""
        link = self.device.link(inside=self.near == self.size, members=self.near)
        return rounds * all_reduce_time("ring", size, self.size, *link) / 2

    def all_reduce(self, size: float) -> float:
        """Return the seconds of an all-reduce of so many bytes, on a ring or a tree, whichever is quicker."""
        tree = all_reduce_time(
            "tree", size, self.size, *self.device.link(inside=self.near == self.size, members=self.near)
        )
        return min(self.ring(size, 2), tree)

    def all_to_all(self, size: float) -> float:
        """Return the seconds in which each device sends its `size` bytes to all, an equal share to each."""
        share = size / self.size
        (first, inside), (second, between) = (self.device.link(inside=near) for near in (True, False))
        near, far = self.near - 1, self.size - self.near
        return max(near * (first + share / (inside or 1)), far * (second + share / (between or 1)))

    def sent(self, size: float) -> tuple[float, float]:
        """Return how many bytes a device sends inside its node and between nodes, if one round of a ring passes `size`.

        It is the average over the devices: of each node's devices, one has its next in another node.
        """
        sent = size * (self.size - 1) / self.size
        far = 0.0 if self.near == self.size else sent / self.near
        return sent - far, far


@cache
def table(name: str) -> dict[str, dict[str, Any]]:
    """Return what a TOML file of this folder holds."""
    return tomllib.loads(files("pipelab.layouts").joinpath(name).read_text(encoding="utf-8"))


def device(name: str, **other: Any) -> Device:
    """Return a device of `devices.toml` by name.

    Args:
        name: its name.
        other: figures to use instead of the file's, by their names in `Device`.

    Example:
        >>> device("h100").peak, device("h100", per_node=4).per_node
        (989000000000000.0, 4)

    Raises:
        UsageError: if there is no such device, or figure.
    """
    tables = table("devices.toml")
    names = [each for each in tables if each != "default"]
    if name not in names:
        raise UsageError(f"device {name!r}: expected one of {', '.join(names)}")
    known = {each.name for each in fields(Device)} - {"name"}
    if unknown := sorted(set(other) - known):
        raise UsageError(f"{', '.join(unknown)}: a device has {', '.join(sorted(known))}")
    return Device(**{**tables["default"], **tables[name], **other, "name": name})
