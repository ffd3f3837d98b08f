"""Drawings of traces and plans: text, figures, pages and graphs.

Importing this package is quick: matplotlib, networkx and graphviz are loaded when something is drawn with them.
"""

from __future__ import annotations

import sys
import tempfile
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

from pipelab.draw import figure, page, text
from pipelab.errors import FormatError

if TYPE_CHECKING:
    from pipelab.analysis import Comparison
    from pipelab.trace import Trace

__all__ = ["save", "save_comparison", "show"]

_FIGURES = (".svg", ".png", ".pdf")


def save(trace: Trace, path: str | Path) -> Path:
    """Write a trace as a drawing; the suffix says as what: `html`, `svg`, `png`, `pdf` or `txt`.

    Example:
        >>> import pipelab
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = save(pipelab.simulate(pipelab.OneFOneB(2, 2)), Path(folder) / "1f1b.txt")
        ...     print(path.read_text(encoding="utf-8").splitlines()[1])
        rank 0 │F0 F1 ······B0─── ···B1───

    Returns:
        The path.

    Raises:
        FormatError: if the suffix is none of these.
    """
    path = Path(path)
    match path.suffix.lower():
        case ".html":
            path.write_text(page.page(trace), encoding="utf-8")
        case ".txt":
            path.write_text(text.timeline(trace, text.PLAIN_WIDTH, colour=False) + "\n", encoding="utf-8")
        case suffix if suffix in _FIGURES:
            figure.write(figure.plot(trace), path)
        case suffix:
            raise _unknown(path, suffix, "a trace", ".html .svg .png .pdf .txt .json")
    return path


def save_comparison(comparison: Comparison, path: str | Path) -> Path:
    """Write a comparison as a drawing; the suffix says as what: `html`, `svg`, `png`, `pdf` or `txt`.

    Returns:
        The path.

    Raises:
        FormatError: if the suffix is none of these.
    """
    path = Path(path)
    match path.suffix.lower():
        case ".html":
            path.write_text(page.comparison_page(comparison), encoding="utf-8")
        case ".txt":
            path.write_text(text.comparison(comparison, text.PLAIN_WIDTH, colour=False) + "\n", encoding="utf-8")
        case suffix if suffix in _FIGURES:
            figure.write(figure.plot_comparison(comparison), path)
        case suffix:
            raise _unknown(path, suffix, "a comparison", ".html .svg .png .pdf .txt")
    return path


def show(trace: Trace) -> Path | None:
    """Show a trace: as a figure in a notebook, else as a page in the web browser.

    Returns:
        The page that was written, or `None` in a notebook. Where there is no browser, its path is printed.
    """
    if _in_notebook():
        from IPython import display

        display.display(display.SVG(figure.svg(trace)))
        return None
    with tempfile.NamedTemporaryFile(prefix="pipelab-", suffix=".html", delete=False) as file:
        path = Path(file.name)
    save(trace, path)
    if not webbrowser.open(path.as_uri()):
        sys.stdout.write(f"No web browser was found; the timeline is in {path}\n")
    return path


def _in_notebook() -> bool:
    """Return whether the code runs in a notebook's kernel: one that shows rich output."""
    # A notebook has loaded IPython; elsewhere it need not even be installed.
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in shell.config


def _unknown(path: Path, suffix: str, what: str, known: str) -> FormatError:
    return FormatError(f"{path.name}: {what} is not written as {suffix or 'no suffix'}; use one of {known}")
