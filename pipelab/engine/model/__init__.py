"""The model, cut into stages.

- `split`: `split`: a model into so many stages
- `balance`: where to cut, by the layers' times or sizes
- `traced`: any model, by PyTorch's tracer
"""
