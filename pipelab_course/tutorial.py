"""What `pipelab tutorial` shows: a tutorial that waits for your predictions, in the terminal or as a notebook.

A tutorial is a Python file in percent format (`# %%` starts a cell, `# %% [markdown]` one of text). A line such as
`my_prediction = None  # units` asks, and the cells after it with the tag `answer` wait for what is written there.
"""

from __future__ import annotations

import ast
import json
import linecache
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from graphlib import TopologicalSorter
from importlib.util import find_spec
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.syntax import Syntax

import __main__
from pipelab import files
from pipelab.cli.printing import echo, say, wrote
from pipelab.errors import UsageError

_HERE = Path(__file__).parent
TUTORIALS = _HERE / "tutorials" if (_HERE / "tutorials").is_dir() else _HERE.parent / "tutorials"
"""In a wheel they are inside the package, in the repository beside it."""
_CODE: dict[str, Any] = {"cell_type": "code", "execution_count": None, "outputs": []}
_ASKS = re.compile(r"^(my_\w+) = None  # (.+)\n*", re.MULTILINE)
_SAYS = re.compile(r"On this page (.+?\.) .*?It takes about (\d+) minutes, and you need (.+?) before it")


class Cell(NamedTuple):
    """A cell of a tutorial: text in Markdown, or code."""

    source: str
    is_text: bool = False
    is_answer: bool = False


def cells(code: str) -> list[Cell]:
    """Return the cells of a tutorial."""
    _, *parts = re.split(r"^# %%(.*)\n", code, flags=re.MULTILINE)
    found = []
    for head, body in zip(parts[::2], parts[1::2], strict=True):
        is_text = "[markdown]" in head
        source = re.sub(r"^# ?", "", body, flags=re.MULTILINE) if is_text else body
        found.append(Cell(source.strip("\n"), is_text, 'tags=["answer"]' in head))
    return found


def run(code: str, name: str, namespace: dict[str, Any]) -> object:
    """Run one cell as a notebook would; return its last line's value."""
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)  # for tracebacks
    tree = ast.parse(code, name)
    last = tree.body[-1] if tree.body else None
    shown = isinstance(last, ast.Expr) and compile(ast.Expression(last.value), name, "eval")
    del tree.body[len(tree.body) - bool(shown) :]
    exec(compile(tree, name, "exec"), namespace)  # noqa: S102 - our own tutorials
    return eval(shown, namespace) if shown else None  # noqa: S307 - likewise


def notebook(name: str, code: str) -> str:
    """Return a tutorial as a notebook without outputs, whose answers are in pipelab and wait for the predictions."""
    made: list[dict[str, Any]] = []
    asked, number = "", 0
    for is_answer, run_of in groupby(cells(code), key=attrgetter("is_answer")):
        shown = list(run_of)
        if is_answer:
            shown = [Cell(f'from pipelab_course.tutorial import show_answer\nshow_answer("{name}", {number}, {asked})')]
            number += 1
        for cell in shown:
            asked = next((found[1] for found in _ASKS.finditer(cell.source)), asked)
            kind = {"cell_type": "markdown"} if cell.is_text else _CODE
            source = _plain(cell.source) if cell.is_text else cell.source
            made.append({"id": f"cell-{len(made)}", "metadata": {}, "source": source, **kind})
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return json.dumps({"cells": made, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}, indent=1)


