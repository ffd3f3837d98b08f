"""Costs: how long each action takes, how long a value travels on the links between ranks, and an all-reduce."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from math import ceil, exp, hypot, log1p, log2, sqrt
from typing import Any, Literal

from pipelab.errors import CostError, counted, require_size
from pipelab.plan.actions import FINITE, KINDS, TRAITS, Kind, finite
from pipelab.plan.binding import NO_RANK
from pipelab.plan.fault import misfit, readable, shorten
from pipelab.plan.plan import Plan
from pipelab.simulation.fitting import fitted, groups, listed, spread
from pipelab.trace.trace import Trace

Number = float | Sequence[float]
"""One number for all stages, or one per stage."""

PerSlot = Number | Callable[[int, int], float]
"""The same, or a function of (micro-batch, stage)."""

Speed = tuple[float, float | None]
"""Latency, and bytes per unit of time; without the second, size does not matter."""

_WORK = ("forward", "backward", "input_grad", "weight_grad", "recompute")
"""The times that `Cost.times` reckons together: some follow from others."""

_PER_ROW = (*_WORK, "pair", "activation_bytes", "boundary_gradient_bytes")
"""The costs that grow with the rows of a micro-batch; only they may be functions of it."""

_ONCE = ("all_reduce", "update")
"""The costs of actions that not every plan lists."""

_MOVES = ("gather", "offload", "load")
"""The costs of moves."""

_PER_STAGE = (*_PER_ROW, *_ONCE, *_MOVES)
_SHARED = (*_PER_ROW, "offload", "load")
"""The costs of which one micro-batch of several has a share."""

_FEWEST = 3
"""To fewer fitted steps no interval is given."""

_TOO_FAR = 1.5
"""Steps that may be as many times longer or shorter give no interval: other programs decide how long they take."""

_KEPT = {"activation_bytes": -1, "boundary_gradient_bytes": 0}
"""Which of several merged stages gives a value's size; all other costs add up."""

