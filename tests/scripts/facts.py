"""What a script finds out, printed for the test that started it: a line of JSON for each fact."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable


def say(**fact: object) -> None:
    sys.stdout.write(f"{json.dumps(fact)}\n")  # in one piece: several processes may write to the same file
    sys.stdout.flush()


def attempt(case: str, act: Callable[[], object]) -> None:
    """Say with which error something ends on this process, if with any, and after how long."""
    began = time.monotonic()
    kind = told = ""
    try:
        act()
    except BaseException as error:  # noqa: BLE001 - an interruption is one of the cases
        kind, told = type(error).__name__, str(error)
    say(case=case, kind=kind, told=told, seconds=time.monotonic() - began)
