"""The GPU's figures as Markdown."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gpu_promises import promises


def report(found: dict[str, Any]) -> str:
    """Return all that was found, part by part; what failed is said."""
    about = found["about"]
    card = f"{about['card']}, driver {about['driver']}" if "card" in about else about["device"]
    lines = [f"{about['date']}: {card}, torch {about['torch']}, ranks on {', '.join(about['ranks'])}.", ""]
    lines += [line.strip() for told in about["told"] for line in told.splitlines()[1:]]  # why the GPU is not cut
    held = [[each.text, each.found, _WORDS[each.kept]] for each in promises(found["parts"])]
    if held:
        lines += ["**Promises**", "", *_table(["promise", "found", "kept"], held), ""]
    for name, result in found["parts"].items():
        lines += [f"**{_TITLES.get(name, name)}**", ""]
        if "error" in result:
            lines.append(f"failed: {result['error']}")
        else:
            lines += ["not on this device"] if result["found"] is None else _TABLES[name](result["found"])
        lines.append("")
    return "\n".join(lines).rstrip()


_WORDS = {True: "yes", False: "**no**", None: "-"}


def _makespans(found: dict[str, Any]) -> list[str]:
    heads = [
        "size",
        "schedule",
        "predicted ms",
        "measured ms",
        "bubble predicted / measured",
        "times naive",
        "of the predicted gain",
        "steps differ by",
        "on streams ms",
    ]
    rows = [
        [
            size,
            row["schedule"],
            f"{row['predicted_ms']:.2f}",
            f"{row['measured_ms']:.2f}",
            f"{row['predicted_bubble']:.1%} / {row['measured_bubble']:.1%}",
            f"{row['over_naive']:.2f}",
            f"{row['of_predicted_gain']:.3f}",
            f"{row['steps_differ_by']:.1%}",
            f"{row['on_streams_ms']:.2f}",
        ]
        for size, each in found.items()
        for row in each["rows"]
    ]
    errors = [
        [size, fitted, *(f"{error:+.1%}" for error in row.values())]
        for size, each in found.items()
        for fitted, row in each["error_by_fitted_schedule"].items()
    ]
    names = [row["schedule"] for each in found.values() for row in each["rows"]]
    fitted = _table(["size", "costs fitted to, error of", *dict.fromkeys(names)], errors)
    return [*_table(heads, rows), "", *fitted]


def _kernels(found: dict[str, Any]) -> list[str]:
    return _table(
        ["rank", "kernels", "kernels ms", "spans ms", "of the kernels inside spans", "largest difference of a span"],
        [
            [
                str(rank),
                str(row["kernels"]),
                f"{row['kernels_ms']:.2f}",
                f"{row['spans_ms']:.2f}",
                _share(row["inside_spans"]),
                _share(row["largest_difference"]),
            ]
            for rank, row in enumerate(found["rows"])
        ],
    )


def _share(number: float | None) -> str:
    return "-" if number is None else f"{number:.2%}"


def _memory(found: dict[str, Any]) -> list[str]:
    return _table(
        ["schedule", "peak above before, MB", "predicted, MB", "activations held, by rank"],
        [
            [
                row["schedule"],
                _megabytes(row["peak_bytes"]),
                _megabytes(row["predicted_bytes"]),
                " ".join(map(str, row["peak_activations"])),
            ]
            for row in found["rows"]
        ],
    )


def _megabytes(number: float | None) -> str:
    return "-" if number is None else f"{number / 1e6:,.0f}"


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
        ["size", "run", "ms", "us of launching per action", "largest difference of gradients"],
        [
            [
                size,
                name,
                f"{times['done_ms']:.2f}",
                f"{each['us_of_launching_per_action'][name]:.1f}",
                f"{each['largest_gradient_difference']:.1e}",
            ]
            for size, each in found.items()
            for name, times in each["times"].items()
        ],
    )


def _tracer(found: dict[str, Any]) -> list[str]:
    return _table(
        ["size", "times taken, ms", "not taken, ms", "more", "us per action"],
        [
            [
                size,
                f"{each['times']['on']['done_ms']:.2f}",
                f"{each['times']['off']['done_ms']:.2f}",
                f"{each['share']:+.1%}",
                f"{each['us_per_action']:.1f}",
            ]
            for size, each in found.items()
        ],
    )


def _graphs(found: dict[str, Any]) -> list[str]:
    return _table(
        ["size", "run", "ms", "us until the call returned"],
        [
            [size, name, f"{times['done_ms']:.3f}", f"{1e3 * times['launched_ms']:.0f}"]
            for size, each in found.items()
            for name, times in each["times"].items()
        ],
    )


def _practical(found: dict[str, Any]) -> list[str]:
    return _table(
        ["method", "micro-batches", "ms per step", "devices busy", "loss"],
        [
            [
                row["schedule"],
                str(row["microbatches"]),
                f"{row['ms']:.2f}",
                f"{row['busy']:.1%}",
                f"{row['loss']:.6f}",
            ]
            for row in found["rows"]
        ],
    )


def _table(head: list[str], rows: Iterable[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---", *["---:"] * (len(head) - 1)], *rows)]


_TITLES = {
    "makespans": "Four ranks on one GPU: predicted from the naive schedule's costs, and measured",
    "kernels": "How a step's spans agree with the kernels that PyTorch's profiler saw",
    "memory": "Peak memory of a step",
    "overhead": "Four ranks with ordinary streams beside the same micro-batches in sequence",
    "tracer": "What taking times costs",
    "native": "PyTorch's own runtime, all stages in one process",
    "practical": "Practical 9: two ranks, each on half of the GPU",
    "graphs": "One stage's forward and backward of one micro-batch: kernel by kernel, and as CUDA graphs",
}
_TABLES = {
    "makespans": _makespans,
    "kernels": _kernels,
    "memory": _memory,
    "overhead": _overhead,
    "tracer": _tracer,
    "native": _native,
    "practical": _practical,
    "graphs": _graphs,
}
