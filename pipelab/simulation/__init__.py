"""SIMULATED: when everything would happen, and how traces compare.

- `clock`: `simulate`: a plan's times, if actions and transfers took so long
- `wire`: the same, with sends and receives that wait in queues; `lower`
- `cost`: `Cost`: how long actions and transfers take; `Links` between ranks; `all_reduce_time`
- `fitting`: a cost from a trace
- `what_if`: `what_if`: what one rank's delay costs
- `bounds`: `lower_bound`: a time that no order can undercut
- `optimum`: `optimum`: the best order, and whether it is proven
- `memory`: `memory_use`: how many bytes every rank holds, and when it passes a cap
- `comparison`: `compare` traces, and find the critical path
"""
