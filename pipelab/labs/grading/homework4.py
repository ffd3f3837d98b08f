"""Homework 4: whether what a submission ran is right. What it printed does not count."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from types import ModuleType
from typing import Any

import torch
from torch import nn

from pipelab.labs.grading.recording import ANYWHERE, FIRST, HOST, SECOND, TOLERANCE, Recorded, Run
from pipelab.labs.grading.tasks import HOMEWORK4, Mark

__all__ = ["judge"]

FUNCTION = "run_1F1B_homework"
PARAMETERS = ("model", "micro_batches", "loss_fn")
SHOWN = ((4, 4, 4, 4), (4, 4), (4,))
STEPS = 20
LEARNING_RATE = 0.1


def _hidden(seed: int) -> list[tuple[int, ...]]:
    """Return the rows of each micro-batch at the hidden sizes: seven alike, and some that differ."""
    numbers = random.Random(seed)  # noqa: S311 - hidden from a reader of this file, not from an attacker
    uneven = [numbers.randint(1, 6) for _ in range(numbers.randint(3, 6))]
    return [(3,) * 7, (*uneven, max(uneven) + 1)]


@dataclass(frozen=True)
class _Found:
    right: bool
    expected: str = ""
    found: str = ""
    effect: str = ""


def _names(events: Sequence[tuple[str, int]]) -> str:
    return " ".join(f"{kind}{m if m >= 0 else '?'}" for kind, m in events) or "nothing"


def _order(count: int) -> list[tuple[str, int]]:
    rounds = [event for m in range(1, count) for event in (("F", m), ("B", m - 1))]
    return [("F", 0), *rounds, ("B", count - 1)]


def _peak(events: Sequence[tuple[str, int]]) -> int:
    held, peak = set[int](), 0
    for kind, m in events:
        held = held | {m} if kind == "F" else held - {m}
        peak = max(peak, len(held))
    return peak


def _forwards(run: Run) -> _Found:
    expected = [("F", m) for m in range(run.count)]
    found = [event for event in run.events if event[0] == "F"]
    once = sum(times == 1 for times in run.times("F"))
    effect = f"{once} of {run.count} micro-batches go forward once"
    return _Found(found == expected, _names(expected), _names(found), effect)


def _targets(run: Run) -> _Found:
    right = [m for m, place in run.targets.items() if place in (SECOND, ANYWHERE)]
    names = {HOST: "not moved", FIRST: "on the first device", SECOND: "on the output's device", ANYWHERE: "on the cpu"}
    found = [f"{m} {names.get(place, place)}" for m, place in sorted(run.targets.items())]
    return _Found(
        len(right) == len(run.targets) and (bool(right) or run.count == 1),
        "every target on the output's device when loss_fn is called",
        ", ".join(found) or "loss_fn was not called with a micro-batch's target",
        f"on two GPUs the first loss raises an error: {len(right)} of {run.count} micro-batches could be trained on",
    )


def _right_order(run: Run) -> _Found:
    expected = _order(run.count)
    effect = f"{sum(map(bool, run.times('B')))} of {run.count} micro-batches go backward"
    if all(run.times("B")):
        held, fewest = _peak(run.events), _peak(expected)
        effect = f"activations of up to {held} micro-batches are held at once; the right order holds {fewest}"
    return _Found(run.events == expected, _names(expected), _names(run.events), effect)


def _finished(run: Run) -> _Found:
    left = [m for m, times in enumerate(run.times("B")) if not times]
    effect = f"{len(left) / run.count:.0%} of the micro-batches are never learned from"
    found = f"no backward of {', '.join(map(str, left))}" if left else "every backward ran"
    return _Found(not left, f"a backward of each of the {run.count} micro-batches", found, effect)


def _once(run: Run) -> _Found:
    times = run.times("B")
    twice = [m for m, each in enumerate(times) if each > 1]
    again = "second time" in run.error
    found = (
        f"a second backward of {', '.join(map(str, twice))}"
        if twice
        else _names([e for e in run.events if e[0] == "B"])
    )
    effect = (
        "PyTorch stops with an error: no step of training ends"
        if again
        else f"{len(twice)} of {run.count} micro-batches count more than once"
    )
    ran = any(times) or run.count == 1  # the only backward of 1 micro-batch is the last
    return _Found(not twice and not again and ran, "at most one backward of each micro-batch", found, effect)


def _gradients(run: Run) -> _Found:
    weights = " ".join(f"{round(weight, 3) + 0.0:g}" for weight in run.weights) or "no gradients"
    if run.rest < TOLERANCE:
        found = f"the micro-batches count {weights} times"
    else:
        found = f"{min(run.rest, 1):.0%} of the gradient comes from no micro-batch" if run.weights else weights
    if run.changed:
        found += "; the weights were changed"
    wanted = f"each of the {run.count} counts once (a sum) or 1/{run.count} times (a mean); the weights are unchanged"
    missing = run.count - sum(weight > TOLERANCE for weight in run.weights)
    effect = f"{missing} of {run.count} micro-batches are missing from the gradient" if missing else found
    return _Found(bool(run.kind()), wanted, found, effect)


_CHECKS: dict[str, Callable[[Run], _Found]] = {
    "forwards": _forwards,
    "targets": _targets,
    "order": _right_order,
    "last backward": _finished,
    "no second backward": _once,
    "gradients": _gradients,
}


def _train(function: Callable[..., object], rows: tuple[int, ...], seed: int, rate: float) -> tuple[float, str]:
    """Return the whole batch's loss after some steps, and the error that ended them early."""
    recorded = Recorded(rows, seed)
    parameters = list(recorded.model.parameters())
    for step in range(STEPS):
        for parameter in parameters:
            parameter.grad = None
        recorded.call(function)
        if recorded.run.error:
            return recorded.whole_loss(), f"; step {step} stopped with {recorded.run.error.partition(':')[0]}"
        with torch.no_grad():
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.sub_(rate * parameter.grad)
    return recorded.whole_loss(), ""


