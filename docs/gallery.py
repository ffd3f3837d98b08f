"""Generate the gallery: a card and a page for each schedule of `pipelab.schedules`, and the picture of Home.

All numbers are simulated when the site is built, on four ranks with eight micro-batches, F = 1 and B = 2. A schedule's
page shows its code as a file that a student could have written. That file is run, and must give the catalogue's plan.
"""

from __future__ import annotations

import ast
import builtins
import html
import inspect
import io
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markdown.extensions.toc import slugify
from matplotlib.figure import Figure
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

import pipelab
from pipelab.catalogue import moving
from pipelab.catalogue.bases import SingleStage
from pipelab.draw.bars import shapes
from pipelab.draw.page import comparison_page, frame, page
from pipelab.draw.scatter import scatter
from pipelab.draw.wording import NAMES
from pipelab.trace.trace import Trace

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

RANKS, MICROBATCHES, SHOWN = 4, 8, 33
"""The sizes of all schedules, and how many units of time a card shows: as many as 1F1B takes."""
KINDS = {**pipelab.schedules, **moving}
TOOLTIPS = ("bubble", "critical path", "latency", "makespan", "own span", "peak activations", "rendezvous", "straggler")
"""Words of the glossary that answer the pointer on every page. Rank, stage and micro-batch are in every line."""

PAPERS = {
    "BPipe (ICML '23)": "https://icml.cc/virtual/2023/poster/25066",
    "PipeDream (SOSP '19)": "https://doi.org/10.1145/3341301.3359646",
    "SIAM J. Appl. Math. 17": "https://doi.org/10.1137/0117039",
}
"""Where a source without a number at arXiv can be read."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List each schedule's page below the gallery."""
    below = [{title(name): f"schedules/{name}.md"} for name in KINDS]
    for entry in config.nav or []:
        if isinstance(entry, dict) and entry.get("Schedules") == "schedules/index.md":
            entry["Schedules"] = ["schedules/index.md", *below]
    return config


def title(name: str) -> str:
    kind = KINDS[name].__name__
    return NAMES.get(kind, kind)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the gallery, and for each schedule its page, its live picture and its thumbnail."""
    traces = {name: simulated(name) for name in KINDS}
    made: dict[str, str] = {}
    for name, trace in traces.items():
        made[f"schedules/{name}.md"] = schedule_page(
            name, trace, traces["1f1b"], edit=editable(files) and name not in moving
        )
        made[f"schedules/{name}.html"] = page(trace)
        if name != "1f1b":
            both = pipelab.compare(trace, traces["1f1b"], names=[trace.name, "1F1B"])
            made[f"schedules/{name}_and_1f1b.html"] = comparison_page(both)
        made[f"schedules/{name}.svg"] = thumbnail(trace)
    shown = [name for name in pipelab.schedules if name not in ("naive", "delayed")]  # they take three times as long
    side_by_side = pipelab.compare(*(traces[name] for name in shown), names=[title(name) for name in shown])
    made["schedules/side_by_side.html"] = comparison_page(side_by_side)
    wrong = pipelab.compare(
        *(traces[name] for name in ("gpipe", "1f1b", "delayed")), names=["GPipe", "1F1B", "Delayed"]
    )
    made["misconceptions.html"] = comparison_page(wrong)
    made["images/logo.svg"] = (Path(config.docs_dir) / "theme" / ".icons" / "logo.svg").read_text(encoding="utf-8")
    made["how_to/numbered.svg"] = numbered(traces["1f1b"], 24, "rank ")
    made["how_to/numbered_small.svg"] = numbered(traces["1f1b"], 9, "")
    for name, content in made.items():
        files.append(File.generated(config, name, content=content))
    files.append(File.generated(config, "images/card.png", content=card_of_links(traces["1f1b"])))
    share(files, config)
    return files


def share(files: Files, config: MkDocsConfig) -> None:
    """Move the looks and the script, nine tenths of every live picture, to files that a browser loads once."""
    several, alone = frame(), page(simulated("1f1b"))
    for name, whole in {"tracer": several, "alone": alone}.items():
        looks, script = (re.search(rf"<{tag}>\n(.*?)</{tag}>", whole, re.DOTALL) for tag in ("style", "script"))
        for file in list(files):
            if file.generated_by and file.src_uri.endswith(".html") and script[0] in (whole := file.content_string):
                up = "../" * file.src_uri.count("/")
                lean = whole.replace(looks[0], f'<link rel="stylesheet" href="{up}{name}.css">')
                lean = lean.replace(script[0], f'<script src="{up}{name}.js"></script>')
                file.content_string = lean.replace("-src 'unsafe-inline'", "-src 'self' 'unsafe-inline'")
        for suffix, found in {"css": looks, "js": script}.items():
            files.append(File.generated(config, f"{name}.{suffix}", content=found[1]))


def card_of_links(trace: Trace) -> bytes:
    """Return the picture that is beside a link to the site elsewhere."""
    figure = Figure(figsize=(12, 6.3), dpi=100, facecolor="white")
    trace.plot(figure.add_axes((0.06, 0.12, 0.9, 0.55)))
    figure.text(0.06, 0.86, "pipelab", size=44, weight="bold")
    figure.text(0.06, 0.76, "one schedule: checked, simulated, drawn, executed", size=22)
    with io.BytesIO() as png:
        figure.savefig(png, format="png")
        return png.getvalue()


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put cards and the table of what a smaller bubble costs where pages ask for them, and the glossary's words."""
    if "<!-- schedules -->" in markdown:
        cards = (card(name, simulated(name), edit=editable(files)) for name in pipelab.schedules)
        markdown = markdown.replace("<!-- schedules -->", "\n\n".join(cards))
        cards = (card(name, simulated(name), edit=False) for name in moving)
        markdown = markdown.replace("<!-- moving -->", "\n\n".join(cards))
    for comment, ranks, microbatches in re.findall(r"(<!-- frontier (\d+) (\d+) -->)", markdown):
        found = pipelab.frontier(int(ranks), int(microbatches))
        up = "" if page.file.src_uri == "schedules/index.md" else "../../schedules/"
        picture = scatter(found.schedules, found.points, up + "{}/")
        markdown = markdown.replace(comment, f'<div class="wide scatter" markdown="0">{picture}</div>')
    if "<!-- price of a bubble -->" in markdown:
        markdown = markdown.replace("<!-- price of a bubble -->", prices())
    if page.file.src_uri == "glossary.md":  # each word can be linked to: glossary.md#own-span
        span = '<span id="{}">{}</span>\n:   '
        return re.sub(r"(?m)^(\w.*)\n:   ", lambda word: span.format(slugify(word[1], "-"), word[1]), markdown)
    if page.file.src_uri != "index.md":
        markdown = f"{markdown}\n\n{tooltips(config)}"
    return markdown


