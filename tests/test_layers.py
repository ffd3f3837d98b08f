"""The rules of the house: where modules are, how large they are, and what they import.

Imports point down only, and the torch-free half never touches torch.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import networkx
import pytest

import pipelab

ROOT = Path(pipelab.__file__).parent
PACKAGES = [ROOT, ROOT.with_name("pipelab_course")]

# Top to bottom. A line imports from the lines below it and from itself; those side by side on a line keep apart.
# A folder stands for all that is in it, whatever is added there; inside the engine, its own lines hold.
LAYERS: list[list[str]] = [
    ["pipelab_course"],  # the course, as any other package; pipelab imports nothing of it
    ["pipelab.__main__"],
    ["pipelab.cli"],
    ["pipelab.hub"],
    ["pipelab"],  # the face: `import pipelab`
    ["pipelab.challenges", "pipelab.layouts"],
    ["pipelab.catalogue", "pipelab.draw", "pipelab.engine"],
    ["pipelab.simulation"],
    ["pipelab.schedule"],
    ["pipelab.trace"],
    ["pipelab.checking"],
    ["pipelab.plan"],
    ["pipelab.table"],
    ["pipelab.files"],
    ["pipelab.errors", "pipelab.display", "pipelab._version"],
]
ENGINE: list[list[str]] = [
    ["pipelab.engine.pipeline"],
    ["pipelab.engine.memory", "pipelab.engine.optimizer"],
    ["pipelab.engine.verify"],
    ["pipelab.engine.threads", "pipelab.engine.torchrun"],
    ["pipelab.engine.emulation", "pipelab.engine.engine", "pipelab.engine.worker"],
    ["pipelab.engine.model"],
    ["pipelab.engine.stage"],
    ["pipelab.engine.device"],
    ["pipelab.engine.stage.pytree"],
    ["pipelab.engine"],
]

# What could hide an import, and the modules that use it for something else.
HIDING_PLACES = {
    "sys.modules": {
        "pipelab",  # its own source names what it imports
        "pipelab.draw",  # is this a notebook, which has loaded IPython?
        "pipelab.cli.targets",  # it is registered there
        "pipelab_course.grading.server",  # a submission's file must not have the name of a loaded module
    },
    "import_module": {
        "pipelab",  # its names, loaded when they are first used, and what draws, when something is first shown
        "pipelab_course",  # likewise
        "pipelab.engine.torchrun.runtime",  # the door to PyTorch's private names
        "pipelab_course.grading.server",  # a submission
    },
    "__import__": set(),
    "__self__": {
        "pipelab.plan.fault",  # is it a method that a student wrote, or a function?
        "pipelab.checking.mistakes",  # the student's schedule, asked for other stages per rank
        "pipelab.engine.stage.pytree",  # what a bound method of a model holds
        "pipelab.engine.stage.replicas",  # a bound method of a model, copied with it
    },
}

TORCH_HALF = ("pipelab.engine", "pipelab.cli.running", "pipelab.cli.demo", "pipelab_course")
HEAVY = {"torch", "networkx", "matplotlib", "graphviz", "rich", "numpy", "ortools", "typer", "IPython", "cuda"}


@dataclass(frozen=True)
class Import:
    """One import: of what, by which module, inside which function ("" at the top of the module)."""

    module: str
    name: str
    function: str
    typed: bool = False  # only type checkers see it


def modules() -> dict[str, Path]:
    """Return every module of both packages."""
    found = {}
    for path in sorted(path for package in PACKAGES for path in package.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(module: str, path: Path) -> list[Import]:
    """Return what a module imports."""
    found: list[Import] = []

    def walk(node: ast.AST, scope: tuple[str, ...], function: str, typed: bool = False) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for child in node.body:
                walk(child, scope, function, typed=True)
            for child in node.orelse:
                walk(child, scope, function)
            return
        if isinstance(node, ast.Import):
            found.extend(Import(module, alias.name, function, typed) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}, line {node.lineno}: write the whole name, not a relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.append(Import(module, whole if whole in MODULES else str(node.module), function, typed))
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            scope = (*scope, node.name)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = function or ".".join(scope)
        for child in ast.iter_child_nodes(node):
            walk(child, scope, function, typed)

    walk(ast.parse(path.read_text()), (), "")
    return found


ALL_IMPORTS = [found for module, path in MODULES.items() for found in imports(module, path)]
IMPORTS = [found for found in ALL_IMPORTS if not found.typed]


def row(module: str, table: list[list[str]]) -> tuple[int, str] | None:
    """Return a module's line in a table, and the name on it: the longest that stands for the module."""
    found = [
        (len(name), depth, name)
        for depth, names in enumerate(table)
        for name in names
        if module == name or (module.startswith(f"{name}.") and name != "pipelab")
    ]
    return max(found)[1:] if found else None


