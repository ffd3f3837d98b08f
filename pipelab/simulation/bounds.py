"""Lower bounds: how quickly a plan's actions could run at best, in whatever order.

Every order keeps three rules, and each one limits the makespan:

    data      an action starts after the actions whose values it needs            the longest path
    rank      a rank runs one action at a time: some before, its work, some after  Carlier's bound for one machine
    memory    with a cap, forward k + cap of a stage starts after release k        further edges of the longest path
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import chain, pairwise
from typing import TYPE_CHECKING, NamedTuple

from pipelab.checking.checker import ScheduleLike, as_plan, require_legal
from pipelab.checking.memory import ACTIVATIONS, Memory
from pipelab.errors import CostError, UsageError, require_caps
from pipelab.plan.actions import TRAITS
from pipelab.plan.binding import NO_RANK
from pipelab.plan.order import NOTHING, Link, Network, traverse, units
from pipelab.plan.plan import Plan
from pipelab.simulation.cost import Cost, as_cost
from pipelab.trace.trace import Trace

if TYPE_CHECKING:
    from pipelab.plan.bound import BoundPlan
    from pipelab.plan.codes import Codes

Subject = Trace | Plan | ScheduleLike

Placed = tuple[float, float, float]
"""A job's earliest start, its time, and the shortest time after it."""

Holding = tuple[int, int | None, int]
"""From the start of which job something is held, to the end of which one, and how much it is."""

Gradients = tuple[tuple[int, ...], int]
"""From the start of the first of which jobs gradients are held, and how many bytes."""


class Job(NamedTuple):
    """One action of a plan, or an overlapped pair in one slot, without its place in a row.

    Attributes:
        codes: the action's code; of a pair, both.
        ranks: the ranks that it occupies: one, or all that hold the stage of an `R`. An `R` beside computing occupies
            their channels instead, whose numbers follow the ranks'.
        time: how long it takes.
        needs: each earlier job that it waits for, as an index, and the number of the value that travels.
    """

    codes: tuple[int, ...]
    ranks: tuple[int, ...]
    time: float
    needs: tuple[Link, ...]


