"""The playground's files: Python for the browser and an editor, from npm, pipelab without PyTorch, and first pictures.

`package-lock.json` in `docs/playground` pins Pyodide, CodeMirror and esbuild by version and hash; `npm ci` brings them
into `build/pyodide`, and esbuild makes one file of the editor. Where that fails, the playground has everything but
Python, a plain box for the code, and says why.
"""

from __future__ import annotations

import inspect
import io
import json
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pipelab
from pipelab.challenges.levels import INSTEAD, Level, built, levels
from pipelab.draw.order import drawings
from pipelab.draw.page import content, frame
from pipelab.plan.actions import TRAITS

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "docs" / "playground"
_EDITING = runpy.run_path(str(ROOT / "docs" / "editing.py"))
_VENDORED = ROOT / "build" / "pyodide"
_PYODIDE = _VENDORED / "node_modules" / "pyodide"
_FOLDERS = ("plan", "checking", "catalogue", "trace", "simulation", "draw", "challenges")
"""The half of pipelab that needs no PyTorch."""
_MADE_OF = ("package.json", "package-lock.json", "editor.mjs")
_WASM = "pyodide.asm.wasm"
_PLAIN = ("pyodide.mjs", "pyodide.asm.js", "pyodide-lock.json", "python_stdlib.zip")
_NOTICE = """\
Pyodide {version}: Python for the browser, unchanged but for the compression of one file.
Its licence is the Mozilla Public License 2.0: https://www.mozilla.org/MPL/2.0/
Its source is at https://github.com/pyodide/pyodide/tree/{version}
It holds CPython, whose licence is the Python Software Foundation's: https://docs.python.org/3/license.html
"""


def files() -> dict[str, bytes]:
    """Return what is generated for the folder `playground` of the site, by name.

    `engine.json` says how many bytes the browser loads to run Python, and how many of them it can count while they
    come; or the reason why it cannot run Python.
    """
    made = {"frame.html": frame().encode(), "pipelab.zip": _archive(), "schedules.json": _json(_schedules())}
    made["levels.json"] = _json(_levels())
    made["NOTICE.txt"] = _NOTICE.format(version=version()).encode()
    try:
        engine = vendored()
    except (OSError, subprocess.SubprocessError) as error:
        return made | {"engine.json": _json({"reason": _reason(error)}), "editor.js": b""}
    made["editor.js"] = (_VENDORED / "editor.js").read_bytes()
    licence = _VENDORED / "node_modules" / "@codemirror" / "view" / "LICENSE"
    made["NOTICE.txt"] += b"\nCodeMirror: the editor.\n" + licence.read_bytes()
    sizes = {name: len(each) for name, each in engine.items()}
    scripts = sum(size for name, size in sizes.items() if name.endswith("js"))
    every = len(made["pipelab.zip"]) + sum(sizes.values())
    made["engine.json"] = _json({"version": version(), "bytes": every, "counted": every - scripts})
    return made | {f"pyodide/{name}": each for name, each in engine.items()}


def version() -> str:
    """Return the pinned version of Pyodide."""
    lock = json.loads((SOURCES / "package-lock.json").read_text(encoding="utf-8"))
    return str(lock["packages"]["node_modules/pyodide"]["version"])


@cache
def vendored() -> dict[str, bytes]:
    """Return Pyodide's files; bring them, and the editor, where they are not there.

    Raises:
        OSError: if there is no npm.
        subprocess.SubprocessError: if npm cannot bring them.
    """
    if not _is_there():
        _bring()
    found = {name: (_PYODIDE / name).read_bytes() for name in _PLAIN}
    found[f"{_WASM}.deflate"] = zlib.compress((_PYODIDE / _WASM).read_bytes(), 9)
    return found


def _bring() -> None:
    """Let npm bring all, whole or not at all: other processes may build the site or run its tests, too."""
    npm = shutil.which("npm")
    if npm is None:
        raise FileNotFoundError("npm is not installed")
    _VENDORED.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_VENDORED.parent) as folder:
        fresh = Path(folder, "pyodide")
        fresh.mkdir()
        for name in _MADE_OF:
            shutil.copy(SOURCES / name, fresh)
        for command in (["ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"], ["run", "build"]):
            run = [npm, *command]
            subprocess.run(run, cwd=fresh, check=True, capture_output=True, text=True, timeout=300)  # noqa: S603 - npm
        if not _is_there():  # else another process was quicker
            shutil.rmtree(_VENDORED, ignore_errors=True)
            with suppress(OSError):
                fresh.rename(_VENDORED)


def _is_there() -> bool:
    """Return whether what the build folder holds was made of the files as they are."""
    kept = [(SOURCES / name, _VENDORED / name) for name in _MADE_OF]
    return all(made.is_file() and made.read_bytes() == source.read_bytes() for source, made in kept)


