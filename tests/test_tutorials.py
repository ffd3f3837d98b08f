"""Every tutorial runs, and what it asserts holds."""

from __future__ import annotations

import re
import runpy
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import pipelab
from pipelab import Action, B, F

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    assert all(number + 1 in answers for number in asked)


class TwoActivations(pipelab.Schedule):
    """Rank 0 stays one forward ahead, the ranks in the middle go two by two, the last one turns around at once."""

    def actions(self, rank: int) -> Iterator[Action]:
        if rank == 0:
            yield F(0)
            for m in range(1, self.microbatches):
                yield F(m)
                yield B(m - 1)
            yield B(self.microbatches - 1)
            return
        group = 1 if rank == self.ranks - 1 else 2
        for first in range(0, self.microbatches, group):
            for m in range(first, first + group):
                yield F(m)
            for m in range(first, first + group):
                yield B(m)


class TwoByTwo(pipelab.Schedule):
    """GPipe with two micro-batches at a time."""

    def actions(self, rank: int) -> Iterator[Action]:
        for first in range(0, self.microbatches, 2):
            yield from (F(first), F(first + 1), B(first), B(first + 1))


class WarmedUp(pipelab.Schedule):
    """1F1B with a warm-up of any length on each rank."""

    def __init__(self, microbatches: int, warmups: tuple[int, ...]) -> None:
        super().__init__(len(warmups), microbatches)
        self.warmups = warmups

    def actions(self, rank: int) -> Iterator[Action]:
        warmup = self.warmups[rank]
        for m in range(warmup):
            yield F(m)
        for m in range(self.microbatches - warmup):
            yield B(m)
            yield F(warmup + m)
        for m in range(self.microbatches - warmup, self.microbatches):
            yield B(m)


def test_the_pars_of_the_first_schedule_can_be_reached() -> None:
    small = TwoActivations(ranks=4, microbatches=8)
    assert pipelab.check(small, memory_cap=2) == []
    assert pipelab.simulate(small).makespan == 51
    assert pipelab.simulate(TwoByTwo(ranks=4, microbatches=8)).makespan == 60

    ahead = pipelab.simulate(WarmedUp(8, (5, 4, 3, 1)), pipelab.Cost(latency=0.5))
    assert (ahead.makespan, ahead.peak_activations) == (37, (5, 4, 3, 1))


def test_no_1f1b_with_two_activations_reaches_the_par() -> None:
    legal = [each for each in product((1, 2), repeat=4) if not pipelab.check(WarmedUp(8, each), memory_cap=2)]
    makespans = {each: pipelab.simulate(WarmedUp(8, each)).makespan for each in legal}
    assert makespans[2, 2, 2, 1] == 69
    assert makespans[2, 2, 1, 1] == min(makespans.values()) == 54
