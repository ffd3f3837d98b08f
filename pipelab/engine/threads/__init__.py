"""The threads engine: every rank is a thread of one process.

- `engine`: one persistent worker thread per rank, one step of all of them, and what each does in it
- `instructions`: a plan's actions as the workers run them
- `all_reduce`: the sum of a stage's gradients over the ranks that hold it
"""
