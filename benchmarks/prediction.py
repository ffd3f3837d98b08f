"""How well one GPipe run predicts other schedules and other numbers of micro-batches: two ranks, both engines.

The model runs once in four stages on two ranks, in GPipe's order, with 8 micro-batches. `Cost.fit` takes the costs from
each of its steps, and the prediction is the median of those that follow; schedules with two stages get them merged.
What `I` and `W` cost comes from the same order with split backwards. All micro-batches have the same rows, and all
steps run in turns. Of these rounds, those count in which other programs used the processor least.

Two more figures say what an error consists of: the error with costs fitted to the predicted schedule's own steps, which
is what a simulation leaves out; and how much longer an action takes while the other rank works.

Intervals are counted in all rounds, however busy: `Cost.interval` of the first third's costs, and the steps after it.
On emulated devices, five steps of GPipe and of ZB-H1 give costs, and one step of each of 42 other plans is measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean, median, quantiles

import torch
from native import linear_stack
from torch import nn

import pipelab
from pipelab.engine.emulation import instantly

RANKS, STAGES, FITTED = 2, 4, 8
SCHEDULES = ("gpipe", "1f1b", "delayed", "interleaved-1f1b", "zb-h1")
MICROBATCHES = (4, 8, 16)
EMULATED = ("gpipe", "1f1b", "eager-1f1b", "delayed", "zb-h1", "zb-h2", "naive")
EMULATED_TIMES = {"forward_ms": [10, 12, 8, 10], "backward_ms": [20, 16, 24, 22]}
FULL = {"width": 1024, "rows": 128, "rounds": 9, "quietest": 5}
QUICK = {"width": 64, "rows": 4, "rounds": 1, "quietest": 1}


def fine(split: bool, ranks: int = RANKS, microbatches: int = FITTED) -> pipelab.Plan:
    """Return GPipe's order of two stages on each rank; with split backwards, each `W` right after its `I`."""
    plan = pipelab.LoopedBFS(ranks, microbatches, stages_per_rank=2).plan()
    if not split:
        return plan
    rows = [
        [part for action in row for part in (_halves(action) if action.kind == "B" else (action,))] for row in plan.rows
    ]
    return pipelab.Plan(rows, name="split")


def _halves(action: pipelab.Action) -> tuple[pipelab.Action, ...]:
    return pipelab.I(action.microbatch, action.stage), pipelab.W(action.microbatch, action.stage)


