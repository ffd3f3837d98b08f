"""Everything that compares with PyTorch's own schedules.

- `report`: every schedule beside PyTorch's: orders and numbers
- `references`: what each schedule is compared with
- `recording`: the order that PyTorch's schedules execute
- `steps`: one step of PyTorch's pipelining, for its numbers
- `processes`: the same in processes connected by gloo
- `native`: PyTorch's schedule classes, as conformance runs them
- `same_work`: one model and one batch, the same in every process
"""
