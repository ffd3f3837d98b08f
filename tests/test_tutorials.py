"""Every tutorial runs, and what it asserts holds."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

import pipelab

FOLDER = Path(__file__).parents[1] / "tutorials"
SOLUTIONS = FOLDER.parent / "teacher" / "solutions"
TUTORIALS = sorted(FOLDER.glob("*.py"))
"""Those of practical 9 run beside the tests of its table."""


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:.* ranks share:UserWarning")  # on a machine with fewer GPUs than ranks
@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial_runs_and_only_its_solution_reaches_par(
    tutorial: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # a tutorial may save files
    page = runpy.run_path(str(tutorial), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed
    if "reaches_par" in page:
        assert printed.endswith("not yet\n")
        assert page["reaches_par"](page["answer"]) is False
    solution = SOLUTIONS / tutorial.name
    if SOLUTIONS.exists():  # students' copies have no solutions
        assert solution.exists() == ("reaches_par" in page)
    if solution.exists():
        assert page["reaches_par"](runpy.run_path(str(solution))["answer"]) is True


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_says_the_minutes_of_its_words_and_needs_only_tutorials_before_it(tutorial: Path) -> None:
    """Teach's table is made from this sentence, and says how the minutes are estimated."""
    text = tutorial.read_text(encoding="utf-8")
    sentence = r"It takes about (\d+) minutes, and you need (.+?) before it"
    [(minutes, before)] = re.findall(sentence, text.replace("\n# ", " "))
    words = len(re.sub(r"(?m)^#( %%.*)?", "", text).split())
    predictions = len(re.findall(r"(?m)^# ## Predict: ", text))
    assert abs(int(minutes) - (words / 200 + 2 * predictions + 10)) < 1.5
    earlier = (FOLDER.parent / "mkdocs.yml").read_text(encoding="utf-8").partition(f"tutorials/{tutorial.stem}.md")[0]
    assert all(f"tutorials/{name}" in earlier for name in re.findall(r"\]\((\w+\.md)\)", before))


def test_the_job_of_reading_a_timeline_takes_and_waits_as_its_first_paragraph_says() -> None:
    as_planned = pipelab.simulate(pipelab.OneFOneB(4, 8), pipelab.Cost(forward=10, backward=20))
    cost = pipelab.Cost(forward=[10, 10, 16, 10], backward=[20, 20, 32, 20])
    trace = pipelab.simulate(pipelab.OneFOneB(4, 8), cost)
    assert round(trace.makespan / as_planned.makespan - 1, 2) == 0.39
    assert round(1 - sum(trace.busy) / 4 / trace.makespan, 2) == 0.40


@pytest.mark.parametrize(("room", "par"), [(2, 10), (3, 7)])
def test_no_choice_of_what_to_free_gathers_less_than_the_par_of_weights_as_a_cache(room: int, par: int) -> None:
    for row in pipelab.Interleaved1F1B(3, 6, stages_per_rank=4).plan().rows:
        fewest: dict[frozenset[int], int] = {frozenset(): 0}  # by what is gathered
        for stage in (action.stage for action in row):
            after: dict[frozenset[int], int] = {}
            for there, count in fewest.items():
                full = stage not in there and len(there) == room
                for gone in there if full else {None}:
                    now = (there - {gone}) | {stage}
                    after[now] = min(after.get(now, count + 1), count + (stage not in there))
            fewest = after
        assert min(fewest.values()) == par


@pytest.mark.teacher
def test_every_solution_belongs_to_a_tutorial() -> None:
    solutions = {each.name for each in SOLUTIONS.glob("*.py")}
    assert solutions
    assert solutions <= {each.name for each in TUTORIALS}


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_a_prediction_is_asked_before_its_answer(tutorial: Path) -> None:
    cells = re.split(r"^(?=# %%)", tutorial.read_text(encoding="utf-8"), flags=re.MULTILINE)
    asked = [
        number for number, cell in enumerate(cells) if re.search(r"^my_\w*prediction = None  # ", cell, re.MULTILINE)
    ]
    answers = {number for number, cell in enumerate(cells) if 'tags=["answer"]' in cell.partition("\n")[0]}
    assert asked or "reaches_par" not in tutorial.read_text(encoding="utf-8")
    assert all(number + 1 in answers for number in asked)
