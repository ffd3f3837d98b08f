"""Compare pipelab's schedules with PyTorch's own.

- `report`: the orders and the numbers of every schedule, compared with PyTorch's, and with what of it
- `recording`: the order that PyTorch's schedules execute
- `steps`: one step of PyTorch's pipelining, for its numbers, in one process or in several connected by gloo
- `native`: PyTorch's schedule classes, as conformance runs them
"""
