"""A ranker of layouts of dense models: a step's time, what each rank holds, and what travels, term by term."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property, lru_cache
from operator import mul
from typing import Any, TypeVar

from pipelab.catalogue import schedules
from pipelab.checking.memory import Memory
from pipelab.errors import UsageError, counted, require_size
from pipelab.layouts.devices import Device, Group
from pipelab.layouts.published import mfu
from pipelab.layouts.transformer import Layer, Transformer
from pipelab.plan.plan import Plan
from pipelab.schedule import Schedule
from pipelab.simulation.bounds import lower_bound
from pipelab.simulation.clock import first_replica, simulate
from pipelab.simulation.cost import Cost, Links
from pipelab.simulation.memory import MemoryUse, memory_use
from pipelab.trace.trace import Trace

Made = TypeVar("Made")
Terms = dict[str, float]
"""Seconds by what takes them."""

WEIGHT, GRADIENT, OPTIMIZER = 2, 4, 12
"""Bytes for each parameter: 16 bits; gradients summed in 32 bits; the weight, its mean and mean square in 32 bits."""

_DATA = ("data", "expert data")
_MOVES = ("tensor", "context", "expert", "pipeline", "data")
_PASSES = {0: [(0, 0)] * 3, 1: [(0, 0)] * 3, 2: [(0, 0), (0, 0), (0, 1)], 3: [(1, 0), (1, 0), (0, 1)]}
"""By ZeRO's level: how often weights and gradients go round in a forward, and in a backward for inputs and weights."""

_AFTER = {0: (0, 2), 1: (1, 1), 2: (1, 0), 3: (0, 0)}
"""The same after the last micro-batch; an all-reduce is two rounds."""

_KNOWN: dict[str, Sequence[object]] = {
    "zero": range(4), "recompute": ("none", "selective", "full"), "overlap": (True, False), "schedule": [*schedules],
}  # fmt: skip

_OPERATIONS = 6
"""Operations without matrix products in a forward of a layer: two norms, two sums, positions, the activation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a step is laid out on devices.

    Devices are numbered as in Megatron-Core: neighbours share a layer (`tensor`), then a sequence (`context`), then
    come `replicas`, whose first `expert` share the experts, and at last the pipeline's ranks.

    Attributes:
        tensor: how many devices share every layer, with sequence parallelism (Korthikanti et al. 2022, section 4.2.2).
        context: how many devices share every sequence; each gathers all keys and values (Llama 3, section 3.3.2).
        expert: how many devices share a layer's routed experts.
        replicas: how many copies of the pipeline share the batch.
        zero: which state the replicas share: 0 none, 1 the optimizer's, 2 gradients too, 3 weights too
            (Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5).
        pipeline: how many ranks a pipeline has.
        stages_per_rank: how many stages a rank of the pipeline has.
        schedule: the schedule's name.
        microbatches: how many micro-batches a replica has in a step.
        microbatch: how many sequences a micro-batch has.
        recompute: `"none"`, `"selective"` (attention's matrices) or `"full"` (each layer).
        overlap: whether the replicas' collectives travel while the last micro-batch is computed.
    """

    tensor: int = 1
    context: int = 1
    expert: int = 1
    replicas: int = 1
    zero: int = 1
    pipeline: int = 1
    stages_per_rank: int = 1
    schedule: str = "1f1b"
    microbatches: int = 1
    microbatch: int = 1
    recompute: str = "none"
    overlap: bool = True

    def __post_init__(self) -> None:
        """Refuse what is not a positive size, and words and levels that there are not."""
        for name in (each.name for each in fields(self)):
            if name not in _KNOWN:
                require_size(name, getattr(self, name))
            elif repr(getattr(self, name)) not in map(repr, _KNOWN[name]):
                raise UsageError(f"{name}={getattr(self, name)!r}: expected {', '.join(map(str, _KNOWN[name]))}")

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return self.tensor * self.context * self.replicas * self.pipeline


