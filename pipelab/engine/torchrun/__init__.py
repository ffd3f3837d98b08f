"""The torch engine: every rank is a process, on PyTorch's pipelining runtime.

- `engine`: this process's part of a plan
- `runtime`: the one door to PyTorch's private names
- `stage`: a stage as PyTorch's runtime asks for it
- `step_state`: one step on this process
- `messages`: the shapes of values, learned once, and values sent as messages
- `start`: the processes compare what they have, and connect
- `groups`: process groups for the pipelines of a plan
- `agreement`: whether all processes mean the same call and batch
- `replicas`: the sum of a stage's gradients over its replicas
- `results`: losses, outputs and traces gathered, on one clock
- `model_state`: the full model gathered from the processes that hold its stages
- `supervisor`: a step that hangs, or loses a process, ends with an error
- `failures`: the first failure, announced to all processes
- `store`: the store that all processes share, and its thread
- `launch`: torchrun in this process, with a short report of failures
"""
