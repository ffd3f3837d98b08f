"""Generate what is made for every site: tutorials, the table of formulas, and examples of pipelab's own pages.

A tutorial is a Python file in percent format (`# %%` starts a cell, `# %% [markdown]` one of text). So it is both a
script, a notebook, a test and a page. The site runs each cell, shows its output below it, and offers the notebook for
download, without outputs: its answers wait for predictions, as those of `pipelab tutorial` do. The script would not.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import html
import io
import json
import os
import re
import runpy
import shutil
import tomllib
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure
from mkdocs.exceptions import PluginError
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files, InclusionLevel

import pipelab
from pipelab.draw.page import comparison_page, diff_page, page
from pipelab.simulation.comparison import Comparison
from pipelab.trace.trace import Trace
from pipelab_course import tutorial

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

mpl.use("agg")
log = get_plugin_logger(__name__)


UNEVEN = pipelab.Cost(forward=[1, 1, 2, 1], backward=[2, 2, 4, 2])
TRACES = {
    "dualpipe": lambda: pipelab.simulate(
        pipelab.DualPipe(ranks=4, microbatches=10), pipelab.Cost(forward=1, backward=2, pair=2.5, all_reduce=1)
    ),
    "greedy": lambda: pipelab.simulate(pipelab.Greedy(4, 6, memory_cap=4, cost=UNEVEN, split=True), UNEVEN),
    "recomputed": lambda: pipelab.simulate(pipelab.with_recompute(pipelab.OneFOneB(4, 8), ahead=1)),
    "replicas": lambda: pipelab.simulate(
        pipelab.replicate(pipelab.OneFOneB(ranks=3, microbatches=4), 2),
        pipelab.Cost(forward=1, backward=2, all_reduce=2),
    ),
}
"""The timelines that `reference/schedules.md` shows, by file name."""
LIVE = {Trace: page, Comparison: comparison_page}
"""What tutorials show as a page in a frame."""
LIGHTS = r"\[([^]]+)\]\(#([sl]=[^)]+)\)"
"""A link to what is in the last frame."""
BOOSTS = {"Learn": 10, "Teach": 0.01}
"""How much more a part of the site counts in its search; a word in a title counts 1000 times as much as in a text."""
ROOT = Path(__file__).resolve().parents[1]
KEPT = Path(os.environ.get("TUTORIALS", ROOT / "build" / "tutorials"))
"""Where what tutorials print and draw is kept."""
EDITING = runpy.run_path(str(Path(__file__).with_name("editing.py")))
PYODIDE = runpy.run_path(str(Path(__file__).with_name("pyodide.py")))


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the formulas that the schedules carry, and the playground, into the pages that hold their places."""
    still = '<img src="../images/1f1b.svg" alt="1F1B on 4 ranks with 8 micro-batches">'
    markdown = markdown.replace("<!-- closed forms -->", closed_forms())
    markdown = re.sub(r"<!-- (questions|key) (\w+) -->", lambda place: questions(place[2], place[1] == "key"), markdown)
    markdown = re.sub(r"<!-- (minutes|before) (\w+) -->", lambda place: needed(place[2])[place[1]], markdown)
    markdown = re.sub(
        r"```python\n([^`]+)```\n<!-- edit -->", lambda shown: f"{shown[0]}\n\n{editable(shown[1])}", markdown
    )
    markdown = markdown.replace("<!-- challenges -->", PYODIDE["challenges"]("../playground/"))
    return markdown.replace("<!-- playground -->", PYODIDE["body"]("", still))


def on_page_content(html: str, page: Page, **_: Any) -> str:
    """Let the search find what learners read before what teachers read."""
    if page.ancestors and (boost := BOOSTS.get(page.ancestors[-1].title)):
        page.meta.setdefault("search", {"boost": boost})
    return html


def on_post_build(config: MkDocsConfig, **_: Any) -> None:
    """Remove what no reader of this site loads: the theme's source maps, and its word cutters for other languages."""
    assets = Path(config.site_dir, "assets")
    for path in assets.rglob("*.map"):
        path.unlink()
    shutil.rmtree(assets / "javascripts" / "lunr", ignore_errors=True)