class NoPredictionError(UsageError):
    """An answer is asked for before its prediction."""

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows of it: the sentence alone."""
        return [str(self)]


def show_answer(name: str, number: int, prediction: object) -> None:
    """Run an answer in the notebook that calls this, and show it.

    Raises:
        NoPredictionError: as long as the prediction is None, so that "Run all" stops here.
    """
    if prediction is None:
        raise NoPredictionError("Write your prediction above in place of None, run that cell, and then this one.")
    from IPython.display import Code, display
    from IPython.display import Markdown as Text

    runs = [list(run_of) for is_answer, run_of in groupby(_read(name), key=attrgetter("is_answer")) if is_answer]
    for cell in runs[number]:
        display(Text(_plain(cell.source)) if cell.is_text else Code(cell.source, language="python"))
        value = None if cell.is_text else run(cell.source, f"{name}.py, answer {number}", vars(__main__))
        if value is not None:
            display(value)


def _read(name: str) -> list[Cell]:
    return cells(files.read_text(TUTORIALS / f"{name}.py"))


def _plain(text: str) -> str:
    """Return text whose links are words (parts of pictures are on the site only), and without how to run it."""
    text = re.sub(r"\s+Run it with\s+`pipelab tutorial[^.]*\.", "", text)
    text = re.sub(r"\[([^]]+)\]\((\w+)\.md[^)]*\)", r"\1 (`pipelab tutorial \2`)", text)
    return re.sub(r"\[([^]]+)\]\((?!http)[^)]*\)", r"\1", text)


def _tell(name: str, ask: Callable[[str], str]) -> None:
    """Show a tutorial in the terminal, cell by cell."""
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(TUTORIALS / f"{name}.py")}
    console = Console()
    for number, cell in enumerate(_read(name)):
        if cell.is_text:
            if number and not cell.is_answer:
                ask("\n[Enter goes on] ")
            console.print("", Markdown(_plain(cell.source)), "")
            continue
        if shown := _ASKS.sub("", cell.source):
            console.print("", Syntax(shown, "python", background_color="default", word_wrap=True), "")
        value = run(cell.source, f"{name}.py, cell {number}", names)
        if value is not None:
            echo("(a picture: the notebook and the site show it)" if hasattr(value, "savefig") else str(value))
        for variable, unit in _ASKS.findall(cell.source):
            names[variable] = ask(f"\nYour prediction, {unit} (only Enter: no guess): ") or "nothing"


def _list() -> None:
    """Print what each tutorial is about, after those that it needs."""
    texts = {path.stem: " ".join(path.read_text("utf-8").replace("\n#", "").split()) for path in TUTORIALS.glob("*.py")}
    said = {name: _SAYS.findall(text)[0] for name, text in sorted(texts.items())}
    needed = {name: re.findall(r"\((\w+)\.md", before) for name, (_, _, before) in said.items()}
    for name in TopologicalSorter(needed).static_order():
        say(f"{name}, {said[name][1]} minutes: {said[name][0].replace('*', '')}")


def _open(name: str) -> None:
    """Write a tutorial's notebook, unless it is there, and open it in this Python's Jupyter."""
    path = Path(f"{name}.ipynb")
    if path.exists():
        say(f"{path} is here already, with what you wrote in it")
    else:
        wrote(files.write(path, notebook(name, files.read_text(TUTORIALS / f"{name}.py"))))
    if jupyter := _jupyter():
        with suppress(KeyboardInterrupt):
            subprocess.run([sys.executable, "-m", jupyter, str(path)], check=False)  # noqa: S603 - our own words
    else:
        say("Open it in VS Code or PyCharm; or in Jupyter, after pip install jupyterlab in this environment.")


def _jupyter() -> str:
    return next(filter(find_spec, ("jupyterlab", "notebook")), "")


def tutorial(
    name: Annotated[str, typer.Argument(help="as listed without a name", show_default=False)] = "",
    answers: Annotated[bool, typer.Option("--answers", help="ask nothing, and show every answer")] = False,
    as_notebook: Annotated[
        bool | None, typer.Option("--notebook/--terminal", help="by default a notebook if Jupyter is installed")
    ] = None,
) -> None:
    """Learn from a tutorial that waits for your predictions.

    It asks for each before it shows the answer. Without a name: which tutorials there are.
    """
    if not name:
        _list()
        return
    if not (TUTORIALS / f"{name}.py").is_file():
        raise UsageError(f"there is no tutorial {name!r}\n  try: pipelab tutorial, which lists them")
    if as_notebook or (as_notebook is None and sys.stdin.isatty() and not answers and _jupyter()):
        _open(name)
        return
    try:
        _tell(name, (lambda _: "") if answers else input)
        say(f"For the exercise, copy {TUTORIALS / name}.py: run as a script, it says how far your answer is from par.")
    except (KeyboardInterrupt, EOFError):
        say(f"\nStopped. To begin again: pipelab tutorial {name}; --answers asks nothing, --notebook writes a notebook")
        raise typer.Exit(1) from None
