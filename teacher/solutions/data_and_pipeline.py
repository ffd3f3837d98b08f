"""The exercise of `data_and_pipeline.py`: how many stages, and how many copies?

On the first cluster, 2 G = 8 ms is less than W = 48 ms, so as few stages as fit: 2, with 8 replicas.

On the second, an all-reduce within a node is quick (8 < 48), and one across nodes is slow (80 > 48). The quick one
wants as few stages as keep the replicas in a node: 4 x 4, 133.5 ms. The slow one wants as many stages as there are, 16
x 1, but that is the pipeline without any all-reduce: 141 ms. With nodes of 8, it would be 2 x 8 and 123.5 ms.

The function tries all cuts with the formula, which counts an all-reduce that nothing hides.
"""


def answer(cluster, devices=16, microbatches=32, blocks=16):
    """Return how many stages each pipeline has."""
    work = 3 * blocks

    def milliseconds(P):
        send = cluster["within_ms"] if devices // P <= cluster["node"] else cluster["across_ms"]
        return work * microbatches / devices + work - 2 * send / devices + (2 * send - work) / P

    return min((P for P in (1, 2, 4, 8, 16) if blocks / P <= cluster["blocks"]), key=milliseconds)
