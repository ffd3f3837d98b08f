"""The threads engine: every rank is a thread of one process.

- `engine`: one persistent worker thread per rank, and one step of all of them
- `worker`: what each thread does in a step
- `instructions`: a plan's actions as the workers run them
- `all_reduce`: the sum of a stage's gradients over the ranks that hold it
"""
