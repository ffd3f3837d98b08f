"""Print how every schedule compares with the installed PyTorch: python -m tests.conformance --help."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from conformance.report import Grid, conformance, table  # noqa: E402 - from the folder of the tests, as there
from pipelab import schedules  # noqa: E402


def numbers(text):
    return tuple(map(int, text.split(",")))


def main(arguments):
    about = (
        "For maintainers: compare every schedule with the installed PyTorch. "
        "The exit code is 1 if anything differs or nothing could be compared."
    )
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=about)
    add = parser.add_argument
    add("schedules", nargs="*", help="a schedule's name; by default, all")
    for short, name, default in (
        ("-r", "ranks", Grid.ranks),
        ("-m", "microbatches", Grid.microbatches),
        ("-s", "stages-per-rank", Grid.stages_per_rank),
    ):
        add(short, f"--{name}", type=numbers, default=default, help=f"by default {','.join(map(str, default))}")
    add("--processes", action="store_true", help="also run PyTorch in two and in four processes")
    add("--save", "-o", help="a file: md csv html txt")
    given = parser.parse_args(arguments)
    names = given.schedules or list(schedules)
    lines = conformance(
        names, Grid(given.ranks, given.microbatches, given.stages_per_rank), (2, 4) if given.processes else ()
    )
    print(table(lines).text())
    for line in lines:
        for difference in (line.differences + line.transfers)[:3]:
            print(f"\n{difference}")
    if given.save:
        table(lines).save(given.save)
    return not (all(line.same for line in lines) and any(line.sizes for line in lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
