"""SIMULATED: when everything would happen, and how traces compare.

- `clock`: `simulate`: a plan's times, if actions and transfers took so long
- `wire`: the same, with sends and receives that stand in queues; `lower`
- `cost`: `Cost`: how long actions and transfers take
- `comparison`: `compare` traces, and find the critical path
"""
