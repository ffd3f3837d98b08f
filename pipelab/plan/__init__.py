"""What a schedule says: actions in rows, bound to stages.

- `actions`: the words: `F`, `B`, `I`, `W`, `R`, and pairs
- `plan`: every rank's actions, read from Python, text or a file
- `fault`: a mistake in a plan or in a student's function, as it is reported
- `binding`: which stage an action means, and why it may mean none
- `codes`: actions and values as whole numbers
- `bound`: a plan bound to stages, as codes, to be checked, simulated and run
- `all_reduce`: inserts the all-reduces that a plan leaves out
- `order`: a walk through a plan that respects every dependency; jobs that follow each other, with times
- `transfers`: a plan's sends and receives, in rows
- `csv_notation`: plans as files in PyTorch's notation
"""
