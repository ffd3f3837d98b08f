"""The model, cut into stages.

- `split`: `split`: a model into so many stages
- `balance`: where to cut, by the layers' times or sizes
- `arguments`: what a whole model is called with
- `traced`: any model, by PyTorch's tracer
"""
