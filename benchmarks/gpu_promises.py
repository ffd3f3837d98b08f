"""What pipelab promises of a GPU, held against what was found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Promise:
    """A promise, the number that was found, and whether it is kept; `None` where nothing was found."""

    text: str
    found: str
    kept: bool | None


def promises(parts: dict[str, Any]) -> list[Promise]:
    """Return every promise about which one of these parts, as `gpu.json` has them, says something."""
    found: list[Promise] = []
    for name, result in parts.items():
        if "error" in result:
            found.append(Promise(f"the part {name} runs", result["error"].splitlines()[0], kept=False))
        elif result["found"] is not None and name in _OF:
            found.extend(_OF[name](result["found"]))
    return found


def _makespans(found: dict[str, Any]) -> Iterator[Promise]:
    for size, each in found.items():
        rows = {row["schedule"]: row for row in each["rows"]}
        for schedule in ("gpipe", "1f1b"):
            gain = rows[schedule]["of_predicted_gain"]
            text = f"{size}: {schedule}'s gain over naive on parts is at least 0.9 of the predicted one"
            yield Promise(text, f"{gain:.3f}", gain >= 0.9)
        slower = rows["delayed"]["measured_ms"] / rows["1f1b"]["measured_ms"]
        yield Promise(f"{size}: the single loop (delayed) is slower than 1f1b", f"{slower:.2f} times", slower > 1)
        error = median(
            abs(error)
            for fitted, row in each["error_by_fitted_schedule"].items()
            for schedule, error in row.items()
            if schedule != fitted
        )
        text = f"{size}: costs fitted to one schedule predict the others' makespans, median error at most 5 %"
        yield Promise(text, f"{error:.1%}", error <= 0.05)


def _kernels(found: dict[str, Any]) -> Iterator[Promise]:
    rows = found["rows"]
    same = all(row["same_kernels"] and not row["actions_without_kernels"] for row in rows)
    yield Promise("the profiler sees every action, with the same kernels in the same order each time", str(same), same)
    off = max((row["largest_difference"] or 0.0 for row in rows), default=0.0)
    count = sum(row["long_actions"] for row in rows)
    text = "a span over 1 ms is as long as its kernels, within 3 %"
    yield Promise(text, f"{off:.1%} at most, of {count} spans", off <= 0.03 if count else None)


def _memory(found: dict[str, Any]) -> Iterator[Promise]:
    rows = {row["schedule"]: row for row in found["rows"]}
    for name, row in rows.items():
        if row["peak_bytes"] is not None:
            error = row["predicted_bytes"] / row["peak_bytes"] - 1
            yield Promise(f"{name}'s peak memory is as predicted, within 20 %", f"{error:+.1%}", abs(error) <= 0.2)
    if rows["gpipe"]["peak_bytes"] is not None:
        ratio = rows["1f1b"]["peak_bytes"] / rows["gpipe"]["peak_bytes"]
        yield Promise("1f1b needs less memory than gpipe", f"{ratio:.2f} of it", ratio < 1)


def _overhead(found: dict[str, Any]) -> Iterator[Promise]:
    for size, each in found.items():
        for name, ratio in each["over_sequence"].items():
            if name != "sequence" and size != "small":
                text = f"{size}: {name} on streams takes at most 5 % more than the micro-batches in sequence"
                yield Promise(text, f"{ratio - 1:+.1%}", ratio <= 1.05)


def _tracer(found: dict[str, Any]) -> Iterator[Promise]:
    for size, each in found.items():
        if size != "small":
            share = each["share"]
            yield Promise(f"{size}: taking times costs at most 2 %", f"{share:+.1%}", share <= 0.02)


def _native(found: dict[str, Any]) -> Iterator[Promise]:
    for size, each in found.items():
        ratio = each["times"]["pipelab on streams"]["done_ms"] / each["times"]["native"]["done_ms"]
        text = f"{size}: a step takes no longer than with PyTorch's runtime in one process"
        yield Promise(text, f"{ratio:.2f} of it", ratio <= 1.0)


def _practical(found: dict[str, Any]) -> Iterator[Promise]:
    spread = found["spread_of_losses"]
    yield Promise("practical 9: all methods compute the same loss", f"within {spread:.1e}", spread <= 1e-5)


_OF = {
    "makespans": _makespans,
    "kernels": _kernels,
    "memory": _memory,
    "overhead": _overhead,
    "tracer": _tracer,
    "native": _native,
    "practical": _practical,
}
