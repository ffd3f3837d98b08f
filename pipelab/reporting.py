"""Under torchrun, leave what ended this process where torchrun looks for it.

torchrun names a file to every process that it starts (`TORCHELASTIC_ERROR_FILE`), and reads it if the process fails.
Whoever decorates `main` with PyTorch's `record` gets an error written there; whoever imports pipelab gets it too, in
few words. So torchrun's report says what failed, and `pipelab launch` repeats it at the very end.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from types import TracebackType

from pipelab.errors import PipelabError
from pipelab.plan.fault import students_line

__all__ = ["report_to_torchrun"]

_FILE = "TORCHELASTIC_ERROR_FILE"


def report_to_torchrun() -> None:
    """If torchrun started this process, have it told of the exception that ends it, if one does."""
    if _FILE not in os.environ:
        return
    before = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, Exception):  # not Ctrl-C
            with contextlib.suppress(OSError, KeyError):
                _write(Path(os.environ[_FILE]), _words(error))
        before(kind, error, trace)

    sys.excepthook = tell


def _words(error: Exception) -> str:
    """Return what an error says, and where it was raised, if it does not say so itself."""
    says_where = isinstance(error, PipelabError) and "\n  at " in str(error)
    place = "" if says_where else f"\n  at {students_line(error)}"
    return f"{type(error).__name__}: {error}{place}"


def _write(path: Path, words: str) -> None:
    """Write an error in the form that torchrun reads, at once, unless something stands there already."""
    if path.exists():
        return
    extra = {"py_callstack": words, "timestamp": str(int(time.time()))}
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps({"message": {"message": words, "extraInfo": extra}}), encoding="utf-8")
    draft.replace(path)
