"""The exercise of `recomputation.py`: how many layers does each rank hold, and how many of them recompute?

For a number of layers, the memory says how many must recompute: as few as fit. Then a rank takes 3 units for each
layer, and 1 more for each that recomputes. So give out one layer at a time, each time to the rank that will then be the
least slow. With 80 GB all ranks keep 8 layers, of which 3 and 1 recompute on the first two. With 48 GB rank 0 would
have to recompute 5 of 8; it gives one layer to the last rank, and recomputes 3 of 7. (On rank 2, a ninth layer would
make two recompute.) With 80 GB, rank 0 takes 27 units for a micro-batch with its 8 layers, and so would any rank with
9: other cuts fill and drain for longer, and take 933 units or more.

Without recomputation the first fits with a cut of 6, 7, 10 and 9 layers, and takes 1023 units. The second does not fit:
its most balanced cut takes 49.5 GB.
"""

from itertools import combinations

import pipelab


def gigabytes(rank, layers, recomputed, s):
    """Return what a rank of 1F1B holds."""
    layer, layer_input = 34 * s * 4096, 2 * s * 4096
    parameters = 16 * (12 * layers * 4096**2 + (32_000 * 4096 if rank in (0, 3) else 0))
    in_flight = (4 - rank) * ((layers - recomputed) * layer + recomputed * layer_input)
    return (parameters + in_flight + (recomputed > 0) * (layer - layer_input)) / 1e9


def fewest(rank, layers, cap, s):
    """Return how many layers must recompute, or None if even all of them are not enough."""
    return next((k for k in range(layers + 1) if gigabytes(rank, layers, k, s) <= cap), None)


def answer(cap, s):
    """Return for each of four ranks how many layers it holds, and how many of them recompute."""
    cut = [0] * 4
    for _ in range(32):
        units = {}
        for rank in range(4):
            again = fewest(rank, cut[rank] + 1, cap, s)
            if again is not None:
                units[rank] = 3 * (cut[rank] + 1) + again
        cut[min(units, key=units.get)] += 1
    return [(layers, fewest(rank, layers, cap, s)) for rank, layers in enumerate(cut)]


assert answer(80, 16384) == [(8, 3), (8, 1), (8, 0), (8, 0)]
assert answer(48, 8192) == [(7, 3), (8, 2), (8, 0), (9, 0)]

# No other cut is quicker with as few recomputed layers as fit; and what fits without recomputation.
for cap, s, par, kept in ((80, 16384, 929, 1023), (48, 8192, 938, None)):
    without = []
    for ends in combinations(range(1, 32), 3):
        layers = [end - start for start, end in zip((0, *ends), (*ends, 32), strict=True)]
        again = [fewest(rank, count, cap, s) for rank, count in enumerate(layers)]
        if set(again) == {0}:
            cost = pipelab.Cost(forward=layers, backward=[2 * n for n in layers])
            without.append(pipelab.simulate(pipelab.OneFOneB(4, 32), cost).makespan)
        if None in again or 32 * max(3 * n + k for n, k in zip(layers, again, strict=True)) >= par:
            continue  # it does not fit, or one rank alone works as long
        cost = pipelab.Cost(forward=layers, backward=[2 * n + k for n, k in zip(layers, again, strict=True)])
        assert pipelab.simulate(pipelab.OneFOneB(4, 32), cost).makespan >= par
    assert min(without, default=None) == kept
