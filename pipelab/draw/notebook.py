"""What notebooks show: a page in its own frame, a still picture where scripts do not run, and text without either.

The frame's page has no access to the notebook (`sandbox`), and the notebook's styles do not reach it. The two exchange
two facts: the page says how high it is, and the notebook whether it is dark.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
from typing import TYPE_CHECKING

from pipelab.checking.checker import check
from pipelab.draw import colours, order_figure, page, wording
from pipelab.draw.bars import shapes
from pipelab.draw.order import drawings, plan_drawing, sentences
from pipelab.errors import clean
from pipelab.plan.actions import Action, Pair
from pipelab.plan.fault import shorten

if TYPE_CHECKING:
    from pipelab.checking.checker import Faults
    from pipelab.draw.order import Drawing
    from pipelab.plan.plan import Plan
    from pipelab.simulation.comparison import Comparison
    from pipelab.trace.trace import Trace

_MOST_ACTIONS = 4_000
"""A notebook keeps its outputs in its file: of larger ones, viewers without scripts see no still picture."""
_MOST_CELLS = 200
"""How many actions of a rank the rows of a plan show."""

# In the page. Its height is its body's and not the document's, which is never lower than the frame.
_INSIDE = """
<script>
{
  document.body.classList.add("framed");
  const tell = fresh => {
    const height = Math.ceil(document.body.getBoundingClientRect().bottom + scrollY) + 12;
    parent.postMessage({ height, fresh }, "*");
  };
  addEventListener("message", event => {
    if (event.source !== parent || typeof event.data?.dark !== "boolean") return;
    document.documentElement.dataset.theme = event.data.dark ? "dark" : "light";
    tell(false);
  });
  tell(true);
  new ResizeObserver(() => tell(false)).observe(document.body);
}
</script>
"""

# In the frame: a notebook keeps its outputs, and packed, the page is a third as large. Five letters are four bytes.
_LETTERS = bytes.maketrans(b"&<>", b",./")  # an attribute holds these as they are
_LOADER = """
(async () => {
  const letters = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%,()*+-;.=/?@^_`{|}~";
  const fives = "DATA".match(/.{5}/g), bytes = new DataView(new ArrayBuffer(4 * fives.length));
  fives.forEach((five, at) =>
    bytes.setUint32(4 * at, [...five].reduce((sum, each) => 85 * sum + letters.indexOf(each), 0)));
  const packed = new Blob([bytes.buffer.slice(0, LENGTH)]).stream();
  const page = await new Response(packed.pipeThrough(new DecompressionStream("gzip"))).text();
  document.open();
  document.write(page);
  document.close();
})();
"""

# In the notebook, for every frame with this mark: the same thing may be shown in several cells.
_OUTSIDE = """
for (const frame of document.querySelectorAll('iframe[data-pipelab="MARK"]:not([data-heard])')) {
  frame.dataset.heard = "";
  const tell = () => {
    const [red, green, blue] = getComputedStyle(frame.parentElement).color.match(/[\\d.]+/g).map(Number);
    frame.contentWindow?.postMessage({ dark: red + green + blue > 384 }, "*");
  };
  addEventListener("message", event => {
    if (event.source !== frame.contentWindow || !(event.data?.height > 0)) return;
    frame.style.height = Math.min(event.data.height, 4000) + "px";
    if (event.data.fresh) tell();
  });
  tell(); // the page may have been there first
}
"""


def framed(source: str, alt: str, still: str, height: int) -> str:
    """Return a page in a frame, with what viewers without scripts show instead."""
    packed = gzip.compress(source.replace("</body>", f"{_INSIDE}</body>").encode("utf-8", "backslashreplace"), mtime=0)
    text = base64.b85encode(packed, pad=True).translate(_LETTERS).decode()
    loader = page.lean(_LOADER, "js").replace("LENGTH", str(len(packed))).replace("DATA", text)
    inside = html.escape(f"<script>{loader}</script>")
    mark = hashlib.sha256(source.encode("utf-8", "backslashreplace")).hexdigest()[:16]
    label = html.escape(clean(alt))
    return (
        f'<div class="pipelab"><iframe data-pipelab="{mark}" title="{label}" sandbox="allow-scripts" srcdoc="{inside}" '
        f'style="width: 100%; height: {height}px; border: 0"></iframe>'
        f"<script>{page.lean(_OUTSIDE, 'js').replace('MARK', mark)}</script>"
        f"<noscript>{still}</noscript></div>"
    )


def _still(trace: Trace, name: str, until: float) -> str:
    """Return a picture that needs no scripts: the name of a trace, what it says, and its bars."""
    words = html.escape(clean(f"{name}: {wording.told(trace)}"))
    size = f'viewBox="0 0 1000 {30 * trace.ranks}" style="max-width: 100%; font: 12px sans-serif"'
    return f'<p>{words}</p><svg {size} aria-hidden="true">{shapes(trace, 1000 / (until or 1), 30)}</svg>'


def trace_html(trace: Trace) -> str:
    """Return what a notebook shows of a trace."""
    actions, name = sum(map(len, trace.starts)), wording.headline(trace)
    still = _still(trace, name, trace.makespan) if actions <= _MOST_ACTIONS else _how_to_save("trace", actions)
    return framed(page.page(trace, notebook=True), name, still, 330 + 40 * min(trace.ranks, 16))


def comparison_html(comparison: Comparison) -> str:
    """Return what a notebook shows of a comparison."""
    alt = f"timelines of {', '.join(map(wording.called, comparison.names))}"
    actions = sum(len(starts) for trace in comparison.traces for starts in trace.starts)
    still = _how_to_save("comparison", actions)
    if actions <= _MOST_ACTIONS:
        longest = max(trace.makespan for trace in comparison.traces)
        named = zip(comparison.traces, map(wording.called, comparison.names), strict=True)
        spans = ((trace, name, longest if comparison.shares_axis else trace.makespan) for trace, name in named)
        still = "".join(_still(*each) for each in spans)
    lanes = sum(min(trace.ranks, 16) for trace in comparison.traces)
    source = page.comparison_page(comparison, notebook=True)
    return framed(source, alt, still, 330 + 90 * len(comparison.traces) + 40 * lanes)


def _how_to_save(name: str, actions: int) -> str:
    return f'<p>{actions:,} actions: {name}.save("{name}.html") writes the page that answers, for a web browser.</p>'


def faults_html(faults: Faults) -> str:
    """Return what a notebook shows of faults: the page with their pictures, and their text."""
    plain = _plain(faults)
    if not faults or faults.plan is None:
        return plain
    try:
        source = faults_page(faults)
    except ImportError:
        return plain
    return framed(source, str(faults).splitlines()[0], plain, 500)


def _plain(faults: Faults) -> str:
    return f"<pre>{html.escape(clean(str(faults), keep=chr(10)))}</pre>"


def plan_html(plan: Plan) -> str:
    """Return what a notebook shows of a plan: the page with its rows, and with its faults if it has any."""
    rows = _rows(plan)
    actions = sum(map(len, plan.written))
    if actions > _MOST_ACTIONS:
        return f"{rows}{_how_to_save('plan', actions)}"
    faults = check(plan)
    still = f"{rows}{_plain(faults)}" if faults else rows
    try:
        source = faults_page(faults) if faults else plan_page(plan)
    except ImportError:
        return still
    alt = str(faults).splitlines()[0] if faults else f"the rows of {wording.called(plan.name)}"
    return framed(source, alt, still, 500 if faults else 120 + 40 * min(plan.ranks, 16))


def _rows(plan: Plan) -> str:
    """Return a plan's name and rows as coloured text; of long rows, the middle is left out."""
    lines = [f"<b>{html.escape(wording.called(plan.name))}</b>"]
    for rank, row in enumerate(plan.rows):
        cells = [_cell(item) for item in row]
        if len(cells) > _MOST_CELLS:
            half = _MOST_CELLS // 2
            cells = [*cells[:half], f"… {len(cells) - 2 * half} more …", *cells[-half:]]
        lines.append(f"rank {rank} | {' '.join(cells)}")
    return "\n".join(['<pre style="overflow-x: auto; white-space: pre">', *lines, "</pre>"])


def _cell(item: object) -> str:
    """Return an item of a row as HTML; what is not an action has no colour."""
    first = item.forward if isinstance(item, Pair) else item
    shown = html.escape(str(item) if isinstance(item, (Action, Pair)) else shorten(item))
    if not isinstance(first, Action) or type(first.microbatch) not in (int, type(None)):
        return shown
    paper = colours.of(first)
    return f'<span style="background: {paper}; color: {colours.ink(paper)}">{shown}</span>'


def plan_page(plan: Plan) -> str:
    """Return a page with a plan's rows as a picture."""
    return page.document(wording.called(plan.name), _section(plan_drawing(plan)))


def faults_page(faults: Faults) -> str:
    """Return a page with a picture for each fault: the plan as far as it runs, and the order that was tried out."""
    title = clean(str(faults).splitlines()[0])
    sections = "".join(map(_section, drawings(faults)))
    if not faults:
        return page.document(title, sections)
    closed = "" if sections else " open"
    return page.document(title, f"{sections}<details{closed}><summary>as text</summary>{_plain(faults)}</details>")


def _section(drawing: Drawing) -> str:
    """Return one picture with its sentences."""
    title = html.escape(clean(drawing.title))
    notes = "".join(
        f'<li value="{number}">{html.escape(clean(words))}</li>' if number else '<li style="list-style: none">…</li>'
        for number, words in sentences(drawing)
    )
    hint = f'<p class="try">try: {html.escape(clean(drawing.hint))}</p>' if drawing.hint else ""
    key = "; ".join(order_figure.key_of(drawing))
    kind = "after" if drawing.after else "faulty" if drawing.faulty else ""
    return (
        f'<section class="order {kind}"><h2>{title}</h2>'
        f'<div class="picture" tabindex="0" role="img" aria-label="{title}">{order_figure.svg(drawing)}</div>'
        f'<ol>{notes}</ol>{hint}<p class="subtitle">{html.escape(key)}</p></section>'
    )
