"""Homework 1: data parallelism, measured: speed-up, efficiency, Amdahl's law, and three experiments.

Examples:
    >>> fit = fit_amdahl({1: 100.0, 2: 60.0, 4: 40.0})
    >>> f"{fit.serial:.0%}, {fit.speed_up(4):.2f} times as fast, at most {fit.limit:.1f}, residual {fit.residual:.2f}"
    '20%, 2.50 times as fast, at most 5.0, residual 0.00'
    >>> [run.label for run in runs(["small"], [1, 2])]
    ['small, DDP', 'small, DDP', 'small, DataParallel']
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, product
from operator import itemgetter
from statistics import median, quantiles, stdev
from typing import Any

import torch

from pipelab.cli.believing import believable
from pipelab.cli.measuring import cores
from pipelab.draw import wording
from pipelab.errors import UsageError, counted
from pipelab.table import Column, Table
from pipelab_course.ddp import DROPPED, Amdahl, Job, fit_amdahl, free_memory, memory_needed, run_job
from pipelab_course.figures import DOUBTED, quoted

Row = Mapping[str, Any]

PRESETS = {"small": (1024, 2), "laptop": (2048, 4), "large": (8192, 8)}
"""The width and depth of each model; large has 2 GB of parameters, and laptop is what a laptop has time for instead."""

EXPERIMENTS = {
    "delay": "every process sleeps 10 ms in each step: Amdahl's law",
    "batch": "batches of 32 to 256 on the largest number of processes",
    "straggler": "rank 0 alone sleeps 20 ms in each step",
}
"""The three experiments."""

_DELAY_MS, _STRAGGLER_MS = 10.0, 20.0
_BATCHES = (32, 64, 128, 256)
_TIMED = ("step_ms", "p10_ms", "p90_ms", "stdev_ms", "rows_per_s", "communication", "utilisation", "rank_ms")
"""The figures of a row that depend on its own times; speed-up and efficiency also depend on one process's."""


@dataclass(frozen=True)
class Run:
    """One row to measure: a name for what is compared, and the job."""

    label: str
    model: str
    job: Job


def shape_of(model: str) -> tuple[int, int]:
    """Return the width and the depth of a model: a preset's name, or both as in `512x4`."""
    if found := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", model):
        return int(found[1]), int(found[2])
    if model not in PRESETS:
        known = ", ".join(f"{name} ({width} x {depth})" for name, (width, depth) in PRESETS.items())
        raise UsageError(f"model {model!r}: expected {known}, or width x depth, such as 512x4")
    return PRESETS[model]


def runs(
    models: Sequence[str] = ("small", "laptop"),
    processes: Sequence[int] = (1, 2, 4),
    *,
    experiment: str | None = None,
    batch: int = 64,
    steps: int = 35,
    seed: int = 0,
    threads: int = 1,
) -> list[Run]:
    """Return what is measured, row by row."""
    if experiment is not None and experiment not in EXPERIMENTS:
        raise UsageError(f"experiment {experiment!r}: expected one of {', '.join(EXPERIMENTS)}")
    if steps < DROPPED + 2:
        raise UsageError(f"steps={steps}: {DROPPED} are dropped, and 2 must be left; the homework asks for 30 or more")
    counts = sorted({1, *processes})
    _require_shares(_BATCHES if experiment == "batch" else (batch,), counts)
    gpus = torch.cuda.device_count() >= counts[-1]
    planned: list[Run] = []
    for model in dict.fromkeys(models):
        width, depth = shape_of(model)
        if not gpus:
            _require_memory(model, counts)
        job = Job(counts[-1], width, depth, batch, steps, seed, threads, gpus=gpus)
        planned += [Run(f"{model}, {label}", model, each) for label, each in _jobs(experiment, job, counts)]
    return planned


def _jobs(experiment: str | None, job: Job, counts: Sequence[int]) -> list[tuple[str, Job]]:
    """Return the jobs that an experiment makes of a model's largest one, each with a label."""
    scaling = [("DDP", replace(job, processes=count)) for count in counts]
    if experiment is None:
        single = replace(job, processes=1, data_parallel=True, devices=job.processes)
        return [*scaling, ("DataParallel", single)]
    if experiment == "delay":
        return scaling + [(f"DDP + {_DELAY_MS:g} ms", replace(each, delay_ms=_DELAY_MS)) for _, each in scaling]
    if experiment == "batch":
        return [("DDP", replace(job, batch=rows)) for rows in _BATCHES]
    return [scaling[-1], (f"rank 0 + {_STRAGGLER_MS:g} ms", replace(job, delay_ms=_STRAGGLER_MS, delayed=0))]


