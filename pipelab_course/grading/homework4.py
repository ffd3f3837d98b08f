"""Homework 4: what a submission ran, and whether that is right. What it printed does not count.

The submission's process records, and sends what it has recorded as plain data. The process that judges has never
imported the submission: it puts the gradients into its own model, made from the same seed, and explains those.
"""

from __future__ import annotations

import inspect
import random
import runpy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import pairwise
from math import isclose
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from pipelab.engine.verify.diagnose import Diagnosis, diagnose
from pipelab_course.grading.emulated import HOST, emulated, gpu, place_of, put
from pipelab_course.grading.tasks import HOMEWORKS, Found, Variant, function_of, of_hidden, raised, ruled, variant

TOLERANCE = 1e-3
"""Relative differences below it are rounding."""

FIRST, SECOND = gpu(0), gpu(1)
"""Where the halves of the model are."""

Data = dict[str, Any]
"""What the submission's process sends, and JSON can hold."""

# ── One call ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Run:
    """What a submission did in one call of its function."""

    rows: tuple[int, ...]  # of each micro-batch
    events: list[tuple[str, int]] = field(default_factory=list)  # what ran, in order, such as ("F", 0)
    targets: dict[int, tuple[torch.device, bool]] = field(default_factory=dict)  # where at a loss, and is it right
    diagnosis: Diagnosis = field(default_factory=lambda: Diagnosis("no-gradients", ""))  # compared with the losses' sum
    changed: bool = False  # the weights, by the function
    own_loss: bool = False  # there was a loss, though `loss_fn` was not called
    error: str = ""  # what it raised, and where
    own: Variant = field(default_factory=Variant)

    def __post_init__(self) -> None:
        """Set in which order the micro-batches must go forward, and how often each loss must count."""
        self.order = ruled("orders", self.own.order, self.count)
        self.weights = ruled("weights", self.own.weights, self.count)

    @classmethod
    def of(cls, rows: tuple[int, ...], data: Data, own: Variant) -> Run:
        """Return the run of which these are the data; a ValueError, TypeError or LookupError if none is."""
        numbers = {-1, *range(len(rows))}
        events = [({"F": "F", "B": "B"}[kind], m) for kind, m in data["events"]]
        targets = {int(m): (torch.device(place), right is True) for m, (place, right) in data["targets"].items()}
        if not ({m for _, m in events} <= numbers and targets.keys() <= numbers):
            raise ValueError("there is no such micro-batch")
        return cls(rows, events, targets, own_loss=data["own_loss"] is True, error=str(data["error"]), own=own)

    @property
    def count(self) -> int:
        """How many micro-batches there are."""
        return len(self.rows)

    def times(self, kind: str) -> list[int]:
        """Return how often each micro-batch's forward or backward ran."""
        return [self.events.count((kind, m)) for m in range(self.count)]

    def kind(self) -> str:
        """Return what the gradients are of, or nothing if they are of neither a sum nor a mean."""
        kinds = {
            "right": "the sum of the micro-batches' losses",
            "divided-by-microbatches": "the mean of the micro-batches' losses",
            "weighed-by-rows": "the mean over all rows",
        }
        found = self.diagnosis
        if self.own.weights:
            right = found.residual <= TOLERANCE and _alike(found.counts, self.weights) and not self.changed
            return f"the weighted sum: {self.own.weights}" if right else ""
        multiple = found.code == "weighed-by-rows" and abs((found.factor or 0.0) - 1) > TOLERANCE
        some = any(each.right for each in found.parameters.values()) and bool(found.wrong)
        code = found.code if found.wrong or not found.parameters else "right"  # whatever the whole batch's loss is
        return "" if self.changed or multiple or some else kinds.get(code, "")


def _alike(found: Sequence[float], wanted: Sequence[float]) -> bool:
    return len(found) == len(wanted) and all(map(partial(isclose, abs_tol=TOLERANCE), found, wanted))


def _copied(kind: str, found: Sequence[float], own: str) -> str:
    """Return a hint that names the rule that a submission follows instead of its variant's, if it follows one."""
    rules = getattr(HOMEWORKS["hw4"], kind) if own and found else ()
    others = (rule for rule in rules if rule != own and _alike(found, ruled(kind, rule, len(found))))
    other = next((f"another variant ({rule})" if rule else "the course's homework" for rule in others), "")
    return f"It follows {other}. This variant: {own}." if other else ""


@cache
def _template() -> dict[str, Any]:
    return runpy.run_path(str(HOMEWORKS["hw4"].template))


