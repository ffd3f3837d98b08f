"""Simulate a plan: when each action would start and end, given how long actions and transfers take."""

from __future__ import annotations

from collections import defaultdict
from functools import partial

from pipelab.checking.checker import ScheduleLike, as_plan, require_legal, with_excerpt
from pipelab.checking.deadlock import deadlocks
from pipelab.errors import CostError, require_size
from pipelab.plan.actions import HALVES
from pipelab.plan.all_reduce import with_reduces
from pipelab.plan.bound import BoundPlan
from pipelab.plan.fault import ScheduleError
from pipelab.plan.order import NOTHING, Link, Network, Traversal, network_of, traverse
from pipelab.plan.plan import Plan
from pipelab.plan.transfers import Order, Transport, require_words
from pipelab.simulation.cost import Cost, as_cost
from pipelab.simulation.wire import on_the_wire
from pipelab.trace.events import Event
from pipelab.trace.trace import Trace


def simulate(
    plan: Plan | ScheduleLike,
    cost: Cost | None = None,
    replicas: int = 1,
    *,
    order: Order = "pytorch",
    transport: Transport = "buffered",
    max_outstanding_sends: int | None = None,
) -> Trace:
    """Return when each action would start and end, if every rank ran each action as soon as it can.

    Each rank runs its row in order, and waits for the values that it needs. Simulating takes time in proportion to the
    number of actions.

    Args:
        plan: the plan or schedule.
        cost: how long actions and transfers take; by default forward 1, backward 2 and free transfers.
        replicas: how many copies of the pipeline share the batch, each with as many micro-batches as the plan has. All
            do the same at the same times, so the trace has only the first one, with the all-reduces of its stages:
            64 replicas take no longer to simulate than one. `replicate` lays out all of them.
        order: where each rank posts its receives. `"pytorch"`: as early as the send can be placed, as PyTorch does.
            `"at-use"`: right before the action that needs the value. `"deferred"`: as PyTorch with `defer_pp_recv`.
            `"by-time"`: where no queue can hang, in an order that pipelab chooses for these costs.
        transport: which transfers wait for each other. `"buffered"`: none, as papers assume. `"rank"`, `"pair"`,
            `"edge"`: those in a queue of a rank, of a pair of ranks, or of a directed pair. `"holding"`: a rank waits
            at each receive for its value. In all but the first, an overlapped pair sends its values after both of its
            halves. [The wire](../wire.md) explains orders and transports.
        max_outstanding_sends: how many sends of a rank may be under way together, by default any number. A rank waits
            for an earlier send before one that would be one too many, as PyTorch's runtime does from 2.15 on.

    Example:
        >>> import pipelab
        >>> trace = pipelab.simulate(pipelab.OneFOneB(ranks=4, microbatches=8), Cost(forward=1, backward=2))
        >>> trace.makespan, round(trace.bubble, 3), trace.peak_activations
        (33.0, 0.273, (4, 3, 2, 1))

        With replicas, every rank ends with the all-reduce of its gradients:

        >>> both = pipelab.simulate(pipelab.OneFOneB(ranks=4, microbatches=8), Cost(all_reduce=5), replicas=64)
        >>> both.ranks, both.makespan, both.plan.rows[3][-1]
        (4, 38.0, 3R)

    Raises:
        ScheduleError: if the plan has faults; or if its sends and receives wait for each other in a circle.
        CostError: if a list of the cost does not have one number per stage; if the transport is not buffered and the
            cost has a busy sender.
        UsageError: if `replicas` or `max_outstanding_sends` is not a positive whole number, or if no order of waits
            keeps to that; if `order` or `transport` is none of the words.
        TypeError: if `cost` is not a `Cost`.
    """
    plan, cost = as_plan(plan).reducing(beside=False), as_cost(cost)
    if require_size("replicas", replicas) > 1:
        plan = first_replica(plan, f"{plan.name}, 1 of {replicas} replicas")
    require_words(order, transport)
    sends = None if max_outstanding_sends is None else require_size("max_outstanding_sends", max_outstanding_sends)
    walk = require_legal(plan)
    plan = plan.reducing(beside=cost.all_reduce_runs == "beside")
    if paired := cost.pair_times(plan):
        walk = _by_slots(plan)
    bound, (lasts, delay) = plan.bound, cost.lengths(plan)
    queued, transfers = transport != "buffered" or sends is not None, None
    if queued:
        _refuse_queues(plan, cost)
        begun, ended, transfers = on_the_wire(plan, cost, paired, order, transport, sends)
    elif bound.moves or cost.sender == "busy":
        begun, ended = _by_network(bound, lasts, delay, paired, busy=cost.sender == "busy")
    else:
        begun, ended = _clock(bound, walk.order, lasts, delay, paired)
    return Trace(
        plan,
        [[begun[code] for code in row] for row in bound.computing],
        [[ended[code] for code in row] for row in bound.computing],
        cost.unit,
        delay=delay.__getitem__ if any(delay) and not queued else None,
        transfers=transfers,
        moves=[Event(move.rank, move.action, begun[move.code], ended[move.code]) for move in bound.moves],
        costs=partial(cost.table, plan),
        note=", ".join(_notes(bound, cost, order if queued else "pytorch", transport, sends)),
    )


def _notes(bound: BoundPlan, cost: Cost, order: Order, transport: Transport, sends: int | None) -> list[str]:
    """Return what is not as usual."""
    notes = {
        "stage 0 as run": cost.first_stage == "as-run" and not set(HALVES).isdisjoint(bound.kinds),
        f"order {order}": order != "pytorch",
        f"at most {sends} sends under way": sends is not None,
        f"transport {transport}": transport != "buffered",
    }
    return [note for note, applies in notes.items() if applies]


