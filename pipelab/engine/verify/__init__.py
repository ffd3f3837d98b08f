"""`Pipeline.verify`: gradients compared with the plain model's.

- `verify`: what is compared, and the result as a sentence
- `reference`: the model without the engine, one micro-batch after another
"""