def _require_shares(batches: Sequence[int], counts: Sequence[int]) -> None:
    for rows, count in product(batches, counts):
        if rows % count:
            raise UsageError(
                f"a batch of {rows} cannot be shared equally by {count} processes: DDP averages their gradients, "
                "which is right for equal shares only"
            )


def measurements(planned: Sequence[Run], timeout: float = 600.0) -> Iterator[dict[str, Any]]:
    """Measure runs one after another; yield a row for each."""
    ones: dict[tuple[str, int, float], float] = {}  # the step time of one process, by model, batch and delay
    for run in planned:
        job, found = run.job, run_job(run.job, timeout)
        times = found["times_ms"]
        step_ms = median(times)
        alone_ms = median(found["alone_ms"]) if found["alone_ms"] else None
        deciles = quantiles(times, n=10, method="inclusive")
        alike = (run.model, job.batch, job.delay_ms)
        one = ones.setdefault(alike, step_ms) if job.processes == 1 else ones.get(alike)
        yield {
            "run": run.label,
            "model": run.model,
            **asdict(job),
            "steps": job.steps - DROPPED,
            "step_ms": step_ms,
            "p10_ms": deciles[0],
            "p90_ms": deciles[-1],
            "stdev_ms": stdev(times),
            "usual_step_off_ms": median(abs(time - step_ms) for time in times),
            "others": found["others"],
            "speed_up": (speed_up := one and one / step_ms),
            "efficiency": speed_up / job.processes if speed_up and not job.data_parallel else None,
            "rows_per_s": 1e3 * job.batch / step_ms,
            "alone_ms": alone_ms,
            "communication": None if alone_ms is None else max(0.0, 1 - alone_ms / step_ms),
            "utilisation": None if job.gpus else tuple(found["utilisation"]),
            "memory_mb": max(found["memory_mb"]),
            "each_mb": tuple(found["memory_mb"]),
            "rank_ms": tuple(found["rank_ms"]),
            "loss": found["loss"],
        }


def table(rows: Sequence[Row], experiment: str | None = None) -> Table:
    """Return the table of measured rows, with sentences that explain it.

    Its plot shows the measured speed-up, Amdahl's law as fitted, and the ideal, over the number of processes; of the
    experiment `batch`, the time of a step and the throughput over the batch.
    """
    rows = _judged(rows)
    fits = {row["run"]: fit for row in rows if (fit := _fit(rows, row["run"]))}
    shown = []
    for row in rows:
        fit, count = fits.get(row["run"]), row["processes"]
        shown.append(row | {"amdahl": fit and fit.speed_up(count), "ideal": fit and count})
    of_experiment = [column for column, experiments in _COLUMNS if experiment in experiments]
    columns = [column for column in of_experiment if any(row[column.key] is not None for row in shown)]
    axes: tuple[str, Sequence[str]] = ("processes", ("speed_up", "efficiency"))
    if experiment not in _SCALING:
        axes = ("batch", ("step_ms", "rows_per_s")) if experiment == "batch" else ("processes", ["step_ms"])
    curves = {"speed_up": ("amdahl", "ideal")} if experiment in _SCALING else {}
    legend = [DOUBTED.format(_WHY)] * any(row["marked"] for row in rows)
    return Table(shown, columns, axes=axes, curves=curves, notes=legend + _notes(rows, fits))


_WHY = (
    "other programs used over 10 % of the processor, half of the steps differ from the median by more than 15 %, or a "
    "delay predicts something else (a speed-up and an efficiency: or because of the time of one process)"
)


