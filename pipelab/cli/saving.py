"""Write what a command made; a file that cannot be written is refused before any work."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

from pipelab import draw
from pipelab.cli.sweeping import SUFFIXES as TABLE_SUFFIXES
from pipelab.draw import graph
from pipelab.errors import require_suffix
from pipelab.trace.trace import Trace

__all__ = ["COMPARISON", "GRAPH", "RUN", "TABLE", "TIMELINE", "require_folder", "require_writable", "save_timeline"]

TIMELINE = ("a timeline", (*draw.TRACE_SUFFIXES, ".csv"))
RUN = ("a run", (*draw.COMPARISON_SUFFIXES, ".json"))
COMPARISON = ("a comparison", draw.COMPARISON_SUFFIXES)
TABLE = ("a table of sizes", TABLE_SUFFIXES)
GRAPH = ("a dependency graph", graph.SUFFIXES)


def require_writable(paths: Sequence[Path] | None, kind: tuple[str, Sequence[str]]) -> None:
    """Refuse files that something of this kind cannot be written to.

    Args:
        paths: the files, if any.
        kind: what is to be written, and the suffixes that it is written as.

    Raises:
        FormatError: if a suffix is none of these.
        FileNotFoundError: if a folder is not there.
    """
    for path in paths or []:
        require_suffix(path, *kind)
        require_folder(path)


def require_folder(path: Path) -> None:
    """Refuse a file in a folder that is not there.

    Raises:
        FileNotFoundError: naming the folder.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"there is no folder {path.parent}", str(path))


def save_timeline(trace: Trace, path: Path) -> Path:
    """Write a trace, or as `csv` its plan in PyTorch's notation; return the path."""
    return trace.plan.to_csv(path) if path.suffix.lower() == ".csv" else trace.save(path)
