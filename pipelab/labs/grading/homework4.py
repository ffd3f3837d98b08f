"""Homework 4: what a submission ran, and whether that is right. What it printed does not count."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType

from pipelab.labs.grading.emulated import HOST, emulated
from pipelab.labs.grading.recording import FIRST, SECOND, TOLERANCE, Data, Recorded, Run
from pipelab.labs.grading.tasks import Found, function_of, of_hidden
from pipelab.labs.variant import variant

FUNCTION = "run_1F1B_homework"
PARAMETERS = ("model", "micro_batches", "loss_fn")
STEPS = 20
LEARNING_RATE = 0.1


def _shown(name: str) -> list[tuple[int, ...]]:
    """Return the rows of each micro-batch at the sizes that a student sees, whose numbers follow from the name."""
    own = variant(name)
    return [(own.rows,) * count for count in (own.microbatches, 2, 1)]


def _hidden(seed: int) -> list[tuple[int, ...]]:
    """Return the rows of each micro-batch at the hidden sizes: seven alike, and some that differ."""
    numbers = random.Random(seed)  # noqa: S311 - hidden from a reader of this file, not from an attacker
    uneven = [numbers.randint(1, 6) for _ in range(numbers.randint(3, 6))]
    return [(3,) * 7, (*uneven, max(uneven) + 1)]


# ── The checks of one run ───────────────────────────────────────────────────────────────────────────────────────────


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


def _forwards(run: Run) -> Found:
    expected = [("F", m) for m in range(run.count)]
    found = [event for event in run.events if event[0] == "F"]
    once = sum(times == 1 for times in run.times("F"))
    stopped = bool(run.error) and found == expected[: len(found)]
    effect = f"{once} of {run.count} micro-batches go forward once"
    return Found(found == expected, _names(expected), _names(found), effect, reached=not stopped)


def _targets(run: Run) -> Found:
    wrong = [m for m, (_, right) in run.targets.items() if not right]
    names = {HOST: "on the cpu", FIRST: "on the first GPU", SECOND: "on the second GPU"}
    found = [f"{m} {names.get(place, place)}" for m, (place, _) in sorted(run.targets.items())]
    seen = len(run.targets)
    effect = f"{seen} of {run.count} micro-batches have a loss"
    if wrong:
        could = f"{seen - len(wrong)} of {run.count} micro-batches could be trained on"
        effect = f"on two GPUs the first loss raises an error: {could}"
    wanted = "every target on the output's device when the loss is computed"
    said = ", ".join(found) or "no loss of an output and its target was computed"
    return Found(not wrong and (seen > 0 or run.count == 1), wanted, said, effect, reached=bool(seen))


def _right_order(run: Run) -> Found:
    """Judge everything but the last backward, which is a separate task."""
    expected = _order(run.count)
    right = run.events in (expected, expected[:-1])
    effect = f"{sum(map(bool, run.times('B')))} of {run.count} micro-batches go backward"
    if all(run.times("B")):
        held, fewest = _peak(run.events), _peak(expected)
        effect = f"activations of up to {held} micro-batches are held at once; the right order holds {fewest}"
    # Without repetitions, is it the beginning of the right order? Then they, or an error, are the only fault.
    firsts, lasts = list(dict.fromkeys(run.events)), list(dict.fromkeys(reversed(run.events)))[::-1]
    only = any(each == expected[: len(each)] for each in (firsts, lasts) if run.error or each != run.events)
    return Found(right, _names(expected), _names(run.events), effect, reached=_forwards(run).right and not only)


def _last(run: Run) -> Found:
    left = [m for m, times in enumerate(run.times("B")) if not times]
    effect = f"{len(left) / run.count:.0%} of the micro-batches are never learned from"
    found = f"no backward of {', '.join(map(str, left))}" if left else "it ran"
    reached = _forwards(run).right and not run.error
    return Found(bool(run.times("B")[-1]), f"a backward of {run.count - 1}", found, effect, reached=reached)


def _once(run: Run) -> Found:
    times = run.times("B")
    twice = [m for m, each in enumerate(times) if each > 1]
    stops = "second time" in run.error
    found = f"a second backward of {', '.join(map(str, twice))}" if twice else "no backward at all"
    ran = any(times) or run.count == 1  # the only backward of 1 micro-batch is the last
    if ran and not twice:
        found = _names([event for event in run.events if event[0] == "B"])
    effect = f"{len(twice)} of {run.count} micro-batches count more than once"
    if stops:
        effect = "PyTorch stops with an error: no step of training ends"
    first = run.events[1:2] == [("B", 0)] and 0 in twice
    hint = "In the first round i is 0. Which element of a list has the index i - 1 then?" if first else ""
    wanted = "at most one backward of each micro-batch"
    return Found(ran and not twice and not stops, wanted, found, effect, hint, reached=ran or stops)


def _gradients(run: Run) -> Found:
    found = run.diagnosis.sentence.partition("\n")[0]
    missing = run.count - sum(count > TOLERANCE for count in run.diagnosis.counts)
    explained = bool(run.diagnosis.counts) and run.diagnosis.residual <= TOLERANCE
    hint = ""
    if run.changed:
        found += " The weights were changed."
        hint = "Your function leaves gradients. Who changes the weights, and when?"
    elif explained and missing:
        hint = "A backward adds to what is in .grad. Which line removes what earlier backwards have added?"
    elif explained and run.own_loss:
        hint = "Your function gets loss_fn. Does it call it?"
    elif explained:
        hint = "By which number is each loss multiplied or divided? Why by that one?"
    wanted = f"each of the {run.count} counts once (a sum) or 1/{run.count} times (a mean); the weights are unchanged"
    effect = f"{missing} of {run.count} micro-batches are missing from the gradient" if missing else found
    reached = all(times == 1 for times in run.times("B"))
    return Found(bool(run.kind()), wanted, found, effect, hint, reached)


_CHECKS: dict[str, Callable[[Run], Found]] = {
    "forwards": _forwards,
    "targets": _targets,
    "order": _right_order,
    "last backward": _last,
    "no second backward": _once,
    "gradients": _gradients,
}


# ── The whole submission ────────────────────────────────────────────────────────────────────────────────────────────


def _training(data: Data, run: Run, seed: int) -> Found:
    """Train for some steps, plainly and with the submission's gradients, and compare the losses of the whole batch."""
    trained, plain = Recorded(run.rows, seed), Recorded(run.rows, seed)
    begun, rate = trained.whole_loss(), _rate(run)
    stopped = f"; step {len(data['steps'])} stopped with {data['error']}" if data["error"] else ""
    for left in data["steps"]:
        trained.put(left)
        trained.descend(rate)
    for _ in range(STEPS):
        plain.descend(LEARNING_RATE / run.count, plain.gradients())
    loss, right = trained.whole_loss(), plain.whole_loss()
    effect = f"the loss falls from {begun:.3f} to {loss:.3f}, and should fall to {right:.3f}"
    same = abs(loss - right) <= TOLERANCE * right and len(data["steps"]) == STEPS
    return Found(same, f"loss {right:.4f} after {STEPS} steps", f"loss {loss:.4f}{stopped}", effect)


