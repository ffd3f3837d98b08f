"""The exercise of `own_schedule_on_pytorch.py`: a pass that splits backwards, and puts weight gradients off.

The ranks before wait for input gradients, not for weight gradients. So rank r keeps its last r `W` for times in which
it would wait, and for the end. Rank 0 holds the most activations and owes nothing; every rank after it holds one
activation less for its forwards, and one more for what it owes. From 1F1B the pass makes ZB-H1 (Qi et al. 2023).

From `TwoFTwoB` on two ranks with 8 micro-batches it makes a plan of 25 units instead of 27.
"""

import pipelab


def answer(lines):
    """Return the lines of a plan, with split backwards."""
    written = []
    for rank, line in enumerate(lines):
        words, owed = [], []
        for word in line.split(","):
            if "B" in word:
                words.append(word.replace("B", "I"))
                owed.append(word.replace("B", "W"))
                if len(owed) > rank:
                    words.append(owed.pop(0))
            else:
                words.append(word)
        written.append(",".join(words + owed))
    return written


def _lines(schedule):
    return [",".join(map(str, row)) for row in schedule.plan().rows]


for ranks, microbatches in ((2, 4), (3, 4), (4, 8), (8, 16)):
    assert answer(_lines(pipelab.OneFOneB(ranks, microbatches))) == _lines(pipelab.ZBH1(ranks, microbatches))