class Recorded:
    """A model on emulated devices, its data, and everything that a function does with them."""

    def __init__(self, rows: tuple[int, ...], seed: int) -> None:
        torch.set_default_dtype(torch.float32)  # whatever a submission has set
        torch.manual_seed(seed)
        self.rows = rows
        self.model: nn.Module = _template()["TwoStages"]()
        self.weights = list(self.model.parameters())
        width = self.weights[0].shape[1]
        x = torch.randn(sum(rows), width)
        y = torch.sin(x.sum(dim=1, keepdim=True))
        self.x, self.y = x.split(rows), y.split(rows)
        # Losses of micro-batches that differ in rows only add up to the whole batch's if the loss is a sum.
        self.loss_fn = nn.MSELoss(reduction="mean" if len(set(rows)) == 1 else "sum")
        for half, device in ((self.model.first, FIRST), (self.model.second, SECOND)):
            for parameter in half.parameters():
                put(parameter, device)
        self._events: list[tuple[str, int]] = []
        self._targets: dict[int, tuple[torch.device, bool]] = {}

    # ── In the submission's process

    def call(self, function: Callable[..., object]) -> Data:
        """Call a submission's function once, on emulated devices; return the gradients and weights that it left.

        An error ends the call, not the grading.
        """
        pairs = [(x.clone(), y.clone()) for x, y in zip(self.x, self.y, strict=True)]
        error = ""
        try:
            with emulated(2, self._look), patch.object(self.model, "devices", [FIRST, SECOND]):
                returned = function(self.model, pairs, self.loss_fn)
        except MemoryError:
            raise
        except Exception as raised_by_it:
            if "can't allocate memory" in str(raised_by_it):  # PyTorch's own words for it
                raise MemoryError from raised_by_it
            error = raised(raised_by_it, function)
        else:
            if inspect.isgenerator(returned) or inspect.iscoroutine(returned):
                error = f"a {type(returned).__name__} was returned, and nothing ran: remove yield or async"
        gradients = [None if each.grad is None else each.grad.tolist() for each in self.weights]
        return {"error": error, "gradients": gradients, "weights": [each.tolist() for each in self.weights]}

    def record(self, function: Callable[..., object]) -> Data:
        """Call the function once; return what ran, and what it left."""
        called: list[object] = []
        hooks = [
            self.loss_fn.register_forward_hook(lambda *_: called.append(None)),
            self.model.get_submodule("second").register_forward_hook(self._forward),
        ]
        left = self.call(function)
        for hook in hooks:
            hook.remove()
        targets = {m: (str(place), right) for m, (place, right) in self._targets.items()}
        own_loss = bool(targets) and not called
        return left | {"events": [*self._events], "targets": targets, "own_loss": own_loss}

    # ── In the process that judges

    def put(self, left: Data) -> None:
        """Put gradients into the model."""
        for parameter, gradient in zip(self.weights, left["gradients"], strict=True):
            parameter.grad = None if gradient is None else torch.tensor(gradient).view(parameter.shape)

    def replay(self, data: Data, own: Variant) -> Run:
        """Return the run of which these are the data; its diagnosis counts micro-batches: 1 is a sum of the losses."""
        run = Run.of(self.rows, data, own)
        pairs = zip(self.weights, data["weights"], strict=True)
        run.changed = not all(torch.equal(own, torch.tensor(other)) for own, other in pairs)
        whole, put = (torch.cat(self.x), torch.cat(self.y)), lambda *_: self.put(data)
        run.diagnosis = diagnose(
            put, self.model, *whole, self.loss_fn, microbatches=self.rows, reduction="sum", repeat=False
        )
        return run

    @torch.no_grad()
    def descend(self, rate: float, gradients: Sequence[tuple[torch.Tensor, ...]] = ()) -> None:
        """Take a step along the sum of these gradients, or along those that are left; leave none."""
        for place, parameter in enumerate(self.weights):
            if gradients:
                parameter.sub_(rate * sum(each[place] for each in gradients))
            elif parameter.grad is not None:
                parameter.sub_(rate * parameter.grad)
            parameter.grad = None

    def whole_loss(self) -> float:
        """Return the mean loss of all rows."""
        with torch.no_grad():
            return nn.functional.mse_loss(self.model(torch.cat(self.x)), torch.cat(self.y)).item()

    @torch.enable_grad()  # whatever a submission has set
    def gradients(self, weights: Sequence[float]) -> list[tuple[torch.Tensor, ...]]:
        """Return the gradients of each micro-batch's own loss, weighed."""
        parts = zip(weights, self.x, self.y, strict=True)
        return [torch.autograd.grad(weight * self.loss_fn(self.model(x), y), self.weights) for weight, x, y in parts]

    # ── What is watched

    def _which(self, value: torch.Tensor, among: Sequence[torch.Tensor]) -> int:
        """Return which micro-batch a value belongs to, -1 for none."""
        alike = [m for m, each in enumerate(among) if value.numel() == each.numel()]
        value = value.detach().flatten().to(among[0].dtype)
        return next((m for m in alike if torch.allclose(value, among[m].flatten(), atol=1e-5)), -1)

    def _forward(self, module: nn.Module, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        del module
        with torch.no_grad():
            hidden = [self.model.first(x) for x in self.x]  # type: ignore[operator]
        m = self._which(given[0], hidden)
        self._events.append(("F", m))
        if output.requires_grad:
            output.register_hook(lambda _: self._events.append(("B", m)))

    def _look(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note where a target is if something is computed from it and an output."""
        for output, target in (tensors, tensors[::-1]) if len(tensors) == 2 else ():
            if output.shape == target.shape and (m := self._which(target, self.y)) >= 0:
                if self._which(output, self.y) >= 0:
                    return
                place = place_of(target)
                right = place == place_of(output)
                self._targets[m] = (place, right and self._targets.get(m, (place, True))[1])


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


def _order(order: Sequence[int]) -> list[tuple[str, int]]:
    rounds = [event for before, m in pairwise(order) for event in (("F", m), ("B", before))]
    return [("F", order[0]), *rounds, ("B", order[-1])]


def _peak(events: Sequence[tuple[str, int]]) -> int:
    held, peak = set[int](), 0
    for kind, m in events:
        held = held | {m} if kind == "F" else held - {m}
        peak = max(peak, len(held))
    return peak


def _forwards(run: Run) -> Found:
    expected = [("F", m) for m in run.order]
    found = [event for event in run.events if event[0] == "F"]
    once = sum(times == 1 for times in run.times("F"))
    stopped = bool(run.error) and found == expected[: len(found)]
    right = found == expected or (stopped and bool(found) and "backward(" in run.error)  # no forward was at fault
    effect = f"{once} of {run.count} micro-batches go forward once" + ", in another order" * (once == run.count)
    hint = _copied("orders", [m for _, m in found], run.own.order)
    return Found(right, _names(expected), _names(found), effect, hint, reached=not stopped)


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
    expected = _order(run.order)
    right = run.events in (expected, expected[:-1])
    effect = f"{sum(map(bool, run.times('B')))} of {run.count} micro-batches go backward"
    if all(run.times("B")):
        held, fewest = _peak(run.events), _peak(expected)
        effect = f"micro-batches whose activations are held: {held}; in the right order: {fewest}"
    # Without repetitions, is it the beginning of the right order? Then they, or an error, are the only fault.
    firsts, lasts = list(dict.fromkeys(run.events)), list(dict.fromkeys(reversed(run.events)))[::-1]
    only = any(each == expected[: len(each)] for each in (firsts, lasts) if run.error or each != run.events)
    return Found(right, _names(expected), _names(run.events), effect, reached=_forwards(run).right and not only)


def _last(run: Run) -> Found:
    left = [m for m, times in enumerate(run.times("B")) if not times]
    effect = f"{len(left) / run.count:.0%} of the micro-batches are never learned from"
    found = f"no backward of {', '.join(map(str, left))}" if left else "it ran"
    reached = _forwards(run).right and not run.error
    last = run.order[-1]
    return Found(bool(run.times("B")[last]), f"a backward of {last}", found, effect, reached=reached)


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
    first = run.events[1:2] == [("B", run.order[0])] and run.order[0] in twice
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
        hint = _copied("weights", run.diagnosis.counts, run.own.weights)
        hint = hint or "By which number is each loss multiplied or divided? Why by that one?"
    wanted = f"each of the {run.count} counts once (a sum) or 1/{run.count} times (a mean); the weights are unchanged"
    if run.own.weights:
        weights, counts = (" ".join(f"{each:.3g}" for each in some) for some in (run.weights, run.diagnosis.counts))
        wanted = f"the micro-batches count {weights} times: {run.own.weights}"
        found = f"they count {counts} times" if explained and not run.changed else found
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
        plain.descend(LEARNING_RATE / sum(run.weights), plain.gradients(run.weights))
    loss, right = trained.whole_loss(), plain.whole_loss()
    effect = f"the loss falls from {begun:.3f} to {loss:.3f}, and should fall to {right:.3f}"
    same = abs(loss - right) <= TOLERANCE * right and len(data["steps"]) == STEPS
    return Found(same, f"loss {right:.4f} after {STEPS} steps", f"loss {loss:.4f}{stopped}", effect)


def _rate(run: Run) -> float:
    return LEARNING_RATE if not run.own.weights and "mean" in run.kind() else LEARNING_RATE / sum(run.weights)


def record(load: Callable[[], ModuleType], seed: int, at: Callable[[str], None], name: str = "") -> Data:
    """Import a submission with `load`, run it at every size, and train with it; return what happened, for `judge`.

    `at` is called with what is about to run. A LookupError says that the module has no such function.
    """
    with emulated(2):  # a script may move its model when it is imported
        function = function_of(load(), "run_1F1B_homework", ("model", "micro_batches", "loss_fn"))
    runs: list[Data] = []
    shown = _shown(name)
    for rows in shown:
        at(f"with {len(rows)} micro-batch{'es' * (len(rows) > 1)}")
        runs.append(Recorded(rows, seed).record(function))
    at(f"in {STEPS} steps of training")
    rate, trained = _rate(Recorded(shown[0], seed).replay(runs[0], variant(name))), Recorded(shown[0], seed)
    steps: list[Data] = []
    while len(steps) < STEPS and not (left := trained.call(function))["error"]:
        steps.append(left)
        trained.descend(rate)
    error = "" if len(steps) == STEPS else left["error"].partition(":")[0]
    at("with a hidden number of micro-batches")
    hidden = [Recorded(rows, seed).record(function) for rows in _hidden(seed)]
    return {"runs": runs, "training": {"steps": steps, "error": error}, "hidden": hidden}


def judge(data: Data, seed: int, name: str = "") -> tuple[dict[str, Found], str]:
    """Return what each task's check found in what `record` returned, and what its gradients are of."""
    shown, hid = (
        [*zip(*each, strict=True)] for each in ((_shown(name), data["runs"]), (_hidden(seed), data["hidden"]))
    )
    own = variant(name)
    runs, hidden = ([Recorded(rows, seed).replay(each, own) for rows, each in some] for some in (shown, hid))
    if any("B" in dict(run.events) and run.diagnosis.code == "no-gradients" and not run.error for run in runs):
        raise ValueError("backwards ran, and left no gradient: does the function end with zero_grad()?")
    found = _of_shown(runs, _training(data["training"], runs[0], seed))
    own_loss = any(run.own_loss for run in runs)
    hint = "Your function gets loss_fn, which is another one there. Does it call it?" if own_loss else ""
    found["hidden sizes"] = of_hidden(found, [*map(_checked, hidden)], hint)
    errors = (f"with {run.count} micro-batch{'es' * (run.count > 1)}: {run.error}" for run in runs if run.error)
    notes = [f"the gradients are of {runs[0].kind()}"] if runs[0].kind() else []
    notes += ["it computes a loss of its own and never calls loss_fn"] if own_loss else []
    return found, next(errors, "; ".join(notes))


def _of_shown(runs: Sequence[Run], training: Found) -> dict[str, Found]:
    """Return what each check found at the shown sizes: only what is a cause was reached, and has its hint.

    Causes are sought at the first size where something is wrong. What goes wrong only after a first right call is a
    matter of the second call, or else of the size.
    """
    wrong_at = next((run for run in runs if not all(seen.right for seen in _checked(run).values())), None)
    found = {name: _at_fault(check, runs, wrong_at, training) for name, check in _CHECKS.items()}
    found["training"] = replace(training, reached=wrong_at is not runs[0])
    wrong = [name for name, seen in found.items() if not seen.right]
    if wrong and not any(found[name].reached for name in wrong):  # an error is the only cause
        first, error = found[wrong[0]], "The error above is the cause. Which line made what the named line uses?"
        found[wrong[0]] = replace(first, reached=True, hint=error if runs[0].error else first.hint)
    return found


def _checked(run: Run) -> dict[str, Found]:
    return {name: check(run) for name, check in _CHECKS.items()}


def _at_fault(check: Callable[[Run], Found], runs: Sequence[Run], wrong_at: Run | None, training: Found) -> Found:
    """Return what a check found at the first size where it is wrong, and whether that is a cause."""
    run = next((run for run in runs if not check(run).right), None)
    if run is None:
        return check(runs[0])
    seen = check(run)
    said = f"{run.count} micro-batch{'es' * (run.count > 1)}: {seen.found}"
    said += f"; then {run.error.partition(':')[0]}" if run.error else ""
    seen = replace(seen, found=said, reached=seen.reached and run is wrong_at)
    if wrong_at is runs[0]:
        return seen
    fixed = f"It is right with {runs[0].count} micro-batches. Which number is fixed in it?"
    return replace(seen, hint=fixed, reached=seen.reached and training.right)
