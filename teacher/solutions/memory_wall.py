"""The exercise of `memory_wall.py`: the quickest order below a memory cap.

With a cap of 2, rank 0 stays one forward ahead, the ranks in the middle go two by two, and the last one turns around at
once. That takes 51 units.

With a cap of 3 the rows have no pattern that is worth a name. The rule has: whenever a rank is free, it runs a backward
if one can run, else the next forward if one can run and there is room. A clock that applies it to all ranks gives 39
units, and for a cap of 2 the same 51. A backward first, because it makes room and because the ranks before wait for it.
"""

import pipelab
from pipelab import B, F


class answer(pipelab.Schedule):  # noqa: N801 - the exercise's name
    """A backward if one can run, else a forward if there is room."""

    cap = 2

    def actions(self, rank):
        return iter(self.rows()[rank])

    def rows(self):
        """Return every rank's actions, in the order in which they begin."""
        last = self.ranks - 1
        rows = [[] for _ in range(self.ranks)]
        forwards, backwards, free = ([0] * self.ranks for _ in range(3))  # how many began, and when a rank is free
        ended = {}
        for now in range(1000):
            for rank in range(self.ranks):
                if free[rank] > now:
                    continue
                f, b = forwards[rank], backwards[rank]
                gradient = ("F", b, rank) if rank == last else ("B", b, rank + 1)
                value = ("F", f, rank - 1)
                if b < f and ended.get(gradient, 1000) <= now:
                    rows[rank].append(B(b))
                    backwards[rank] += 1
                    free[rank] = ended["B", b, rank] = now + 2
                elif f < self.microbatches and f - b < self.cap and (rank == 0 or ended.get(value, 1000) <= now):
                    rows[rank].append(F(f))
                    forwards[rank] += 1
                    free[rank] = ended["F", f, rank] = now + 1
        return rows
