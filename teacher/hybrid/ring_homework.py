"""The hybrid simulator's homework: average gradients around a ring.

    python ring_homework.py           runs it, with or without your code in the holes
    pipelab grade ring_homework.py    compares its results bit for bit

Every replica of a pipeline has its own gradient, and all need the mean. D replicas cut their gradients into D chunks.
Each sends only to the next one around the ring: first D - 1 steps that add up (reduce-scatter), then D - 1 steps in
which the finished chunks go around once (all-gather). To see who sends which chunk:
`print(pipelab_course.ring_all_reduce([torch.zeros(6)] * 3))`.

Fill the four holes, and change nothing else. Then answer:

- How many bytes does each replica send with 120 numbers, and how many with D twice as large?
- With `half`, messages have 16 bits. What happens if the owner of a chunk keeps what it had, instead of what it sent?
"""

import torch


def plain(chunk):
    """Return the message of a chunk: its numbers as they are."""
    return chunk.clone()


def half(chunk):
    """Return a message of half as many bytes."""
    return chunk.half()


def ring_all_reduce(gradients, encode=plain, decode=torch.Tensor.float):
    """Return the mean of all replicas' gradients, one tensor for each replica: all have the same bits.

    `gradients` has a tensor `[n]` for each replica, and stays as it is. What travels is a message: `encode(chunk)`
    makes one, and `decode(message)` returns its numbers.
    """
    replicas = len(gradients)
    chunks = [list(gradient.clone().tensor_split(replicas)) for gradient in gradients]  # chunks[replica][number]

    for step in range(replicas - 1):
        # Hole 1: make all messages. In step 0 replica r sends chunk r, then the one to which it has just added.
        messages = [encode(chunks[r][(r - step) % replicas]) for r in range(replicas)]

        for r in range(replicas):
            # Hole 2: add what the replica before has sent to your own chunk of the same number.
            chunks[r][(r - 1 - step) % replicas] += decode(messages[r - 1])

    # Hole 3: now each replica owns one finished chunk. Divide it, make its message, and keep what you send.
    finished = []
    for r in range(replicas):
        own = (r + 1) % replicas
        finished.append(encode(chunks[r][own] / replicas))
        chunks[r][own] = decode(finished[r])

    for step in range(replicas - 1):
        # Hole 4: pass the finished messages on, as they arrived, and put their numbers into the chunks.
        finished = [finished[r - 1] for r in range(replicas)]
        for r in range(replicas):
            chunks[r][(r - step) % replicas] = decode(finished[r])

    return [torch.cat(each) for each in chunks]


def main():
    """Average four gradients, and print what every replica ends with: the mean of 1, 2, 3 and 4 is 2.5."""
    for encode in (plain, half):
        for mean in ring_all_reduce([torch.full((6,), float(value)) for value in (1, 2, 3, 4)], encode):
            print(encode.__name__, mean.tolist())


if __name__ == "__main__":
    main()