def tooltips(config: MkDocsConfig) -> str:
    """Return the first sentence of the glossary for each of some words, as abbreviations: they answer the pointer."""
    text = (Path(config.docs_dir) / "glossary.md").read_text(encoding="utf-8")
    meanings = dict(re.findall(r"^(\w[\w -]*)\n:   (.*?[.:])(?: |$)", re.sub(r"\n    ", " ", text), flags=re.MULTILINE))
    return "\n".join(f"*[{word}]: {meanings[word].rstrip(':')}" for word in TOOLTIPS)


def editable(files: Files) -> bool:
    """Return whether the site has a page that edits a schedule in the browser."""
    return files.get_file_from_path("playground.md") is not None


def prices() -> str:
    """Return what each schedule that is no slower than GPipe holds and sends, as a table."""
    lines = ["| schedule | bubble | most micro-batches held | values sent |", "|---|--:|--:|--:|"]
    for name in ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-h2", "zbv", "dualpipev", "dualpipe"):
        trace = simulated(name)
        link = f"[{trace.name}](schedules/{name}.md)"
        lines.append(f"| {link} | {100 * trace.bubble:.1f} % | {held(trace):g} | {sent(trace)} |")
    return "\n".join(lines)


def sent(trace: Trace) -> int:
    """Return how many values go from one rank to another."""
    place, stages = trace.plan.place, range(trace.plan.stages - 1)
    return 2 * sum(place(m, s) != place(m, s + 1) for m in range(MICROBATCHES) for s in stages)


def simulated(name: str) -> Trace:
    """Simulate a schedule under the name that papers give it; what it sends away takes half a forward."""
    cost = pipelab.Cost(offload=0.5, load=0.5) if name in moving else None
    trace = pipelab.simulate(KINDS[name](RANKS, MICROBATCHES), cost)
    return Trace(trace.plan, trace.starts, trace.ends, moves=trace.moves, name=title(name))


