"""SIMULATED: when everything would happen, and how traces compare.

- `clock`: `simulate`: a plan's times, if actions and transfers took so long
- `contention`: the same, with transfers that keep ranks busy or slow them down
- `cost`: `Cost`: how long actions and transfers take
- `fitting`: a cost from a trace
- `jitter`: `jitter`: slow ranks, and noise on every action
- `links`: `Links` between ranks; `all_reduce_time`
- `comparison`: `compare` traces, and find the critical path
"""
