"""Submissions, run and graded by what they ran.

- `tasks`: what is graded, with which numbers, for how many points, and the grade that comes out
- `emulated`: GPUs on one processor: tensors carry the name of the device where they would be
- `homework4`: what each call of its function ran, on two emulated GPUs, what it left, and whether that was right
- `sized`: a homework whose function runs at several sizes
- `homework1`: a benchmark of data parallelism, in two processes, by a clock of the grader's
- `ring`: a ring all-reduce, compared bit for bit
- `homework3`: where a constructor puts each layer, and what a forward moves
- `schedules`: the plans that a schedule writes, against their pars
- `report`: grades as text, JSON, a table, and in the formats of Gradescope and Classroom 50
- `command`: `pipelab grade`
- `runner`: submissions in their own processes, in a sandbox where there is one
- `server`: the process that runs them, with limits, and judges what they recorded
"""
