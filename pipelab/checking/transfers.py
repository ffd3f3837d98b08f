"""Let a plan's actions and transfers wait for each other as a transport makes them, and explain where they hang."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipelab.checking.deadlock import Head, Wait, cycle_fault, cycles
from pipelab.plan.actions import Posting
from pipelab.plan.bound import BoundPlan
from pipelab.plan.fault import Code, Fault
from pipelab.plan.order import NOTHING, Network
from pipelab.plan.transfers import Lowering, Order, Step, Transport, crossings, inbound, lowered

_HINT = 'use pipelab.lower(plan, order="by-time"): it cannot hang, and its to_csv writes a file that PyTorch runs'
_PAIR_HINT = (
    "yield the halves of one of these pairs one after the other: a pair's receives come before both of its halves, and "
    "its sends after both"
)


class Wire:
    """A lowered plan on a transport, as jobs that follow each other.

    What a pair gives leaves after both of its halves, where its sends are. In a queue, a transfer follows the one
    before it, at both of its ends. A receive that holds its rank is followed by all that comes after it in the row, and
    so is a send that the row waits for. Where a plan lists its sends, each follows the action before it, too.
    """

    def __init__(self, low: Lowering, transport: Transport, *, atomic_pairs: bool = False) -> None:
        """Lay out the jobs."""
        codes = low.bound.codes
        self.low, self.transport, self.holding = low, transport, transport == "holding"  # does a receive hold its rank?
        listed = low.order == "pytorch" and bool(low.bound.postings)
        self.in_line = self.holding or listed  # does a send wait for what comes before it?
        self.queues: dict[tuple[int, int], list[int]] = {}  # by rank and a number, the values in a queue
        self.ends: dict[int, list[tuple[int, int]]] = {value: [] for value in low.crossings}  # the queues that it is in
        self.made: dict[int, int] = {}  # by value that crosses, the job at whose end it exists
        self.needed = inbound(low.crossings)
        self._codes = len(codes.kind)
        self.job = list(range(self._codes))  # by code; the job of a value that crosses is `transfer(value)`
        self._follows: list[list[int]] = [[] for _ in range(self._codes + codes.always)]
        for rank, row in enumerate(low.rows):
            self._lay_out(rank, row, atomic_pairs)
        self.network = Network([[(each, NOTHING) for each in before] for before in self._follows])

    def _lay_out(self, rank: int, row: Sequence[Step], atomic_pairs: bool) -> None:
        """Let the jobs of a row follow each other."""
        before: list[int] = []  # what the next item of the row follows
        waited: list[int] = []  # the sends that the row has waited for since its last item
        for word, numbers in row:
            if word == "run":
                if atomic_pairs and len(numbers) > 1:
                    self.job[numbers[1]] = numbers[0]
                before, waited = [self._run(numbers, before)], []
            elif word == "WAIT_SEND":
                before = [*before, self.transfer(numbers[0])]
                waited = [*waited, self.transfer(numbers[0])]
            elif word == "SEND":
                (value,) = numbers
                self._follows[self.transfer(value)] += [self.made[value], *(before if self.in_line else waited)]
                self._queue(rank, value, self.low.crossings[value].target, sends=True)
            elif word == "RECV":
                (value,) = numbers
                before = [*before, self.transfer(value)] if self.holding else before
                self._queue(rank, value, self.low.crossings[value].source, sends=False)

    def _run(self, numbers: Sequence[int], before: list[int]) -> int:
        """Enter an item; return its last job."""
        for code in numbers:
            job = self.job[code]
            self._follows[job] += [each for each in before if each != job]
            self._follows[job] += [self.transfer(self.needed[code])] if code in self.needed else []
            before = [job]
        gives = {self.low.bound.codes.gives[code] for code in numbers if not self.low.bound.codes.collective[code]}
        self.made.update(dict.fromkeys(gives.intersection(self.low.crossings), before[0]))
        return before[0]

    def _queue(self, rank: int, value: int, peer: int, *, sends: bool) -> None:
        """Let a transfer follow the one before it in the queue of one of its ends."""
        if self.transport not in ("rank", "pair", "edge"):
            return
        queue = {"rank": 0, "pair": peer, "edge": 2 * peer + sends}[self.transport]
        values = self.queues.setdefault((rank, queue), [])
        self._follows[self.transfer(value)] += [self.transfer(each) for each in values[-1:]]
        self.ends[value].append((rank, queue))
        values.append(value)

    @property
    def stuck(self) -> bool:
        """Whether some job never begins."""
        return len(self.network.order) < len(self.network.follows)

    def transfer(self, value: int) -> int:
        """Return the job that is the transfer of a value."""
        return self._codes + value


def transfer_deadlocks(bound: BoundPlan, order: Order, transport: Transport) -> list[Fault]:
    """Return one fault for each cycle of sends, receives and actions that wait for each other, in a legal plan."""
    hung = hang(bound, order, transport)
    return [] if hung is None else hung.faults()


def hang(bound: BoundPlan, order: Order, transport: Transport) -> Hang | None:
    """Return where a legal plan and its transfers are stuck; `None` if they do not."""
    if transport == "buffered" and not (bound.postings and order == "pytorch"):
        return None
    if bound.pairs:  # may hang without any queue, and then has no order in which it does not
        wire = Wire(lowered(bound, "at-use"), "buffered")
        if wire.stuck:
            return Hang(wire, _PAIR_HINT)
    if order == "by-time":  # one order for all ranks: the first of the transfers that are left can always cross
        return None
    wire = Wire(lowered(bound, order), transport)
    return Hang(wire, _HINT) if wire.stuck else None


def misposted(bound: BoundPlan) -> Iterator[Fault]:
    """Find sends and receives that a plan lists twice, on the wrong side of their action, in vain, or not at all.

    Example:
        >>> from pipelab import Plan
        >>> for fault in misposted(Plan.parse("0F0 0SEND_F0 0B0 0RECV_B0; 1F0 1B0 1SEND_B0").bound):
        ...     print(fault.message)
        rank 0 lists 0RECV_B0, but not before 0B0: 0B0 needs the value of 1B0 on rank 1
        rank 1 lists no 1RECV_F0: 1F0 needs the value of 0F0 on rank 0
    """
    if not bound.postings:
        return
    low, every = Lowering(bound, crossings(bound), [], "pytorch"), [*map(bound.placed, range(len(bound.computing)))]
    listed: dict[tuple[int, str, int], list[tuple[int, Posting]]] = {}
    for rank, row in enumerate(bound.postings):
        for at, each in row:
            listed.setdefault((rank, each.word, bound.codes.posted(each)), []).append((at, each))
    for value, crossing in low.crossings.items():
        giver, needer = map(bound.codes.action, (crossing.giver, crossing.needer))
        ends = ("SEND", crossing.source, giver, "after"), ("RECV", crossing.target, needer, "before")
        for way, rank, action, side in ends:
            word, places = low.word((way, (value,))), listed.pop((rank, way, value), [])
            place = every[rank][bound.codes.code(action)]
            if len(places) == 1 and (places[0][0] > place) == (side == "after"):
                continue
            codes: tuple[Code, ...] = ("missing", "unordered", "duplicate")
            code = codes[min(len(places), 2)]
            what = [f"no {word}", f"{word}, but not {side} {action}", f"{word} {len(places)} times"][codes.index(code)]
            message = f"rank {rank} lists {what}: {needer} needs the value of {giver} on rank {crossing.source}"
            yield Fault(code, rank, place, action, message, f"write {word} once, {side} {action} on rank {rank}")
    for (rank, word, value), ((_, each), *_) in listed.items():
        if word != "WAIT_SEND" or value not in low.crossings:
            message = f"rank {rank} lists {each}, but no such value crosses between this rank and another one"
            yield Fault("wrong-rank", rank, None, None, message, f"remove {each}")


class Hang:
    """Where actions and transfers are stuck, and why, in words."""

    def __init__(self, wire: Wire, hint: str) -> None:
        """Find the first step that cannot run in each row, and the first value that cannot cross in each queue."""
        self.wire, self.low, self.bound, self.hint = wire, wire.low, wire.low.bound, hint
        self._done = set(wire.network.order)
        kinds = ("run", "RECV") if wire.holding else ("run",)
        self._step = {
            rank: next((step for step in row if step[0] in kinds and not self.has_run(step)), None)
            for rank, row in enumerate(self.low.rows)
        }
        self._value = {
            queue: next((value for value in values if wire.transfer(value) not in self._done), None)
            for queue, values in wire.queues.items()
        }

    def has_run(self, step: Step) -> bool:
        """Return whether a step of a lowered row is over."""
        job = self.wire.job.__getitem__ if step[0] == "run" else self.wire.transfer
        return all(job(each) in self._done for each in step[1])

    def blocks(self, rank: int, step: Step) -> bool:
        """Return whether a rank waits before a step: the next one, or the first transfer in one of its queues."""
        queues = self.wire.ends[step[1][0]] if step[0] != "run" else ()
        return step == self._step[rank] or any(each[0] == rank and self._value[each] == step[1][0] for each in queues)

    def faults(self) -> list[Fault]:
        """Return one fault for each cycle."""
        return [self._fault(cycle) for cycle in cycles([rank for rank, step in self._step.items() if step], self._wait)]

    def _fault(self, cycle: list[Wait]) -> Fault:
        rank = cycle[0].rank
        step = next(step for step in self.low.rows[rank] if self._name(step) == cycle[0].name)
        code = step[1][0]
        if step[0] == "run":
            code = next(each for each in step[1] if self.wire.job[each] not in self._done)
        else:
            crossing = self.low.crossings[code]
            code = crossing.giver if step[0] == "SEND" else crossing.needer
        position = self.bound.position(rank, self.bound.computing[rank].index(code))
        return cycle_fault("transfer-deadlock", cycle, position, self.bound.codes.action(code), self.hint)

    def _wait(self, head: Head) -> Wait:
        """Return what a rank, or the first transfer in a queue, waits for."""
        if isinstance(head, int):
            rank, step = head, self._step[head]
        else:
            rank, value = head[0], self._value[head]
            step = None if value is None else ("SEND" if rank == self.low.crossings[value].source else "RECV", (value,))
        assert step is not None, "it is stuck, so there is a first step that cannot run"
        return self._wait_of_item(rank, step) if step[0] == "run" else self._wait_of_transfer(rank, step)

    def _wait_of_transfer(self, rank: int, step: Step) -> Wait:
        """Return the wait of a send or a receive: for the other, which is not first in its queue, or for the giver."""
        (value,) = step[1]
        behind = next((queue for queue in self.wire.ends[value] if self._value[queue] != value), None)
        if behind is None:
            return self._wait_for_giver(rank, self._name(step), value)
        meets = self.low.word(("RECV" if step[0] == "SEND" else "SEND", (value,)))
        return Wait(rank, self._name(step), f"has to meet {meets}", meets, behind)

    def _wait_of_item(self, rank: int, step: Step) -> Wait:
        """Return the wait of an action, or of a pair: for the ranks of an `R`, or for a value."""
        name = self._name(step)
        code = next(each for each in step[1] if self.wire.job[each] not in self._done)
        if self.bound.codes.collective[code]:
            absent = next(each for each in self.bound.reduces[code] if self._step[each] != step)
            return Wait(rank, name, f"needs rank {absent} to reach it too", name, absent)
        value = self.wire.needed[code]
        if not self.wire.ends[value]:
            return self._wait_for_giver(rank, name, value)
        receive = self.low.word(("RECV", (value,)))
        return Wait(rank, name, f"needs {receive}", receive, next(q for q in self.wire.ends[value] if q[0] == rank))

    def _wait_for_giver(self, rank: int, name: str, value: int) -> Wait:
        """Return the wait for what has to end before a value can cross: its send, an action, or a pair."""
        source, giver = self.low.crossings[value].source, self.low.crossings[value].giver
        item = next(step for step in self.low.rows[source] if step[0] == "run" and giver in step[1])
        needed = self._name(("SEND", (value,)) if self.has_run(item) else item)
        return Wait(rank, name, f"needs {needed}", needed, source)

    def _name(self, step: Step) -> str:
        """Return a step as messages call it: an `R` by pipelab's name, all others by PyTorch's."""
        alone = step[0] == "run" and len(step[1]) == 1
        return str(self.bound.codes.action(step[1][0])) if alone else self.low.word(step)
