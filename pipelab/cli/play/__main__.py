"""The process in which `pipelab play` makes and draws schedules: one line of JSON asks, JSON and a zero byte answer.

What a schedule needs is imported once. Each drawing then has its own fork, which imports the student's file again,
so nothing is left of the version before. If a file does not end, the fork ends itself and says at which line it was.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import signal
import sys
import traceback
import warnings
from typing import Any

from pipelab.checking.checker import check
from pipelab.cli.options import Sizes, Times, untimed
from pipelab.draw.notebook import faults_page
from pipelab.draw.page import page
from pipelab.errors import PipelabError, UsageError, clean
from pipelab.plan.fault import ScheduleError
from pipelab.simulation.clock import simulate

_TIMES = {"forward", "backward", "latency"}
_COSTS = {"input_grad", "weight_grad", "all_reduce"}


def drawn(asked: dict[str, str]) -> str:
    """Return the page of the schedule that `schedule` names, or of its faults, with the sizes and costs asked for."""
    costs = [f"{name}={asked[name]}" for name in _COSTS & asked.keys()]
    sets = re.split(r",\s*(?=\w+=)", asked["parameters"].strip()) if "parameters" in asked else []
    try:
        whole = {name: int(asked[name]) for name in ("ranks", "microbatches") if name in asked}
        cap = int(asked["cap"]) if "cap" in asked else None
        times: dict[str, Any] = {name: float(asked[name]) for name in _TIMES & asked.keys()}
    except ValueError as error:
        raise UsageError(f"a size or a time is not a number: {error}") from error
    subject = untimed(Sizes(**whole, sets=sets).find(asked["schedule"]))
    if faults := check(subject, memory_cap=cap):
        with contextlib.suppress(ImportError):  # without matplotlib, in words
            if faults.plan is not None:
                return faults_page(faults)
        raise ScheduleError(faults, faults.subject)
    return page(simulate(subject, Times(**times, costs=costs).cost()), cap=cap)


def answer(asked: dict[str, str]) -> dict[str, Any]:
    """Return the page, or what is wrong in words."""
    try:
        return {"page": drawn(asked)}
    except PipelabError as error:
        lead = "" if isinstance(error, UsageError) else f"{type(error).__name__}: "
        return {"fault": clean(f"{lead}{error}", keep="\n\t")}
    except (Exception, SystemExit):  # noqa: BLE001 - whatever a file raises is shown
        return {"fault": clean(traceback.format_exc(), keep="\n\t")}


def main() -> None:
    """Answer until stdin ends; what the student's file prints goes to the terminal. SIGUSR1 ends the drawing of now."""
    seconds, child = float(sys.argv[1]), 0
    signal.signal(signal.SIGUSR1, lambda *_: os.kill(child, signal.SIGKILL) if child else None)
    if sys.argv[2:]:
        import pipelab.engine.pipeline  # noqa: F401 - brings PyTorch, so that not every drawing must import it
    questions, answers = os.fdopen(os.dup(0)), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)  # PyTorch's threads, which rest here
    for question in questions:
        if child := os.fork():
            os.waitpid(child, 0)
            child = 0
            os.write(answers, b"\0")
            continue
        faulthandler.dump_traceback_later(seconds, exit=True, file=answers)
        said = json.dumps(answer(json.loads(question))).encode()
        faulthandler.cancel_dump_traceback_later()
        with os.fdopen(answers, "wb") as file:
            file.write(said)
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
