"""Compare a pipeline's gradients with plain training's.

verify      the comparison, and what explains a difference
reference   plain training
"""
