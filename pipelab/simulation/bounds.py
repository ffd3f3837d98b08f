"""Lower bounds: how quickly a plan's actions could run at best, in whatever order.

Every order keeps three rules, and each one limits the makespan:

    data      an action starts after the actions whose values it needs            the longest path
    rank      a rank runs one action at a time: some before, its work, some after  Carlier's bound for one machine
    memory    with a cap, forward k + cap of a stage starts after release k        further edges of the longest path
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain, pairwise
from typing import TYPE_CHECKING

from pipelab.checking.checker import ScheduleLike, as_plan, require_legal
from pipelab.checking.memory import ACTIVATIONS, Memory
from pipelab.errors import CostError, UsageError, require_caps
from pipelab.plan.binding import NO_RANK
from pipelab.plan.order import Link, Network, traverse, units
from pipelab.plan.plan import Plan
from pipelab.simulation.cost import Cost, as_cost
from pipelab.trace.trace import Trace

if TYPE_CHECKING:
    from pipelab.plan.bound import BoundPlan
    from pipelab.plan.codes import Codes

Subject = Trace | Plan | ScheduleLike

Placed = tuple[float, float, float]
"""A job's earliest start, its time, and the shortest time after it."""

Held = tuple[int, int | None, int]
"""From the start of which job something is held, to the end of which one, and how much it is."""

Edge = tuple[int, int, float]
"""An earlier job, a later one, and the time between them."""


