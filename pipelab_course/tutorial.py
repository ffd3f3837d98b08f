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
_ASKS = re.compile(r"^(my_\w+) = None  # ([^:\n]+)", re.MULTILINE)
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
            call = f'show_answer("{name}", {number}, {asked})'
            shown = [Cell(f"from pipelab_course.tutorial import show_answer\n\n{call}")]
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
    """Return text whose links are words: a part of a picture is only on the site, another tutorial a command away."""
    text = re.sub(r"\[([^]]+)\]\((\w+)\.md[^)]*\)", r"\1 (`pipelab tutorial \2`)", text)
    return re.sub(r"\[([^]]+)\]\((?!http)[^)]*\)", r"\1", text)


def _tell(name: str, ask: Callable[[str], str]) -> bool:
    """Show a tutorial in the terminal, cell by cell; return whether it ends with an exercise."""
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(TUTORIALS / f"{name}.py")}
    console = Console()
    for number, cell in enumerate(_read(name)):
        if cell.is_text:
            if number and not cell.is_answer:
                ask("\n[Enter goes on] ")
            console.print("", Markdown(_plain(cell.source)), "")
            continue
        asked = _ASKS.findall(cell.source)
        if not asked:
            console.print("", Syntax(cell.source, "python", background_color="default", word_wrap=True), "")
        value = run(cell.source, f"{name}.py, cell {number}", names)
        if value is not None:
            echo(str(value))
        for variable, unit in asked:
            names[variable] = ask(f"\nYour prediction, {unit.strip()} (only Enter: no guess): ") or "nothing"
    return "reaches_par" in names


def _list() -> None:
    """Print what each tutorial is about, after those that it needs."""
    texts = {each.stem: " ".join(cell.source for cell in _read(each.stem)) for each in sorted(TUTORIALS.glob("*.py"))}
    told = {name: found.groups() for name, text in texts.items() if (found := _SAYS.search(" ".join(text.split())))}
    needed = {name: re.findall(r"\((\w+)\.md", before) for name, (_, _, before) in told.items()}
    for name in TopologicalSorter(needed).static_order():
        say(f"{name}, {told[name][1]} minutes: {told[name][0].replace('*', '')}")


def _open(name: str) -> None:
    """Write a tutorial's notebook, unless it is there, and open it in this Python's Jupyter."""
    path = Path(f"{name}.ipynb")
    if path.exists():
        say(f"{path} is here already, with what you wrote in it")
    else:
        wrote(files.write(path, notebook(name, files.read_text(TUTORIALS / f"{name}.py"))))
    if not (jupyter := _jupyter()):
        say("Open it in VS Code or PyCharm; or in Jupyter, after pip install jupyterlab in this environment.")
        return
    with suppress(KeyboardInterrupt):
        subprocess.run([sys.executable, "-m", jupyter, str(path)], check=False)  # noqa: S603 - our own words


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
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if as_notebook or (as_notebook is None and terminal and not answers and _jupyter()):
        _open(name)
        return
    if not answers and not terminal:
        raise UsageError(
            "a tutorial asks for predictions, and this is not a terminal\n"
            f"  try: pipelab tutorial {name} --answers, which asks nothing; or --notebook, which writes {name}.ipynb"
        )
    path = Path(f"{name}.py")
    try:
        exercise = _tell(name, (lambda _: "") if answers else input)
        if exercise and not answers and not path.exists() and typer.confirm(f"Write {path} here, for the exercise?"):
            wrote(files.write(path, files.read_text(TUTORIALS / path)))
            say(f"The exercise is at its end; python {path} says how far your answer is from par.")
    except (KeyboardInterrupt, EOFError, typer.Abort):
        say(f"\nStopped. To begin again: pipelab tutorial {name}")
        raise typer.Exit(1) from None
