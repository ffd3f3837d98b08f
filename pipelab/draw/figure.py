"""Timelines as matplotlib figures.

Figures are made through matplotlib's objects, never through `pyplot`: nothing is registered, so nothing leaks, and no
window system is needed.
"""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING

from pipelab.draw import labels, panel, wording
from pipelab.draw.lanes import Lanes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pipelab.analysis import Comparison
    from pipelab.trace.trace import Trace

__all__ = ["comparison_svg", "plot", "plot_comparison", "svg", "write"]

_LEFT, _RIGHT, _TITLE, _AXIS = 0.75, 0.3, 0.55, 0.62
"""The margins of one timeline, in inches: rank names, nothing, two lines of title, axis and legend."""
_NARROWEST, _WIDEST = 8.0, 14.0
"""How many inches the time may take."""


def plot(trace: Trace, ax: Axes | None = None) -> Axes:
    """Draw a trace: rank 0 on top, time from left to right, idle time hatched.

    Args:
        trace: what to draw.
        ax: where to; by default, a figure of its own.

    Example:
        >>> import pipelab
        >>> axes = plot(pipelab.simulate(pipelab.OneFOneB(ranks=4, microbatches=8)))
        >>> print(axes.get_title(loc="left"))
        OneFOneB(ranks=4, microbatches=8), simulated
        makespan 33 units, bubble 27.3 %, peak activations 4 3 2 1
        >>> axes.get_xlabel()
        'time (units)'

    Returns:
        The axes; `.figure` is the figure.
    """
    if ax is None:
        ax = _figure([trace], same_axis=False)[1][0]
    panel.draw(trace, ax, wording.headline(trace), trace.makespan)
    panel.legend([trace], ax)
    return ax


def plot_comparison(comparison: Comparison) -> Figure:
    """Draw traces one above the other, on one time axis where their units agree.

    Example:
        >>> import pipelab
        >>> both = pipelab.compare(*(pipelab.simulate(kind(4, 8)) for kind in (pipelab.Naive, pipelab.OneFOneB)))
        >>> [axes.get_xlim() == (0, 96) for axes in plot_comparison(both).axes]
        [True, True]
    """
    figure, axes = _figure(comparison.traces, same_axis=comparison.shares_axis)
    longest = max(trace.makespan for trace in comparison.traces)
    for trace, name, ax in zip(comparison.traces, comparison.names, axes, strict=True):
        until = longest if comparison.shares_axis else trace.makespan
        panel.draw(trace, ax, wording.headline(trace, name), until)
    if comparison.shares_axis:
        for ax in axes[:-1]:
            ax.set_xlabel("")
    panel.legend(comparison.traces, axes[-1])
    return figure


def svg(trace: Trace) -> str:
    """Return a trace's figure as SVG; its text stays text, so it can be searched.

    Example:
        >>> import pipelab
        >>> "B0" in svg(pipelab.simulate(pipelab.OneFOneB(ranks=2, microbatches=2)))
        True
    """
    return _svg(panel.owner(plot(trace)))


def comparison_svg(comparison: Comparison) -> str:
    """Return a comparison's figure as SVG."""
    return _svg(plot_comparison(comparison))


def write(drawing: Axes | Figure, path: Path) -> Path:
    """Write a figure, or the figure of some axes; the suffix says as what. Return the path."""
    buffer = io.BytesIO()
    _save(panel.owner(drawing), buffer, path.suffix.lower().removeprefix("."))
    path.write_bytes(buffer.getvalue())
    return path


def _svg(figure: Figure) -> str:
    buffer = io.BytesIO()
    _save(figure, buffer, "svg")
    return buffer.getvalue().decode()


def _save(figure: Figure, buffer: io.BytesIO, suffix: str) -> None:
    """Write a figure, the same bytes every time."""
    import matplotlib as mpl

    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(suffix, {})
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "pipelab"}), warnings.catch_warnings():
        # A name may hold letters that the font does not have: they show as boxes, which is no reason to stop.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure.savefig(buffer, format=suffix, dpi=160, metadata=metadata)


def _figure(traces: Sequence[Trace], same_axis: bool) -> tuple[Figure, list[Axes]]:
    """Return a figure with one pair of axes per trace, as wide as the labels need and as high as the ranks."""
    from matplotlib.figure import Figure

    wide = min(max(*(labels.inches(Lanes(trace)) for trace in traces), _NARROWEST), _WIDEST)
    lanes = [panel.height(trace.ranks) for trace in traces]
    high = sum(lanes) + len(traces) * _TITLE + (len(traces) if not same_axis else 1) * _AXIS
    if same_axis:
        high += (len(traces) - 1) * 0.3  # tick labels between two timelines
    figure = Figure(figsize=(_LEFT + wide + _RIGHT, high))
    axes: list[Axes] = []
    top = high
    for each in lanes:
        top -= _TITLE + each
        box = (_LEFT / (_LEFT + wide + _RIGHT), top / high, wide / (_LEFT + wide + _RIGHT), each / high)
        axes.append(figure.add_axes(box, sharex=axes[0] if axes and same_axis else None))
        top -= 0.3 if same_axis else _AXIS
    return figure, axes
