"""CHECKED: every fault of a plan, explained.

- `checker`: `check`: all faults, worst kind first
- `rules`: everything exactly once, each action on its rank
- `residency`: weights gathered before each use, activations back before their backwards
- `mistakes`: the commonest mistakes behind many faults
- `deadlock`: the cycle of ranks that wait for each other
- `repair`: the move that undoes a deadlock, tried out
- `transfers`: the cycle of sends and receives that wait for each other
- `memory`: `Memory`: how many bytes each stage takes, and so what each action adds and frees
"""
