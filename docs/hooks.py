"""Generate what is made for every site: tutorials, the table of formulas, and examples of pipelab's own pages.

A tutorial is a Python file in percent format (`# %%` starts a cell, `# %% [markdown]` one of text). So it is at once a
script, a notebook (VS Code, PyCharm, `jupytext --to ipynb`), a test and a page. The site runs each cell and shows its
output below it.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import linecache
import re
import runpy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jupytext
import matplotlib as mpl
from matplotlib.figure import Figure
from mkdocs.exceptions import PluginError
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files, InclusionLevel

import pipelab
from pipelab.draw.page.page import comparison_page, diff_page, page

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig

mpl.use("agg")
log = get_plugin_logger(__name__)


UNEVEN = pipelab.Cost(forward=[1, 1, 2, 1], backward=[2, 2, 4, 2])
TRACES = {
    "dualpipe": lambda: pipelab.simulate(
        pipelab.DualPipe(ranks=4, microbatches=10), pipelab.Cost(forward=1, backward=2, pair=2.5, all_reduce=1)
    ),
    "greedy": lambda: pipelab.simulate(pipelab.Greedy(4, 6, memory_cap=4, cost=UNEVEN, split=True), UNEVEN),
    "replicas": lambda: pipelab.simulate(
        pipelab.replicate(pipelab.OneFOneB(ranks=3, microbatches=4), 2),
        pipelab.Cost(forward=1, backward=2, all_reduce=2),
    ),
}
"""The timelines that `reference/schedules.md` shows, by file name."""
EDITING = runpy.run_path(str(Path(__file__).with_name("editing.py")))
PYODIDE = runpy.run_path(str(Path(__file__).with_name("pyodide.py")))


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the formulas that the schedules carry, and the playground, into the pages that hold their places."""
    still = '<img src="../images/1f1b.svg" alt="1F1B on 4 ranks with 8 micro-batches">'
    markdown = markdown.replace("<!-- closed forms -->", closed_forms())
    return markdown.replace("<!-- playground -->", PYODIDE["body"]("", still))


def closed_forms() -> str:
    """Return every schedule's formulas and its source, as a table."""
    rows = ["| schedule | quantity | formula | if | source |", "|---|---|---|---|---|"]
    for name, kind in pipelab.schedules.items():
        source = re.sub(r"arXiv:([\d.]+)", r"[\g<0>](https://arxiv.org/abs/\1)", kind.source)
        for number, (key, formula) in enumerate(kind.closed_forms.items()):
            quantity, _, condition = key.partition(" if ")
            condition = ", ".join(f"`{each}`" for each in condition.split(" and ") if each)
            first = (f"`{name}`", source) if number == 0 else ("", "")
            rows.append(f"| {first[0]} | {quantity} | `{formula}` | {condition} | {first[1]} |")
    return "\n".join(rows)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each tutorial, a file for each figure, and the timelines of the reference."""
    traces = {name: pipelab.simulate(kind(ranks=4, microbatches=8)) for name, kind in pipelab.schedules.items()}
    files.append(File.generated(config, "reference/1f1b.html", content=page(traces["1f1b"])))
    shown = [name for name in traces if name not in ("naive", "delayed")]  # they take three times as long
    catalogue = pipelab.compare(*(traces[name] for name in shown), names=shown)
    files.append(File.generated(config, "reference/catalogue.html", content=comparison_page(catalogue)))
    slower = pipelab.simulate(traces["1f1b"].plan, pipelab.Cost(forward=[1, 1.5, 1, 1], latency=0.25))
    found = pipelab.diff(traces["1f1b"], slower, names=["predicted", "slower"])
    files.append(File.generated(config, "reference/diff.html", content=diff_page(found)))
    for name, trace in TRACES.items():
        files.append(File.generated(config, f"reference/{name}.svg", content=str(_call(trace(), "_repr_svg_"))))
    files_of_the_playground(files, config)
    for source in sorted(Path(config.config_file_path).parent.glob("tutorials/*.py")):
        text, figures = render(source)
        files.append(File.generated(config, f"tutorials/{source.stem}.md", content=text))
        for name, svg in figures.items():
            files.append(File.generated(config, f"tutorials/{name}", content=svg))
    return files


def files_of_the_playground(files: Files, config: MkDocsConfig) -> None:
    """Add Python for the browser; where it cannot be had, the playground shows still pictures and the reason."""
    made = PYODIDE["files"]()
    if "reason" in (engine := json.loads(made["engine.json"])):
        log.info("The playground is built without Python for the browser: %s", engine["reason"])
    for name, content in made.items():
        files.append(File.generated(config, f"playground/{name}", content=content, inclusion=InclusionLevel.INCLUDED))


def render(source: Path) -> tuple[str, dict[str, str]]:
    """Run a tutorial; return its page as Markdown, and its figures by file name.

    Raises:
        PluginError: if a cell raises, naming the cell.
    """
    blocks: list[str] = []
    figures: dict[str, str] = {}
    namespace: dict[str, Any] = {"__name__": "__main__", "__file__": str(source)}
    cells = jupytext.read(source).cells
    edits = iter(EDITING["links"]([cell.source for cell in cells if cell.cell_type == "code"], "../../playground/"))
    for number, cell in enumerate(cells):
        if cell.cell_type == "markdown":
            blocks.append(cell.source)
            continue
        try:
            printed, result = run(cell.source, f"{source.name}, cell {number}", namespace)
        except Exception as error:
            raise PluginError(f"{source.name}, cell {number}: {type(error).__name__}: {error}") from error
        blocks.append(_fenced(cell.source, "python"))
        if edit := next(edits):
            blocks.append(edit)
        if printed:
            blocks.append(_fenced(printed, "text"))
        if (markup := _call(result, "_repr_svg_") or _figure(result)) is not None:
            name = f"{source.stem}-{number}.svg"
            figures[name] = markup
            blocks.append(f"![what the cell above draws]({name})")
        elif (markup := _call(result, "_repr_html_")) is not None:
            blocks.append(f"<div>{markup}</div>")
        elif result is not None:
            blocks.append(_fenced(repr(result), "text"))
    return "\n\n".join(blocks) + "\n", figures


def run(code: str, name: str, namespace: dict[str, Any]) -> tuple[str, Any]:
    """Run one cell as a notebook would; return its printed text and its last line's value."""
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)  # for tracebacks
    tree = ast.parse(code, name)
    shown = None
    if tree.body and isinstance(last := tree.body[-1], ast.Expr):
        tree.body.pop()
        shown = compile(ast.Expression(last.value), name, "eval")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, name, "exec"), namespace)  # noqa: S102 - our own tutorials
        result = eval(shown, namespace) if shown else None  # noqa: S307 - likewise
    return printed.getvalue(), result


def _call(result: object, method: str) -> str | None:
    shown = getattr(result, method, None)
    return None if shown is None or isinstance(result, type) else str(shown())


def _figure(result: object) -> str | None:
    """Return the SVG of a matplotlib figure, or of the figure that axes belong to."""
    figure = getattr(result, "figure", result)
    if not isinstance(figure, Figure):
        return None
    with io.StringIO() as svg:
        figure.savefig(svg, format="svg", bbox_inches="tight")
        return svg.getvalue()


def _fenced(text: str, language: str) -> str:
    """Return text as a code block with a fence longer than any in the text."""
    longest = max(map(len, re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"
