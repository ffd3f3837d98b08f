"""The link *edit this* under a tutorial's code: to the playground, with the code and what it needs of the code above.

Whether the playground can draw a block is found out by running it as the browser would: without PyTorch.
"""

from __future__ import annotations

import ast
import base64
import builtins
import json
import subprocess
import sys
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_MOST_LINK = 8192
_TRY = """
import json, sys, time
sys.path[:0] = json.loads(sys.argv[1])
missing = "torch matplotlib networkx graphviz rich typer numpy pipelab.engine pipelab_course pipelab.cli".split()
sys.modules.update(dict.fromkeys(missing))
from playground import draw
drawn = []
for code in json.load(sys.stdin):
    began = time.perf_counter()
    found = draw(code, {"ranks": 4, "microbatches": 8, "cost": {}})
    drawn.append(bool(found.get("content") or found.get("pictures")) and time.perf_counter() - began < 0.5)
print(json.dumps(drawn))
"""


def links(cells: list[str], base: str) -> list[str]:
    """Return for each cell of a tutorial the link as HTML, or nothing if it draws nothing without PyTorch.

    Args:
        cells: the code, in order.
        base: the playground's address, relative to the tutorial's page.
    """
    whole = [self_contained(cells[:at], cell) if _may_draw(cell) else "" for at, cell in enumerate(cells)]
    tried = [code for code in whole if code]
    drawn = dict(zip(tried, _drawn(tried), strict=True))
    found = [f"{base}#code={packed(code)}" if drawn.get(code) else "" for code in whole]
    fits = [link if len(link) <= _MOST_LINK else "" for link in found]
    return [f'<p class="edit-this"><a href="{link}" target="_blank">edit this</a></p>' if link else "" for link in fits]


def packed(code: str) -> str:
    """Return code as the playground's links carry it: deflated, and in letters that an address may hold."""
    deflate = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
    return base64.urlsafe_b64encode(deflate.compress(code.encode()) + deflate.flush()).decode().rstrip("=")


def self_contained(above: list[str], cell: str) -> str:
    """Return a cell's code after those statements of the cells above that define what it needs."""
    apart = "\n\n" if cell.lstrip().startswith(("class ", "def ", "@")) else ""
    needed, kept = _names(ast.parse(cell), ast.Load), [apart + cell.strip()]
    for source in reversed(above):
        lines = source.splitlines()
        for statement in reversed(ast.parse(source).body):
            if _bound(statement) & needed:
                needed |= _names(statement, ast.Load)
                first = min([statement.lineno, *(each.lineno for each in getattr(statement, "decorator_list", []))])
                text = "\n".join(lines[first - 1 : statement.end_lineno])
                kept.append(f"\n{text}\n\n" if isinstance(statement, (ast.ClassDef, ast.FunctionDef)) else text)
    return "\n".join(reversed(kept)).strip() + "\n"


def _bound(statement: ast.stmt) -> set[str]:
    """Return the names that a statement of a module defines."""
    if isinstance(statement, (ast.ClassDef, ast.FunctionDef)):
        return {statement.name}
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {(each.asname or each.name).partition(".")[0] for each in statement.names}
    return set() if isinstance(statement, ast.Assert) else _names(statement, ast.Store)


def _names(tree: ast.AST, kind: type[ast.expr_context]) -> set[str]:
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, kind)}
    return names - set(vars(builtins))


def _may_draw(cell: str) -> bool:
    """Return whether a cell defines a schedule, or calls anything whose result could be drawn."""
    drawing = {"simulate", "check", "compare", "plan", "parse"}
    for node in ast.walk(ast.parse(cell)):
        if isinstance(node, ast.ClassDef):
            return True
        if isinstance(node, ast.Call) and (getattr(node.func, "attr", "") or getattr(node.func, "id", "")) in drawing:
            return True
    return False


def _drawn(codes: list[str]) -> list[bool]:
    """Return for each code whether the playground draws it, within a quarter of the time that it has."""
    if not codes:
        return []
    paths = json.dumps([str(ROOT), str(ROOT / "docs" / "playground")])
    command = [sys.executable, "-Pc", _TRY, paths]
    run = subprocess.run(  # noqa: S603 - the tutorials' own code
        command, input=json.dumps(codes), capture_output=True, text=True, check=True, timeout=120
    )
    return list(json.loads(run.stdout))