def _busy() -> float:
    """Return how many seconds all cores together have worked for anybody; 0 where Linux does not say."""
    try:
        with open("/proc/stat") as file:
            user, nice, system, _idle, _wait, *interrupts = map(int, file.readline().split()[1:9])
    except OSError:
        return 0.0
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def predict(engine: str, width: int, rows: int, rounds: int, quietest: int) -> dict[str, object]:
    """Return each schedule's predicted and measured makespan in one engine, in milliseconds.

    With them, how many cores other programs used in the rounds that count; in two processes, both work alike.
    """
    own = 1 if engine == "threads" else RANKS
    torch.set_num_threads(1)
    model = linear_stack(width)
    plans = {"fit": fine(split=False), "split": fine(split=True)}
    plans |= {
        (name, count): pipelab.schedules[name](RANKS, count).plan() for name in SCHEDULES for count in MICROBATCHES
    }
    data = {count: torch.randn(2, rows * count, width).unbind() for count in {FITTED, *MICROBATCHES}}
    pipes = {
        key: pipelab.Pipeline(model, plan, nn.functional.mse_loss, engine=engine, intra_op_threads=1)
        for key, plan in plans.items()
    }
    found_in: list[tuple[float, dict[object, pipelab.Trace]]] = []  # by round: cores that others used, and the traces
    for _ in range(rounds + 1):
        began, busy, mine = time.perf_counter(), _busy(), time.process_time()
        steps: dict[object, pipelab.Trace] = {}
        for key, pipe in pipes.items():
            model.zero_grad()
            steps[key] = pipe.step(*data[plans[key].microbatches]).trace
        others = _busy() - busy - own * (time.process_time() - mine)
        found_in.append((max(others, 0.0) / (time.perf_counter() - began), steps))
    for pipe in pipes.values():
        pipe.close()
    kept = sorted(found_in[1:], key=lambda each: each[0])[:quietest]  # the first round warms up
    traces = {key: [steps[key] for _, steps in kept] for key in pipes}
    costs = [
        pipelab.Cost.fit(*both, typical="mean") for both in zip(traces.pop("fit"), traces.pop("split"), strict=True)
    ]
    found = []
    for key, measured_traces in traces.items():
        plan = plans[key]
        predicted = median(
            pipelab.simulate(plan, cost if plan.stages == STAGES else cost.merged(plan.stages)).makespan
            for cost in costs
        )
        own = pipelab.Cost.fit(measured_traces, measured_traces if "I" in plan.bound.kinds else None, typical="mean")
        spans = [each.makespan for each in measured_traces]
        measured = median(spans)
        low, _, high = quantiles(spans, n=4) if len(spans) > 1 else (measured,) * 3
        found.append(
            {
                "schedule": key[0],
                "microbatches": key[1],
                "predicted_ms": predicted,
                "measured_ms": measured,
                "quartile_1_ms": low,
                "quartile_3_ms": high,
                "error": predicted / measured - 1,
                "own_error": pipelab.simulate(plan, own).makespan / measured - 1,
            }
        )
    third = rounds // 3
    early, late = ([steps for _, steps in some] for some in (found_in[1 : third + 1], found_in[third + 1 :]))
    return {
        "others": max(others for others, _ in kept),
        "beside": _beside(traces.values()),
        "rows": found,
        "intervals": _intervals(plans, early, late),
    }


def _beside(steps: Iterable[Sequence[pipelab.Trace]]) -> float | None:
    """Return how many times as long an action takes while the other rank works as while it waits; None if unknown."""
    ratios = []
    for traces in steps:
        alone, both = defaultdict[tuple[str, int | None], list[float]](list), defaultdict[tuple, list[float]](list)
        for trace in traces:
            for event in (each for each in trace.events if each.duration):
                other = trace.events_of(1 - event.rank)
                shared = sum(max(0.0, min(event.end, each.end) - max(event.start, each.start)) for each in other)
                if not 0.1 < (share := shared / event.duration) < 0.9:
                    (both if share > 0.5 else alone)[event.action.kind, event.action.stage].append(event.duration)
        ratios += [
            median(both[each]) / median(alone[each]) for each in alone if min(len(alone[each]), len(both[each])) > 2
        ]
    return median(ratios) if ratios else None


def _intervals(
    plans: dict[object, pipelab.Plan], early: list[dict[object, pipelab.Trace]], late: list[dict[object, pipelab.Trace]]
) -> dict[str, object]:
    """Return how many later steps are inside the intervals of costs fitted to early ones, and how far off they are."""
    inside, errors, widths = 0, [], []
    try:
        cost = pipelab.Cost.fit([each["fit"] for each in early], [each["split"] for each in early], typical="mean")
        for key, plan in plans.items():
            if key in ("fit", "split"):
                continue
            own = cost if plan.stages == STAGES else cost.merged(plan.stages)
            predicted = pipelab.simulate(plan, own).makespan
            low, high = own.interval(predicted)
            widths.append(high / low)
            for each in late:
                inside += low <= each[key].makespan <= high
                errors.append(abs(predicted / each[key].makespan - 1))
    except (pipelab.errors.CostError, TypeError) as error:  # too few steps, or too far apart
        return {"refused": str(error).partition("\n")[0]}
    return {"inside": inside / len(errors), "steps": len(errors), "error": median(errors), "width": median(widths)}


def _steps(model: nn.Module, plan: pipelab.Plan, count: int) -> list[pipelab.Trace]:
    """Return steps of emulated devices, after one that warms up and takes no time."""
    batch = torch.ones(plan.microbatches, 1)
    with pipelab.Pipeline(model, plan, nn.functional.mse_loss) as pipe:
        with instantly(model):
            pipe.step(batch, batch)
        return [pipe.step(batch, batch).trace for _ in range(count)]