@dataclass(frozen=True)
class Work:
    """What any order of a plan's actions has to do.

    Attributes:
        plan: the plan.
        jobs: its actions, each after all that it needs.
        job_of: by code, its job.
        lags: how long each value travels, by its number.
        lines: jobs of one kind and stage, of micro-batches that are all alike. They may be assumed to run in this
            order: whichever micro-batch comes first can be given the first one's name.
        memory: what a stage takes.
    """

    plan: Plan
    jobs: list[Job]
    job_of: list[int]
    lags: Sequence[float]
    lines: list[list[int]]
    memory: Memory

    @cached_property
    def held(self) -> list[list[Holding]]:
        """For each rank, what it holds: one activation, or bytes; to `None` is to the end of the step."""
        return [list(self._held_on(rank)) for rank in range(self.plan.ranks)]

    def _held_on(self, rank: int) -> Iterator[Holding]:
        """Yield what a rank holds: of a micro-batch on a stage, what was added last is freed first."""
        bound, stacks = self.plan.bound, defaultdict[tuple[int, int], list[tuple[int, int]]](list)
        for code, change in zip(bound.lists[rank], self.memory.changes(bound, rank), strict=True):
            if not bound.computes(code):
                continue
            stack, job, less = stacks[bound.what(code)], self.job_of[code], change.freed
            if change.activations or change.outputs:
                stack.append((job, change.activations + change.outputs))
            while less:
                made, size = stack.pop()
                if size > less:
                    stack.append((made, size - less))
                yield made, job, min(size, less)
                less -= min(size, less)
        yield from ((made, None, size) for stack in stacks.values() for made, size in stack)

    @cached_property
    def gradients(self) -> list[list[Gradients]]:
        """For each rank, the gradients of each of its stages."""
        return [list(self._gradients_on(rank)) for rank in range(self.plan.ranks)]

    def _gradients_on(self, rank: int) -> Iterator[Gradients]:
        bound, codes = self.plan.bound, self.plan.bound.codes
        for first, change in zip(bound.lists[rank], self.memory.changes(bound, rank), strict=True):
            if change.gradients:
                own = (code for code in bound.computing[rank] if codes.stage[code] == codes.stage[first])
                yield tuple(self.job_of[code] for code in own if codes.traits(code).weight_grad), change.gradients

    def rooms(self, caps: Sequence[int]) -> list[int]:
        """Return how much of `held`, and of gradients, fits on each rank beside what is always there.

        All that the forwards of a micro-batch keep on a rank is held together, before its first backward there.
        """
        bound, codes = self.plan.bound, self.plan.bound.codes
        rooms = [cap - sum(self.memory.always(bound, rank)) for rank, cap in enumerate(caps)]
        for rank, (room, held) in enumerate(zip(rooms, self.held, strict=True)):
            kept = Counter[int]()
            for code, size in ((self.jobs[made].codes[0], size) for made, _, size in held):
                kept[codes.microbatch[code]] += size * codes.forward[code]
            least = max([0, *kept.values(), *(size for *_, size in held)])
            if room < least:
                always = caps[rank] - room
                what = "activations" if self.memory is ACTIVATIONS else "bytes"
                beside = f" beside {always:,} of weights and optimizer's state" if always else ""
                raise UsageError(
                    f"memory_cap={caps[rank]:,} on rank {rank}: no order keeps it, as one micro-batch needs {least:,} "
                    f"{what}{beside}\n  try: a cap of {least + always:,} or more"
                )
        return rooms

    def network(self, rooms: Sequence[int] | None) -> Network:
        """Return which jobs come before which, with the numbers of the values that travel.

        If there is only so much room, a stage alone may not hold more than its rank: of micro-batches that are alike,
        one waits until an earlier one is released.
        """
        follows = [list(job.needs) for job in self.jobs]
        for line in self.lines:
            for before, after in pairwise(line):
                follows[after].append((before, NOTHING))
        for before, after in () if rooms is None else self._waits(rooms):
            follows[after].append((before, NOTHING))
        return Network(follows)

    def _waits(self, rooms: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield for which release of an earlier job another job of its line waits."""
        held_of = defaultdict[int, list[tuple[int | None, int]]](list)
        for made, released, size in chain.from_iterable(self.held):
            held_of[made].append((released, size))
        for line in self.lines:
            room, sizes = rooms[self.jobs[line[0]].ranks[0]], [size for _, size in held_of[line[0]]]
            for at in range(len(sizes)):  # at the k-th release, the sizes from here on are held yet
                for made, later in zip(line, line[room // sum(sizes[at:]) :], strict=False):
                    released = held_of[made][at][0]
                    if released is not None:
                        yield released, later


def lower_bound(
    plan: Subject,
    cost: Cost | None = None,
    *,
    memory_cap: int | Sequence[int] | None = None,
    memory: Memory | None = None,
    bare: bool = False,
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
        bare: leave out the time of recomputations. Gathers and offloads count in no bound.

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
    if bare:
        lasts = [0.0 if TRAITS[kind].again else time for kind, time in zip(plan.bound.codes.kind, lasts, strict=True)]
    if memory_cap is not None and any(move.action.microbatch is not None for move in plan.bound.moves):
        raise UsageError(
            f"{plan.name} sends activations away: it has no bound under a memory cap\n  try: no memory_cap"
        )
    if memory_cap is None and not paired:
        return _by_codes(plan, lasts, delays)
    work = _laid_out(plan, lasts, delays, paired, memory)
    rooms = None if memory_cap is None else work.rooms(require_caps(memory_cap, plan.ranks))
    network, times = work.network(rooms), [job.time for job in work.jobs]
    heads, tails = network.starts(times, delays), network.rests(times, delays)
    best = _slowest(plan, zip([job.ranks for job in work.jobs], zip(heads, times, tails, strict=True), strict=True))
    return best if rooms is None else max(best, *(_held(work, *each, heads, tails) for each in enumerate(rooms)))


def _by_codes(plan: Plan, lasts: Sequence[float], delays: Sequence[float]) -> float:
    """Return the bound without caps and pairs: `Work` says the same, in twice the time and three times the memory."""
    bound, order, itself = plan.bound, _order(plan, {}), range(len(lasts))
    before = {later: code for line in _lines(bound, lasts, delays) for code, later in pairwise(line)}
    heads, tails = [0.0] * len(lasts), [0.0] * len(lasts)
    for code in order:
        if code in before:
            heads[code] = heads[before[code]] + lasts[before[code]]
        for giver, value in _needs(bound, code, itself):
            heads[code] = max(heads[code], heads[giver] + lasts[giver] + delays[value])
    for code in reversed(order):
        whole = lasts[code] + tails[code]
        if code in before:
            tails[before[code]] = max(tails[before[code]], whole)
        for giver, value in _needs(bound, code, itself):
            tails[giver] = max(tails[giver], delays[value] + whole)
    return _slowest(plan, ((_ranks(bound, code), (heads[code], lasts[code], tails[code])) for code in order))


def _slowest(plan: Plan, jobs: Iterable[tuple[Sequence[int], Placed]]) -> float:
    """Return how long the slowest rank, or channel of one, takes for its jobs at least."""
    on_rank: list[list[Placed]] = [[] for _ in range(2 * plan.ranks)]
    for ranks, placed in jobs:
        for rank in ranks:
            on_rank[rank].append(placed)
    return max(map(_one_machine, on_rank), default=0.0)


def work_of(subject: Subject, cost: Cost | None = None, memory: Memory | None = None) -> Work:
    """Return what any order of the actions of a plan, a schedule or a trace has to do."""
    return _laid_out(*_timed(subject, cost), memory)


def _timed(subject: Subject, cost: Cost | None) -> tuple[Plan, list[float], list[float], dict[int, float]]:
    """Return the legal plan, how long its actions and values take, and its overlapped pairs in one slot."""
    if not isinstance(subject, Trace):
        cost = as_cost(cost)
        plan = as_plan(subject).reducing(beside=False)
        require_legal(plan)
        plan = plan.reducing(beside=cost.all_reduce_runs == "beside")
        return plan, *cost.lengths(plan), cost.pair_times(plan)
    if cost is not None:
        raise CostError("lower_bound got a cost, but a trace has its own times: give it the trace's plan instead")
    require_legal(subject.plan)
    return subject.plan, *_times_of(subject)


def _times_of(trace: Trace) -> tuple[list[float], list[float], dict[int, float]]:
    """Return how long a trace's actions, values and overlapped pairs took; nine digits, because sums are rounded."""
    bound = trace.plan.bound
    lasts = [0.0] * len(bound.codes.kind)
    paired: dict[int, float] = {}
    for row, starts, ends in zip(bound.computing, trace.starts, trace.ends, strict=True):
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
    bound, codes = plan.bound, plan.bound.codes
    updates = any(TRAITS[kind].updates for kind in codes.kinds)
    if memory is not None and (updates or any(not move.action.traits.computes for move in bound.moves)):
        raise UsageError("a cap in bytes: not for plans that update weights, gather or offload\n  try: no memory=")
    jobs, job_of = list[Job](), [-1] * len(codes.kind)
    for both in units(_order(plan, paired), paired):
        needs = [need for code in both for need in _needs(bound, code, job_of)]
        for code in both:
            job_of[code] = len(jobs)
        time = paired.get(both[0], lasts[both[0]])
        jobs.append(Job(tuple(both), _ranks(bound, both[0]), time, tuple(needs)))
    lines = [] if paired else [[job_of[code] for code in line] for line in _lines(bound, lasts, delays)]
    return Work(plan, jobs, job_of, delays, lines, memory or ACTIVATIONS)


def _order(plan: Plan, paired: dict[int, float]) -> list[int]:
    """Return a legal plan's codes, each after all that it needs."""
    bound, codes = plan.bound, plan.bound.codes
    order = traverse(bound, atomic_pairs=True).order if paired else require_legal(plan).order
    order = [*order, *bound.reduces] if bound.beside else order
    if paired:
        return order
    # Sequence after sequence, so that lines and caps, too, lead from earlier to later jobs; then all-reduces, whose -1
    # is the last place.
    first = [*_sequences(codes), codes.microbatches]
    return sorted(order, key=lambda code: first[codes.microbatch[code]])


def _lines(bound: BoundPlan, lasts: Sequence[float], delays: Sequence[float]) -> Iterator[Sequence[int]]:
    """Yield the codes of one kind and stage, of micro-batches with the same actions, ranks and times."""
    codes = bound.codes
    alike = defaultdict[tuple[float, ...], list[list[int]]](list)
    for microbatch in range(0 if codes.joins else codes.microbatches):
        own = [code for kind in codes.per_microbatch for code in codes.table[kind][microbatch]]
        travel = (delays[codes.gives[code]] for code in own)
        alike[*(bound.rank_of[code] for code in own), *(lasts[code] for code in own), *travel].append(own)
    for together in alike.values():
        for line in zip(*together, strict=True):
            if len(line) > 1 and bound.rank_of[line[0]] != NO_RANK:
                yield line


def _ranks(bound: BoundPlan, code: int) -> tuple[int, ...]:
    """Return what an action occupies: see `Job.ranks`."""
    if not bound.codes.collective[code]:
        return (bound.rank_of[code],)
    return tuple(rank + len(bound.computing) * bound.beside for rank in bound.reduces[code])


def _sequences(codes: Codes) -> list[int]:
    """Return, by micro-batch, the first one of its sequence: slices need each other, other micro-batches do not."""
    first = list(range(codes.microbatches))
    for code, values in codes.more_needs.items():
        for giver in (codes.givers(value)[0] for value in values):
            low, high = sorted((first[codes.microbatch[code]], first[codes.microbatch[giver]]))
            first = first if low == high else [low if each == high else each for each in first]
    return first


def _needs(bound: BoundPlan, code: int, job_of: Sequence[int]) -> Iterator[Link]:
    """Yield the jobs that an action waits for, and which values travel."""
    codes, rank_of, giver_of = bound.codes, bound.rank_of, bound.giver_of
    if codes.collective[code]:
        givers = (giver for value in codes.all_needs(code) for giver in codes.givers(value))
        yield from ((job_of[giver], NOTHING) for giver in givers if rank_of[giver] != NO_RANK)
        return
    for value in (codes.first_need[code], codes.second_need[code], *codes.more_needs.get(code, ())):
        if value != codes.always:
            giver = giver_of[value]
            yield job_of[giver], NOTHING if rank_of[giver] == rank_of[code] else value


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
            for before, what in jobs[after].needs:
                if before >= made:
                    if before not in longest:
                        heappush(pending, -before)
                    longest[before] = max(
                        longest.get(before, 0.0), jobs[before].time + work.lags[what] + longest[after]
                    )
        found[which] = longest[made]
    return [found[which] for which in alike]
