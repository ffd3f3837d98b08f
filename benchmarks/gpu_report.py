"""The GPU's figures as Markdown."""

from __future__ import annotations

from typing import Any


def report(found: dict[str, Any]) -> str:
    """Return all that was found, part by part; what failed is said."""
    about = found["about"]
    card = f"{about['card']}, driver {about['driver']}" if "card" in about else about["device"]
    lines = [f"{about['date']}: {card}, torch {about['torch']}, ranks on {', '.join(about['ranks'])}.", ""]
    lines += [line.strip() for told in about["told"] for line in told.splitlines()[1:]]  # why the GPU is not cut
    for name, result in found["parts"].items():
        lines += [f"**{_TITLES[name]}**", ""]
        lines += [f"failed: {result['error']}"] if "error" in result else _TABLES[name](result["found"])
        lines.append("")
    return "\n".join(lines).rstrip()


def _makespans(found: dict[str, Any]) -> list[str]:
    return _table(
        [
            "schedule",
            "predicted ms",
            "measured ms",
            "error",
            "bubble predicted / measured",
            "times naive",
            "on streams ms",
        ],
        [
            [
                row["schedule"],
                f"{row['predicted_ms']:.2f}",
                f"{row['measured_ms']:.2f}",
                f"{row['error']:+.1%}",
                f"{row['predicted_bubble']:.1%} / {row['measured_bubble']:.1%}",
                f"{row['over_naive']:.2f}",
                f"{row['on_streams_ms']:.2f}",
            ]
            for row in found["rows"]
        ],
    )


def _fits(found: dict[str, Any]) -> list[str]:
    errors = found["error_by_fitted_schedule"]
    return _table(
        ["costs fitted to", *errors],
        [[fitted, *(f"{error:+.1%}" for error in row.values())] for fitted, row in errors.items()]
        + [["(steps differ by)", *(f"{spread:.1%}" for spread in found["spread_of_steps"].values())]],
    )


def _memory(found: dict[str, Any]) -> list[str]:
    return _table(
        ["schedule", "peak above before, MB", "activations held, by rank"],
        [
            [
                row["schedule"],
                "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:,.0f}",
                " ".join(map(str, row["peak_activations"])),
            ]
            for row in found["rows"]
        ],
    )


def _overhead(found: dict[str, Any]) -> list[str]:
    return _table(
        ["size", "run", "ms", "over sequence", "us per action above it", "us of launching per action"],
        [
            [
                size,
                name,
                f"{each['times'][name]['done_ms']:.2f}",
                f"{each['over_sequence'][name]:.3f}",
                f"{each['us_per_action_above_sequence'][name]:.1f}",
                f"{each['us_of_launching_per_action'][name]:.1f}",
            ]
            for size, each in found.items()
            for name in each["times"]
        ],
    )


def _native(found: dict[str, Any]) -> list[str]:
    return _table(
        ["size", "run", "ms", "largest difference of gradients"],
        [
            [size, name, f"{times['done_ms']:.2f}", f"{each['largest_gradient_difference']:.1e}"]
            for size, each in found.items()
            for name, times in each["times"].items()
        ],
    )


def _tracer(found: dict[str, Any]) -> list[str]:
    lines = _table(
        ["size", "times taken, ms", "not taken, ms", "us per action"],
        [
            [
                size,
                f"{each['times']['on']['done_ms']:.2f}",
                f"{each['times']['off']['done_ms']:.2f}",
                f"{each['us_per_action']:.1f}",
            ]
            for size, each in found["cost"].items()
        ],
    )
    if found["kernels"] is None:
        return lines
    shares = ["-" if row["inside_spans"] is None else f"{row['inside_spans']:.2%}" for row in found["kernels"]["rows"]]
    kernels = _table(
        ["rank", "kernels", "kernels ms", "spans ms", "of the kernels inside spans"],
        [
            [str(rank), str(row["kernels"]), f"{row['kernels_ms']:.2f}", f"{row['spans_ms']:.2f}", share]
            for rank, (row, share) in enumerate(zip(found["kernels"]["rows"], shares, strict=True))
        ],
    )
    return [*lines, "", *kernels]


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---", *["---:"] * (len(head) - 1)], *rows)]


_TITLES = {
    "makespans": "Four ranks on one GPU, predicted from the naive schedule's costs, and measured",
    "fits": "Error of predicted makespans, by the schedule whose trace the costs were fitted to",
    "memory": "Peak memory of a step",
    "overhead": "Four ranks with ordinary streams beside the same micro-batches in sequence",
    "native": "PyTorch's own runtime, all stages in one process",
    "tracer": "What taking times costs, and how spans agree with kernels",
}
_TABLES = {
    "makespans": _makespans,
    "fits": _fits,
    "memory": _memory,
    "overhead": _overhead,
    "native": _native,
    "tracer": _tracer,
}
