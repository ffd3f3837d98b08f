"""Run the benchmarks: `python benchmarks/run.py [NAME ...]`, or all; the names are those of `PARTS`.

`--quick` runs the parts that have a quick form, to see that they run; their figures mean nothing and are not kept.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import drawing
import dropout
import emulation
import engine
import faults
import memory
import playground
import prediction
import reduces
import schedules
import simulation
import split
import wire
from timing import machine

PARTS = {
    "simulation": simulation,
    "engine": engine,
    "schedules": schedules,
    "split": split,
    "emulation": emulation,
    "drawing": drawing,
    "dropout": dropout,
    "playground": playground,
    "faults": faults,
    "reduces": reduces,
    "prediction": prediction,
    "memory": memory,
    "wire": wire,
}
QUICK = {"schedules": schedules, "faults": faults, "reduces": reduces, "prediction": prediction}
RESULTS = Path(__file__).parent.parent / "docs" / "results"


def main(words: list[str]) -> None:
    """Measure the named parts, print them, and keep them beside what was measured before."""
    parser = argparse.ArgumentParser(description="Run the benchmarks, and keep what they measure in docs/results.")
    parser.add_argument("names", nargs="*", choices=PARTS, metavar="NAME", help=f"{', '.join(PARTS)}; by default, all")
    parser.add_argument(
        "--quick", action="store_true", help=f"see that these run, and keep no figures: {', '.join(QUICK)}"
    )
    given = parser.parse_args(words)
    names = given.names
    if given.quick:
        for name in set(QUICK).intersection(names) or QUICK:
            print(QUICK[name].report(QUICK[name].measure(quick=True)))
        return
    kept = RESULTS / "cpu.json"
    found = json.loads(kept.read_text()) if kept.exists() else {}
    for name in names or PARTS:
        about = machine()
        print(f"\n{name}: measuring", flush=True)
        found[name] = {**PARTS[name].measure(), "machine": about}
        print(PARTS[name].report(found[name]), flush=True)
    RESULTS.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(found, indent=1) + "\n")
    for name, part in PARTS.items():
        if name in found:
            about = found[name]["machine"]
            made = (
                f"Measured on {about['date']} with `make bench ARGS={name}`: {about['processor']}, "
                f"{about['cores']} cores, Python {about['python']}, torch {about['torch']}."
            )
            (RESULTS / f"{name}.md").write_text(f"{part.report(found[name])}\n\n{made}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