def _plainly(model: nn.Module, micro_batches: Sequence[tuple[torch.Tensor, torch.Tensor]], loss_fn: nn.Module) -> None:
    for x, y in micro_batches:
        loss_fn(model(x), y.to(SECOND)).backward()


def _training(function: Callable[..., object], run: Run, seed: int) -> _Found:
    rate = LEARNING_RATE if "mean" in run.kind() else LEARNING_RATE / run.count
    right, _ = _train(_plainly, run.rows, seed, LEARNING_RATE / run.count)
    loss, stopped = _train(function, run.rows, seed, rate)
    begun = Recorded(run.rows, seed).whole_loss()
    effect = f"the loss falls from {begun:.3f} to {loss:.3f}, and should fall to {right:.3f}"
    same = abs(loss - right) <= TOLERANCE * right and not stopped
    return _Found(same, f"loss {right:.4f} after {STEPS} steps", f"loss {loss:.4f}{stopped}", effect)


def judge(module: ModuleType, seed: int, at: Callable[[str], None]) -> tuple[list[Mark], str]:
    """Run a submission at every size; return a mark for each task, and what its gradients are of.

    Args:
        module: the submission, imported.
        seed: of the weights, the data and the hidden sizes.
        at: called with what is about to run.

    Raises:
        LookupError: if the module has no function of the right name and parameters.
    """
    function = _function(module)
    runs = []
    for rows in SHOWN:
        at(f"with {len(rows)} micro-batches")
        runs.append(Recorded(rows, seed).measure(function))
    found = {name: _first_wrong(check, runs) for name, check in _CHECKS.items()}
    at(f"in {STEPS} steps of training")
    found["training"] = _training(function, runs[0], seed)
    at("with a hidden number of micro-batches")
    hidden = [Recorded(rows, seed).measure(function) for rows in _hidden(seed)]
    wrong = [name for name, check in _CHECKS.items() if not all(check(run).right for run in hidden)]
    right = sum(all(check(run).right for check in _CHECKS.values()) for run in hidden)
    found["hidden sizes"] = _Found(
        not wrong,
        "everything above, at sizes that are not shown",
        f"wrong there: {', '.join(wrong)}" if wrong else "right there too",
        f"{right} of {len(hidden)} sizes are right",
    )
    marks = [
        Mark(task, task.points * seen.right, seen.expected, seen.found, "" if seen.right else seen.effect)
        for task in HOMEWORK4
        for seen in [found[task.name]]
    ]
    errors = (f"with {len(run.rows)} micro-batches: {run.error}" for run in runs if run.error)
    kind = runs[0].kind()
    return marks, next(errors, f"the gradients are those of {kind}" if kind else "")


def _first_wrong(check: Callable[[Run], _Found], runs: Sequence[Run]) -> _Found:
    """Return the finding at the first size where something is wrong, or at the first size."""
    for run in runs:
        seen = check(run)
        if not seen.right:
            said = f"{run.count} micro-batch{'es' * (run.count > 1)}: {seen.found}"
            return replace(seen, found=f"{said}; then {run.error.partition(':')[0]}" if run.error else said)
    return check(runs[0])


def _function(module: ModuleType) -> Callable[..., object]:
    """Return the submission's function.

    Raises:
        LookupError: if there is none, or if it cannot be called as the homework says.
    """
    function: Any = vars(module).get(FUNCTION)
    if not callable(function):
        own = {name.lower(): name for name, each in vars(module).items() if inspect.isfunction(each)}
        close = [own[name] for name in get_close_matches(FUNCTION.lower(), own, n=1)]
        guess = f"; did you mean {close[0]}?" if close else ""
        raise LookupError(  # noqa: TRY004 - the server reports LookupErrors
            f"it defines no function {FUNCTION}; it defines {', '.join(own.values()) or 'no function'}{guess}"
        )
    try:
        inspect.signature(function).bind(*PARAMETERS)
    except (TypeError, ValueError):
        written = f"{FUNCTION}{inspect.signature(function)}"
        raise LookupError(f"it defines {written}; it is called as {FUNCTION}({', '.join(PARAMETERS)})") from None
    found: Callable[..., object] = function
    return found
