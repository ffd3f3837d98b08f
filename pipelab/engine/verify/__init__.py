"""Gradients compared with plain training's: a pipeline's, and any other training step's.

- `verify`: `Pipeline.verify`: what is compared, and the result as a sentence
- `diagnose`: any step's gradients, as multiples of what each micro-batch adds, and which parameters are wrong
- `causes`: the mistake behind them, by counts or by what the step does
- `reference`: the model without the engine, one micro-batch after another
"""