def points_up(each: Import) -> bool:
    """Tell whether an import breaks the rule: up, or sideways."""
    here, there = row(each.module, LAYERS), row(each.name, LAYERS)
    assert here is not None
    if here == there and here[1] == "pipelab.engine":
        here, there = row(each.module, ENGINE), row(each.name, ENGINE)
    if there is None or here == there:
        return False
    return there[0] <= here[0]


def test_every_module_has_its_line_in_the_table_and_every_line_a_module():
    assert [module for module in MODULES if row(module, LAYERS) is None] == []
    assert [name for names in LAYERS + ENGINE for name in names if name not in MODULES] == []


def test_imports_point_down_only():
    assert [each for each in IMPORTS if points_up(each)] == []


def test_no_circle_of_imports_leaves_its_folder():
    """Imports inside functions and for type checkers count too: what knows each other can only be read together."""
    graph = networkx.DiGraph((found.module, found.name) for found in ALL_IMPORTS if found.name in MODULES)
    circles = [sorted(circle) for circle in networkx.strongly_connected_components(graph)]
    assert [circle for circle in circles if len({MODULES[name].parent for name in circle}) > 1] == []


def test_the_rule_sees_an_upward_import_a_sideways_one_and_one_inside_a_function():
    assert points_up(Import("pipelab.plan.plan", "pipelab.checking.checker", ""))
    assert points_up(Import("pipelab.draw.text", "pipelab.engine.pipeline", ""))
    assert points_up(Import("pipelab.engine.threads", "pipelab.draw", ""))
    assert points_up(Import("pipelab.engine.device", "pipelab.engine.stage.stage", "code"))
    assert points_up(Import("pipelab.simulation.clock", "pipelab", ""))
    assert not points_up(Import("pipelab.engine.threads", "pipelab.engine.stage.stage", ""))
    assert not points_up(Import("pipelab.cli.app", "pipelab.catalogue", ""))


def test_the_torch_free_half_never_imports_torch():
    torch = [each for each in IMPORTS if each.name.split(".")[0] == "torch"]
    guilty = [each for each in torch if not each.module.startswith(TORCH_HALF)]
    assert guilty == []


def test_heavy_packages_are_imported_only_when_they_are_used():
    always = ("pipelab.cli", "pipelab.draw", *TORCH_HALF)
    guilty = [
        each
        for each in IMPORTS
        if each.name.split(".")[0] in HEAVY and not each.function and not each.module.startswith(always)
    ]
    assert guilty == []


@cache
def needs_torch(module: str) -> bool:
    """Tell whether importing a module loads torch."""
    names = {each.name for each in IMPORTS if each.module == module and not each.function} - {module}
    return any(name.split(".")[0] == "torch" or (name in MODULES and needs_torch(name)) for name in names)


def test_a_function_imports_only_what_is_heavy():
    """Heavy packages, and torch with what needs it: for modules that do without. All else stands at the top."""
    hidden = [
        each
        for each in IMPORTS
        if each.function
        and each.name.split(".")[0] not in HEAVY
        and not (needs_torch(each.name) and not needs_torch(each.module))
    ]
    assert hidden == []