@dataclass(frozen=True, slots=True)
class Job:
    """One action of a plan, or an overlapped pair in one slot, without its place in a row.

    Attributes:
        codes: the action's code; of a pair, both.
        ranks: the ranks that it occupies: one, or all that hold the stage of an `R`. An `R` beside computing occupies
            their channels instead, whose numbers follow the ranks'.
        time: how long it takes.
        needs: each earlier job that it waits for, as an index, and how long the value travels.
    """

    codes: tuple[int, ...]
    ranks: tuple[int, ...]
    time: float
    needs: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Work:
    """What any order of a plan's actions has to do.

    Attributes:
        plan: the plan.
        jobs: its actions, each after all that it needs.
        held: for each rank, what it holds: from the start of which job on, until the end of which one (`None`: of the
            step), and how much: one activation, or bytes.
        gradients: for each rank, the bytes of each stage's gradients, held from the first of some jobs on.
        memory: what a stage takes.
        lines: jobs of one kind and stage, of micro-batches that are all alike. They may be assumed to run in this
            order: whichever micro-batch comes first can be given the first one's name.
    """

    plan: Plan
    jobs: tuple[Job, ...]
    held: tuple[tuple[Held, ...], ...]
    gradients: tuple[tuple[tuple[tuple[int, ...], int], ...], ...]
    memory: Memory
    lines: tuple[tuple[int, ...], ...]

    def rooms(self, caps: Sequence[int]) -> list[int]:
        """Return how much of `held`, and of gradients, fits on each rank beside what is always there."""
        bound = self.plan.bound
        rooms = [cap - sum(self.memory.always(bound, rank)) for rank, cap in enumerate(caps)]
        for rank, (room, held) in enumerate(zip(rooms, self.held, strict=True)):
            if room < (most := max((size for *_, size in held), default=0)):
                left = f"beside weights and optimizer's state it has no room for {most:,} bytes"
                raise UsageError(f"memory_cap={caps[rank]:,} on rank {rank}: no order keeps it, as {left}")
        return rooms

    def edges(self, rooms: Sequence[int] | None) -> list[Edge]:
        """Return what must come before what.

        If there is only so much room, a stage alone may not hold more than its rank: of micro-batches that are alike,
        one waits until an earlier one is released.
        """
        found = [(before, after, lag) for after, job in enumerate(self.jobs) for before, lag in job.needs]
        found += [(before, after, 0.0) for line in self.lines for before, after in pairwise(line)]
        return found if rooms is None else [*found, *self._waits(rooms)]

    def _waits(self, rooms: Sequence[int]) -> Iterator[Edge]:
        """Yield which job of a line waits for which release of an earlier one."""
        held_of = defaultdict[int, list[tuple[int | None, int]]](list)
        for made, released, size in chain.from_iterable(self.held):
            held_of[made].append((released, size))
        for line in self.lines:
            room, sizes = rooms[self.jobs[line[0]].ranks[0]], [size for _, size in held_of[line[0]]]
            for at in range(len(sizes)):  # at the k-th release, the sizes from here on are held yet
                for made, later in zip(line, line[room // sum(sizes[at:]) :], strict=False):
                    released = held_of[made][at][0]
                    if released is not None:
                        yield released, later, 0.0

    def network(self, edges: Sequence[Edge]) -> tuple[Network, list[float]]:
        """Return the jobs as a network, and the lags in it."""
        follows: list[list[Link]] = [[] for _ in self.jobs]
        for number, (before, after, _) in enumerate(edges):
            follows[after].append((before, number))
        return Network(follows), [*(lag for *_, lag in edges), 0.0]


def lower_bound(
    plan: Subject,
    cost: Cost | None = None,
    *,
    memory_cap: int | Sequence[int] | None = None,
    memory: Memory | None = None,
) -> float:
    """Return a time that no order of a plan's actions on its ranks can undercut.

    The bound holds for every plan with the same actions on the same ranks, in any order. For each rank it adds up the
    work, the earliest possible start and the shortest possible rest after it (Carlier 1982, The One-Machine Sequencing
    Problem, with interruptions allowed), and it follows the longest path. So `trace.makespan / lower_bound(trace)` says
    how far a schedule is from the best order, at most. `pipelab.optimum` finds that order.

    Args:
        plan: a plan or a schedule, whose order does not matter; or a trace, simulated or measured, with its actions'
            times. Measured transfers count as free.
        cost: how long actions and transfers take; by default forward 1, backward 2 and free transfers.
        memory_cap: how many stage activations a rank may hold, or how many bytes if there is a `memory`: one number, or
            one per rank; `None` for any number.
        memory: how many bytes each stage takes.

    Returns:
        The bound, in the cost's unit of time or in the trace's.

    Example:
        No order of 1F1B's actions is faster than 1F1B. ZB-H1's actions, which split the backward, could be done sooner:

        >>> import pipelab
        >>> lower_bound(pipelab.OneFOneB(ranks=4, microbatches=8))
        33.0
        >>> trace = pipelab.simulate(pipelab.ZBH1(ranks=4, microbatches=8))
        >>> trace.makespan, lower_bound(trace), lower_bound(trace, memory_cap=3)
        (27.0, 27.0, 30.0)

    Raises:
        ScheduleError: if the plan has faults.
        CostError: if a trace comes with a cost, or if a list of the cost does not have one number per stage.
        UsageError: if `memory_cap` is not a positive whole number, or one per rank; if no order keeps it; if the
            plan offloads; or if there is a `memory`, and the plan updates weights or gathers.
        TypeError: if `plan` is not a trace, a plan or a schedule, or if `cost` is not a `Cost`.
    """
    plan, lasts, delays, paired = _timed(plan, cost)
    if memory_cap is not None and any(move.action.microbatch is not None for move in plan.bound.moves):
        raise UsageError(
            f"{plan.name} sends activations away: it has no bound under a memory cap\n  try: no memory_cap"
        )
    work = _laid_out(plan, lasts, delays, paired, memory)
    rooms = None if memory_cap is None else work.rooms(require_caps(memory_cap, plan.ranks))
    jobs, (network, lags) = work.jobs, work.network(work.edges(rooms))
    times = [job.time for job in jobs]
    heads, tails = network.starts(times, lags), network.rests(times, lags)
    on_rank: list[list[Placed]] = [[] for _ in range(2 * plan.ranks)]
    for head, job, tail in zip(heads, jobs, tails, strict=True):
        for rank in job.ranks:
            on_rank[rank].append((head, job.time, tail))
    best = max(map(_one_machine, on_rank), default=0.0)
    return best if rooms is None else max(best, *(_held(work, *each, heads, tails) for each in enumerate(rooms)))


def work_of(subject: Subject, cost: Cost | None = None, memory: Memory | None = None) -> Work:
    """Return what any order of the actions of a plan, a schedule or a trace has to do."""
    return _laid_out(*_timed(subject, cost), memory)


def _timed(subject: Subject, cost: Cost | None) -> tuple[Plan, list[float], list[float], dict[int, float]]:
    """Return the legal plan, how long its actions and values take, and its overlapped pairs in one slot."""
    paired: dict[int, float] = {}
    if isinstance(subject, Trace):
        if cost is not None:
            raise CostError("lower_bound got a cost, but a trace has its own times: give it the trace's plan instead")
        plan, (lasts, delays, paired) = subject.plan, _times_of(subject)
    else:
        cost = as_cost(cost)
        plan = as_plan(subject).reducing(beside=False)
        require_legal(plan)
        plan = plan.reducing(beside=cost.all_reduce_runs == "beside")
        lasts, delays = cost.lengths(plan)
        if plan.bound.pairs and (each := cost.pair_times(plan)) is not None:
            paired = {code: each[plan.bound.codes.slot[code]] for code in plan.bound.pairs}
    require_legal(plan)
    return plan, lasts, delays, paired


def _times_of(trace: Trace) -> tuple[list[float], list[float], dict[int, float]]:
    """Return how long a trace's actions, values and overlapped pairs took; nine digits, because sums are rounded."""
    bound = trace.plan.bound
    lasts = [0.0] * len(bound.codes.kind)
    paired: dict[int, float] = {}
    for row, starts, ends in zip(bound.rows, trace.starts, trace.ends, strict=True):
        for index, (code, start, end) in enumerate(zip(row, starts, ends, strict=True)):
            lasts[code] = float(f"{end - start:.9g}")
            if code in bound.pairs and starts[index + 1] == start and end > start:
                paired[code] = lasts[code]
    for move, event in zip(bound.moves, trace.moves, strict=False):
        lasts[move.code] = float(f"{event.duration:.9g}")
    delays = [0.0] * (bound.codes.always + 1)
    if trace.source == "simulated":
        for each in trace.transfers:
            code = bound.codes.code(each.giver)
            delays[bound.codes.gives[code]] = float(f"{each.end - each.start:.9g}")
    return lasts, delays, paired


def _laid_out(
    plan: Plan, lasts: Sequence[float], delays: Sequence[float], paired: dict[int, float], memory: Memory | None
) -> Work:
    bound, jobs, job_of = plan.bound, list[Job](), dict[int, int]()
    if memory is not None and ("U" in bound.codes.kinds or bound.moves):
        raise UsageError("a cap in bytes: not for plans that update weights, gather or offload\n  try: no memory=")
    memory = memory or ACTIVATIONS
    for both in units(_order(plan, paired), paired):
        code = both[0]
        needs = [need for each in both for need in _needs(bound, each, job_of, delays)]
        ranks: tuple[int, ...] = (bound.rank_of[code],)
        if bound.codes.collective[code]:
            ranks = tuple(rank + len(bound.rows) * bound.beside for rank in bound.reduces[code])
        job_of.update(dict.fromkeys(both, len(jobs)))
        jobs.append(Job(tuple(both), ranks, paired.get(code, lasts[code]), tuple(needs)))
    held = tuple(tuple(_held_on(bound, rank, job_of, memory)) for rank in range(plan.ranks))
    gradients = tuple(tuple(_gradients_on(bound, rank, job_of, memory)) for rank in range(plan.ranks))
    lines = () if paired else tuple(tuple(map(job_of.__getitem__, line)) for line in _lines(bound, lasts, delays))
    return Work(plan, tuple(jobs), held, gradients, memory, lines)


def _order(plan: Plan, paired: dict[int, float]) -> list[int]:
    """Return a legal plan's codes, each after all that it needs."""
    bound, codes = plan.bound, plan.bound.codes
    order = traverse(bound, atomic_pairs=True).order if paired else require_legal(plan).order
    order = [*order, *bound.reduces] if bound.beside else order
    if paired:
        return order
    first = _sequences(codes)  # sequence after sequence, so that lines and caps, too, lead from earlier to later jobs
    return sorted(order, key=lambda code: (codes.collective[code], first[codes.microbatch[code]]))


def _lines(bound: BoundPlan, lasts: Sequence[float], delays: Sequence[float]) -> Iterator[tuple[int, ...]]:
    """Yield the codes of one kind and stage, of micro-batches with the same actions, ranks and times."""
    codes, alike = bound.codes, defaultdict[tuple[float, ...], list[list[int]]](list)
    for microbatch in range(0 if codes.joins else codes.microbatches):
        own = [code for kind in codes.per_microbatch for code in codes.table[kind][microbatch]]
        times = ((bound.rank_of[code], lasts[code], delays[codes.gives[code]]) for code in own)
        alike[tuple(chain.from_iterable(times))].append(own)
    lines = (line for each in alike.values() for line in zip(*each, strict=True))
    yield from (line for line in lines if len(line) > 1 and bound.rank_of[line[0]] != NO_RANK)


def _held_on(bound: BoundPlan, rank: int, job_of: dict[int, int], memory: Memory) -> Iterator[Held]:
    """Yield what a rank holds: of a micro-batch on a stage, what was added last is freed first."""
    codes, stacks = bound.codes, defaultdict[tuple[int, int], list[tuple[int, int]]](list)
    for code, change in zip(bound.lists[rank], memory.changes(bound, rank), strict=True):
        if not bound.computes(code):
            continue
        stack, less = stacks[codes.microbatch[code], codes.stage[code]], change.freed
        if change.activations or change.outputs:
            stack.append((job_of[code], change.activations + change.outputs))
        while less:
            made, size = stack.pop()
            if size > less:
                stack.append((made, size - less))
            yield made, job_of[code], min(size, less)
            less -= min(size, less)
    yield from ((made, None, size) for stack in stacks.values() for made, size in stack)


def _gradients_on(
    bound: BoundPlan, rank: int, job_of: dict[int, int], memory: Memory
) -> Iterator[tuple[tuple[int, ...], int]]:
    codes = bound.codes
    for first, change in zip(bound.lists[rank], memory.changes(bound, rank), strict=True):
        if change.gradients:
            own = (code for code in bound.rows[rank] if codes.stage[code] == codes.stage[first])
            yield tuple(job_of[code] for code in own if codes.traits(code).weight_grad), change.gradients


def _sequences(codes: Codes) -> list[int]:
    """Return, by micro-batch, the first one of its sequence: slices need each other, other micro-batches do not."""
    first = list(range(codes.microbatches))
    for code, values in codes.more_needs.items():
        for giver in (codes.givers(value)[0] for value in values):
            low, high = sorted((first[codes.microbatch[code]], first[codes.microbatch[giver]]))
            first = first if low == high else [low if each == high else each for each in first]
    return first


def _needs(bound: BoundPlan, code: int, job_of: dict[int, int], delays: Sequence[float]) -> list[tuple[int, float]]:
    """Return the jobs that an action waits for, and how long their values travel."""
    codes, rank_of = bound.codes, bound.rank_of
    if codes.collective[code]:
        givers = (giver for value in codes.all_needs(code) for giver in codes.givers(value))
        return [(job_of[giver], 0.0) for giver in givers if giver in job_of]
    here = rank_of[code]
    return [(job_of[giver], 0.0 if rank_of[giver] == here else delays[value]) for value, giver in bound.inputs(code)]


def _one_machine(jobs: Sequence[Placed]) -> float:
    """Return how long a rank's jobs take at least.

    Whenever a job could start, the one with the longest time after it runs, even if another one is interrupted: that is
    the best order if interruptions cost nothing.
    """
    urgent = sorted((-tail, time, head) for head, time, tail in jobs)
    left, heads = [time for _, time, _ in urgent], [head for *_, head in urgent]
    best, now = max((head + time - rest for rest, time, head in urgent), default=0.0), 0.0
    waiting: list[int] = []  # by urgency
    for coming in sorted(range(len(urgent)), key=heads.__getitem__):
        head = heads[coming]
        while waiting and now < head:
            job = waiting[0]
            if now + left[job] <= head:
                now += left[heappop(waiting)]
                best = max(best, now - urgent[job][0])
            else:
                left[job] -= head - now
                now = head
        now = max(now, head)
        heappush(waiting, coming)
    for job in sorted(waiting):
        now += left[job]
        best = max(best, now - urgent[job][0])
    return best


def _held(work: Work, rank: int, room: int, heads: Sequence[float], tails: Sequence[float]) -> float:
    """Return how long a rank takes at least because it has only so much room.

    Each activation is held from its forward to its release. As areas, size by time, all of them fill this time.
    """
    held = [(made, released, size) for made, released, size in work.held[rank] if released is not None]
    if sum(size for *_, size in held) <= room:
        return 0.0
    at_least = _residences(work, [(made, released) for made, released, _ in held])
    filled = sum(size * time for (*_, size), time in zip(held, at_least, strict=True)) / room
    return min(heads[made] for made, *_ in held) + filled + min(tails[released] for _, released, _ in held)


def _residences(work: Work, held: Sequence[tuple[int, int]]) -> list[float]:
    """Return how long each activation is held at least: the longest path from its forward to its release."""
    jobs = work.jobs
    first_of = {made: line[0] for line in work.lines for made in line}
    alike = [(first_of.get(made, made), first_of.get(released, released)) for made, released in held]
    found: dict[tuple[int, int], float] = {}
    for (made, released), which in zip(held, alike, strict=True):
        if which in found:  # of a micro-batch that is like this one
            continue
        longest = {released: jobs[released].time}  # by job: from its start to the release
        pending = [-released]
        while pending:  # each job after all that need it, and none from before the forward
            after = -heappop(pending)
            for before, lag in jobs[after].needs:
                if before >= made:
                    if before not in longest:
                        heappush(pending, -before)
                    longest[before] = max(longest.get(before, 0.0), jobs[before].time + lag + longest[after])
        found[which] = longest[made]
    return [found[which] for which in alike]
