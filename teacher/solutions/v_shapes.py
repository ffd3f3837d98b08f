"""The exercise of `v_shapes.py`: when may micro-batches enter from both ends?

A micro-batch that goes down and enters at slot 0 takes slots r and 2 P - 1 - r on rank r. One that comes from the other
end takes P - 1 - r and P + r. With an even number of ranks, these are even slots on one side and odd ones on the other.
So two micro-batches, one from each end, may enter in the same slot, and two more every two slots. P of them fill the 2
P slots of a rank nearly without a gap. The next P enter 2 P slots later.

This is Chimera (Li and Hoefler 2021). It takes 2 M + P - 2 units. If a backward takes twice as long, it takes 48 units
on six ranks with 12 micro-batches, and 1F1B takes 51. The ranks hold two stages each, so they need memory for twice the
parameters, and an all-reduce for each stage.
"""

import pipelab
from pipelab import B, F


def answer(microbatch, ranks):
    """Return whether a micro-batch goes down the ranks, and the slot in which it enters."""
    block, place = divmod(microbatch, ranks)
    return place % 2 == 0, 2 * ranks * block + 2 * (place // 2)


class _Chimera(pipelab.Schedule):
    def place(self, microbatch, stage):
        return stage if answer(microbatch, self.ranks)[0] else self.ranks - 1 - stage

    def actions(self, rank):
        taken = {}
        for m in range(self.microbatches):
            down, slot = answer(m, self.ranks)
            s = rank if down else self.ranks - 1 - rank
            taken[slot + s], taken[slot + 2 * self.ranks - 1 - s] = F(m, s), B(m, s)
        for slot in sorted(taken):
            yield taken[slot]


for ranks, microbatches in ((2, 6), (4, 4), (4, 8), (6, 12)):
    makespan = pipelab.simulate(_Chimera(ranks, microbatches), pipelab.Cost(forward=1, backward=1)).makespan
    assert makespan == 2 * microbatches + ranks - 2
assert pipelab.simulate(_Chimera(6, 12), pipelab.Cost(forward=1, backward=2)).makespan == 48
assert pipelab.simulate(pipelab.OneFOneB(6, 12), pipelab.Cost(forward=1, backward=2)).makespan == 51