def body(base: str, still: str) -> str:
    """Return the playground as HTML for a page.

    Args:
        base: the address of the playground's files, relative to the page.
        still: the picture for a browser that runs no scripts, as HTML.
    """
    names = {"": "my schedule", **dict.fromkeys(pipelab.schedules)}
    options = "".join(f'<option value="{name}">{words or name}</option>' for name, words in names.items())
    options += '<option value="edited" hidden>other code</option>'
    parts = {"options": options, "base": base, "still": still}
    source = (SOURCES / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], source)


def challenges(base: str) -> str:
    """Return the challenges as HTML for a page; `base` is the address of the playground's files, relative to it."""
    return (SOURCES / "challenge.html").read_text(encoding="utf-8").replace("{{base}}", base)


def build(folder: Path) -> dict[str, Any]:
    """Write the whole playground into a folder, with a page that holds nothing else; return `engine.json`."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    style = '<style>:root{color-scheme:light dark}</style><link rel="icon" href="data:,">'
    page = f'<!DOCTYPE html><title>playground</title>{head}{style}<link rel="stylesheet" href="playground.css">'
    (folder / "index.html").write_text(page + body("", ""), encoding="utf-8")
    (folder / "challenges.html").write_text(page + challenges(""), encoding="utf-8")
    made = files()
    for name, each in made.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(each)
    for source in (*SOURCES.glob("*.js"), *SOURCES.glob("*.css")):
        shutil.copy(source, folder)
    return dict(json.loads(made["engine.json"]))


def _reason(error: Exception) -> str:
    said = getattr(error, "stderr", "") or str(error)
    return " ".join(str(said).split())[:300]


def _json(data: object) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode()


def _archive() -> bytes:
    """Return pipelab's half that needs no PyTorch, and the modules beside `playground.py`, as a zip."""
    package = ROOT / "pipelab"
    sources = [*package.glob("*.py"), *(each for name in _FOLDERS for each in package.glob(f"{name}/**/*"))]
    with io.BytesIO() as made:
        with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for each in sorted(sources):
                if each.is_file() and "__pycache__" not in each.parts:
                    archive.writestr(_entry(str(each.relative_to(ROOT))), each.read_bytes())
            for each in sorted(SOURCES.glob("*.py")):
                archive.writestr(_entry(each.name), each.read_bytes())
        return made.getvalue()


def _entry(name: str) -> zipfile.ZipInfo:
    """Return a zip's entry whose time is always the same, so that the same files make the same zip."""
    entry = zipfile.ZipInfo(name)
    entry.compress_type = zipfile.ZIP_DEFLATED
    return entry


_WORDS, _RULES = (
    ("name", "title", "story", "given", "goals", "unit", "hints", "lesson"),
    ("microbatches", "latency", "cap", "queued", "sharded", "within", "good", "par"),
)


def _levels() -> dict[str, dict[str, Any]]:
    """Return each level as `board.js` plays it: its rules are rows of `TRAITS`."""
    return {
        each.name: {
            **{key: getattr(each, key) for key in (*_WORDS, *_RULES)},
            "listed": [row.split() for row in each.listed],
            "home": [each.rank_of(stage) for stage in range(each.stages)],
            "times": [{kind: each.time(kind, rank) for kind in each.kinds} for rank in range(each.ranks)],
            "kinds": {
                kind: {
                    "needs": TRAITS[kind].needs,
                    "gives": TRAITS[kind].gives,
                    "held": TRAITS[kind].in_flight,
                    "instead": INSTEAD.get(kind, ()),
                    "colours": TRAITS[kind].colours,
                }
                for kind in each.kinds
            },
            # Of several with the same rows, the first counts.
            "known": {
                "; ".join(" ".join(map(str, row)) for row in plan.rows): built(name)
                for name, plan in reversed(each.known)
            },
            "circle": _circle(each) if each.listed else None,
        }
        for each in levels().values()
    }


def _circle(level: Level) -> dict[str, Any]:
    """Return the picture of what is wrong in a level's listed rows, without what would repair it."""
    faults = pipelab.check(pipelab.Plan.parse(list(level.listed)))
    made = runpy.run_path(str(SOURCES / "playground.py"))["picture"](drawings(faults)[0])
    return dict(made | {"hint": ""})


def _schedules() -> dict[str, dict[str, Any]]:
    """Return each schedule's source, and the content of its page, which is there before Python is; "" is the first."""
    first = SOURCES / "first.py"
    codes = {"": first.read_text(encoding="utf-8")} | {name: _code(kind) for name, kind in pipelab.schedules.items()}
    kinds = {"": runpy.run_path(str(first))["MySchedule"], **pipelab.schedules}
    return {
        name: {"code": codes[name], "content": content(pipelab.simulate(kind(ranks=4, microbatches=8)))}
        for name, kind in kinds.items()
    }


def _code(kind: type[pipelab.Schedule]) -> str:
    """Return a schedule's class as a file of its own, with what it needs of its file."""
    file = Path(str(inspect.getsourcefile(kind))).read_text(encoding="utf-8")
    return str(_EDITING["self_contained"]([file], inspect.getsource(kind)))


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
