"""Timelines as one HTML file that needs nothing else.

- `page`: the data, the frame, and the parts that fill it
"""