def needed(tutorial: str) -> re.Match[str]:
    """Find a tutorial's sentence on the minutes that it takes, and on what a reader needs before it."""
    text = (ROOT / "tutorials" / f"{tutorial}.py").read_text(encoding="utf-8").replace("\n# ", " ")
    text = re.sub(r"\]\((\w+\.md)", r"](../tutorials/\1", text)
    if found := re.search(r"It takes about (?P<minutes>\d+) minutes, and you need (?P<before>.+?) before it", text):
        return found
    raise PluginError(f"{tutorial}.py lacks the sentence 'It takes about … minutes, and you need … before it'")


def questions(lab: str, answered: bool) -> str:
    """Return what an assignment asks as a list; answered by the teacher's key, with the names of a run's numbers."""
    asked = tomllib.loads((ROOT / "pipelab_course" / "questions.toml").read_text(encoding="utf-8"))[lab]
    key = tomllib.loads((ROOT / "teacher" / "keys" / f"{lab}.toml").read_text(encoding="utf-8")) if answered else {}
    lines, part = [], ""
    for number, (name, question) in enumerate(asked.items(), start=1):
        lead = "" if part == (part := question["part"]) else f"*{part}.* "
        ask = html.escape(question["ask"], quote=False)
        lines.append(f"{number}. {lead}{f'**{ask}**' if answered else ask}")
        if answered:
            text = re.sub(r"{(\w+)}", r"`\1`", html.escape(" ".join(key[name]["answer"]), quote=False))
            lines += ["", f"    {text}", "", f"    *Rubric:* {key[name]['rubric']}.", ""]
    return "\n".join(lines)


def editable(code: str) -> str:
    """Return the link *edit this* of a schedule that a slide shows without its imports."""
    *_, link = EDITING["links"](["import pipelab\nfrom pipelab import B, F", code], "../../playground/")
    if not link:
        raise PluginError("the playground draws nothing of this:\n" + code)
    return str(link)


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
    predicted = pipelab.simulate(pipelab.OneFOneB(ranks=4, microbatches=8))
    files.append(File.generated(config, "reference/1f1b.html", content=page(predicted)))
    slower = pipelab.simulate(predicted.plan, pipelab.Cost(forward=[1, 1.5, 1, 1], latency=0.25))
    found = pipelab.diff(predicted, slower, names=["predicted", "slower"])
    files.append(File.generated(config, "reference/diff.html", content=diff_page(found)))
    for name, trace in TRACES.items():
        files.append(File.generated(config, f"reference/{name}.svg", content=str(_call(trace(), "_repr_svg_"))))
    files_of_the_playground(files, config)
    schema = Path(pipelab.__file__).parent / "trace" / "trace.schema.json"
    files.append(File.generated(config, f"how_to/{schema.name}", abs_src_path=str(schema)))
    root = Path(config.config_file_path).parent
    for path in (root / "teacher" / "site").rglob("*.md"):  # the key, which students' copies lack
        uri = f"teach/{path.relative_to(root / 'teacher' / 'site').as_posix()}"
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    tutorials = root / "tutorials"
    for path in tutorials.glob("*/*.gz"):  # what a tutorial reads, for the reader of its notebook
        files.append(File.generated(config, f"tutorials/{path.parent.name}/{path.name}", content=path.read_bytes()))
    for source in sorted(tutorials.glob("*.py")):
        code = source.read_text(encoding="utf-8")
        text, notebook, figures = rendered(source, code)
        files.append(File.generated(config, f"tutorials/{source.stem}.md", content=text))
        for name, content in {f"{source.stem}.ipynb": notebook, **figures}.items():
            files.append(File.generated(config, f"tutorials/{name}", content=content))
    return files


def files_of_the_playground(files: Files, config: MkDocsConfig) -> None:
    """Add Python for the browser; where it cannot be had, the playground shows still pictures and the reason."""
    made = PYODIDE["files"]()
    if "reason" in (engine := json.loads(made["engine.json"])):
        log.info("The playground is built without Python for the browser: %s", engine["reason"])
    for name, content in made.items():
        files.append(File.generated(config, f"playground/{name}", content=content, inclusion=InclusionLevel.INCLUDED))


