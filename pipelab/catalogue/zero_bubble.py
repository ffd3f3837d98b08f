"""The backward split in two: weight gradients fill the bubble."""

from __future__ import annotations

from collections.abc import Iterator

from pipelab.catalogue.bases import Looped, SingleStage
from pipelab.plan.actions import Action, F, I, W


class ZBH1(SingleStage):
    """1F1B with split backwards: weight gradients fill the bubble.

        rank 0 | F0 F1 F2       I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
        rank 1 |    F0 F1    I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
        rank 2 |       F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4

    Another rank waits only for the input gradient `I` (the paper calls it B), so `I` comes first, and the weight
    gradient `W` may run later. Rank `r` delays its weight gradients by `r` micro-batches: the first input gradients
    reach rank 0 sooner, and the remaining weight gradients fill the drain.

    Its bubble is never larger than 1F1B's, and a third of it if `F`, `I` and `W` take equally long. Every rank holds as
    many activations as 1F1B's rank 0; what is held between `I` and `W` is less than a whole activation, which is not
    counted here.

    PyTorch has no class for it; its `ScheduleInterleavedZeroBubble` with one stage per rank executes this order.

    Example:
        >>> import pipelab
        >>> trace = pipelab.simulate(pipelab.ZBH1(ranks=4, microbatches=8))
        >>> trace.makespan, trace.peak_activations
        (27.0, (4, 4, 4, 4))
    """

    source = "Qi et al. 2023, Zero Bubble Pipeline Parallelism (arXiv:2401.10241), section 2.1, figure 3 and table 2"
    closed_forms = {
        "makespan": "M * (F + B) + (P - 1) * (F + I) - (min(M, P) - 1) * min(F, I, W)",
        "makespan if M >= P and W <= min(F, I)": "M * (F + B) + (P - 1) * (F + I - W)",
        "peak": "min(M, P)",
    }

    looping = "interleaved-zb"

    def actions(self, rank: int) -> Iterator[Action]:
        """Yield the warm-up's forwards, then forward and input gradient in turn, weight gradients `rank` behind."""
        warmup = min(self.ranks - 1 - rank, self.microbatches)
        for m in range(warmup):
            yield F(m)
        for m in range(self.microbatches):
            if warmup + m < self.microbatches:
                yield F(warmup + m)
            yield I(m)
            if m >= rank:
                yield W(m - rank)
        for m in range(max(0, self.microbatches - rank), self.microbatches):
            yield W(m)


class ZBH2(SingleStage):
    """ZB-H1 with twice the warm-up: no rank waits once it has begun, if `M >= 2 * P - 1` and times are equal.

        rank 0 | F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5
        rank 1 |    F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5
        rank 2 |       F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5

    Rank `r` warms up with `2 * (P - r) - 1` forwards, which fill the time until its first input gradient comes, and
    puts its weight gradients off by `2 * r` micro-batches. The lanes are a parallelogram: with at least `2 * P - 1`
    micro-batches and equal times, no rank waits between its first start and its last end. The ranks do not start
    together: over the whole step, 4 ranks with 8 micro-batches have a bubble of 11.1 %.

    The makespan need not be shorter: if `I` and `W` are equal and no longer than `F`, ZB-H1's makespan is the same. The
    gain is that rank 0 is done before the last rank, and can begin its next step right away if the optimizer allows it:
    the paper postpones the check that all ranks would have to wait for. So compare each rank's own span,
    `Trace.spans`. With fewer than `2 * P - 1` micro-batches and equal times, ZB-H1's makespan is never longer; if `I`
    is longer than `F` or than `W`, it can be.

    Example:
        >>> import pipelab
        >>> trace = pipelab.simulate(pipelab.ZBH2(ranks=4, microbatches=8))
        >>> trace.makespan, trace.spans, trace.peak_activations
        (27.0, (24.0, 24.0, 24.0, 24.0), (7, 7, 7, 7))
    """

    source = "Qi et al. 2023, Zero Bubble Pipeline Parallelism (arXiv:2401.10241), section 2.2, figure 3 and table 2"
    closed_forms = {
        "makespan if M >= 2 * P - 1": "M * (F + B) + (P - 1) * max(F, I - F, F + I - 2 * W)",
        "span if M >= 2 * P - 1": "M * (F + B) + (P - 1 - r) * max(0, I - F, F + I - 2 * W)",
        "peak": "min(M, 2 * P - 1)",
    }

    looping = "interleaved-zb"

    def actions(self, rank: int) -> Iterator[Action]:
        """Yield the warm-up's forwards, then forward and input gradient in turn, weight gradients `2 * rank` behind."""
        warmup = min(2 * (self.ranks - 1 - rank), self.microbatches)
        behind = 2 * rank
        for m in range(warmup):
            yield F(m)
        for m in range(self.microbatches):
            if warmup + m < self.microbatches:
                yield F(warmup + m)
            yield I(m)
            if m >= behind:
                yield W(m - behind)
        for m in range(max(0, self.microbatches - behind), self.microbatches):
            yield W(m)


