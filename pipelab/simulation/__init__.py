"""SIMULATED: when everything would happen, and how traces compare.

- `clock`: `simulate`: a plan's times, if actions and transfers took so long
- `cost`: `Cost`: how long actions and transfers take
- `memory`: `memory_use`: how many bytes every rank holds, and when it passes a cap
- `comparison`: `compare` traces, and find the critical path
"""
