"""The exercise of `own_schedule_on_pytorch.py`: plans for PyTorch, by hand.

Rank 0 waits for input gradients, not for weight gradients. So the ranks behind it run `I` as early as they can, and
keep `W` for times in which they would wait. These are the rows of ZB-H1 (Qi et al. 2024): on the last of three ranks
the first `W` comes only after the third `I`.
"""

answer = {
    2: """0F0,0F1,0I0,0W0,0F2,0I1,0W1,0F3,0I2,0W2,0I3,0W3
1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1F3,1I3,1W2,1W3""",
    3: """0F0,0F1,0F2,0I0,0W0,0F3,0I1,0W1,0I2,0W2,0I3,0W3
1F0,1F1,1I0,1F2,1I1,1W0,1F3,1I2,1W1,1I3,1W2,1W3
2F0,2I0,2F1,2I1,2F2,2I2,2W0,2F3,2I3,2W1,2W2,2W3""",
}
