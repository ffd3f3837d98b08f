"""Which layout should I use? A ranker for dense transformers: a training step's time, memory and traffic.

- `transformer`: a model's sizes: parameters, floating-point operations, activation bytes
- `devices`: devices, their links, and collectives on them
- `estimate`: a layout's step, term by term
- `search`: every layout that fits, the quickest first
- `published`: published training set-ups, and their MFU
"""
