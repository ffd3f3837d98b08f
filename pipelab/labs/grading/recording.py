"""One call of homework 4's function: what ran, on two emulated devices, and what it left in the gradients.

The submission's process records, and sends what it has recorded as plain data. The process that judges has never
imported the submission: it puts the gradients into its own model, made from the same seed, and explains those.
"""

from __future__ import annotations

import inspect
import runpy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from pipelab.engine.verify.diagnose import Diagnosis, diagnose
from pipelab.labs.grading.emulated import emulated, gpu, place_of, put
from pipelab.labs.grading.tasks import HOMEWORKS, raised

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

    @classmethod
    def of(cls, rows: tuple[int, ...], data: Data) -> Run:
        """Return the run of which these are the data; a ValueError, TypeError or LookupError if none is."""
        numbers = {-1, *range(len(rows))}
        events = [({"F": "F", "B": "B"}[kind], m) for kind, m in data["events"]]
        targets = {int(m): (torch.device(place), right is True) for m, (place, right) in data["targets"].items()}
        if not ({m for _, m in events} <= numbers and targets.keys() <= numbers):
            raise ValueError("there is no such micro-batch")
        return cls(rows, events, targets, own_loss=data["own_loss"] is True, error=str(data["error"]))

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
        multiple = found.code == "weighed-by-rows" and abs((found.factor or 0.0) - 1) > TOLERANCE
        some = any(each.right for each in found.parameters.values()) and bool(found.wrong)
        return "" if self.changed or multiple or some else kinds.get(found.code, "")


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

    def replay(self, data: Data) -> Run:
        """Return the run of which these are the data; its diagnosis counts micro-batches: 1 is a sum of the losses.

        Raises:
            ValueError, TypeError, LookupError: if these are no data of a run.
        """
        run = Run.of(self.rows, data)
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
    def gradients(self) -> list[tuple[torch.Tensor, ...]]:
        """Return the gradients of each micro-batch's own loss."""
        pairs = zip(self.x, self.y, strict=True)
        return [torch.autograd.grad(self.loss_fn(self.model(x), y), self.weights) for x, y in pairs]

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