_ALL, _SCALING = (None, *EXPERIMENTS), (None, "delay")
_COLUMNS: Sequence[tuple[Column, Sequence[str | None]]] = (
    (Column("run"), _ALL),
    (Column("processes"), _ALL),
    (Column("batch"), ["batch"]),
    (Column("step_ms", "time of a step, ms", wording.number), _ALL),
    (Column("predicted_step_ms", "predicted, ms", wording.number), _ALL),
    (Column("p10_ms", "p10", wording.number), _ALL),
    (Column("p90_ms", "p90", wording.number), _ALL),
    (Column("stdev_ms", "stdev", wording.number), _ALL),
    (Column("speed_up", "speed-up", "{:.2f}".format), _SCALING),
    (Column("efficiency", show=wording.percent), _SCALING),
    (Column("rows_per_s", "rows per second", lambda value: wording.number(round(value))), ["batch"]),
    (Column("communication", "all-reduce", wording.percent), _ALL),
    (Column("utilisation", "utilisation of each", wording.percents), _ALL),
    (Column("rank_ms", "each rank's step, ms", lambda each: wording.elided(f"{ms:.1f}" for ms in each)), ["straggler"]),
    (Column("each_mb", "MB of each", lambda each: wording.elided(f"{mb:.0f}" for mb in each)), _ALL),
)
"""The table's columns, each with the experiments that show it."""
_CELLS = {column.key: column.cell for column, _ in _COLUMNS}


