"""How things are shown: they ask here, and what draws them answers, so that nothing below imports it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pipelab.table import Table

WAYS: dict[str, dict[str, Callable[..., Any]]] = {}
"""By class and way, such as `WAYS["Trace"]["text"]`, what shows a thing."""
FILL: list[Callable[[], object]] = []
"""What fills `WAYS` when something is first shown: `pipelab` names it."""


@overload
def show(thing: object, way: Literal["text", "html", "svg", "sentence", "why"], *given: Any) -> str: ...
@overload
def show(thing: object, way: Literal["save", "graph"], *given: Any) -> Path: ...
@overload
def show(thing: object, way: Literal["table"]) -> Table: ...
@overload
def show(thing: object, way: Literal["axes"], *given: Any) -> Axes: ...
@overload
def show(thing: object, way: Literal["figure"], *given: Any) -> Figure: ...
@overload
def show(thing: object, way: Literal["screen"]) -> None: ...
def show(thing: object, way: str, *given: Any) -> Any:
    """Show a thing in one of its class's ways; the first time, load what shows it."""
    if not WAYS:
        FILL[0]()
    known = next(WAYS[kind.__name__] for kind in type(thing).__mro__ if kind.__name__ in WAYS)
    return known[way](thing, *given)