_WORDS = {
    "all_reduce_runs": ("in-row", "beside"),
    "per": ("rank", "stage"),
    "first_stage": ("uniform", "as-run"),
    "sender": ("free", "busy"),
}


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
    inside: Speed
    between: Speed

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """How long each action takes, and how long a value travels from rank to rank.

    Every time is in one unit of your choice (name it with `unit`). A number holds for all stages; a list always has one
    number per stage. For micro-batches of unequal length, times of work and sizes of values may also be a function of
    (micro-batch, stage). A list and a function give each stage's own number.

    Attributes:
        forward: time of `F`.
        backward: time of `B`.
        input_grad: time of `I`; half of `backward` if left out.
        weight_grad: time of `W`; half of `backward` if left out. If `I` and `W` together take longer or shorter than
            `backward`, comparing schedules that split it with schedules that do not is unfair.
        recompute: time of `C`; as long as `forward` if left out.
        pair: time of an overlapped pair as one slot, as in the DualPipe paper. If left out, a pair takes as long as its
            forward and its backward, one after the other.
        all_reduce: time of `R`, such as one from `all_reduce_time`.
        all_reduce_runs: `"in-row"`: a rank does nothing else during an `R`. `"beside"`: an `R` begins on a channel of
            its ranks when all of them have come to it and the `R` before it is over, and they compute meanwhile.
        update: time of `U`.
        gather: time of `UNSHARD`, on a channel beside computing.
        offload: time of `OFFLOAD`, likewise.
        load: time of `LOAD`, likewise.
        latency: time that any transfer takes, however small. It delays the action that needs the value.
        bandwidth: bytes per unit of time; if left out, size does not matter.
        links: latency and bandwidth inside a node and between nodes, instead of `latency` and `bandwidth`; `Links`, or
            a dict of its three arguments.
        sender: `"free"`: another device moves the values, and the sending rank goes on immediately. `"busy"`: the
            sending rank is idle until all that it sends has arrived.
        activation_bytes: bytes that a stage's forward sends on for one micro-batch; they take time if there is a
            bandwidth.
        boundary_gradient_bytes: bytes that a stage's backward sends back for one micro-batch; they take time if there
            is a bandwidth.
        per: what a single number is for. `"rank"`: one rank's share of the model, so that you can compare schedules
            with several stages per rank. A stage then takes `number * ranks / stages`, with the ranks that one
            micro-batch visits. `"stage"`: one stage.
        first_stage: `"uniform"`, as papers count, or `"as-run"`, as PyTorch runs it: stage 0 needs no input gradient,
            so `I` takes no time there and `W` is the whole backward.
        unit: the unit of time, such as `"ms"`; for labels only.
        spread: from `Cost.fit`: how much longer each fitted step took than these costs predict, as a share, ascending.
            Predictions may be wrong by as much. `(-0.03, 0.02, 0.4)` are three steps, one of them disturbed.
        variation: from `Cost.fit`: by which share half of the repeated actions, or more, differ from the usual ones.

    Example:
        >>> Cost(forward=50, backward=[80, 90], unit="ms").backward
        (80, 90)

        The last micro-batch is half as long as the others, on two ranks:

        >>> import pipelab
        >>> half = Cost(forward=lambda m, s: 0.5 if m == 3 else 1, backward=lambda m, s: 1 if m == 3 else 2)
        >>> pipelab.simulate(pipelab.GPipe(2, 4), half).makespan
        13.5

        A transfer takes 0.5, and the sender does nothing meanwhile:

        >>> pipelab.simulate(pipelab.GPipe(2, 4), Cost(latency=0.5, sender="busy")).makespan
        19.0

    Raises:
        CostError: if a number is neither 0 nor between 1e-30 and 1e+30, or a cost is of another type; if there are
            `links` and a latency or bandwidth too.
    """

    forward: PerSlot = 1
    backward: PerSlot = 2
    input_grad: PerSlot | None = None
    weight_grad: PerSlot | None = None
    recompute: PerSlot | None = None
    pair: PerSlot | None = None
    all_reduce: Number = 0
    all_reduce_runs: Literal["in-row", "beside"] = "in-row"
    update: Number = 0
    gather: Number = 0
    offload: Number = 0
    load: Number = 0
    latency: float = 0
    bandwidth: float | None = None
    links: Links | dict[str, Any] | None = None
    sender: Literal["free", "busy"] = "free"
    activation_bytes: PerSlot = 0
    boundary_gradient_bytes: PerSlot = 0
    per: Literal["rank", "stage"] = "rank"
    first_stage: Literal["uniform", "as-run"] = "uniform"
    unit: str = ""
    spread: tuple[float, ...] = field(default=(), compare=False)
    variation: float = field(default=0, compare=False)

    def __post_init__(self) -> None:
        """Refuse values that cannot be a time or a size; make lists immutable."""
        for each in fields(self):
            name, value = each.name, readable(getattr(self, each.name))
            if name in ("unit", "links", "spread", *_WORDS) or (value is None and each.default is None):
                continue
            if callable(value) and name in _PER_ROW:
                if fault := misfit(name, value, "microbatch", "stage"):
                    raise CostError(f"{fault.message}\n  try: {fault.hint}")
                continue
            several = isinstance(value, Sequence)
            if several and name in ("latency", "bandwidth"):
                raise CostError(f"{name}={shorten(value)}: expected one number, not a list")
            numbers = tuple(map(finite, value if several else (value,)))
            if not numbers or None in numbers:
                function = ", or a function of (microbatch, stage)" * (name in _PER_ROW)
                raise CostError(f"{name}={shorten(value)}: expected numbers, {FINITE}{function}")
            object.__setattr__(self, name, numbers if several else numbers[0])
        self._refuse()

    def _refuse(self) -> None:
        """Refuse words and numbers that make no sense, alone or together."""
        if not isinstance(self.unit, str):
            raise CostError(f"unit={shorten(self.unit)}: expected a text, such as 'ms'")
        if self.bandwidth == 0:
            raise CostError("bandwidth=0: nothing would ever arrive; leave it out if size does not matter")
        if isinstance(self.links, dict) and set(self.links) == {each.name for each in fields(Links)}:
            object.__setattr__(self, "links", Links(**self.links))
        if not (self.links is None or isinstance(self.links, Links)):
            raise CostError(f"links={shorten(self.links)}: expected pipelab.Links(ranks_per_node, inside, between)")
        if self.links is not None and (self.latency or self.bandwidth is not None):
            raise CostError("links have their own latencies and bandwidths: leave out latency and bandwidth")
        for name, words in _WORDS.items():
            if (word := getattr(self, name)) not in words:
                raise CostError(f"{name}={word!r}: expected {' or '.join(map(repr, words))}")

    @classmethod
    def fit(
        cls,
        traces: Trace | Sequence[Trace],
        split: Trace | Sequence[Trace] | float | None = None,
        typical: Literal["median", "mean"] = "median",
    ) -> Cost:
        """Return the costs that traces show: the median time of each kind of action on each stage.

        A single step of a busy machine may take half or twice the usual time. So give several steps: the median is over
        all of them, and `spread` says how far each step is from the prediction.

        In a measured trace, an action's time counts from the moment at which its rank and its inputs were ready. So
        what the rank did between two actions belongs to the work.

        Transfer times come from values that an idle rank waited for. The shortest of the stages' medians becomes the
        latency. The rest of the other stages' times becomes their bytes, at a bandwidth of 1.

        The costs have one number for each stage that ran. They predict other orders of these stages, other numbers of
        micro-batches with as many rows, and, with `merged`, fewer stages.

        Args:
            traces: one trace, or several with the same stages and rows, such as five steps after a warm-up step. A
                schedule in which ranks often work alone, such as GPipe, is best.
            split: what a split backward costs more than a whole one: the ratio `(I + W) / B`, or traces of the same
                stages and rows with split backwards. If left out, each half takes half of `B`. On the first stage of a
                measured trace, `I` takes no time and `W` takes all of `B`.
            typical: `"median"`, which a few disturbed actions do not change; or `"mean"`, in which they count.

        Example:
            >>> import pipelab
            >>> trace = pipelab.simulate(pipelab.GPipe(2, 4), Cost(forward=[3, 4], backward=6, latency=1, per="stage"))
            >>> Cost.fit(trace).forward, Cost.fit(trace).latency
            ((3.0, 4.0), 1.0)
            >>> pipelab.simulate(pipelab.ZBH1(2, 8), Cost.fit(trace, split=1.5)).makespan
            110.0

            In one of three steps, everything took twice as long:

            >>> slow = pipelab.simulate(trace.plan, Cost(forward=[6, 8], backward=12, latency=2, per="stage"))
            >>> Cost.fit([trace, slow, trace]).spread
            (0.0, 0.0, 1.0)

        Raises:
            TypeError: if `traces` are not traces, or `split` neither traces nor a number.
            CostError: if traces have other stages, units or sources; if `typical` or `split` is none of the above.

        Warns:
            UserWarning: if the times of repeated actions of measured traces vary by over 15 %.
        """
        apart = listed(split) if isinstance(split, (Trace, list, tuple)) else split
        cost = cls(per="stage", **fitted(steps := listed(traces), apart, typical))
        return replace(cost, spread=spread([*steps, *apart] if isinstance(apart, list) else steps, cost))

    def interval(self, predicted: float) -> tuple[float, float]:
        """Return between which times a step probably lies that these costs predict to take so long.

        Nine of ten steps should lie inside, those of other orders and other numbers of micro-batches too, if actions
        take milliseconds: below, Python decides how long they take, and other orders lie outside. How wide it
        is follows from the fitted steps: from how far they are from these costs (`spread`, Student's distribution), and
        how far repeated actions are from each other (`variation`), because in another order other actions decide. If
        other programs kept the machine busy, there is none.

        Args:
            predicted: the makespan of a simulation with these costs, in any unit.

        Example:
            >>> import pipelab
            >>> traces = [pipelab.simulate(pipelab.GPipe(2, 4), Cost(forward=each)) for each in (0.9, 1, 1, 1, 1.2)]
            >>> cost = Cost.fit(traces)
            >>> makespan = pipelab.simulate(pipelab.OneFOneB(2, 8), cost).makespan
            >>> low, high = cost.interval(makespan)
            >>> makespan, round(low, 1), round(high, 1)
            (27.0, 24.8, 29.4)

        Raises:
            CostError: if the costs are not from `Cost.fit` with three steps or more, or if these were too far off.
        """
        if len(self.spread) < _FEWEST:
            raise CostError(
                f"an interval needs costs that were fitted to {_FEWEST} steps or more, not to {len(self.spread)}\n"
                "  try: Cost.fit([step.trace, ...]) of five steps"
            )
        freedom = len(self.spread) - 1
        student = 1.645 + 1.524 / freedom + 1.42 / freedom**2  # its 95 % quantile, within 6 %
        off = sqrt(sum(log1p(each) ** 2 for each in self.spread) / freedom * (1 + 1 / len(self.spread)))
        far = exp(hypot(student * off, 1.645 * self.variation))
        if far > _TOO_FAR:
            raise CostError(
                f"the fitted steps are {self.spread[0]:+.0%} to {self.spread[-1]:+.0%} off these costs, and half of "
                f"their actions {self.variation:.0%} or more off the usual ones: too far for an interval\n"
                "  try: measure five steps again, while nothing else uses the processor"
            )
        return predicted / far, predicted * far

    def merged(self, stages: int | Sequence[int]) -> Cost:
        """Return the costs of a model cut into fewer stages: the costs of neighbours are added.

        So a trace of a finely cut model predicts coarser cuts. A merged stage sends the bytes of its last stage on, and
        the bytes of its first stage back. Times between two stages, such as a transfer, do not count. Times of `R` are
        added too, although a ring's latency then counts several times.

        Args:
            stages: how many stages to make, all equally large; or how many stages go into each, such as `[3, 1]`.

        Example:
            >>> import pipelab
            >>> fine = Cost(forward=[1, 2, 3, 4], backward=[2, 4, 6, 8])
            >>> fine.merged(2).forward, fine.merged([3, 1]).backward
            ((3, 7), (12, 8))

        Raises:
            CostError: if no cost has one number per stage, so that the number of stages is not known; or if they cannot
                be merged so. Stages are never cut: for more stages, run the model with more.
        """
        given = {len(value) for value in map(self.__getattribute__, _PER_STAGE) if isinstance(value, Sequence)}
        if len(given) != 1:
            raise CostError(
                "merged needs costs with one number per stage, as from Cost.fit: these have none, or differ"
            )
        merged = list(groups(given.pop(), stages))

        def merge(name: str, value: Any) -> Any:
            if value is None or (self.per == "rank" and not isinstance(value, Sequence) and not callable(value)):
                return value
            taken = [[group[_KEPT[name]]] if name in _KEPT else group for group in merged]
            if callable(value):
                return lambda microbatch, stage: sum(value(microbatch, each) for each in taken[stage])
            return tuple(
                sum(value[each] if isinstance(value, Sequence) else value for each in group) for group in taken
            )

        return replace(self, **{name: merge(name, getattr(self, name)) for name in _PER_STAGE})

    def shared(self, microbatches: int) -> Cost:
        """Return the costs of one micro-batch, if these are the costs of a whole batch.

        Times of work and sizes of activations are divided. Latency, bandwidth, parameters and their all-reduce do not
        depend on the number of rows and stay the same.

        Example:
            >>> Cost(forward=80, latency=5).shared(8).forward
            10.0

        Raises:
            UsageError: if `microbatches` is not a positive whole number.
        """
        count = require_size("microbatches", microbatches)

        def part(value: Any) -> Any:
            if callable(value):
                return lambda microbatch, stage: value(microbatch, stage) / count
            if isinstance(value, Sequence):
                return tuple(number / count for number in value)
            return None if value is None else value / count

        return replace(self, **{name: part(getattr(self, name)) for name in _SHARED})

    def times(self, plan: Plan) -> dict[Kind, list[float]]:
        """Return, for each kind of action, its time on every stage of a plan.

        If a time is a function, each kind except `R` has one time per slot: micro-batch 0 on all stages, then
        micro-batch 1.

        Example:
            >>> import pipelab
            >>> Cost(forward=1, backward=2).times(pipelab.GPipe(2, 2).plan())["B"]
            [2.0, 2.0]

        Raises:
            CostError: if a list does not have one number per stage, or a function returns anything but a finite number.
        """
        share = self._share(plan)
        given = {name: self._each(name, plan, share) for name in _WORK if getattr(self, name) is not None}
        half = [time / 2 for time in given["backward"]]
        work = {"input_grad": half, "weight_grad": half, "recompute": given["forward"], **given}
        longest = max(map(len, work.values()))
        work = {name: times * (longest // len(times)) for name, times in work.items()}
        if self.first_stage == "as-run":
            work["input_grad"][:: plan.stages] = [0.0] * (longest // plan.stages)
            work["weight_grad"][:: plan.stages] = work["backward"][:: plan.stages]
        found = work | {name: self._each(name, plan, share) for name in _ONCE} | {"": [0.0] * plan.stages}
        return {kind: found[TRAITS[kind].cost] for kind in KINDS}

    def transfer_times(self, plan: Plan) -> tuple[list[float], list[float]]:
        """Return how long the output and the input gradient of every stage travel to another rank.

        With `links`, or sizes that are functions, one of them or both are by slot, as in `times`.
        """
        outputs, gradients = (self._each(f"{what}_bytes", plan, 1.0) for what in ("activation", "boundary_gradient"))
        if self.links is None:
            slow = 0.0 if self.bandwidth is None else 1.0 / self.bandwidth
            return [self.latency + size * slow for size in outputs], [self.latency + size * slow for size in gradients]
        ranks, stages = plan.bound.rank_of_slot, plan.stages
        outputs, gradients = (each * (len(ranks) // len(each)) for each in (outputs, gradients))
        assert isinstance(self.links, Links)  # made of a dict when the cost was made
        time = self.links.time
        for slot, rank in enumerate(ranks):
            stage = slot % stages
            outputs[slot] = time(rank, ranks[slot + 1], outputs[slot]) if stage + 1 < stages else 0.0
            gradients[slot] = time(rank, ranks[slot - 1], gradients[slot]) if stage else 0.0
        return outputs, gradients

    def lengths(self, plan: Plan) -> tuple[list[float], list[float]]:
        """Return how long each action and each move takes, by code; and how long each value travels."""
        codes = plan.bound.codes
        moves = range(codes.first_move, len(codes.kind))
        times = {name: self._each(name, plan, self._share(plan)) for name in _MOVES if moves}
        times[""] = [0.0] * plan.stages
        moved = [times[codes.traits(code).cost][codes.stage[code]] for code in moves]
        return codes.by_code(self.times(plan)) + moved, codes.by_value(*self.transfer_times(plan))

    def table(self, plan: Plan) -> dict[str, list[float]]:
        """Return how long each kind of a plan's actions takes, and its values travel (`out`, `gin`), as traces save it.

        Each has one number per stage; or, if a time is a function or there are links, one per slot, as in `times`. An
        overlapped pair that is one slot is called `pair`.

        Example:
            >>> import pipelab
            >>> Cost(latency=0.5).table(pipelab.GPipe(2, 2).plan())
            {'F': [1.0, 1.0], 'B': [2.0, 2.0], 'out': [0.5, 0.5], 'gin': [0.5, 0.5]}
        """
        bound, share = plan.bound, self._share(plan)
        times = {kind: time for kind, time in self.times(plan).items() if kind in bound.kinds}
        moved = {move.action.kind: move.action.traits.cost for move in bound.moves if move.action.traits.cost}
        named = moved | ({"pair": "pair"} if bound.pairs and self.pair is not None else {})
        outputs, gradients = self.transfer_times(plan)
        return (
            times
            | {kind: self._each(name, plan, share) for kind, name in named.items()}
            | {"out": outputs, "gin": gradients}
        )

    def pair_times(self, plan: Plan) -> dict[int, float]:
        """Return the time of each overlapped pair, by the code of its forward; nothing if pairs are not one slot."""
        if self.pair is None or not plan.bound.pairs:
            return {}
        times = plan.bound.codes.by_slot(self._each("pair", plan, self._share(plan)))
        return {code: times[plan.bound.codes.slot[code]] for code in plan.bound.pairs}

    def _share(self, plan: Plan) -> float:
        """Return the fraction of a single number that one stage takes."""
        if self.per == "stage":
            return 1.0
        return len(set(plan.bound.route(0)) - {NO_RANK}) / plan.stages

    def _each(self, name: str, plan: Plan, share: float) -> list[float]:
        """Return one number per stage, of a function one per slot; a single number is scaled by `share`."""
        value, stages = getattr(self, name), plan.stages
        if callable(value):
            return list(_asked(name, value, plan))
        if isinstance(value, Sequence):
            if len(value) != stages:
                fewer = f", or add up neighbours with cost.merged({stages})" * (len(value) % stages == 0)
                raise CostError(
                    f"{name} has {counted(len(value), 'number')} for {counted(stages, 'stage')}: give one number, or "
                    f"one per stage; of a fitted cost, run the model with {stages} and fit that trace{fewer}"
                )
            return [float(number) for number in value]
        return [value * share] * stages


def as_cost(cost: Cost | None) -> Cost:
    """Return a cost, by default forward 1, backward 2 and free transfers."""
    if cost is not None and not isinstance(cost, Cost):
        raise TypeError(f"cost={cost!r}: expected a Cost, such as pipelab.Cost(forward=1, backward=2)")
    return cost or Cost()


def _asked(name: str, function: Callable[[int, int], float], plan: Plan) -> Iterator[float]:
    """Yield a function's answers, by slot."""
    for microbatch in range(plan.microbatches):
        for stage in range(plan.stages):
            answer = readable(function(microbatch, stage))
            number = finite(answer)
            if number is None:
                raise CostError(
                    f"{name}(microbatch={microbatch}, stage={stage}) returned {shorten(answer)}: expected a "
                    f"number, {FINITE}"
                )
            yield float(number)


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
