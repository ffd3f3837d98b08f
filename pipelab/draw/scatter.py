"""Bubbles against memory as a picture: a dot for each schedule, and a line for what building blocks reach."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipelab.draw import wording

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipelab.catalogue.frontier import Point

_TOP, _UP, _WIDE, _LOW, _LEFT = 30, 8.5, 576, 275, 36
"""Per cent at the upper edge, pixels for one; pixels from 0 to the right edge, to the axis, and left of its rules."""


def scatter(points: Sequence[Point], front: Sequence[Point] = (), link: str = "") -> str:
    """Return bubbles against memory as an SVG. What is larger lies on the upper or the right edge, with its number."""
    ranks, microbatches = points[0].trace.ranks, points[0].trace.plan.microbatches
    most = max(1, min(2 * ranks, microbatches))
    right, every = _WIDE / most, 1 + most // 9
    parts = []
    for holds in range(every, most + 1, every):
        left = f"{holds * right:g}"
        parts.append(f'<path d="M{left} 20v255" class="rule" stroke="#ccc"/><text x="{left}" y="292">{holds}</text>')
    for each in range(0, _TOP + 1, 10):
        y = _LOW - each * _UP
        parts.append(f'<path d="M{_LEFT} {y:g}H{_WIDE + _LEFT}" class="rule" stroke="#ccc"/>')
        parts.append(f'<text x="16" y="{y + 4:g}">{each} %</text>')

    def at(point: Point) -> tuple[float, float]:
        return min(point.held, most) * right, _LOW - min(100 * point.bubble, _TOP) * _UP

    if front:
        steps = "".join(f"H{x:.5g}V{y:.5g}" for x, y in map(at, front))
        (x, y), reach = at(front[0]), f"H{_WIDE + _LEFT}"
        parts.append(f'<path d="M{x:.5g} {y:.5g}{steps}{reach}" class="front" fill="none" stroke="#CA5900"/>')
    spots: dict[tuple[float, float], list[Point]] = {}
    for point in sorted(points, key=lambda each: (each.held, each.bubble)):
        x, y = at(point)
        spots.setdefault((round(x, 1), round(y, 1)), []).append(point)
    taken = [(x - 6, y - 6, x + 6, y + 6) for x, y in spots]
    for (x, y), there in spots.items():
        names = [_name(point, most) for point in there]
        half = 3.4 * len(", ".join(names))
        around = [(half + 9, 4), (0, -10), (0, 20), (-half - 9, 4), (half, -10), (half, 20), (-half, -10), (-half, 20)]
        around += [(0, -24), (0, 34), (-half, -24), (-half, -28), (-half, 34)]
        boxes = [(x + dx - half, y + dy - 12, x + dx + half, y + dy + 4) for dx, dy in around]
        inside = [box for box in boxes if box[0] > _LEFT - 2 and box[2] < _WIDE + 2 * _LEFT]
        box = next((box for box in inside if not any(_overlap(box, each) for each in taken)), (inside or boxes)[0])
        taken.append(box)
        if link:
            names = [
                f'<a href="{link.format(point.name)}">{name}</a>' for point, name in zip(there, names, strict=True)
            ]
        parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="5" fill="#00598A"/>')
        parts.append(f'<text x="{(box[0] + box[2]) / 2:.5g}" y="{box[3] - 4:.5g}">{", ".join(names)}</text>')
    words = "bubble of each schedule against the most micro-batches that a rank holds"
    axes = f'<text x="{_WIDE / 2}" y="310">most micro-batches held</text><text x="22" y="-6">bubble</text>'
    look = 'fill="currentColor" font-family="sans-serif" font-size="12" text-anchor="middle"'
    size = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 -18 {_WIDE + 2 * _LEFT} 336"'
    return f'<svg {size} {look} role="group" aria-label="{words}">{axes}{"".join(parts)}</svg>'


def _name(point: Point, most: float) -> str:
    """Return what papers call a schedule, and what lies beyond an edge."""
    name = wording.called(point.trace.plan.name).partition(" · ")[0]
    beyond = [f"{100 * point.bubble:.0f} %"] * (100 * point.bubble > _TOP) + [f"{point.held:g}"] * (point.held > most)
    return f"{name} ({', '.join(beyond)})" if beyond else name


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Return whether two boxes, each left, top, right and bottom, lie on each other."""
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
