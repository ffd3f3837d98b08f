"""What one step of a pipeline gave."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from torch._C import _disabled_torch_function_impl

from pipelab.engine.device.clocks import StepClock
from pipelab.engine.stage.batch import join
from pipelab.errors import EngineError, UsageError
from pipelab.plan.plan import Plan
from pipelab.trace.trace import Trace

__all__ = ["BatchLoss", "Ran", "Step"]


class Ran(Protocol):
    """What an engine gives back."""

    @property
    def outputs(self) -> list[Any]:
        """Per micro-batch, the model's output."""

    @property
    def outputs_on(self) -> Sequence[int] | None:
        """The ranks whose processes have outputs; `None` if all are here."""

    @property
    def begun(self) -> list[list[Any]]:
        """Per rank, the clock at the start of each action."""

    @property
    def ended(self) -> list[list[Any]]:
        """Per rank, the clock at the end of each action."""

    @property
    def clocks(self) -> Sequence[StepClock]:
        """Per rank, by what the readings of its clock are turned into times."""

    @property
    def note(self) -> str:
        """What a reader of the trace should know."""

    def travel(self) -> dict[int, float]:
        """Return, by number of the value, how many milliseconds a value travelled between ranks."""


class BatchLoss(torch.Tensor):
    """The loss of a batch whose backward has already run: a tensor, but for `backward`, which says so.

    What is computed or saved from it is a plain tensor.
    """

    __torch_function__ = _disabled_torch_function_impl  # type: ignore[assignment]  # as torch.nn.Parameter does

    def backward(self, *_: object, **__: object) -> NoReturn:
        """Refuse.

        Raises:
            UsageError: saying what comes next.
        """
        raise UsageError(
            "the backward has already run, in pipe.step: the parameters' .grad holds the batch's gradients; "
            "call optimizer.step()"
        )

    def _plain(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._plain().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def __format__(self, spec: str) -> str:
        return format(self._plain(), spec)

    def __repr__(self, **settings: Any) -> str:  # type: ignore[override]
        return str(self._plain().__repr__(**settings))


class Step:
    """What one step gave.

    Attributes:
        loss: the loss of the whole batch, a tensor without dimensions or history.
    """

    def __init__(self, loss: torch.Tensor, run: Ran, plan: Plan, labels: Sequence[str]) -> None:
        """Keep what was measured; the trace and the outputs are put together when they are asked for."""
        self.loss = loss.as_subclass(BatchLoss)
        self._outputs_on = run.outputs_on
        self._note, self._travel = run.note, run.travel
        self._pieces = run.outputs
        self._marks = [
            [mark for both in zip(begun, ended, strict=True) for mark in both]
            for begun, ended in zip(run.begun, run.ended, strict=True)
        ]
        self._plan = plan
        self._clocks = run.clocks
        self._labels = labels

    @cached_property
    def outputs(self) -> Any:
        """The model's outputs for the whole batch, rows in the batch's order, without history.

        With `engine="torch"` they are on the last stage's process only; `Pipeline.forward` gives them to all.
        """
        if self._outputs_on is not None and any(piece is None for piece in self._pieces):
            ranks = f"rank{'s' if len(self._outputs_on) > 1 else ''} {', '.join(map(str, self._outputs_on))}"
            raise EngineError(
                f"the outputs of a step stay on {ranks}, where the last stage is\n"
                "  try: pipe.forward(x), which gives them to every process"
            )
        return join(self._pieces)

    @cached_property
    def trace(self) -> Trace:
        """When each action started and ended, in milliseconds since the step began; measured in the workers."""
        readings = [clock.nanoseconds(marks) for clock, marks in zip(self._clocks, self._marks, strict=True)]
        origin = min((marks[0] for marks in readings if marks), default=0)
        times = [[(mark - origin) / 1e6 for mark in marks] for marks in readings]
        starts, ends = ([each[half::2] for each in times] for half in (0, 1))
        travel = self._travel()
        return Trace(
            self._plan,
            starts,
            ends,
            "ms",
            "measured",
            delay=(lambda value: travel.get(value, 0.0)) if travel else None,
            lanes=self._labels,
            note=self._note,
        )

    @cached_property
    def clock_error_ms(self) -> float:
        """How far the trace's times on two devices may be apart, in milliseconds; 0 where all ranks share a clock.

        Ranks on one GPU do: its events are compared with one another.
        """
        if len(set(self._clocks)) == 1:
            return 0.0
        _ = self.trace  # by its last event a clock knows how far it may have drifted
        errors = sorted(clock.error_ns for clock in set(self._clocks))
        return sum(errors[-2:]) / 1e6

    def backward(self, *_: object, **__: object) -> NoReturn:
        """Refuse: the backward has already run.

        Raises:
            UsageError: saying what comes next.
        """
        self.loss.backward()

    if not TYPE_CHECKING:  # a type checker should go on to refuse what is not there

        def __getattr__(self, name: str) -> NoReturn:
            """Point to the loss for what only a tensor has."""
            if name in ("item", "detach"):
                raise AttributeError(f"a Step has no {name!r}, but its loss has: step.loss.{name}()")
            raise AttributeError(f"'Step' object has no attribute {name!r}")

    def __repr__(self) -> str:
        """Return the loss."""
        return f"Step(loss={float(self.loss):g})"
