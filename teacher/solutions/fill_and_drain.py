"""The exercise of `fill_and_drain.py`: into how many micro-batches should a batch be cut?

With M micro-batches of rows / M rows, a forward and a backward take 6 + 3 * rows / M ms together. So the step takes

    (M + P - 1) * (6 + 3 * rows / M) = 6 * M + 3 * rows * (P - 1) / M + terms without M.

The first part is launches and grows with M. The second is the bubble and shrinks with M. Their sum is smallest where
both are equal, at M = sqrt(rows * (P - 1) / 2): 12 on four ranks, 18.3 on eight. So more ranks want more micro-batches:
there is more bubble to pay for. 18.3 does not divide 96, so we look at all numbers that do.
"""


def answer(ranks, rows):
    """Return into how many micro-batches to cut the batch."""

    def milliseconds(count):
        return (count + ranks - 1) * (6 + 3 * rows / count)

    return min((count for count in range(1, rows + 1) if rows % count == 0), key=milliseconds)


assert answer(4, 96) == 12
assert answer(8, 96) == 16
