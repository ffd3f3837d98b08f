"""The exercise of `the_wire.py`: an order of sends and receives that does not hang and costs nothing.

One of the two must change its habit: in the steady state, a rank has a forward's output to send down and waits for a
gradient from below. The rank below has that gradient to send up, and sends first. So the upper rank receives first, and
sends afterwards. Swapping each `SEND_F` with a `RECV_B` right behind it is enough, on any number of ranks.

Letting every second rank change its habit is enough for two ranks, but not for four: a rank in the middle has two
neighbours.

It costs nothing, because the lower rank wants the forward only after it has sent the gradient. Megatron-LM's
`send_forward_recv_backward` gives both to the network at once, so neither has to be first. In the warm-up nothing comes
back yet.
"""


def answer(row):
    """Return a rank's words in an order that does not hang."""
    row, at = list(row), 0
    while at + 1 < len(row):
        if "SEND_F" in row[at] and "RECV_B" in row[at + 1]:
            row[at], row[at + 1] = row[at + 1], row[at]
            at += 1
        at += 1
    return row
