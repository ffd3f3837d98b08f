"""A homework whose function runs at several sizes, of which some are hidden: what its grades have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import ModuleType
from typing import Any
from unittest.mock import patch

from pipelab_course.grading.emulated import emulated
from pipelab_course.grading.tasks import Found, function_of, of_hidden, raised

Data = dict[str, Any]


class Sized(ABC):
    """A homework; its function is called `name`, with these parameters.

    What of pipelab's does the same is `own`: where it is, and the name of what it calls. Whoever calls it is told so.
    """

    name: str
    parameters: Sequence[str]
    shown: Sequence[tuple[Any, ...]]
    own: Sequence[tuple[object, str]]

    @abstractmethod
    def hidden(self, seed: int) -> Sequence[tuple[Any, ...]]:
        """Return the sizes that students do not see."""

    @abstractmethod
    def run(self, found: Data, function: Callable[..., Any], seed: int, *size: Any) -> None:
        """Run a submission's function at one size, and put what happens into `found`."""

    @abstractmethod
    def check(self, found: Data, seed: int, *size: Any) -> dict[str, Found]:
        """Return what each task's check found in what happened at one size."""

    def note(self, runs: Sequence[Data]) -> str:  # noqa: ARG002 - a homework that overrides it uses them
        """Return what else a reader should know of the shown sizes, if there was no error."""
        return ""

    def record(self, load: Callable[[], ModuleType], seed: int, at: Callable[[str], None]) -> Data:
        """Import a submission with `load`, and run it at every size; return what happened, for `judge`."""
        with emulated(2):
            function = function_of(load(), self.name, self.parameters)
        runs: list[Data] = []
        with ExitStack() as watch:
            asked = [watch.enter_context(patch.object(*own, wraps=getattr(*own))) for own in self.own]
            for size in (*self.shown, *self.hidden(seed)):
                at(f"at size {', '.join(map(str, size))}")
                runs.append({"error": ""})
                try:
                    self.run(runs[-1], function, seed, *size)
                except MemoryError:
                    raise
                except Exception as error:  # noqa: BLE001 - whatever a submission raises is a finding
                    runs[-1]["error"] = raised(error, function)
        if any(each.called for each in asked):
            raise LookupError(f"looked up: {self.name} calls pipelab's own. Write it yourself, and it counts")
        return {"runs": runs}

    def judge(self, data: Data, seed: int) -> tuple[dict[str, Found], str]:
        """Return what each task's check found in what `record` returned, and a note."""
        runs = [*zip(data["runs"], (*self.shown, *self.hidden(seed)), strict=True)]
        checked = [self.check(run, seed, *size) for run, size in runs]
        shown, hidden = checked[: len(self.shown)], checked[len(self.shown) :]
        found = {
            name: next((each[name] for each in shown if not each[name].right), seen) for name, seen in shown[0].items()
        }
        errors = (f"at size {', '.join(map(str, size))}: {run['error']}" for run, size in runs if run["error"])
        note = next(errors, "") or self.note(data["runs"][: len(self.shown)])
        return found | {"hidden sizes": of_hidden(found, hidden)}, note
