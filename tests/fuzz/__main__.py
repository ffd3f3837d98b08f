"""Run random attacks in turns: python -m tests.fuzz --seconds 300

Two workers, processes of their own, so that an attack that hangs or crashes stops nothing but its worker.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from contextlib import suppress
from itertools import cycle
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from fuzz import kinds, limit  # noqa: E402 - as the attacks import the oracle: from the folder of the tests

WORKERS = 2
STARTING_SECONDS = 120.0
"""How long a worker may take to start: it imports PyTorch."""


class Worker:
    """A process that makes one try after another."""

    def __init__(self) -> None:
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the worker
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz", "--worker"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            start_new_session=True,
        )
        self.answer(STARTING_SECONDS)

    def answer(self, seconds: float) -> str | None:
        """Return the next line of the worker: empty if it ended, `None` if there is none in time."""
        there, _, _ = select.select([self.process.stdout], [], [], seconds)
        return self.process.stdout.readline() if there else None

    def attempt(self, kind: str, seed: int, seconds: float) -> str | None:
        """Make one try; return what went wrong."""
        try:
            self.process.stdin.write(json.dumps([kind, seed]) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return f"the worker ended before the try\n{self.end()}"
        if answer := self.answer(seconds):
            return json.loads(answer)
        lead = f"no end within {seconds:g} s" if answer is None else f"crashed with exit code {self.process.wait()}"
        return f"{lead}\n{self.end()}"

    def end(self) -> str:
        """End the process and its children; return the end of its error output."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.errors.closed:
            return ""
        self.errors.seek(0)
        told = self.errors.read()[-3000:]
        self.errors.close()
        return told


def work() -> None:
    """Make the tries that standard input names; answer each on standard output with what went wrong."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an attack prints is no answer
    known = kinds()
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        kind, seed = json.loads(line)
        faulthandler.dump_traceback_later(max(0.1, limit(known[kind]) - 0.5))
        try:
            told = known[kind](seed)
        except BaseException as error:  # noqa: BLE001 - whatever an attack raises is a failure
            told = "".join(traceback.format_exception(error)[-6:]) + "\n".join(getattr(error, "__notes__", []))
        faulthandler.cancel_dump_traceback_later()
        answers.write(json.dumps(told) + "\n")
        answers.flush()


class Run:
    """All tries of a run.

    Args:
        tries: what to try, in turns, as (kind, seed); may be endless.
        seconds: how long.
    """

    def __init__(self, tries, seconds: float) -> None:
        self.tries = tries
        self.until = time.monotonic() + seconds
        self.guard = threading.Lock()
        self.made: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.spent: Counter[str] = Counter()

    def attack(self) -> None:
        """Make tries in one worker until the time is over."""
        worker = Worker()
        known = kinds()
        while time.monotonic() < self.until:
            with self.guard:
                kind, seed = next(self.tries, (None, 0))
            if kind is None:
                break
            start = time.monotonic()
            told = worker.attempt(kind, seed, limit(known[kind]))
            with self.guard:
                self.made[kind] += 1
                self.spent[kind] += time.monotonic() - start
                if told is not None:
                    self.failed[kind] += 1
                    print(f"{kind} failed; again: make fuzz KIND={kind} SEED={seed}\n{told}\n", flush=True)
            if worker.process.poll() is not None:
                worker.end()
                worker = Worker()
        worker.end()

    def table(self) -> str:
        """Return how many tries of each kind were made."""
        lines = [f"{'kind':12} {'tries':>7} {'failures':>8} {'seconds':>8}"]
        lines += [f"{kind:12} {self.made[kind]:7} {self.failed[kind]:8} {self.spent[kind]:8.0f}" for kind in self.made]
        return "\n".join(lines)


def main() -> int:
    """Run; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="how long to attack")
    parser.add_argument("--seed", type=int, help="try this seed once, to repeat a failure")
    parser.add_argument("--kind", choices=list(kinds()), help="try this kind only")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work()
        return 0
    chosen = [given.kind] if given.kind else list(kinds())
    if given.seed is None:
        first = random.SystemRandom().randrange(10**9)
        turns = ((kind, first + number // len(chosen)) for number, kind in enumerate(cycle(chosen)))
    else:
        turns = iter([(kind, given.seed) for kind in chosen])
    run = Run(turns, given.seconds)
    threads = [threading.Thread(target=run.attack) for _ in range(WORKERS)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        run.until = 0.0
        for thread in threads:
            thread.join()
    print(run.table())
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
