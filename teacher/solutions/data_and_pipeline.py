"""The exercise of `data_and_pipeline.py`: which cuts are worth a measurement?

Among cuts whose all-reduce is equally quick, only the last term of the formula knows P. So one of the ends is the best:
the fewest stages that fit, or the most. Three things add a candidate:

- The most stages of all, N, have no all-reduce. If one is hidden, the step from two replicas to one gains less than the
  formula says, and N / 2 may be better than N.
- With nodes there are two formulas. Within a node, the fewest stages are N / node. Cuts across nodes are slower than
  they would be within, so if many stages are better there, N / node is better still. Only the fewest stages of all
  remain.

So there are two cuts for the first cluster, 4 and 64, and four for the second: 1, 8, 32 and 64. If only 4 blocks fit, a
pipeline needs 16 stages. Then all replicas are within a node, and 16, 32 and 64 are left.
"""


def answer(cluster, devices=64, blocks=64):
    """Return the numbers of stages to measure."""
    fewest = max(1, blocks // cluster["blocks"])
    cuts = {fewest, max(fewest, devices // cluster["node"]), devices}
    if cluster["hidden"]:
        cuts.add(devices // 2)
    return sorted(cuts)


assert answer({"blocks": 16, "node": 64, "hidden": 0}) == [4, 64]
assert answer({"blocks": 64, "node": 8, "hidden": 1}) == [1, 8, 32, 64]
assert answer({"blocks": 4, "node": 8, "hidden": 1}) == [16, 32, 64]
