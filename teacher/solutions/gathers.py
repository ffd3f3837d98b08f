"""The exercise of `gathers.py`: keep what is needed soonest, and free only for a gather that has no room.

A plan says what will be used when, so this is the cache whose future is known: if there is no room, free the stage
whose next use is farthest away (Belady 1966). No rule gathers less. PyTorch's gathers 12 times with room for two,
because it frees a stage as soon as it is not among the next two, and one of these two is there ahead of its use. That
is why its step takes 19.75 units, and this one 22: it gathers less, and waits for each gather.
"""

from pipelab import RESHARD, UNSHARD


def answer(actions, room):
    """Yield a rank's actions, with gathers and frees between them."""
    gathered = []
    for at, action in enumerate(actions):
        if action.stage not in gathered:
            if len(gathered) == room:
                coming = [each.stage for each in actions[at:]] + gathered  # what is used no more counts as used last
                gone = max(gathered, key=coming.index)
                gathered.remove(gone)
                yield RESHARD(gone)
            gathered.append(action.stage)
            yield UNSHARD(action.stage)
        yield action
    for stage in gathered:
        yield RESHARD(stage)
