"""Cut a model into stages.

split      sequences and lists, and what a cut must not separate
balance    even cuts, by layers, parameters or time
traced     any other model, by PyTorch's tracer
"""
