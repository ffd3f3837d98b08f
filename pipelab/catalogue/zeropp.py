"""ZeroPP: looped breadth-first in units, whose weight gradients fill the gaps between one unit and the next."""

from __future__ import annotations

from collections.abc import Iterator

from pipelab.catalogue.bases import Looped
from pipelab.plan.actions import Action, F, I, W


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
