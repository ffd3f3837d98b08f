"""Compare pipelab's schedules with PyTorch's own.

- `report`: the orders and the numbers of every schedule, compared with PyTorch's
- `references`: what each schedule is compared with
- `recording`: the order that PyTorch's schedules execute
- `steps`: one step of PyTorch's pipelining, for its numbers
- `processes`: the same step in several processes, connected by gloo
- `native`: PyTorch's schedule classes, as conformance runs them
- `workload`: the model and the batch for comparing numbers, the same in every process
"""
