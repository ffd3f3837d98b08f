"""The threads engine beside PyTorch's native schedules and beside one thread, at two sizes of layer."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import torch
from native import Native, linear_stack
from timing import in_turns, milliseconds, one_thread, timed
from torch import nn

import pipelab

BATCH = 256
SIZES = ((1024, 12, 2), (64, 40, 10))
"""Width, rounds, and steps in each round."""


def measure() -> dict[str, object]:
    """Return step times in milliseconds, by width, micro-batches and contender."""
    with one_thread():
        return {"batch": BATCH, "rows": [row for size in SIZES for row in _width(*size)]}


def _width(width: int, rounds: int, steps: int) -> list[dict[str, object]]:
    x, y = torch.randn(BATCH, width), torch.randn(BATCH, width)
    model = linear_stack(width)
    native = Native(width, BATCH)
    pool = ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(1,))  # as persistent as pipelab's workers
    rows = []
    for microbatches in (2, 4, 8):
        pipes = {
            name: pipelab.Pipeline(
                model, pipelab.schedules[name](2, microbatches), nn.functional.mse_loss, intra_op_threads=1
            )
            for name in ("gpipe", "1f1b")
        }
        sets: dict[str, Callable[[], list[float]]] = {
            "one thread": lambda m=microbatches: timed(model, lambda: _sequence(model, x, y, m), steps),
            "two threads, apart": lambda m=microbatches: timed(model, lambda: _apart(model, x, m, pool), steps),
            "one thread, apart": lambda m=microbatches: timed(model, lambda: _apart(model, x, m, None), steps),
        }
        for name, pipe in pipes.items():
            sets[f"pipelab {name}"] = lambda pipe=pipe: timed(model, lambda: pipe.step(x, y), steps)
            sets[f"native {name}"] = lambda name=name, m=microbatches: native.steps(name, m, steps)
        times = in_turns(sets, rounds)
        for pipe in pipes.values():
            pipe.close()
        rows.append(_row(width, microbatches, times))
    native.close()
    pool.shutdown()
    return rows


def _row(width: int, microbatches: int, times: dict[str, list[float]]) -> dict[str, object]:
    typical = {name: median(found) for name, found in times.items()}
    two_threads = typical["one thread, apart"] / typical["two threads, apart"]
    allowed = 2 * microbatches / (microbatches + 1) * two_threads / 2
    return {
        "width": width,
        "microbatches": microbatches,
        "ms": {name: milliseconds(found) for name, found in times.items()},
        "two_thread_speed_up": two_threads,
        "allowed_speed_up": allowed,
        **{
            f"{name}_{key}": value
            for name in ("gpipe", "1f1b")
            for key, value in {
                "speed_up": typical["one thread"] / typical[f"pipelab {name}"],
                "of_allowed": typical["one thread"] / typical[f"pipelab {name}"] / allowed,
                "over_native": typical[f"native {name}"] / typical[f"pipelab {name}"],
            }.items()
        },
    }


def _sequence(model: nn.Module, x: torch.Tensor, y: torch.Tensor, microbatches: int) -> None:
    """Run the same micro-batches one after another, in this thread."""
    for micro_x, micro_y in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
        (nn.functional.mse_loss(model(micro_x), micro_y) / microbatches).backward()


def _apart(model: nn.Sequential, x: torch.Tensor, microbatches: int, pool: ThreadPoolExecutor | None) -> None:
    """Run both halves on the same input, independently: in a pool's two threads at once, or in turn in this one."""

    def half(layers: nn.Sequential) -> None:
        for micro_x in x.chunk(microbatches):
            layers(micro_x.detach().requires_grad_()).sum().backward()

    for _ in (pool.map if pool else map)(half, (model[:8], model[8:])):
        pass


def report(found: dict[str, object]) -> str:
    """Return the figures as Markdown."""
    lines = []
    for width in sorted({row["width"] for row in found["rows"]}, reverse=True):  # type: ignore[attr-defined]
        lines += [
            f"**Width {width}**, milliseconds per step (median)",
            "",
            "| M | one thread | pipelab GPipe | pipelab 1F1B | native GPipe | native 1F1B | speed-up GPipe / 1F1B "
            "| yardstick | over native GPipe / 1F1B |",
            "|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        ]
        for row in found["rows"]:  # type: ignore[attr-defined]
            if row["width"] != width:
                continue
            typical = {name: value["median"] for name, value in row["ms"].items()}
            names = ("one thread", "pipelab gpipe", "pipelab 1f1b", "native gpipe", "native 1f1b")
            lines.append(
                f"| {row['microbatches']} | "
                + " | ".join(f"{typical[name]:.2f}" for name in names)
                + f" | {row['gpipe_speed_up']:.2f} / {row['1f1b_speed_up']:.2f} | {row['allowed_speed_up']:.2f} "
                f"| {row['gpipe_over_native']:.2f} / {row['1f1b_over_native']:.2f} |"
            )
        lines.append("")
    return "\n".join(lines).rstrip()
