"""Experiments: what a course runs and measures. They return plain data; the command line prints it."""
