"""The exercise of `model_memory.py`: how many layers should each rank hold, so that the fullest one holds least?

A layer on rank r takes 16 bytes for each of its 12 h² parameters, and P - r times what it keeps for a micro-batch. So
give out one layer at a time, each time to the rank that will then be the least full. Nothing can be better: a rank that
ends fuller than the others got its last layer when every other rank would have become at least as full.

7B on 4 ranks becomes 6, 8, 9, 9. With 64 micro-batches the step takes 12 % longer, since the slowest rank has 9 layers
instead of 8. 70B on 40 ranks becomes 1 on the first ranks and 5 on the last, and the step takes 2.3 times as long with
320 micro-batches. That is a high price: recomputing everything costs a third.
"""

import pipelab

SIZES = {"7B": (32, 4096), "70B": (80, 8192)}


def answer(name, ranks, words=32_000, s=4096):
    """Return how many layers of a model each rank holds."""
    layers, h = SIZES[name]

    def held(rank, count):
        of_parameters = 16 * (12 * count * h**2 + (words * h if rank in (0, ranks - 1) else 0))
        return of_parameters + (ranks - rank) * count * 34 * s * h

    cut = [1] * ranks
    for _ in range(layers - ranks):
        cut[min(range(ranks), key=lambda rank: held(rank, cut[rank] + 1))] += 1
    return cut


assert answer("7B", 4) == [6, 8, 9, 9]
assert (min(answer("70B", 40)), max(answer("70B", 40))) == (1, 5)


def longer(name, ranks, microbatches):
    """Return how many times as long as with equal cuts the step takes."""
    equal, cut = [SIZES[name][0] // ranks] * ranks, answer(name, ranks)
    schedule = pipelab.OneFOneB(ranks, microbatches)
    costs = [pipelab.Cost(forward=each, backward=[2 * count for count in each]) for each in (equal, cut)]
    usual, uneven = (pipelab.simulate(schedule, cost).makespan for cost in costs)
    return uneven / usual


assert round(longer("7B", 4, 64), 2) == 1.12
assert round(longer("70B", 40, 320), 1) == 2.3