class InterleavedZeroBubble(Looped):
    """Interleaved 1F1B with split backwards, as in ZB-H1.

        rank 0 | 0F0 0F1 2F0 2F1     2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0 2F2 0I1 0W1 2F3 2I2 2W2 2I3 2W3 0I2 0W2 0I3 0W3
        rank 1 |     1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 1F3 1I1 1W0 3F2 3I2 1W1 3F3 3I3 3W2 1I2 3W3 1I3 1W2 1W3

    Micro-batches go in interleaved 1F1B's rounds, but each rank warms up with only one forward more than the next,
    instead of two. Rank `r` delays its weight gradients by `r` input gradients. With one stage per rank it is ZB-H1.

    It is the order of PyTorch's `ScheduleInterleavedZeroBubble`, which needs a multiple of the number of rounds; here
    any number of micro-batches is accepted.

    Example:
        >>> import pipelab
        >>> trace = pipelab.simulate(pipelab.InterleavedZeroBubble(ranks=4, microbatches=8))
        >>> trace.makespan, trace.peak_activations
        (25.5, (8, 8, 8, 8))
    """

    source = (
        "Qi et al. 2023, Zero Bubble Pipeline Parallelism (arXiv:2401.10241), section 2.1, over the stages of "
        "Narayanan et al. 2021, Megatron-LM (arXiv:2104.04473), section 2.2.2"
    )
    closed_forms = {
        "makespan if M >= P": "M * (F + B) + (P - 1) / v * (F + I - min(F, I, W))",
        "peak": "min(v * M, (v - 1) * L + P)",
    }

    def actions(self, rank: int) -> Iterator[Action]:
        """Yield the warm-up's forwards, then forward and input gradient in turn, weight gradients `rank` behind."""
        stages = self.stages_of(rank)
        forwards = [F(m, s) for each in self.rounds for s in stages for m in each]
        backwards = [(m, s) for each in self.rounds for s in reversed(stages) for m in each]
        warmup = (self.stages_per_rank - 1) * len(self.rounds[0]) + self.ranks - 1 - rank
        yield from forwards[:warmup]
        for at, (m, s) in enumerate(backwards):
            if warmup + at < len(forwards):
                yield forwards[warmup + at]
            yield I(m, s)
            if at >= rank:
                yield W(*backwards[at - rank])
        for m, s in backwards[max(0, len(backwards) - rank) :]:
            yield W(m, s)


class ZeroPP(Looped):
    """Looped BFS in units, with split backwards: a rank stays with a stage for a whole unit, and gathers it rarely.

        rank 0 | 0F0 0F1 0F2 2F0 2F1 2F2         2I2 2I1 2I0 2W2 2W1 2W0 0I2 0I1 0I0 0W2 0W1 0W0
        rank 1 |     1F0 1F1 1F2 3F0 3F1 3F2 3I2 3I1 3I0 3W2 3W1 3W0 1I2 1I1 1I0 1W2 1W1 1W0

    A unit of micro-batches, at least `2P - 1` if there are so many, goes through a rank's stages one after the other,
    as in looped BFS, then its backwards in reverse. After each stage's input gradients come its weight gradients. But
    rank `r` leaves `2(P - 1 - r)` of them for later: they fill its wait between the next unit's forwards and backwards.
    So only the first unit waits there, and a rank holds little more than one unit, not the whole batch.

    With sharded weights that is the point: with room for one stage, a rank gathers at most `2v` times for each unit,
    where interleaved 1F1B gathers at every turn. The price is activations.

    Example:
        >>> import pipelab
        >>> zeropp, interleaved = pipelab.ZeroPP(4, 32, 4), pipelab.Interleaved1F1B(4, 32, 4)
        >>> for schedule in (zeropp, interleaved):
        ...     rows = pipelab.with_gathers(schedule, max_active_stages=1).rows
        ...     gathers = [sum(action.traits.gathers for action in row) for row in rows]
        ...     print(pipelab.simulate(schedule).makespan, pipelab.simulate(schedule).peak_activations, gathers)
        97.5 (38, 36, 34, 32) [31, 31, 31, 25]
        98.25 (19, 17, 15, 13) [163, 219, 189, 133]
    """

    source = (
        "Tang et al. 2024, ZeroPP (arXiv:2402.03791), abstract: pipeline stages whose weights are fully sharded; the "
        "units and the order are ours"
    )
    closed_forms = {
        "makespan if F == I == W and M >= P": "M * (F + B) + (P - 1) / v * (F + I)",
        "peak if M % L == 0": "min(v * M, v * L + 2 * (P - 1 - r))",
    }

    @property
    def shortest_round(self) -> int:
        """How many micro-batches a unit has at least: as many as fill the turn of rank 0."""
        return 2 * self.ranks - 1

    def actions(self, rank: int) -> Iterator[Action]:
        """Yield each unit's forwards stage by stage, then its backwards; a few weight gradients come a unit later."""
        stages, late = self.stages_of(rank), list[Action]()
        *units, last = self.rounds
        for unit in (*units, last):
            yield from (F(m, s) for s in stages for m in unit)
            yield from late
            for s in reversed(stages):
                yield from (I(m, s) for m in reversed(unit))
                weights = [W(m, s) for m in reversed(unit)]
                now = len(unit) if s != rank or unit is last else len(unit) - 2 * (self.ranks - 1 - rank)
                yield from weights[:now]
                late = weights[now:]