def _by_slots(plan: Plan) -> Traversal:
    """Return a walk through a legal plan in which both halves of a pair may start together."""
    walk = traverse(plan.bound, atomic_pairs=True)
    if walk.stuck:
        faults = [with_excerpt(plan, fault) for fault in deadlocks(plan, walk, atomic_pairs=True)]
        raise ScheduleError(faults, f"{plan.name} with each overlapped pair as one slot")
    return walk


def _refuse_queues(plan: Plan, cost: Cost) -> None:
    """Refuse what is simulated only where transfers do not queue."""
    if cost.sender == "busy":
        raise CostError(
            "sender='busy': a busy sender needs buffered transfers: leave out transport, max_outstanding_sends"
        )
    for move in plan.bound.moves:
        raise CostError(
            f"{plan.name} has {move.action}: what runs beside computing is simulated where transfers do not queue\n"
            "  try: leave out transport and max_outstanding_sends"
        )


def first_replica(plan: Plan, name: str = "") -> Plan:
    """Return the plan with the all-reduces that each of its replicas has, in the places where `replicate` has them.

    One rank stands for its whole group: the others arrive at the all-reduce at the same time.
    """
    require_legal(plan)
    alone = BoundPlan.bind(plan.written, plan.stages, plan.microbatches, plan.place, plan.after)
    bound = with_reduces(alone, every_stage=True)
    return plan.with_rows(map(bound.items, range(plan.ranks)), name or plan.name)


def _clock(
    bound: BoundPlan, order: list[int], lasts: list[float], delay: list[float], paired: dict[int, float]
) -> tuple[list[float], list[float]]:
    """Return the start and end of every code."""
    codes, rank_of = bound.codes, bound.rank_of
    collective, first_need, second_need, gives = codes.collective, codes.first_need, codes.second_need, codes.gives
    first_lag, second_lag = _lags(bound, delay)

    needs_more = codes.more_needs.keys() | paired.keys()
    ready = [0.0] * (codes.always + 1)  # by value: when it leaves its giver
    free = [0.0] * len(bound.computing)  # by rank
    begun = [0.0] * len(lasts)
    ended = [0.0] * len(lasts)
    slot_of: dict[int, float] = {}  # backward of a pair -> start of the slot it shares

    def arrived(code: int) -> float:
        first, second = ready[first_need[code]] + first_lag[code], ready[second_need[code]] + second_lag[code]
        return max([first, second, *(ready[value] for value in codes.more_needs.get(code, ()))])

    for at, code in enumerate(order):
        if collective[code]:
            group = bound.reduces[code]
            start = max(free[rank] for rank in group)
            end = start + lasts[code]
            begun[code], ended[code] = start, end
            for rank in group:
                free[rank] = end
            continue
        rank = rank_of[code]
        if code in slot_of:
            start = slot_of.pop(code)
            end = free[rank]
        else:
            start = free[rank]
            arrives = ready[first_need[code]] + first_lag[code]
            if arrives > start:  # noqa: PLR1730 - half the time of max(), in the loop that simulation is
                start = arrives
            arrives = ready[second_need[code]] + second_lag[code]
            if arrives > start:  # noqa: PLR1730 - likewise
                start = arrives
            end = start + lasts[code]
            if needs_more and code in needs_more:
                start = max(start, arrived(code))
                end = start + lasts[code]
                if code in paired:
                    start = max(start, arrived(order[at + 1]))
                    end = start + paired[code]
                    slot_of[order[at + 1]] = start
        ready[gives[code]] = end
        begun[code] = start
        ended[code] = end
        free[rank] = end
    return begun, ended


def _by_network(
    bound: BoundPlan, lasts: list[float], delay: list[float], paired: dict[int, float], *, busy: bool
) -> tuple[list[float], list[float]]:
    """Return the start and end of every code and move: slower than `_clock`."""
    jobs, network = network_of(bound, paired)
    times = [paired.get(slot[0], lasts[slot[0]]) for _, slot in jobs]
    if busy:
        network = _held_until_sent(network)
    begun, ended = [0.0] * len(lasts), [0.0] * len(lasts)
    for (_, slot), start, last in zip(jobs, network.starts(times, bound.codes.by_need(delay)), times, strict=True):
        for code in slot:
            begun[code], ended[code] = start, start + last
    return begun, ended


def _held_until_sent(network: Network) -> Network:
    """Return a network in which what follows a job on its rank also waits until all that the job sends has arrived."""
    sent: dict[int, list[Link]] = defaultdict(list)
    for before in network.follows:
        for job, what in before:
            if what != NOTHING:
                sent[job].append((job, what))
    held = ([link for job, what in before if what == NOTHING for link in sent[job]] for before in network.follows)
    return Network([[*before, *more] for before, more in zip(network.follows, held, strict=True)])


def _lags(bound: BoundPlan, delay: list[float]) -> tuple[list[float], list[float]]:
    """Return, by code, how long its two inputs travel; 0 on its own rank."""
    codes, rank_of = bound.codes, bound.rank_of
    none = [0.0] * len(codes.gives)
    if not any(delay):
        return none, none
    first, second = list(none), list(none)
    for row in bound.computing:
        for code in row:
            value = codes.always if codes.collective[code] else codes.comes[code]
            if value != codes.always and rank_of[bound.giver_of[value]] != rank_of[code]:
                (first if value == codes.first_need[code] else second)[code] = delay[value]
    return first, second
