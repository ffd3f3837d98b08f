"""The documentation's own tools, and the site that they build."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

TUTORIAL = """# %% [markdown]
# # A title
#
# A story; before it comes [another](first_schedule.md#here).

# %%
print("question")

# %% tags=["answer"]
import pipelab

print("printed")
pipelab.simulate(pipelab.GPipe(2, 2))

# %% [markdown] tags=["answer"]
# Because.

# %%
1 + 1
"""


def test_answers_of_a_tutorial_are_folded_and_its_notebook_has_outputs() -> None:
    nbformat = pytest.importorskip("nbformat", reason="comes with the tools of documentation")
    pytest.importorskip("jupytext", reason="comes with the tools of documentation")
    hooks = runpy.run_path(str(ROOT / "docs" / "hooks.py"))
    page, written, figures = hooks["render"]("small", TUTORIAL)

    assert page.startswith("# A title\n\n[Notebook](small.ipynb){ download } [Script](small.py){ download }\n")
    before, folded, after = (page.split("<details", 1)[0], *page.split("<details", 1)[1].split("</details>"))
    assert "question" in before
    assert "Because." not in before + after
    assert all(text in folded for text in ("show the answer", 'print("printed")', "small-2.svg", "Because."))
    assert "```text\n2\n```" in after

    book = nbformat.reads(written, as_version=4)
    nbformat.validate(book)
    assert "](first_schedule.ipynb#here)" in book.cells[0].source
    printed, drawn = book.cells[2].outputs
    assert printed.text == "printed\n"
    assert drawn.data["image/svg+xml"] == figures["small-2.svg"]
    assert book.cells[4].outputs[0].data == {"text/plain": "2"}
    assert [cell.execution_count for cell in book.cells if cell.cell_type == "code"] == [1, 2, 3]
