"""Every tutorial runs, and what it asserts holds."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "tutorials"
TUTORIALS = sorted(FOLDER.glob("*.py"))
"""Those of practical 9 run beside the tests of its table."""
SOLUTIONS = sorted((FOLDER / "solutions").glob("*.py"))


@pytest.mark.filterwarnings("ignore:.* ranks share:UserWarning")  # on a machine with fewer GPUs than ranks
@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial_runs_and_only_its_solution_reaches_par(
    tutorial: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # a tutorial may save files
    page = runpy.run_path(str(tutorial), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed
    solution = FOLDER / "solutions" / tutorial.name
    assert solution.exists() == ("reaches_par" in page)
    if solution.exists():
        assert printed.endswith("not yet\n")
        assert page["reaches_par"](page["answer"]) is False
        assert page["reaches_par"](runpy.run_path(str(solution))["answer"]) is True


def test_every_solution_belongs_to_a_tutorial() -> None:
    assert SOLUTIONS
    assert {each.name for each in SOLUTIONS} <= {each.name for each in TUTORIALS}


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_a_prediction_is_asked_before_its_answer(tutorial: Path) -> None:
    cells = re.split(r"^(?=# %%)", tutorial.read_text(encoding="utf-8"), flags=re.MULTILINE)
    asked = [
        number for number, cell in enumerate(cells) if re.search(r"^my_\w*prediction = None  # ", cell, re.MULTILINE)
    ]
    answers = {number for number, cell in enumerate(cells) if 'tags=["answer"]' in cell.partition("\n")[0]}
    assert asked or not (FOLDER / "solutions" / tutorial.name).exists()
    assert all(number + 1 in answers for number in asked)
