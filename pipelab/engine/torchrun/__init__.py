"""The torch engine: every rank is a process, on PyTorch's pipelining runtime.

- `engine`: this process's part of a plan; the full model, gathered
- `runtime`: PyTorch's private names, all in one place
- `stage`: one step on this process: a stage with the methods that PyTorch's runtime calls, and its replicas' sums
- `messages`: the shapes of values, values as messages, and the process groups by which they travel
- `exchange`: whether all processes make the same call with the same batch; their times, losses and clocks
- `start`: the processes compare their plans and models, and connect
- `supervisor`: a step that hangs, or loses a process, ends with an error, in all processes
- `launch`: starts the processes on one machine, with a short report of failures
"""
