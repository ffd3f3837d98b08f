"""Gradients compared with plain training's: a pipeline's, and any other training step's.

- `verify`: `Pipeline.verify`: what is compared, and the result as a sentence
- `diagnose`: any step's gradients, as multiples of what each micro-batch adds, and which parameters are wrong
- `causes`: the causes of other gradients, in one table: the test, the sentence, what to try
- `reference`: plain training, one micro-batch after another, and what is known of a step that is compared with it
"""
