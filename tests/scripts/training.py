"""Training steps of a pipeline whose micro-batches do not divide the rows."""

from __future__ import annotations

import plain

ROWS = 13
NORMS = (2.0, "inf", 0.0, -1.0, 3.5)


def train(pipe, optimizer, numbers):
    """Return each step's loss, and the norm to which its gradients were clipped."""
    figures = []
    for number in numbers:
        x, y = plain.batch(ROWS, seed=number)
        optimizer.zero_grad()
        figures.append(float(pipe.step(x, y).loss))
        figures.append(float(pipe.clip_grad_norm_(0.5, NORMS[number])))
        optimizer.step()
    return figures
