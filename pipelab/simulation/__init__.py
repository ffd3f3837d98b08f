"""SIMULATED: when everything would happen, and how traces compare.

- `clock`: `simulate`: a plan's times, if actions and transfers took so long
- `wire`: the same, with sends and receives that stand in queues; `lower`
- `cost`: `Cost`: how long actions and transfers take
- `bounds`: `lower_bound`: a time that no order can undercut
- `optimum`: `optimum`: the best order, and whether it is proven
- `comparison`: `compare` traces, and find the critical path
- `published`: published training set-ups, and their MFU
"""
