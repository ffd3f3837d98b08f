"""Every tutorial runs, and what it asserts holds."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import pipelab
from pipelab import Action, B, F

if TYPE_CHECKING:
    from collections.abc import Iterator

TUTORIALS = sorted(Path(__file__).parents[1].glob("tutorials/*.py"))


@pytest.mark.filterwarnings("ignore:.* ranks share:UserWarning")  # on a machine with fewer GPUs than ranks
@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial_runs_and_its_numbers_hold(
    tutorial: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # a tutorial may save files
    runpy.run_path(str(tutorial), run_name="__main__")
    assert capsys.readouterr().out


class TwoActivations(pipelab.Schedule):
    """Rank 0 as in 1F1B with a shorter warm-up, the ranks between two by two, the last one at once: 1F1B in 2."""

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


class OneAhead(pipelab.Schedule):
    """1F1B with one more forward of warm-up on every rank but the last."""

    def actions(self, rank: int) -> Iterator[Action]:
        warmup = min(self.microbatches, self.ranks - rank + (rank < self.ranks - 1))
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

    ahead = pipelab.simulate(OneAhead(ranks=4, microbatches=8), pipelab.Cost(latency=0.5))
    assert (ahead.makespan, ahead.peak_activations) == (37, (5, 4, 3, 1))
