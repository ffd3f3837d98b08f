"""Which layout should I use? The time, memory and traffic of a transformer's training step, and the quickest layout.

- `transformer`: a model's sizes: parameters, floating-point operations, activation bytes
- `devices`: devices, their links, and collectives on them
- `estimate`: a layout's step, term by term
- `search`: every layout that fits, the quickest first
- `published`: published training set-ups, and their MFU
"""