def _rate(run: Run) -> float:
    return LEARNING_RATE if "mean" in run.kind() else LEARNING_RATE / run.count


def record(load: Callable[[], ModuleType], seed: int, at: Callable[[str], None], name: str = "") -> Data:
    """Import a submission with `load`, run it at every size, and train with it; return what happened, for `judge`.

    `at` is called with what is about to run. A LookupError says that the module has no such function.
    """
    with emulated(2):  # a script may move its model when it is imported
        function = function_of(load(), FUNCTION, PARAMETERS)
    runs: list[Data] = []
    shown = _shown(name)
    for rows in shown:
        at(f"with {len(rows)} micro-batch{'es' * (len(rows) > 1)}")
        runs.append(Recorded(rows, seed).record(function))
    at(f"in {STEPS} steps of training")
    rate, trained = _rate(Recorded(shown[0], seed).replay(runs[0])), Recorded(shown[0], seed)
    steps: list[Data] = []
    while len(steps) < STEPS and not (left := trained.call(function))["error"]:
        steps.append(left)
        trained.descend(rate)
    error = "" if len(steps) == STEPS else left["error"].partition(":")[0]
    at("with a hidden number of micro-batches")
    hidden = [Recorded(rows, seed).record(function) for rows in _hidden(seed)]
    return {"runs": runs, "training": {"steps": steps, "error": error}, "hidden": hidden}


def judge(data: Data, seed: int, name: str = "") -> tuple[dict[str, Found], str]:
    """Return what each task's check found in what `record` returned, and what its gradients are of.

    Raises:
        ValueError, TypeError, LookupError: if these are not its data, or say that backwards left nothing.
    """
    shown, hid = (
        [*zip(*each, strict=True)] for each in ((_shown(name), data["runs"]), (_hidden(seed), data["hidden"]))
    )
    runs, hidden = ([Recorded(rows, seed).replay(each) for rows, each in some] for some in (shown, hid))
    if any("B" in dict(run.events) and run.diagnosis.code == "no-gradients" and not run.error for run in runs):
        raise ValueError("backwards ran, and left no gradient: does the function end with zero_grad()?")
    found = _of_shown(runs, _training(data["training"], runs[0], seed))
    own_loss = any(run.own_loss for run in runs)
    hint = "Your function gets loss_fn, which is another one there. Does it call it?" if own_loss else ""
    checked = [{name: check(run) for name, check in _CHECKS.items()} for run in hidden]
    found["hidden sizes"] = of_hidden(found, checked, hint)
    errors = (f"with {run.count} micro-batch{'es' * (run.count > 1)}: {run.error}" for run in runs if run.error)
    notes = [f"the gradients are those of {runs[0].kind()}"] if runs[0].kind() else []
    notes += ["it computes a loss of its own and never calls loss_fn"] if own_loss else []
    return found, next(errors, "; ".join(notes))


def _of_shown(runs: Sequence[Run], training: Found) -> dict[str, Found]:
    """Return what each check found at the shown sizes: only what is a cause was reached, and has its hint.

    Causes are sought at the first size where something is wrong. What goes wrong only after a first right call is a
    matter of the second call, or else of the size.
    """
    found: dict[str, Found] = {}
    wrong_at = next((run for run in runs if not all(check(run).right for check in _CHECKS.values())), None)
    for name, check in _CHECKS.items():
        run = next((run for run in runs if not check(run).right), runs[0])
        seen = check(run)
        if not seen.right:
            said = f"{run.count} micro-batch{'es' * (run.count > 1)}: {seen.found}"
            said += f"; then {run.error.partition(':')[0]}" if run.error else ""
            seen = replace(seen, found=said, reached=seen.reached and run is wrong_at)
            if wrong_at is not runs[0]:
                fixed = f"It is right with {runs[0].count} micro-batches. Which number is fixed in it?"
                seen = replace(seen, hint=fixed, reached=seen.reached and training.right)
        found[name] = seen
    found["training"] = replace(training, reached=wrong_at is not runs[0])
    wrong = [name for name, seen in found.items() if not seen.right]
    if wrong and not any(found[name].reached for name in wrong):  # an error is the only cause
        first, error = found[wrong[0]], "The error above is the cause. What does the line that it names do there?"
        found[wrong[0]] = replace(first, reached=True, hint=error if runs[0].error else first.hint)
    return found