def test_no_import_is_hidden():
    for words, allowed in HIDING_PLACES.items():
        last = words.rpartition(".")[2]  # a text without it needs no closer look
        found = set()
        for module, path in MODULES.items():
            text = path.read_text()
            for node in ast.walk(ast.parse(text)) if last in text else ():
                named = isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node).endswith(words)
                if named or (isinstance(node, ast.Constant) and node.value == words):
                    found.add(module)
        assert found <= allowed, words


IN_A_FRESH_PROCESS = """
import atexit, json, signal, sys, threading
hooks = lambda: [sys.excepthook, sys.unraisablehook, sys.displayhook, threading.excepthook, sys.gettrace(),
                 *map(signal.getsignal, signal.valid_signals())]
before, register, registered = hooks(), atexit.register, []
atexit.register = lambda function, *given: registered.append(function.__module__) or register(function, *given)
import pipelab
facts = {"hooked": hooks() != before or [name for name in registered if name.startswith("pipelab")],
         "ours": sum(name.startswith("pipelab") for name in sys.modules)}
pipelab.simulate(pipelab.OneFOneB(4, 8)).transfers
facts["loaded"] = sorted(sys.modules)
facts["parts"] = [getattr(pipelab, part).__name__ for part in pipelab._PARTS]
print(json.dumps(facts))
"""


def test_importing_pipelab_sets_no_hook_and_loads_30_modules_of_ours_at_most_and_nothing_heavy():
    env = os.environ | {"TORCHELASTIC_ERROR_FILE": "error.json"}
    command = [sys.executable, "-c", IN_A_FRESH_PROCESS]
    facts = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout)
    assert not facts["hooked"]
    assert facts["ours"] <= 30
    assert not HEAVY & set(facts["loaded"])  # nor does checking and simulating
    assert facts["parts"] == [f"pipelab.{part}" for part in pipelab._PARTS]


def test_a_function_has_at_most_60_lines_beside_its_docstring():
    long = set()
    for path in MODULES.values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = node.body[ast.get_docstring(node) is not None and len(node.body) > 1].lineno
                if node.end_lineno - first > 60:
                    long.add(node.name)
    assert long == set()


def test_a_small_module_has_two_importers_or_is_a_schedule():
    """What only one module needs is a chapter of that module, unless it is long enough for a room of its own."""
    importers = {name: {found.module for found in ALL_IMPORTS if found.name == name} for name in MODULES}
    ours = (name for name, module in pipelab._modules().items() if str(module).startswith("pipelab.catalogue"))
    kinds = (getattr(pipelab, name) for name in ours)
    schedules = {kind.__module__ for kind in kinds if isinstance(kind, type) and issubclass(kind, pipelab.Schedule)}
    splinters = {
        module
        for module, path in MODULES.items()
        if path.name not in ("__init__.py", "__main__.py")
        and len(path.read_text().splitlines()) < 60
        and len(importers[module]) < 2
    }
    assert splinters - schedules == set()


FOLDERS = [path.parent for path in MODULES.values() if path.name == "__init__.py"]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_a_folder_lists_its_modules_in_its_docstring(folder):
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    listed = re.findall(r"^- `(\w+)`: \S.*$", text, re.MULTILINE)
    modules = [path.stem for path in folder.glob("[a-z]*.py")]
    folders = [path.parent.name for path in folder.glob("*/__init__.py")]
    assert sorted(listed) == sorted(modules + folders)


def test_every_public_name_is_imported_for_type_checkers_too_and_no_module_has_it():
    typed = {name for name, module in pipelab._modules().items() if str(module).startswith("pipelab.")}
    assert typed - {"NO_TORCH"} == set(pipelab.__all__) <= set(dir(pipelab))
    assert {name for name in pipelab.__all__ if f"pipelab.{name}" in MODULES} == set()
    with pytest.raises(AttributeError, match="module 'pipelab' has no attribute 'nonsense'"):
        _ = pipelab.nonsense