@lru_cache(maxsize=512)
def _schedule(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    return schedules[name](ranks, microbatches, stages_per_rank)


@cache
def _splits(name: str) -> bool:
    """Return whether a schedule splits its backwards, whatever its sizes."""
    return "I" in schedules[name](2, 4).draft().bound.kinds


@lru_cache(maxsize=4096)
def _places(*sizes: Any) -> list[int]:
    """Return the rank of each stage of a schedule."""
    schedule = _schedule(*sizes)
    if schedule.slices > 1 or len({schedule.place(each, 0) for each in range(schedule.microbatches)}) > 1:
        raise UsageError(f"schedule={sizes[0]}: estimates are for whole sequences, and each stage on one rank")
    return [schedule.place(0, stage) for stage in range(schedule.stages)]


@lru_cache(maxsize=64)
def _plan(*sizes: Any) -> Plan:
    """Return a schedule's plan, with the all-reduce that each of several replicas has."""
    return first_replica(_schedule(*sizes).plan())


@lru_cache(maxsize=1024)
def _holdings(*sizes: Any) -> list[tuple[list[int], set[tuple[int, ...]]]]:
    """Return what each rank of a schedule holds over the step: of its stages, how many activations, then gradients.

    First come the places of these numbers in a list of all stages' activations, then of their gradients.
    """
    bound = _schedule(*sizes).draft().bound
    codes, found = bound.codes, []
    for row in bound.computing:
        now, over = [0] * (2 * codes.stages), set()
        mine = sorted({codes.stage[code] + more for code in row for more in (0, codes.stages)})
        for code in row:
            stage = codes.stage[code]
            now[stage] += codes.holds[code]
            if codes.traits(code).weight_grad:
                now[codes.stages + stage] = 1
            over.add(tuple([now[place] for place in mine]))
            now[stage] -= codes.releases[code]
        found.append((mine, over))
    return found


def cut(layers: int, stages: int) -> list[range]:
    """Return each stage's layers, as even as possible; the first and the last stage get fewer, or none."""
    base, more = divmod(layers, stages)
    order = sorted(range(stages), key=lambda stage: (stage == 0, stage == stages - 1))
    counts = [base + (stage in order[:more]) for stage in range(stages)]
    starts = [sum(counts[:stage]) for stage in range(stages)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


@lru_cache(maxsize=256)
def _stages(model: Transformer, count: int) -> tuple[list[Counter[Layer]], list[int]]:
    """Return each stage's layers, alike ones counted; and for each stage, the first one that is like it."""
    first, last = model.layer(0), model.layer(model.layers - 1)
    cuts = cut(model.layers, count)
    dense = [len(range(each.start, max(each.start, min(each.stop, model.dense_layers)))) for each in cuts]
    both = zip(cuts, dense, strict=True)
    stages = [Counter({first: few}) + Counter({last: len(each) - few}) for each, few in both]
    found: dict[object, int] = {}
    keys = ((*layers.items(), stage == 0, stage == count - 1) for stage, layers in enumerate(stages))
    return stages, [found.setdefault(key, stage) for stage, key in enumerate(keys)]


@lru_cache(maxsize=4096)
def _passes(
    model: Transformer, device: Device, layer: Layer, tensor: int, context: int, expert: int, size: int, recompute: str
) -> tuple[Terms, Terms, Terms]:
    """Return the seconds of a layer's forward, and of its backward for inputs and for weights, in any pipeline."""
    alone = Layout(tensor=tensor, context=context, expert=expert, replicas=expert, microbatch=size, recompute=recompute)
    estimate = Estimate(model, alone, device)
    return estimate.forward(layer), *estimate.backward(layer)


@dataclass(frozen=True)
class Estimate:
    """What a layout does with a model on a kind of device: good for ranking layouts of dense models.

    Attributes:
        model: the model.
        layout: the layout.
        device: the device.

    Example:
        >>> from pipelab.layouts.devices import device
        >>> gpt3 = Transformer(layers=96, hidden=12288, heads=96, ffn=49152, vocab=51200, sequence=2048, gated=False)
        >>> layout = Layout(tensor=8, pipeline=8, microbatches=64)
        >>> estimate = Estimate(gpt3, layout, device("a100"))
        >>> layout.devices, 0.3 < estimate.mfu < 0.6
        (64, True)
    """

    model: Transformer
    layout: Layout
    device: Device

    def __post_init__(self) -> None:
        """Refuse a layout that the model cannot have."""
        layout, model = self.layout, self.model
        sharing, stages = layout.tensor * layout.context * layout.replicas, layout.pipeline * layout.stages_per_rank
        refusals = {
            f"tensor={layout.tensor} does not divide {counted(model.heads, 'head')}": model.heads % layout.tensor,
            f"context={layout.context} does not divide {model.sequence} tokens": model.sequence % layout.context,
            f"{counted(model.experts, 'expert')} on {layout.expert} devices": (model.experts or 1) % layout.expert,
            f"expert={layout.expert} does not divide {sharing} devices of a stage": sharing % layout.expert,
            f"{stages} stages, but only {counted(model.layers, 'layer')} and two ends": stages > model.layers + 2,
        }
        if why := [why for why, refused in refusals.items() if refused]:
            raise UsageError(f"no such layout: {why[0]}")

    @property
    def _sizes(self) -> tuple[str, int, int, int]:
        each = self.layout
        return each.schedule, each.pipeline, each.microbatches, each.stages_per_rank

    # --- groups of devices -------------------------------------------------------------------------------------------

    @cached_property
    def groups(self) -> dict[str, Group]:
        """The devices that share a layer, a sequence, the experts, weights, and one expert's weights."""
        each, device = self.layout, self.device
        inner = each.tensor * each.context
        return {
            "tensor": Group(device, each.tensor),
            "context": Group(device, each.context, each.tensor),
            "expert": Group(device, each.expert),
            "data": Group(device, each.context * each.replicas, each.tensor),
            "expert data": Group(device, inner * each.replicas // each.expert, each.expert),
        }

    # --- one layer, one micro-batch ----------------------------------------------------------------------------------

    @property
    def tokens(self) -> float:
        """How many tokens of a micro-batch a device computes, before tensor parallelism."""
        return self.layout.microbatch * self.model.sequence / self.layout.context

    @property
    def boundary(self) -> float:
        """Bytes of a micro-batch between two layers, before tensor parallelism."""
        return 2 * self.model.hidden * self.tokens

    def moves(self, layer: Layer) -> dict[str, tuple[float, int, int]]:
        """Return what a layer's collectives pass: bytes, how often in a forward, and how often in a backward.

        Sequence parallelism gathers and scatters twice in a forward and twice in a backward, which gathers the two
        products' inputs again (Korthikanti et al. 2022, section 4.2.2).
        """
        keys = layer.keys * self.tokens * self.layout.context / self.layout.tensor
        routed = layer.sent * self.tokens / self.layout.tensor
        return {"tensor": (self.boundary, 4, 6), "context": (keys, 1, 2), "expert": (routed, 2, 2)}

    def forward(self, layer: Layer) -> Terms:
        """Return the seconds of a layer's forward, term by term."""
        device, groups, tokens = self.device, self.groups, self.tokens / self.layout.tensor
        traffic = tokens * (layer.elementwise + 2 * layer.matrices)
        terms = {
            "matrix products": 2 * layer.parameters * tokens / (device.peak * device.matrices),
            "experts' products": 2 * layer.routed * tokens / (device.peak * device.experts),
            "attention's products": layer.attention * tokens / (device.peak * device.attention),
            "other operations": traffic / (device.bandwidth * device.memory_share) + _OPERATIONS * device.launch,
        }
        for name, (size, often, _) in self.moves(layer).items():
            pass_on = groups[name].all_to_all if name == "expert" else groups[name].ring
            terms[f"{name} parallelism"] = often * pass_on(size)
        return terms

    def backward(self, layer: Layer) -> tuple[Terms, Terms]:
        """Return the seconds of a layer's backward, term by term: for its input, and for its weights.

        Products take twice a forward's operations; of matrices of weights, half of it is for the weights.
        """
        forward = self.forward(layer)
        weights = {name: forward[name] for name in ("matrix products", "experts' products")}
        inputs = {name: seconds * (1 if name in weights else 2) for name, seconds in forward.items()}
        for name, (_, there, back) in self.moves(layer).items():
            inputs[f"{name} parallelism"] = forward[f"{name} parallelism"] * back / there
        if self.layout.recompute == "full":
            inputs["recomputation"] = sum(forward.values())
        elif self.layout.recompute == "selective" and layer.matrices:
            traffic = 2 * layer.matrices * self.tokens / self.layout.tensor
            again = traffic / (self.device.bandwidth * self.device.memory_share)
            inputs["recomputation"] = forward["attention's products"] + again
        return inputs, weights

    # --- stages ------------------------------------------------------------------------------------------------------

    @cached_property
    def stages(self) -> list[Counter[Layer]]:
        """Each stage's layers, alike ones counted."""
        return _stages(self.model, self.layout.pipeline * self.layout.stages_per_rank)[0]

    @cached_property
    def _alike(self) -> list[int]:
        """For each stage, the first one that is like it, so that each kind of stage is computed once."""
        return _stages(self.model, self.layout.pipeline * self.layout.stages_per_rank)[1]

    def _each(self, made: Callable[[int], Made]) -> list[Made]:
        """Return what a function makes of each stage, made once for those alike."""
        found = {stage: made(stage) for stage in set(self._alike)}
        return [found[stage] for stage in self._alike]

    @cached_property
    def work(self) -> list[tuple[Terms, Terms, Terms]]:
        """For each stage, the seconds of a forward, of a backward for its input and for its weights, term by term."""
        return self._each(self._work)

    @cached_property
    def _spent(self) -> list[tuple[float, ...]]:
        """For each stage, the same three as sums."""
        return self._each(lambda stage: tuple(sum(part.values()) for part in self.work[stage]))

    def _work(self, stage: int) -> tuple[Terms, Terms, Terms]:
        parts: tuple[Terms, Terms, Terms] = ({}, {}, {})
        own = self.layout
        sizes = (own.tensor, own.context, own.expert, own.microbatch, own.recompute)
        for layer, count in self.stages[stage].items():
            for part, each in zip(parts, _passes(self.model, self.device, layer, *sizes), strict=True):
                for name, seconds in each.items():
                    part[name] = part.get(name, 0.0) + count * seconds
        if stage == len(self.stages) - 1:
            products = 2 * self.model.hidden * self.model.vocab * self.tokens / self.layout.tensor
            for part in parts:
                part["head"] = products / (self.device.peak * self.device.matrices)
        spare = 0.0  # of the backward for inputs, behind which gradients travel too
        for part, (weights, gradients) in zip(parts, _PASSES[self.layout.zero], strict=True):
            spare = sum(part.values()) + (spare if part is parts[2] else 0)
            if weights or gradients:
                seconds = self._data(stage, weights, gradients)
                part["data parallelism"] = max(0.0, seconds - self.layout.overlap * spare)
                spare = max(0.0, spare - seconds)
        return parts

    @cached_property
    def _held(self) -> list[tuple[float, float]]:
        """For each stage, the parameters on one device: without and of its routed experts, before ZeRO shares them."""
        return self._each(self._hold)

    def _hold(self, stage: int) -> tuple[float, float]:
        own = sum(layer.parameters * count for layer, count in self.stages[stage].items())
        experts = sum(layer.experts * count for layer, count in self.stages[stage].items())
        ends = (stage == 0) + (stage == len(self.stages) - 1)
        own += self.model.hidden * self.model.vocab * (1 if self.model.tied else ends) * (ends > 0)
        own += self.model.hidden * self.model.positions * (stage == 0)
        return own / self.layout.tensor, experts / self.layout.expert

    def _shared(self, level: int, stage: int) -> float:
        """Return a stage's parameters on one device, divided by the replicas if ZeRO has at least this level."""
        sizes = [self.groups[name].size if self.layout.zero >= level else 1 for name in _DATA]
        return sum(held / size for held, size in zip(self._held[stage], sizes, strict=True))

    def _data(self, stage: int, weights: int, gradients: int) -> float:
        """Return the seconds in which the replicas pass a stage's weights and gradients so many times."""
        each = weights * WEIGHT + gradients * GRADIENT
        held = [(self.groups[name], own * each) for name, own in zip(_DATA, self._held[stage], strict=True)]
        if self.layout.zero == 0:
            return sum(group.all_reduce(size / 2) for group, size in held if size)
        return sum(group.ring(size) for group, size in held if size)

    @cached_property
    def after(self) -> list[Terms]:
        """For each stage, the seconds after its last micro-batch: the replicas' collectives and the update."""
        return self._each(self._after)

    def _after(self, stage: int) -> Terms:
        forward, *backward = self._spent[stage]
        (weights, gradients), overlap = _AFTER[self.layout.zero], self.layout.overlap
        behind_forward = max(0.0, self._data(stage, weights, 0) - overlap * forward)
        behind_backward = max(0.0, self._data(stage, 0, gradients) - overlap * sum(backward))
        update = self._shared(1, stage) * (GRADIENT + 2 * OPTIMIZER + WEIGHT)
        return {
            "data parallelism": behind_forward + behind_backward,
            "optimizer": update / (self.device.bandwidth * self.device.memory_share),
        }

    @cached_property
    def by_rank(self) -> list[Terms]:
        """For each rank of the pipeline, the seconds of a step, term by term; the rest of the step it waits."""
        ranks: list[Terms] = [{} for _ in range(self.layout.pipeline)]
        for stage, (rank, parts) in enumerate(zip(self.ranks, self.work, strict=True)):
            for many, part in [*((self.layout.microbatches, part) for part in parts), (1, self.after[stage])]:
                for name, seconds in part.items():
                    ranks[rank][name] = ranks[rank].get(name, 0.0) + many * seconds
        return ranks

    @property
    def terms(self) -> Terms:
        """The seconds of a step, term by term, on the rank that works longest."""
        return max(self.by_rank, key=lambda terms: sum(terms.values()))

    @cached_property
    def at_least(self) -> float:
        """Seconds that a step cannot undercut, without a simulation: for each rank, its work and what surrounds it.

        Before its first stage, a micro-batch passes all earlier stages forwards, and after it, all of them backwards:
        meanwhile, a schedule that splits backwards can compute the gradients of weights.
        """
        many, fill, drain = self.layout.microbatches, 0.0, 0.0
        own: dict[int, list[float]] = {}
        for rank, (forward, inputs, weights) in zip(self.ranks, self._spent, strict=True):
            work = own.setdefault(rank, [fill, drain, 0.0])
            work[0] += many * (forward + inputs)
            work[2] += many * weights
            fill, drain = fill + forward, drain + inputs
        together = max if _splits(self.layout.schedule) else sum
        most = max(busy + together((after, late)) for busy, after, late in own.values())
        return most + min(sum(each.values()) for each in self.after)

    @cached_property
    def sent(self) -> dict[str, tuple[float, float]]:
        """The bytes that each device of the first rank sends in a step: inside its node, and between nodes."""
        many, found = self.layout.microbatches, dict.fromkeys(_MOVES, (0.0, 0.0))

        def add(name: str, group: str, size: float) -> None:
            found[name] = tuple(map(sum, zip(found[name], self.groups[group].sent(size), strict=True)))  # type: ignore[assignment]

        for stage in (stage for stage, rank in enumerate(self.ranks) if rank == 0):
            for layer, count in self.stages[stage].items():
                for name, (size, there, back) in self.moves(layer).items():
                    add(name, name, many * count * size * (there * (1 + (self.layout.recompute == "full")) + back))
            each = [sum(numbers) for numbers in zip(*_PASSES[self.layout.zero], strict=True)]
            weights, gradients = (many * often + end for often, end in zip(each, _AFTER[self.layout.zero], strict=True))
            for name, held in zip(_DATA, self._held[stage], strict=True):
                add("data", name, held * (weights * WEIGHT + gradients * GRADIENT))
            ends = (stage == 0) + (stage == len(self.stages) - 1)
            travels, near = many * (2 - ends) * self.boundary / self.layout.tensor, self._per_node > 1
            inside, between = found["pipeline"]
            found["pipeline"] = (inside + travels * near, between + travels * (not near))
        return found

    @property
    def ranks(self) -> list[int]:
        """The rank of each stage."""
        return _places(*self._sizes)

    @property
    def kind(self) -> str:
        """The kind of step it is, by which `pipelab.layouts.published.errors` says how wrong estimates were."""
        if self.model.experts:
            return "mixture of experts"
        if self.model.sequence > 8192:
            return "long sequences"
        if self.model.parameters < 2e9:
            return "small model"
        return "dense" if self.layout.recompute == "none" else "dense, recomputed"

    # --- the pipeline ------------------------------------------------------------------------------------------------

    @property
    def _per_node(self) -> int:
        """How many ranks of a pipeline are in one node."""
        return max(1, self.device.per_node // (self.layout.devices // self.layout.pipeline))

    @cached_property
    def cost(self) -> Cost:
        """The stages' times, for `pipelab.simulate`, in seconds."""
        forward, inputs, weights = map(list, zip(*self._spent, strict=True))
        backward, boundary = [sum(each[1:]) for each in self._spent], self.boundary / self.layout.tensor
        links = Links(self._per_node, self.device.link(), self.device.link(inside=False))
        after = [sum(part.values()) for part in self.after]
        return Cost(
            forward=forward, backward=backward, input_grad=inputs, weight_grad=weights, all_reduce=after, links=links,
            activation_bytes=boundary, boundary_gradient_bytes=boundary, per="stage", unit="s",
        )  # fmt: skip

    @cached_property
    def trace(self) -> Trace:
        """The step, simulated: the pipeline, and after it gradients, weights and the optimizer."""
        return simulate(_plan(*self._sizes), self.cost)

    @property
    def seconds(self) -> float:
        """How long the step takes."""
        return self.trace.makespan

    @property
    def bound(self) -> float:
        """Seconds that no order of these actions on these ranks can undercut; see `lower_bound`."""
        return lower_bound(self.trace)

    @property
    def mfu(self) -> float:
        """The model FLOPs utilisation, 0 to 1; see `pipelab.layouts.published.mfu`."""
        sequences = self.layout.replicas * self.layout.microbatches * self.layout.microbatch
        return mfu(self.model.flops(sequences), self.seconds, self.layout.devices, self.device.peak)

    # --- memory ------------------------------------------------------------------------------------------------------

    @property
    def memory(self) -> Memory:
        """The bytes of each stage, for `pipelab.memory_use`."""
        weights, gradients, optimizer, activations = zip(*self._stored, strict=True)
        return Memory(weights=weights, gradients=gradients, optimizer=optimizer, activations=activations)

    @cached_property
    def _stored(self) -> list[tuple[int, ...]]:
        """For each stage, the bytes of its weights, gradients and optimizer's state, and of a micro-batch."""
        return self._each(self._store)

    def _store(self, stage: int) -> tuple[int, ...]:
        levels = ((3, WEIGHT), (2, GRADIENT), (1, OPTIMIZER))
        return *(round(self._shared(level, stage) * size) for level, size in levels), round(self._kept(stage))

    def _kept(self, stage: int) -> float:
        """Return the bytes that a stage keeps for a micro-batch; the last one its output and its logits in 32 bits."""
        each = float(2 * self.model.hidden * (stage == 0))
        for layer, count in self.stages[stage].items():
            whole = layer.whole + layer.cut + layer.matrices * (self.layout.recompute == "none")
            each += count * (2 * self.model.hidden if self.layout.recompute == "full" else whole)
        each += 4 * (self.model.vocab + self.model.hidden) * (stage == len(self.stages) - 1)
        return each * self.tokens / self.layout.tensor

    @cached_property
    def use(self) -> MemoryUse:
        """What each rank of the pipeline holds over the step, in bytes, without `working`."""
        return memory_use(self.trace, self.memory)

    @property
    def kept(self) -> int:
        """Bytes that the first stage keeps for a micro-batch."""
        return self._stored[0][-1]

    @cached_property
    def bytes_at_least(self) -> float:
        """Bytes that no schedule undercuts: all that is kept always, and one micro-batch's activations or gradients."""
        one, end = [self.working] * self.layout.pipeline, [self.working] * self.layout.pipeline
        for rank, (weights, gradients, optimizer, kept) in zip(self.ranks, self._stored, strict=True):
            one[rank] += weights + optimizer + kept
            end[rank] += weights + optimizer + gradients
        return max(one + end)

    @property
    def working(self) -> float:
        """Bytes that one layer needs while its backward runs.

        They are the gradients of half of what its products keep, and of its widest matrix in 16 bits. If layers are
        recomputed, all that one layer keeps is there too. With ZeRO 3, the weights of two layers are.
        """
        layer, tokens = self.model.layer(self.model.layers - 1), self.tokens / self.layout.tensor
        kept = layer.whole + layer.cut + layer.matrices
        again = kept if self.layout.recompute == "full" else layer.matrices
        weights = 2 * WEIGHT * layer.parameters / self.layout.tensor * (self.layout.zero == 3)
        matrix = WEIGHT * self.model.hidden * max(self.model.ffn, self.model.hidden) * (1 + self.model.gated)
        return tokens * (layer.cut / 2 + again) + matrix / self.layout.tensor + weights

    @cached_property
    def bytes(self) -> tuple[float, ...]:
        """The most bytes that each rank holds: the peak of `use`, found without a simulation, and `working`."""
        always = [0] * self.layout.pipeline
        for rank, (weights, _, optimizer, _) in zip(self.ranks, self._stored, strict=True):
            always[rank] += weights + optimizer
        each = [kept for *_, kept in self._stored] + [gradients for _, gradients, *_ in self._stored]
        found = []
        for held, (places, over) in zip(always, _holdings(*self._sizes), strict=True):
            own = [each[place] for place in places]
            found.append(self.working + held + max(sum(map(mul, counts, own)) for counts in over))
        return tuple(found)
