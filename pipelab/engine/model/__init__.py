"""The model, cut into stages.

- `split`: `split`: a model into so many stages, and where to cut
- `arguments`: what a whole model is called with
- `traced`: any model, by PyTorch's tracer
- `unmade`: layers that are made where their stage is
"""
