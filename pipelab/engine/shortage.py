"""What helps where a device's memory ran out."""

from __future__ import annotations

import traceback

import torch

__all__ = ["relieve"]


def relieve(error: BaseException) -> str:
    """Return what to try next, if a device's memory ran out; nothing otherwise.

    A traceback holds the local variables of every function in it, and with them activations of the step that failed.
    They are let go, so that the next step has the memory even while the error is being looked at; the lines stay.
    """
    if not isinstance(error, torch.OutOfMemoryError):
        return ""
    traceback.clear_frames(error.__traceback__)
    return (
        "\n  try: more micro-batches of fewer rows each, a schedule that holds fewer of them at once (1F1B holds fewer "
        "than GPipe; pipelab.compare shows the peaks), or more ranks"
    )