def rendered(source: Path, code: str) -> tuple[str, str, Mapping[str, str]]:
    """Return what `render` returns; where neither the tutorial nor pipelab has changed, what an earlier run made."""
    kept = KEPT / f"{source.stem}-{hashlib.sha256(code.encode() + _sources()).hexdigest()[:16]}.json"
    if not kept.is_file():
        log.info("Running tutorials/%s", source.name)
        made = json.dumps(render(source, code))
        KEPT.mkdir(parents=True, exist_ok=True)
        for old in KEPT.glob(f"{source.stem}-*.json"):
            old.unlink(missing_ok=True)
        kept.write_text(made, encoding="utf-8")
    text, notebook, figures = json.loads(kept.read_text(encoding="utf-8"))
    return text, notebook, figures


@functools.cache  # of what was imported: an edit of pipelab while `make docs` runs is not
def _sources() -> bytes:
    """Return a digest of all that tutorials run: pipelab, their data, and the versions of other packages."""
    files = [*ROOT.glob("docs/*.py"), *ROOT.glob("tutorials/*/*"), ROOT / "constraints.txt"]
    files += [path for path in ROOT.glob("pipelab*/**/*") if path.is_file() and path.suffix != ".pyc"]
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.read_bytes())
    return digest.digest()


def render(source: Path, code: str) -> tuple[str, str, Mapping[str, str]]:
    """Run a tutorial; return its page as Markdown, its notebook, and its figures by file name.

    Consecutive cells with the tag `answer`, and what they print, are folded on the page. A trace or a comparison is
    live, and a link such as `[waits 6](#s=0:idle.0.4)` selects there what it would select in that page's address.

    Raises:
        PluginError: if a cell raises, naming the cell.
    """
    stem = source.stem
    book = tutorial.cells(code)
    figures: dict[str, str] = {}
    namespace: dict[str, Any] = {"__name__": "__main__", "__file__": str(source)}
    edits = iter(EDITING["links"]([cell.source for cell in book if not cell.is_text], "../../playground/"))
    blocks: list[tuple[bool, str]] = []
    live = None
    for number, cell in enumerate(book):
        if cell.is_text:
            select = rf'<a class="lights" href="../{live}.html#v=1&\2" target="{live}">\1</a>'
            blocks.append((cell.is_answer, re.sub(LIGHTS, select, cell.source)))
            continue
        try:
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                result = tutorial.run(cell.source, f"{stem}.py, cell {number}", namespace)
        except Exception as error:
            raise PluginError(f"{stem}.py, cell {number}: {type(error).__name__}: {error}") from error
        name = f"{stem}-{number}.svg"
        svg = _call(result, "_repr_svg_") or _figure(result)
        markup = None if svg else _call(result, "_repr_html_")
        if draw := LIVE.get(type(result)):
            live = f"{stem}-{number}"
            figures[f"{live}.html"] = draw(result)
        text = printed.getvalue()
        shown = [_fenced(cell.source, "python"), next(edits), text and _fenced(text, "text")]
        if draw:
            says = f'name="{live}" title="what the cell above draws"'
            shown.append(f'<iframe src="../{live}.html" {says} class="page" loading="lazy"></iframe>')
        elif svg:
            figures[name] = svg
            shown.append(f"![what the cell above draws]({name})")
        elif markup:
            shown.append(f'<div markdown="0">{markup}</div>')
        elif result is not None:
            shown.append(_fenced(repr(result), "text"))
        blocks += [(cell.is_answer, block) for block in shown if block]
    return _page(stem, blocks), tutorial.notebook(stem, code), figures


def _page(stem: str, blocks: Sequence[tuple[bool, str]]) -> str:
    """Return a tutorial's page: runs of answers are folded, and its notebook is below the title."""
    parts = []
    for answer, run_of in groupby(blocks, key=itemgetter(0)):
        text = "\n\n".join(block for _, block in run_of)
        folded = f'<details class="answer" markdown="1"><summary>show the answer</summary>\n\n{text}\n\n</details>'
        parts.append(folded if answer else text)
    title, _, rest = "\n\n".join(parts).partition("\n")
    links = f"[Notebook]({stem}.ipynb){{ download }} In a terminal: `pipelab tutorial {stem}`"
    return f"{title}\n\n{links}\n{{ .downloads }}\n{rest}\n"


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
