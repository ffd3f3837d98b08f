"""Compare pipelab's schedules with PyTorch's own: `make conformance` runs it whole, the tests here at fewer sizes.

- `report`: the orders and the numbers of every schedule, compared with PyTorch's, and with what of it
- `recording`: the order that PyTorch's schedules execute
- `steps`: one step of PyTorch's pipelining, for its numbers, in one process or in several connected by gloo
"""