def card(name: str, trace: Trace, *, edit: bool) -> str:
    """Return a schedule's card as an item of a Markdown list."""
    kind = KINDS[name]
    links = [f"[open]({name}.md)"]
    if edit:
        links.append(f'<a href="../playground/#schedule={name}">edit</a>')
    lines = [
        f"- [![timeline of {trace.name}]({name}.svg){{ .thumbnail loading=lazy }}]({name}.md)",
        f"**[{trace.name}]({name}.md)**<br>{kind.__doc__.partition(chr(10))[0]}",
        f"**{trace.makespan:g}** units{f' ({SHOWN} are shown)' if trace.makespan > SHOWN else ''}, "
        f"bubble **{100 * trace.bubble:.1f} %**, holds {most(trace, '**')}",
        f"{paper(kind.source)}<br>{' · '.join(links)}",
    ]
    return "\n\n    ".join(lines)


def held(trace: Trace) -> float:
    """Return the most activations that a rank holds, in micro-batches of its share of the model."""
    return max(trace.peak_activations) * trace.ranks / trace.plan.stages


def most(trace: Trace, mark: str = "") -> str:
    """Return the most that a rank holds, in words; where micro-batches are slices, its share of the batch."""
    if trace.plan.after is None:
        return f"{mark}{held(trace):g}{mark} micro-batches"
    return f"{mark}{part(trace)}{mark} of the batch"


def part(trace: Trace) -> str:
    """Return which part of the batch the fullest rank holds."""
    return f"{100 * held(trace) / MICROBATCHES + 1e-9:.0f} %"


def paper(source: str) -> str:
    """Return authors and year of a source, linked to the paper."""
    links = [link for words, link in PAPERS.items() if words in source]
    where = next(
        iter(links + [f"https://arxiv.org/abs/{each}" for each in re.findall(r"arXiv:([\d.]+\d)", source)]), ""
    )
    name = re.split(r",| \(|:|;", source)[0]
    return f"[{name}]({where})" if where else source.partition(";")[0]


def linked(source: str) -> str:
    """Return a source with links to its papers."""
    source = re.sub(r"arXiv:([\d.]+\d)", r"[\g<0>](https://arxiv.org/abs/\1)", source)
    for words, link in PAPERS.items():
        source = source.replace(words, f"[{words}]({link})")
    return source


def thumbnail(trace: Trace) -> str:
    """Return a timeline as a small SVG without words, for light and dark pages."""
    wide, lane = 320, 20  # all cards have one axis, so that a shorter step looks shorter
    name = html.escape(f"timeline of {trace.name}")
    size = f'viewBox="0 0 {wide} {lane * trace.ranks}" preserveAspectRatio="none"'
    parts = shapes(trace, wide / SHOWN, lane, words=False)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{name}">{parts}</svg>'


