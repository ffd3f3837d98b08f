"""Practical 9: three ways to run a split model, and the true 1F1B beside them, measured.

Examples:
    >>> rows = list(measurements(ranks=2, counts=(2, 4), emulate=(4, 8), steps=1))
    >>> [row["method"] for row in rows if row["microbatches"] == 4]
    ['A naive, whole batch', 'A naive, one by one', 'B GPipe', 'C single loop', 'true 1F1B']
    >>> [row["predicted_step_time_ms"] for row in rows if row["microbatches"] == 4]
    [24.0, 24.0, 15.0, 21.0, 15.0]
    >>> [row["peak_activations"] for row in rows if row["microbatches"] == 4]
    [(1, 1), (1, 1), (4, 4), (2, 2), (2, 1)]
    >>> table(rows).axes
    ('microbatches', ('step_time_ms', 'bubble', 'peak_share'))
    >>> numbers(rows)["gpipe_peaks"], numbers(rows)["true_peaks"]
    ('4 4', '2 1')
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from pipelab.catalogue import DelayedBackward, GPipe, Naive, OneFOneB
from pipelab.cli.believing import BUSY, LEGEND, believable
from pipelab.cli.running import Result, make_jobs, run_all
from pipelab.draw import wording
from pipelab.engine.stage.batch import row_counts
from pipelab.errors import UsageError, counted
from pipelab.schedule import Schedule
from pipelab.simulation.clock import simulate
from pipelab.simulation.comparison import compare
from pipelab.simulation.cost import Cost
from pipelab.table import Column, Table
from pipelab.trace.trace import Trace
from pipelab_course.figures import quoted

WHOLE, ONE_BY_ONE, GPIPE, LOOP, TRUE = METHODS = (
    "A naive, whole batch",
    "A naive, one by one",
    "B GPipe",
    "C single loop",
    "true 1F1B",
)
"""The methods: `Naive(ranks, 1)`, `Naive(ranks, M)`, `GPipe`, `DelayedBackward` and `OneFOneB`."""

_KINDS: dict[str, type[Schedule]] = {ONE_BY_ONE: Naive, GPIPE: GPipe, LOOP: DelayedBackward, TRUE: OneFOneB}
_ALSO_MARKED = (
    "A's times are marked, and all predictions are made from them: run it again on a quiet machine, or with --emulate "
    "200 400, whose predictions need no measurement."
)
_LONGER = "Emulated devices with long actions need no quiet machine: pipelab lab practical9 --emulate 200 400"
_CLEARLY = 1.1
"""From this ratio on, two predicted times differ clearly."""

Row = Mapping[str, Any]


def measurements(
    ranks: int = 2,
    counts: Sequence[int] = (2, 4, 8),
    *,
    width: int = 1024,
    depth: int = 8,
    batch: int = 256,
    emulate: tuple[float, float] | None = None,
    steps: int = 5,
) -> Iterator[dict[str, Any]]:
    """Measure every method with every number of micro-batches, always on the same batch; yield a row for each.

    The whole batch is measured one time, and its row is repeated for each number of micro-batches.
    """
    if emulate is not None and not sum(emulate) > 0:
        raise UsageError(f"emulate={emulate}: a step without any time has nothing to compare")
    for count in counts:
        row_counts(batch, count)
    names = [(WHOLE, 1), *((method, count) for count in counts for method in _KINDS)]
    plans = [(_KINDS.get(method, Naive))(ranks, count).plan() for method, count in names]
    jobs = make_jobs(plans, [count for _, count in names], width, depth, batch, emulate)
    stages = f"{depth} real layers of width {width}"
    if emulate is not None:
        stages = "emulated: {:g} ms forward and {:g} ms backward of each stage for the whole batch".format(*emulate)
    setting = {"batch": batch, "stages": stages, "emulated": emulate is not None, "steps": steps}
    alone: dict[int, Cost] = {}
    for (method, count), job in zip(names, jobs, strict=True):
        (result,) = run_all([job], steps)
        if method in (WHOLE, ONE_BY_ONE):  # one rank works at a time, so that none disturbs another
            alone[count] = result.cost
        cost = alone[count]
        if emulate is not None:
            cost = Cost(forward=emulate[0] / count, backward=emulate[1] / count, unit="ms")
        row = _row(result, simulate(job.plan, cost), result.others if emulate is None else 0)
        for shown in counts if method == WHOLE else [count]:
            yield {"method": method, "microbatches": shown, "ranks": ranks, **setting, **row}


def _row(result: Result, prediction: Trace, others: float) -> dict[str, Any]:
    """Return a row; `others` is what disturbs it, nothing where the prediction needs no measurement."""
    measured, predicted = _timed(result.measured), _timed(prediction)
    marked = []
    for name, value in measured.items():
        one, other = (sum(each) if isinstance(each, tuple) else each for each in (value, predicted[name]))
        marked += [] if believable(one, other, others) else [name]
    return {
        **measured,
        **{f"predicted_{name}": value for name, value in predicted.items()},
        "marked": tuple(marked),
        "others": others,
        "loss": result.loss,
        "peak_activations": result.measured.peak_activations,
        "peak_share": max(compare(result.measured).rows[0].peak_share),
        "core_share": result.core_share,
        "gradients_exact": result.proof.exact,
        "whole_batch_difference": result.proof.whole_batch_difference,
    }


def _timed(trace: Trace) -> dict[str, Any]:
    """Return the figures of a trace that depend on its times."""
    backwards = [event.start for event in trace.events if event.action.kind == "B"]
    return {
        "step_time_ms": trace.makespan,
        "utilisation": compare(trace).rows[0].busy_share,
        "bubble": trace.bubble,
        "first_backward_ms": min(backwards) - trace.start,
    }


def table(rows: Sequence[Row], remarks: Sequence[str] = ()) -> Table:
    """Return the table of measured rows, the numbers of micro-batches side by side, and what they mean."""
    columns = [
        Column("method"),
        Column("microbatches", "M"),
        Column("step_time_ms", "time of a step, ms", wording.number),
        Column("predicted_step_time_ms", "predicted, ms", wording.number),
        Column("loss", show="{:.6f}".format),
        Column("utilisation", "utilisation of each rank", wording.percents),
        Column("bubble", show=wording.percent),
        Column("predicted_bubble", "bubble, predicted", wording.percent),
        Column("first_backward_ms", "first backward after, ms", wording.number),
        Column("peak_activations", "peak activations of each rank", wording.elided),
        Column("peak_share", "peak, share of the batch", lambda share: wording.percents([share])),
    ]
    busy = bool(rows) and all("step_time_ms" in row["marked"] for row in rows)
    if busy:  # what can be trusted comes first
        columns[2:8] = [columns[at] for at in (3, 2, 4, 5, 7, 6)]
    exact = all(row["gradients_exact"] for row in rows)
    off = max((row["whole_batch_difference"] or 0.0 for row in rows), default=0.0)
    alone = [row for row in rows if row["method"] in (WHOLE, ONE_BY_ONE) and not row["emulated"]]
    notes = [
        *([f"{BUSY} {_LONGER}"] if busy else [LEGEND] if any(row["marked"] for row in rows) else []),
        *([_ALSO_MARKED] if not busy and any("step_time_ms" in row["marked"] for row in alone) else []),
        *remarks,
        "A naive, whole batch: the batch in one piece, measured once. Its 1 activation is of the whole batch; the "
        "other methods' activations are of one micro-batch each.",
        f"The gradients match plain training with the same micro-batches {'bit for bit' if exact else 'to rounding'}. "
        f"Against the whole batch at once they differ by at most {off:.1e}.",
    ]
    axes = ("microbatches", ("step_time_ms", "bubble", "peak_share"))
    setting = "A batch of {batch} rows in M micro-batches through {ranks} stages, {stages}; median of {steps}"
    title = setting.format_map({**rows[0], "steps": counted(rows[0]["steps"], "step")}) if rows else ""
    return Table(rows, columns, "microbatches", axes, notes, title=title)


def surprise(rows: Sequence[Row]) -> str:
    """Return a sentence if the measured order of two methods is the opposite of a clear prediction; "" if none is."""
    found = []
    for one, other in combinations(rows, 2):
        slow, fast = sorted((one, other), key=lambda row: -row["predicted_step_time_ms"])
        clear = slow["predicted_step_time_ms"] > _CLEARLY * fast["predicted_step_time_ms"]
        if one["microbatches"] == other["microbatches"] and clear and slow["step_time_ms"] < fast["step_time_ms"]:
            found.append((slow, fast))
    if not found:
        return ""
    slow, fast = found[-1]
    others = f" (nor {counted(len(found) - 1, 'other')})" if len(found) > 1 else ""
    count = counted(slow["microbatches"], "micro-batch")
    return (
        f"With {count}, {slow['method']} was measured faster than {fast['method']}, {_ms(slow)} "
        f"against {_ms(fast)}: the schedule does not explain this difference{others}."
    )


def numbers(rows: Sequence[Row]) -> dict[str, str]:
    """Return what the practical's questions are answered with, by name, from the numbers of a whole table.

    Without all rows, or where no batch is cut, there are none. A number that says nothing here is left out.
    """
    at = {(row["method"], row["microbatches"]): row for row in rows}
    counts = sorted({row["microbatches"] for row in rows})
    if not rows or counts[-1] < 2 or any((method, count) not in at for method in METHODS for count in counts):
        return {}
    few, many, ranks = counts[0], counts[-1], rows[0]["ranks"]
    whole, one, _, loop, _ = (at[method, many] for method in METHODS)
    found = {"ranks": str(ranks), "many": str(many), "more": str(4 * many), "halving": str(2 * many + ranks - 1)}
    found["before"] = f"{few}" if few < many else "the whole batch in one piece"
    for name, count in (("many", many), ("more", 4 * many)):
        found[f"bubble_of_{name}"] = wording.percent((ranks - 1) / (count + ranks - 1))
    found["loop_of_one"] = wording.percent(loop["predicted_step_time_ms"] / one["predicted_step_time_ms"])
    for name, method in zip(("whole", "one", "gpipe", "loop", "true"), METHODS, strict=True):
        before = at[method, few] if few < many else whole
        found |= {f"{name}_{figure}": said for figure, said in _figures(at[method, many], before, whole).items()}
    start = at[ONE_BY_ONE, few] if few < many else whole
    if not any(row["emulated"] or "step_time_ms" in row["marked"] for row in (start, one)):
        found["extra"] = f"{wording.number(one['step_time_ms'] - start['step_time_ms'])} ms"
    late = Cost(forward=1, backward=2, latency=0.5)
    gpipe, true = (simulate(kind(ranks, many), late).makespan for kind in (GPipe, OneFOneB))
    return found | ({"gpipe_late": wording.number(gpipe), "true_late": wording.number(true)} if true > gpipe else {})


def _figures(row: Row, before: Row, whole: Row) -> dict[str, str]:
    """Return the figures of a method, as answers say them."""
    return {
        "loss": f"{row['loss']:.6f}",
        "ms": _ms(row),
        "before": _ms(before),
        "bubble": _said(row, "bubble", wording.percent),
        "working": _said(row, "utilisation", lambda shares: f"{sum(shares):.2f}"),
        "start": _ms(row, "first_backward_ms"),
        "peaks": wording.elided(row["peak_activations"]),
        "share": wording.percent(row["peak_share"]),
        "faster": _faster(row, whole),
    }


def _said(row: Row, name: str, show: Callable[[Any], str]) -> str:
    return quoted(show(row[name]), show(row[f"predicted_{name}"]), name not in row["marked"])


def _ms(row: Row, name: str = "step_time_ms") -> str:
    return _said(row, name, lambda value: f"{wording.number(value)} ms")


def _faster(row: Row, whole: Row) -> str:
    """Return how many times as fast as the whole batch in one piece a step is."""
    measured, predicted = (f"{whole[name] / row[name]:.2f}" for name in ("step_time_ms", "predicted_step_time_ms"))
    return quoted(measured, predicted, not any("step_time_ms" in each["marked"] for each in (row, whole)))