def _emulated(quick: bool) -> dict[str, object]:
    """Return how many plans' steps on four emulated devices are inside the intervals of costs fitted to two plans."""
    stages = len(EMULATED_TIMES["forward_ms"])
    times = {name: [time / 10 if quick else time for time in each] for name, each in EMULATED_TIMES.items()}
    model = pipelab.emulated(stages, **times)
    fitted = [_steps(model, pipelab.schedules[name](stages, 2 * stages).plan(), 5) for name in ("gpipe", "zb-h1")]
    errors, inside = [], []
    try:
        cost = pipelab.Cost.fit(*fitted, typical="mean")
        for name in EMULATED:
            for many in range(1, 2 if quick else 7):
                plan = pipelab.schedules[name](stages, many * stages).plan()
                predicted, (took,) = pipelab.simulate(plan, cost).makespan, _steps(model, plan, 1)
                low, high = cost.interval(predicted)
                inside.append(low <= took.makespan <= high)
                errors.append(abs(predicted / took.makespan - 1))
    except pipelab.errors.CostError as error:
        return {"refused": str(error).partition("\n")[0]}
    return {"inside": fmean(inside), "steps": len(errors), "error": median(errors), "width": high / low}


def measure(quick: bool = False) -> dict[str, object]:
    """Return predictions and measurements of both engines."""
    setting = QUICK if quick else FULL
    threads = torch.get_num_threads()
    try:
        here = predict("threads", **setting)
    finally:
        torch.set_num_threads(threads)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    ran = subprocess.run(
        [*command, __file__, json.dumps(setting)], stdout=subprocess.PIPE, text=True, check=True, timeout=900
    )
    there = json.loads(ran.stdout.splitlines()[-1])
    return {**setting, "engines": {"threads": here, "torch": there}, "emulated": _emulated(quick)}


def report(found: dict[str, object]) -> str:
    """Return the figures as Markdown."""
    engines: dict[str, dict] = found["engines"]  # type: ignore[assignment]
    lines = [
        f"Width {found['width']}, {found['rows']} rows per micro-batch, median of {found['quietest']} steps each: of "
        f"{found['rounds']} rounds, those in which other programs used the processor least. The first table counts all "
        "rows below, GPipe's too, although the run that was fitted is in GPipe's order.",
        "",
        "| engine | median error | half of the errors between | largest | error with own times | action beside another "
        "| cores used by others, at most |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for engine, made in engines.items():
        errors = [row["error"] for row in made["rows"]]
        low, _, high = quantiles(errors, n=4)
        lines.append(
            f"| {engine} | **{median(map(abs, errors)):.1%}** | {low:+.1%} and {high:+.1%} "
            f"| {max(errors, key=abs):+.1%} | {median(abs(row['own_error']) for row in made['rows']):.1%} "
            f"| {format(made['beside'], '.3f') + ' times' if made['beside'] else '?'} | {made['others']:.2f} |"
        )
    for where, held in {
        **{each: made["intervals"] for each, made in engines.items()},
        "emulated": found["emulated"],
    }.items():
        says = held.get("refused") or (
            f"{held['inside']:.0%} of {held['steps']} later steps are inside, median error {held['error']:.1%}; the "
            f"upper end is {held['width']:.3f} times the lower"
        )
        lines += ["", f"Intervals, {where}: {says}."]
    for engine, made in engines.items():
        lines += [
            "",
            f"**{engine}**, predicted and measured milliseconds",
            "",
            f"| schedule | {' | '.join(f'M = {count}' for count in MICROBATCHES)} |",
            f"|---|{'---:|' * len(MICROBATCHES)}",
        ]
        for name in SCHEDULES:
            cells = [
                f"{row['predicted_ms']:.1f}, {row['measured_ms']:.1f}: {row['error']:+.1%}"
                for row in made["rows"]
                if row["schedule"] == name
            ]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    made = predict("torch", **json.loads(sys.argv[1]))
    if os.environ["RANK"] == "0":
        print(json.dumps(made))
