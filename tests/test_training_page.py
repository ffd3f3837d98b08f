"""The page about plain training code: its blocks run from top to bottom, and print what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "training.md").read_text(encoding="utf-8")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # TorchDynamo
def test_the_pages_code_runs_and_prints_what_it_says(capsys):
    made = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL):
        exec(block, made)  # noqa: S102 - it is the page's own
    printed = capsys.readouterr().out.splitlines()
    said = re.findall(r"print\(.*\)  # (.*?)(?: …)?$", PAGE, flags=re.MULTILINE)
    assert len(said) == len(printed) == 2
    for line, promised in zip(printed, said, strict=True):
        assert line.startswith(promised)
