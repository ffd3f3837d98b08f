"""The torch engine: every rank is a process, on PyTorch's pipelining runtime.

- `engine`: this process's part of a plan; what is gathered from the others: losses, times, the full model
- `runtime`: PyTorch's private names, all in one place
- `stage`: one step on this process, and a stage with the methods that PyTorch's runtime calls
- `messages`: the shapes of values, and values as messages
- `start`: the processes compare their plans and models, and connect
- `groups`: the process groups of a plan: of all ranks, and of those that hold the same stage
- `agreement`: whether all processes make the same call with the same batch
- `replicas`: the sum of a stage's gradients over its replicas
- `supervisor`: a step that hangs, or loses a process, ends with an error, in all processes
- `store`: the store that all processes share, and its thread
- `launch`: starts the processes on one machine, with a short report of failures
"""
