"""The model, cut into stages.

- `split`: `split`: a model into so many stages, and where to cut
- `traced`: any model, by PyTorch's tracer, and what a whole model is called with
- `unmade`: layers that are made where their stage is
"""