def numbered(trace: Trace, scale: int, word: str) -> str:
    """Return 1F1B's timeline with numbers at the parts that "Read the picture" explains."""
    lane, left = 36, 35 + 7 * len(word)
    rows = "".join(f'<text x="22" y="{rank * lane + 38}">{word}{rank}</text>' for rank in range(trace.ranks))
    ticks = range(0, int(trace.makespan) + 1, 72 // scale)
    axis = "".join(f'<text x="{each * scale}" y="166" text-anchor="middle">{each}</text>' for each in ticks)
    spots = [(0.5, -10), (11, -10), (0.45, 126), (4.45, 18), (32.55, 126), (33 + 25 / scale, 162)]
    places = [(10 - left, 18), *((x * scale, y) for x, y in spots)]  # left and top
    numbers = "".join(
        f'<g transform="translate({x:g} {y})"><circle r="9" fill="#fff" stroke="#000"/>'
        f'<text y="4" text-anchor="middle" font-weight="bold">{number}</text></g>'
        for number, (x, y) in enumerate(places, 1)
    )
    size = f'viewBox="0 0 {left + 33 * scale + 36} 200" font-family="sans-serif" font-size="12"'
    moved = f'<g transform="translate({left} 20)">{shapes(trace, scale, lane)}{axis}{numbers}</g>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{rows}{moved}</svg>'


PAGE = """# {title}

{summary}

{against}

<iframe src="../{frame}.html" title="timeline of {title}" class="page figures-below"></iframe>

[The picture alone]({name}.html) · {edit}from {source}

| schedule | makespan | bubble | {column} | peak activations |
|---|--:|--:|--:|--:|
{rows}
{note}
{body}

## How long does it take, and what does it hold?

{formulas}

## How is it written?

{code}

## Try it

{example}

```console
$ pipelab draw {name} --ranks {ranks} --microbatches {microbatches} --save {name}.html
$ pipelab compare {other} {name} --ranks {ranks} --microbatches {microbatches}
```

The reference has [every detail of the class][pipelab.{kind}].
"""


HALVES = "\nA rank holds two stages, each half of its share: two activations count as one micro-batch held.\n"


def schedule_page(name: str, trace: Trace, first: Trace, *, edit: bool) -> str:
    """Return a schedule's page as Markdown."""
    kind = KINDS[name]
    text = inspect.getdoc(kind)
    text = re.split(r"^(?:Args|Example|Raises):$", text, flags=re.MULTILINE)[0]
    paragraphs = text.strip().split("\n\n")[1:]
    body = "\n\n".join(each for each in paragraphs if not each.startswith("    "))  # a drawing: the page has a picture
    return PAGE.format(
        title=trace.name,
        summary=kind.__doc__.partition("\n")[0],
        name=name,
        against=against(trace, first),
        frame=name if trace is first else f"{name}_and_1f1b",
        other="gpipe" if trace is first else "1f1b",
        kind=kind.__name__,
        ranks=RANKS,
        microbatches=MICROBATCHES,
        edit=f'<a href="../../playground/#schedule={name}">change its code and costs</a> · ' if edit else "",
        source=linked(kind.source),
        column="most micro-batches held" if trace.plan.after is None else "most of the batch held",
        rows="\n".join(row(each, trace) for each in dict.fromkeys((trace, first))),
        note=(HALVES if trace.plan.stages == 2 * trace.ranks else "") + (slices(name) if trace.plan.after else ""),
        body=body,
        formulas=formulas(kind),
        code=code(name),
        example=example(kind),
    )


def against(trace: Trace, first: Trace) -> str:
    """Return what a schedule changes against 1F1B, in a sentence."""
    if trace is first:
        return "All other schedules are compared with this one."

    def than(what: str, mine: float, theirs: float) -> str:
        return f"{mine:g} instead of {theirs:g} {what}" if mine != theirs else f"as many {what} ({mine:g})"

    parts = [
        "takes " + than("units", trace.makespan, first.makespan),
        "holds " + than("micro-batches", held(trace), held(first))
        if trace.plan.after is None
        else f"holds {most(trace)} instead of {part(first)}",
        "and sends " + than("values", sent(trace), sent(first)),
    ]
    pairs = enumerate(zip(trace.plan.rows[0], first.plan.rows[0], strict=False), 1)
    said = "Action {} of rank 0 is the first that differs: `{}` instead of `{}`."
    order = next((said.format(at, mine, theirs) for at, (mine, theirs) in pairs if mine != theirs), "")
    sizes = f"with {RANKS} ranks and {MICROBATCHES} micro-batches"
    return f"**Against [1F1B](1f1b.md)**, {sizes}, it {', '.join(parts)}. {order}"


def row(trace: Trace, shown: Trace) -> str:
    peaks = " ".join(map(str, trace.peak_activations))
    holds = f"{held(trace):g}" if shown.plan.after is None else part(trace)
    return f"| {trace.name} | {trace.makespan:g} | {100 * trace.bubble:.1f} % | {holds} | {peaks} |"


def slices(name: str) -> str:
    """Return what a micro-batch is in a schedule of slices, and what its peaks count."""
    count = KINDS[name](RANKS, MICROBATCHES).slices
    return (
        f"\nIts {MICROBATCHES} micro-batches are slices, {count} of each of {MICROBATCHES // count} sequences, and its "
        "peaks count slices. 1F1B's micro-batches are whole sequences: compare the shares of the batch.\n"
    )


def formulas(kind: type[pipelab.Schedule]) -> str:
    """Return a schedule's closed forms as a table."""
    if not kind.closed_forms:
        return "It has no formula: what it takes follows from its parameters, and `pipelab.simulate` computes it."
    lines = ["| quantity | formula | if |", "|---|---|---|"]
    for key, formula in kind.closed_forms.items():
        quantity, _, condition = key.partition(" if ")
        lines.append(
            f"| {quantity} | `{formula}` | {' and '.join(f'`{each}`' for each in condition.split(' and ') if each)} |"
        )
    letters = (
        "`P` ranks, `M` micro-batches, rank `r`; `F`, `B`, `I` and `W` are the times of a forward, a backward and its "
        "two halves for a rank's share of the model, `T` the time of a transfer, `C` of a forward that runs again. "
        "[All letters](../reference/schedules.md#which-schedules-are-there-and-how-long-do-they-take)."
    )
    return "\n".join([*lines, "", letters])


def example(kind: type[pipelab.Schedule]) -> str:
    """Return the examples of a class's docstring, the lines for Python as code blocks."""
    _, _, rest = inspect.getdoc(kind).partition("Example:\n")
    rest = textwrap.dedent(re.split(r"^\S", rest, flags=re.MULTILINE)[0]).strip()
    return "\n\n".join(f"```python\n{each}\n```" if each.startswith(">>>") else each for each in rest.split("\n\n"))


def code(name: str) -> str:
    """Return a schedule's class as a whole file, as a code block; check that it gives the catalogue's plan."""
    kind = KINDS[name]
    if kind is pipelab.Greedy:
        return "It computes its order from its parameters, so there is no list of actions to show."
    source = students_file(kind)
    made: dict[str, Any] = {"__name__": "student"}
    exec(compile(source, f"the page of {name}", "exec"), made)  # noqa: S102 - pipelab's own class
    for ranks, microbatches in ((RANKS, MICROBATCHES), (2, 6)):
        theirs, ours = made[kind.__name__](ranks, microbatches).plan(), kind(ranks, microbatches).plan()
        if theirs.rows != ours.rows:
            raise PluginError(f"the code shown for {name} gives another plan")
    return f"```python\n{source}\n```\n\n{base(kind)}"


def base(kind: type[pipelab.Schedule]) -> str:
    """Return the source of what a schedule is based on, folded."""
    (parent,) = kind.__bases__
    if parent in (pipelab.Schedule, SingleStage):
        return ""
    source = inspect.getsource(parent).rstrip()
    title = f"<summary>the base class {parent.__name__}</summary>"
    return f'<details markdown="1">{title}\n\n```python\n{source}\n```\n\n</details>'


def students_file(kind: type[pipelab.Schedule]) -> str:
    """Return the source of a class, and of the functions beside it that it calls, with the imports that they need."""
    file = inspect.getmodule(kind)
    module = ast.parse(inspect.getsource(file))
    kept = as_written(inspect.getsource(kind))
    beside = [node.name for node in module.body if isinstance(node, ast.FunctionDef) and node.name in names_in(kept)]
    parts = [*(as_written(inspect.getsource(getattr(file, name))) for name in beside), kept]
    whole = "\n\n\n".join(part.strip() for part in parts)
    bases = [node.name for node in module.body if isinstance(node, ast.ClassDef) and node.name in names_in(whole)]
    return f"{imports(module, whole, {file.__name__: bases})}\n\n\n{whole}"


def as_written(source: str) -> str:
    """Return a source without docstrings, annotations and figures."""
    tree = ast.parse(source).body[0]
    lines = source.splitlines()
    gone: set[int] = set()
    hidden = {"source", "closed_forms", "needs", "looping"}
    for node in ast.walk(tree):
        docstring = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        target = node.targets[0].id if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) else ""
        if (
            docstring
            or target in hidden
            or (isinstance(node, ast.FunctionDef) and node.name in ("refusal", "__init__"))
        ):
            first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
            gone.update(range(first, node.end_lineno + 1))
    kept = "\n".join(line for number, line in enumerate(lines, 1) if number not in gone)
    kept = re.sub(r"  # (noqa|type:).*", "", kept)
    kept = re.sub(r"(def \w+\(.*\)) -> .*:$", r"\1:", kept, flags=re.MULTILINE)
    kept = re.sub(
        r"^ *def .*$", lambda line: re.sub(r": [\w\[\], |.]+?(?= =|,|\):)", "", line[0]), kept, flags=re.MULTILINE
    )
    kept = re.sub(r"^( +\w+): [\w\[\], ]+ = ", r"\1 = ", kept, flags=re.MULTILINE)
    kept = kept.replace("(SingleStage):", "(pipelab.Schedule):").replace("(Schedule):", "(pipelab.Schedule):")
    return re.sub(r":\n\n+", ":\n", re.sub(r"\n{3,}", "\n\n", kept))


def names_in(source: str) -> set[str]:
    """Return the names that a source uses."""
    return {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)} - set(dir(builtins))


def imports(module: ast.Module, kept: str, beside: dict[str, list[str]]) -> str:
    """Return the imports of a module that a part of it needs, the actions from `pipelab` itself; and those `beside`."""
    used = names_in(kept)
    lines = [f"from {file} import {', '.join(names)}" for file, names in beside.items() if names]
    actions = []
    for node in module.body:
        if not isinstance(node, ast.ImportFrom) or node.module == "__future__":
            continue
        names = [each.name for each in node.names if each.name in used]
        if node.module == "pipelab.plan.actions":
            actions = names
        elif names:
            lines.append(f"from {node.module} import {', '.join(names)}")
    ours = ["import pipelab"] if "pipelab" in used else []
    ours += [f"from pipelab import {', '.join(actions)}"] if actions else []
    ours += [line for line in lines if "from pipelab" in line]
    others = [line for line in lines if line not in ours]
    return "\n\n".join("\n".join(group) for group in (others, ours) if group)
