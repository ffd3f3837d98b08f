"""Pages of a copy whose site is not built, as plain HTML: `pipelab docs` shows them until `make site` has run.

They have what the pages in `docs/` include and no raw marks, but not what only the site makes: live pictures, the
playground, tables of the reference. Tutorials are a command away.
"""

from __future__ import annotations

import atexit
import re
import shutil
from pathlib import Path
from tempfile import mkdtemp

from markdown_it import MarkdownIt  # rich needs it, too

ROOT = Path(__file__).resolve().parents[1]
HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>
:root {{ color-scheme: light dark; }} body {{ max-width: 52rem; margin: 2rem auto; font: 16px/1.5 system-ui; }}
pre {{ overflow-x: auto; }} td, th {{ padding: .2rem .6rem; text-align: left; }} img {{ max-width: 100%; }}
</style><p><em>The site is not built here, so these pages lack live pictures and the playground: <code>make site</code>
builds it.</em> <a href="/contents.html">All pages</a></p>
"""


def included(found: re.Match[str]) -> str:
    """Return a file that a page includes, or its named part."""
    text = (ROOT / found[1]).read_text(encoding="utf-8")
    if found[2]:
        text = text.partition(f"[start:{found[2]}] -->\n")[2].partition("<!-- --8<-- [end:")[0]
    return text.rstrip("\n")


def html(text: str) -> str:
    """Return a page of the documentation as plain HTML."""
    text = re.sub(r'^ *--8<-- "([^":]+)(?::(\w+))?"$', included, text, flags=re.MULTILINE)
    text = re.sub(r"\[([^]]+)\]\((?:\.\./)*tutorials/(\w+)\.(?:md|py)[^)]*\)", r"\1 (`pipelab tutorial \2`)", text)
    text = re.sub(r"(\]\((?!http)[^)#]+)\.md\b", r"\1.html", text)
    site_only = r"\A---\n.*?\n---\n|<!--.*?-->|<iframe.*?</iframe>|(?<=\))\{[^}\n]*\}|^\{[^}\n]*\}$| ?\{ \.[^}\n]* \}"
    text = re.sub(site_only, "", text, flags=re.DOTALL | re.MULTILINE)
    title = (re.search(r"^# (.+)", text, re.MULTILINE) or ["", "pipelab"])[1]
    markdown = MarkdownIt("commonmark", {"html": True}).enable("table")
    return HEAD.format(title=title.replace("`", "")) + markdown.render(re.sub(r"<(/?)div[^>]*>", r"<\1div>\n", text))


def pages() -> Path:
    """Write all pages into a new folder, which is removed in the end; return it."""
    folder = Path(mkdtemp(prefix="pipelab-docs-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder, dirs_exist_ok=True)
    sources = sorted(path for path in folder.rglob("*.md") if path.parent.name != "results")
    for path in sources:
        path.with_suffix(".html").write_text(html(path.read_text(encoding="utf-8")), encoding="utf-8")
    links = [f"- [{path.stem}]({path.relative_to(folder).as_posix()})" for path in sources]
    (folder / "contents.html").write_text(html("# All pages\n\n" + "\n".join(links)), encoding="utf-8")
    return folder