def _judged(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return rows with the time that a delay predicts, and with the figures that are marked because they are doubtful.

    A delay makes a step as much longer, if it is on all processes or on one. Nothing else predicts a step's time, so
    that the usual step is compared with the median.
    """
    judged: list[dict[str, Any]] = []
    doubted: set[tuple[str, float, int]] = set()  # model, delay and batch whose one process's time is doubtful
    ones: dict[tuple[str, float, int], float | None] = {}  # by these, the predicted time of the fewest processes
    for row in rows:
        step, predicted = row["step_ms"], _predicted(row, rows)
        found, expected = (step, predicted) if predicted else (step + row["usual_step_off_ms"], step)
        alike = (row["model"], row["delay_ms"], row["batch"])
        marked: tuple[str, ...] = () if believable(found, expected, row["others"]) else _TIMED
        if marked and row["processes"] == 1 and not row["data_parallel"]:
            doubted.add(alike)
        one = ones.setdefault(alike, predicted)
        off = one and predicted and row["speed_up"] and not believable(row["speed_up"], one / predicted, 0)
        if marked or alike in doubted or off:
            marked += ("speed_up", "efficiency")
        judged.append({**row, "predicted_step_ms": predicted, "marked": marked})
    return judged


def _predicted(row: Row, rows: Sequence[Row]) -> float | None:
    """Return the time of the same step without a delay, and the delay; `None` if it has none."""
    if not row["delay_ms"]:
        return None
    alike = itemgetter("model", "batch", "processes", "data_parallel")
    plain = (other["step_ms"] for other in rows if not other["delay_ms"] and alike(other) == alike(row))
    without = next(plain, None)
    return without and without + row["delay_ms"]


def _fit(rows: Sequence[Row], label: str) -> Amdahl | None:
    return fit_amdahl({row["processes"]: row["step_ms"] for row in rows if row["run"] == label})


def _require_memory(model: str, counts: Sequence[int]) -> None:
    """Refuse a model for which the machine's free memory is too small, counted for every process."""
    each, free = memory_needed(*shape_of(model)), free_memory()
    if counts[-1] * each <= free:
        return
    fitting = [str(count) for count in counts if count * each <= free]
    instead = f"--processes {','.join(fitting)}, or " if len(fitting) > 1 else ""
    raise UsageError(
        f"{model} needs {counts[-1] * each / 1e9:.1f} GB in {counts[-1]} processes, and {free / 1e9:.1f} GB are free: "
        f"each process holds {each / 1e9:.1f} GB of parameters, gradients, momentum and DDP's buckets; use {instead}"
        "--model laptop"
    )


def _notes(rows: Sequence[Row], fits: Mapping[str, Amdahl]) -> list[str]:
    """Return what is computed from the rows, in sentences with their numbers."""
    notes = [_of_fit(label, fit, rows) for label, fit in fits.items()]
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        found = _scaling(mine)
        if "alone_ms" in found:
            notes.append(
                "{model}: of {last_ms} on {processes}, {all_reduce_ms} are the all-reduce and waiting for it: without "
                "it (DDP.no_sync) a step took {alone_ms}.".format_map(found)
            )
        if "loss" in found:
            notes.append(
                "{model}: the loss of the last step was {loss}, and differs by at most {loss_range} among these "
                "rows.".format_map(found)
            )
        if "dp_first" in (single := _data_parallel(mine)):
            notes.append(
                "{model}: DataParallel is emulated: one process scatters, copies and gathers for {dp_devices}, and "
                "computes for them in turn, which counts as simultaneous. Device 0 works {dp_first} of the step and "
                "holds {dp_mb}, the others {dp_others} and {dp_others_mb}: bytes of tensors. DDP's MB are what "
                "training added to a process, libraries included: do not compare the two.".format_map(found | single)
            )
    return notes


def _ms(value: float) -> str:
    return f"{wording.number(value)} ms"


def _took(row: Row) -> str:
    predicted = row["predicted_step_ms"]
    return quoted(_ms(row["step_ms"]), predicted and _ms(predicted), "step_ms" not in row["marked"])


def _of_fit(label: str, fit: Amdahl, rows: Sequence[Row]) -> str:
    one, *_, last = [row for row in rows if row["run"] == label]
    if fit.serial >= 1:
        return f"{label}: more processes were not faster, so Amdahl's law has no serial fraction to find."
    missed = ""
    if fit.residual is not None:
        missed = (
            f" The fit misses the measured times by {_ms(fit.residual * one['step_ms'])} (root mean square), "
            f"{wording.percent(fit.residual)} of one process's time."
        )
    if abs(one["step_ms"] - last["step_ms"]) < (spread := max(one["stdev_ms"], last["stdev_ms"])):
        missed += f" Single steps vary more than these runs, {_ms(spread)} (standard deviation): do not trust the fit."
    elif any(row["marked"] for row in rows if row["run"] == label):
        missed += " It is a fit to marked times: do not trust it."
    return f"{label}: Amdahl's law fits best with a serial fraction of {wording.percent(fit.serial)}.{missed}"


def numbers(rows: Sequence[Row], experiment: str | None = None) -> list[dict[str, str]]:
    """Return what the homework's questions are answered with, by name, for each model."""
    rows = _judged(rows)
    special = {None: _data_parallel, "delay": _delay, "batch": _batch, "straggler": _straggler}[experiment]
    models = dict.fromkeys(row["model"] for row in rows)
    mine = [[row for row in rows if row["model"] == model] for model in models]
    return [_scaling(each) | special(each) for each in mine]


def _scaling(rows: Sequence[Row]) -> dict[str, str]:
    """Return the numbers of runs that differ in their processes only."""
    losses = [row["loss"] for row in rows]
    found = {"model": rows[0]["model"], "processes": counted(rows[-1]["processes"], "process")}
    if len({row["batch"] for row in rows}) > 1:
        return found
    if len(rows) > 1:
        found |= {"loss": f"{losses[0]:.6f}", "loss_range": f"{max(losses) - min(losses):.1e}"}
    plain = [row for row in rows if not row["data_parallel"] and not row["delay_ms"]]
    last = max(plain, key=lambda row: row["processes"], default=None)
    if last is None or last["processes"] == 1:
        return found
    believed, processes = "communication" not in last["marked"], counted(last["processes"], "process")
    if not last["gpus"] and last["processes"] * last["threads"] > cores():
        found["turns"] = f"{processes} take turns on {counted(cores(), 'core')}"
    found |= {
        "processes": processes,
        "ideal": str(last["processes"]),
        "last_ms": _took(last),
        "all_reduce_ms": quoted(_ms(last["communication"] * last["step_ms"]), None, believed),
        "all_reduce_share": _CELLS["communication"](last),
        "alone_ms": quoted(_ms(last["alone_ms"]), None, believed),
        "megabytes": f"{4 * last['depth'] * (last['width'] ** 2 + last['width']) / 1e6:.1f} MB",
        "dominates": "communication" if last["communication"] > 0.5 else "computation",
    }
    fit = _fit(plain, plain[0]["run"])
    return found | (_efficiency(plain, last, fit) if fit else {})


def _efficiency(plain: Sequence[Row], last: Row, fit: Amdahl) -> dict[str, str]:
    """Return where the efficiency drops most, and what Amdahl's law says."""
    drops = {row["processes"]: before["efficiency"] - row["efficiency"] for before, row in pairwise(plain)}
    worst = max(drops, key=lambda count: drops[count])
    efficiency = {row["processes"]: _CELLS["efficiency"](row) for row in plain}
    found = {"drop_at": str(worst), "drop_to": efficiency[worst], "efficiency": efficiency[last["processes"]]}
    found |= {"speed_up": _CELLS["speed_up"](last), "one_ms": _took(plain[0])}
    if fit.serial >= 1:
        return found | {"slow_one": _took(plain[0]), "slow_last": _took(last)}
    return found | {"serial": wording.percent(fit.serial), "limit": wording.number(fit.limit)}


def _data_parallel(rows: Sequence[Row]) -> dict[str, str]:
    single = next((row for row in rows if row["data_parallel"]), None)
    if single is None:
        return {}
    last = [row for row in rows if row is not single][-1]
    found = {
        "dp_ms": _took(single),
        "last_ms": _took(last),
        "dp_mb": f"{single['memory_mb']:.0f} MB",
        "ddp_mb": f"{last['memory_mb']:.0f} MB",
        "ddp_all_mb": f"{sum(last['each_mb']):.0f} MB",
    }
    for name, row in {"dp": single, "ddp": last}.items():
        found[f"{name}_variance"] = quoted(f"{wording.number(row['stdev_ms'] ** 2)} ms²", None, not row["marked"])
        if row["utilisation"]:
            found[f"{name}_busy"] = _CELLS["utilisation"](row)
    if single["gpus"] or single["devices"] < 2:
        return found
    first, other = (quoted(wording.percent(share), None, not single["marked"]) for share in single["utilisation"][:2])
    found |= {"dp_devices": counted(single["devices"], "device"), "dp_first": first, "dp_others": other}
    return found | {"dp_others_mb": f"{single['each_mb'][1]:.0f} MB"}


def _delay(rows: Sequence[Row]) -> dict[str, str]:
    plain, slow = ([row for row in rows if (row["delay_ms"] > 0) == delayed] for delayed in (False, True))
    before, after = (fit_amdahl({row["processes"]: row["step_ms"] for row in each}) for each in (plain, slow))
    if before is None or after is None:
        return {}
    one, last, late = plain[0]["step_ms"], plain[-1]["step_ms"], slow[-1]
    predicted = f"{(one + _DELAY_MS) / (last + _DELAY_MS):.2f}"
    found = {"delay_without": f"{plain[-1]['speed_up']:.2f}"}
    found["delay_with"] = quoted(f"{late['speed_up']:.2f}", predicted, "speed_up" not in late["marked"])
    if max(before.serial, after.serial) >= 1:
        return found | {"no_law": _ms(_DELAY_MS)}
    return found | {
        "delay_before": wording.percent(before.serial),
        "delay_law": wording.percent((before.serial * one + _DELAY_MS) / (one + _DELAY_MS)),
        "delay_one": _ms(one),
        "delay_after": wording.percent(after.serial),
    }


def _batch(rows: Sequence[Row]) -> dict[str, str]:
    first, last = rows[0], rows[-1]
    if first is last:
        return {}
    more, longer = last["batch"] / first["batch"], last["step_ms"] / first["step_ms"]
    believed = not (first["marked"] or last["marked"])
    found = {"batch_more": f"{more:.0f}", "batch_first": str(first["batch"]), "batch_last": str(last["batch"])}
    found["batch_longer"], found["batch_gained"] = (
        quoted(f"{value:.2f}", None, believed) for value in (longer, more / longer)
    )
    if last["processes"] > 1:
        found["batch_first_share"], found["batch_last_share"] = (
            wording.percent(row["communication"]) for row in (first, last)
        )
    return found


def _straggler(rows: Sequence[Row]) -> dict[str, str]:
    if len(rows) < 2 or rows[0]["processes"] < 2:
        return {}
    plain, late = rows
    longer = [after - before for before, after in zip(plain["rank_ms"][1:], late["rank_ms"][1:], strict=True)]
    more = late["step_ms"] - plain["step_ms"]
    believed = not (plain["marked"] or late["marked"]) and believable(more, _STRAGGLER_MS, 0)
    return {
        "straggler_longer": quoted(_ms(more), _ms(_STRAGGLER_MS), believed),
        "straggler_others": counted(len(longer), "other rank"),
        "straggler_least": _ms(min(longer)),
        "straggler_most": _ms(max(longer)),
    }
