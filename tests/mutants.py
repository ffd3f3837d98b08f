"""Change pipelab at random and see whether its tests notice: python tests/mutants.py --count 100

Each mutant is one small change to one central module. The tests of that module run on it in a copy, two mutants at a
time; the checkout stays as it is. A survivor is either equivalent (it changes nothing that anybody can observe), or it
shows where a test is missing.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]
AT_A_TIME = 2
MOST_BYTES = 16 << 30
"""How much memory a mutant may map: one that collects without end must not take the machine's."""
ENDS = ["--timeout", "60", "--timeout-method", "thread"]
"""A mutant that loops ends its process: an exception in the test could be caught, by Hypothesis for one."""

CHECKED = "plan/test_plan plan/test_fault plan/test_all_reduce checking/test_checker"
MORE = "plan/test_updates plan/test_recomputation plan/test_forwards checking/test_residency"
TESTS = {
    "plan/codes": "plan/test_codes simulation/test_clock checking/test_checker",
    "plan/bound": f"{CHECKED} {MORE} checking/test_sizes test_replication",
    "plan/order": f"{CHECKED} checking/test_deadlock simulation/test_clock simulation/test_bounds trace/test_diff",
    "plan/binding": f"{CHECKED} plan/test_strangers checking/test_sizes test_schedule",
    "checking/checker": f"{CHECKED} {MORE} checking/test_deadlock simulation/test_byte_caps test_schedule",
    "checking/rules": f"{CHECKED} plan/test_forwards checking/test_sizes",
    "checking/mistakes": f"{CHECKED} {MORE} checking/test_sizes",
    "checking/residency": "checking/test_residency",
    "checking/deadlock": f"{CHECKED} checking/test_deadlock",
    "checking/repair": "checking/test_deadlock checking/test_repair",
    "simulation/clock": "simulation/test_clock simulation/test_cost simulation/test_links",
    "simulation/memory": "simulation/test_memory",
    "catalogue/list_scheduling": "catalogue/test_greedy simulation/test_byte_caps",
    "engine/stage/split_backward": "engine/stage/test_split_backward",
    "engine/stage/batch": "engine/stage/test_batch engine/stage/test_loss engine/stage/test_inputs",
}
"""The tests of each module, beside its own doctests."""

PAIRS = "Lt LtE, Gt GtE, Lt GtE, Gt LtE, Eq NotEq, In NotIn, Is IsNot, Add Sub, And Or, Continue Break"
SWAPS = [tuple(getattr(ast, name) for name in pair.split()) for pair in PAIRS.split(", ")]
"""What may take each other's place: operators, and statements of one word."""


def instead(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what may take a node's place."""
    for one, other in SWAPS:
        if type(node) in (one, other):
            yield other() if type(node) is one else one()
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            yield from (ast.Constant(number + 1), ast.Constant(number - 1))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.Call(func=function, args=arguments, keywords=keywords):
            for at in range(len(arguments) - 1):
                swapped = [*arguments[:at], arguments[at + 1], arguments[at], *arguments[at + 2 :]]
                yield ast.Call(function, swapped, keywords)
        case ast.Expr(value=ast.Constant()):
            pass  # a docstring
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            pass
        case ast.Expr() | ast.AugAssign() | ast.If() | ast.Raise() | ast.Return():
            yield ast.Pass()


def changes(tree: ast.Module) -> Iterator[tuple[int, Callable[[], None]]]:
    """Yield every change to a module: its line, and the function that makes it in the tree."""
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            children = value if isinstance(value, list) else [value]
            for at, child in enumerate(children):
                put = partial(value.__setitem__, at) if isinstance(value, list) else partial(setattr, parent, name)
                for other in instead(child):
                    yield getattr(child, "lineno", getattr(parent, "lineno", 0)), partial(put, other)


def mutant(source: str, number: int | None) -> tuple[str, str]:
    """Return a module with one of its changes, or with none, and this change in words."""
    tree = ast.parse(source)
    before = ast.unparse(tree).splitlines()
    if number is None:
        return "\n".join(before), ""
    line, make = list(changes(tree))[number]
    make()
    after = ast.unparse(tree).splitlines()
    # None if two equal arguments have changed places: then the mutant survives, and is told as equivalent.
    first = next((at for at, (old, new) in enumerate(zip(before, after, strict=False)) if old != new), 0)
    return "\n".join(after), f"line {line}: {before[first].strip()}\n      -> {after[first].strip()}"


def survives(folder: Path, module: str, text: str) -> bool:
    """Return whether a module's tests pass on this text of it, in a copy of the project."""
    path = folder / f"pipelab/{module}.py"
    source = path.read_text()
    path.write_text(text)
    tests = [f"pipelab/{module}.py", *(f"tests/{each}.py" for each in TESTS[module].split())]
    python = [sys.executable, "-m", "pytest", "-p", "pytest_timeout", "-p", "_hypothesis_pytestplugin"]
    alone = {"PYTHONPATH": str(folder), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    quiet = {"MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        result = subprocess.run(
            [*python, *ENDS, "-x", "-q", "-m", "not browser", "-p", "no:cacheprovider", *tests],
            cwd=folder,
            env=os.environ | alone | quiet,
            capture_output=True,
            timeout=600,  # of an import that does not end
            check=False,
        )
        return result.returncode == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        path.write_text(source)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument(
        "--modules", nargs="+", choices=TESTS, default=list(TESTS), metavar="MODULE", help=", ".join(TESTS)
    )
    chosen = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    sources = {module: (ROOT / f"pipelab/{module}.py").read_text() for module in chosen.modules}
    possible = [(each, at) for each in sources for at in range(len(list(changes(ast.parse(sources[each])))))]
    picked = random.Random(chosen.seed).sample(possible, min(chosen.count, len(possible)))
    with tempfile.TemporaryDirectory() as top, ThreadPoolExecutor(AT_A_TIME) as pool:
        copies: SimpleQueue[Path] = SimpleQueue()
        for name in range(AT_A_TIME):
            copies.put(Path(shutil.copytree(ROOT, f"{top}/{name}", ignore=shutil.ignore_patterns(".*", "__pycache__"))))

        def noticed(module: str, number: int | None) -> bool:
            text, change = mutant(sources[module], number)
            folder = copies.get()
            survived = survives(folder, module, text)
            copies.put(folder)
            if number is not None:
                print(f"{'SURVIVED' if survived else 'noticed '}  {module}, {change}", flush=True)
            return not survived

        modules = sorted({module for module, _ in picked})
        for module, failed in zip(modules, pool.map(noticed, modules, [None] * len(modules)), strict=True):
            if failed:
                sys.exit(f"the tests of {module} fail on pipelab as it is")
        results = list(pool.map(noticed, *zip(*picked, strict=True)))
    print(f"{sum(results)} of {len(results)} mutants noticed ({sum(results) / len(results):.0%})")


if __name__ == "__main__":
    main()
