"""A homework whose function runs at several sizes, of which some are hidden: what its grades have in common."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from pipelab.engine.stage import streams
from pipelab.plan.fault import OWN
from pipelab_course.grading.emulated import emulated
from pipelab_course.grading.tasks import Found, function_of, of_hidden, raised

Data = dict[str, Any]
_OWN = tuple(f"{folder}{os.sep}" for folder in OWN)
_NOT_CALLED = str(Path(__file__).parent), streams.__file__
"""What runs without being called by name: the grader, and what a process's draws go through once it has a pipeline."""


class Sized(ABC):
    """A homework; its function is called `name`, with these parameters. If it calls pipelab's, its grade says so."""

    name: str
    parameters: Sequence[str]
    shown: Sequence[tuple[Any, ...]]

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
        runs, called = list[Data](), list[str]()

        def watch(frame: FrameType, event: str, _: object) -> None:
            code, caller = frame.f_code, frame.f_back and frame.f_back.f_code.co_filename
            own = event == "call" and code.co_filename.startswith(_OWN) and not code.co_filename.startswith(_NOT_CALLED)
            if own and code.co_name != "<module>" and not str(caller).startswith(_OWN):
                called.append(code.co_name)

        sys.setprofile(watch)
        try:
            for size in (*self.shown, *self.hidden(seed)):
                at(f"at size {', '.join(map(str, size))}")
                runs.append({"error": ""})
                try:
                    self.run(runs[-1], function, seed, *size)
                except MemoryError:
                    raise
                except Exception as error:  # noqa: BLE001 - whatever a submission raises is a finding
                    runs[-1]["error"] = raised(error, function)
        finally:
            sys.setprofile(None)
        if called:
            raise LookupError(f"looked up: {self.name} calls pipelab's {called[0]}. Write it yourself, and it counts")
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
