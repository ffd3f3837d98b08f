"""The version of pipelab."""

__version__ = "0.1.0"
