"""Building blocks, failed ranks, and groups: what the parts of the catalogue's newer schedules refuse and give."""

from __future__ import annotations

import oracle
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import pipelab
from pipelab import UsageError, building_block, check, simulate

ONE = {"0F": 0, "1F": 1, "1B": 2, "0B": 4}


@given(data=st.data(), ranks=st.integers(1, 3), microbatches=st.integers(1, 6))
def test_every_block_is_a_legal_schedule_and_its_peaks_bound_what_is_held(data, ranks, microbatches):
    stages = data.draw(st.integers(ranks, 2 * ranks))
    place = [
        *range(ranks),
        *data.draw(st.lists(st.integers(0, ranks - 1), min_size=stages - ranks, max_size=stages - ranks)),
    ]
    split = data.draw(st.booleans())
    kinds = [(stage, "F") for stage in range(stages)] + [
        (stage, "I" if split else "B") for stage in reversed(range(stages))
    ]
    passes, slot = {}, 0
    for stage, kind in kinds:
        slot += data.draw(st.integers(0, 3))
        passes[f"{stage}{kind}"] = slot
        slot += 2 if kind == "B" else 1
    try:
        block = building_block(passes, data.draw(st.integers(3, 14)), place)
    except UsageError:  # two passes of a rank meet
        assume(False)
    plan = block.plan(microbatches)
    assert not check(plan)
    assert oracle.legal(plan.rows, plan.stages, microbatches)
    assert all(held <= peak for held, peak in zip(simulate(plan).peak_activations, block.peaks, strict=True))
    assert simulate(block.plan(40)).peak_activations == block.peaks


@pytest.mark.parametrize(
    ("passes", "interval", "told"),
    [
        ({**ONE, "1B": 1}, 3, r"1B starts in slot 1, but 1F, which it needs, ends with slot 1\n  try: slot 2 "),
        ({**ONE, "0B": 3}, 3, r"0B starts in slot 3, but 1B, which it needs, ends with slot 3\n  try: slot 4 "),
        (ONE, 2, r"1F and 1B of rank 1 meet: slot 3, and every 2 later"),
        ({"0F": 0, "1F": 1, "1B": 2}, 3, r"no slot for 0B"),
        ({"0F": 0, "0I": 1, "0W": 1}, 3, r"0W starts in slot 1, but 0I"),
        (ONE, 0, r"interval"),
        ({"0F": 0, "1F": 1, "1I": 2, "0I": 4, "0W": 5}, 3, r"no slot for 1W"),
        ({"0F": 0, "1F": 1, "1I": 2, "0I": 4, "1B": 9}, 3, r"has F, I, B\n  try: F and B, or F and I"),
        ({"0F": 0, "0B": 1, "0W": 4}, 4, r"has F, B, W"),
        ({**ONE, "0B": "4"}, 3, r"'4' for 0B: expected a slot"),
        ({**ONE, "0B": 4.5}, 3, r"4.5 for 0B"),
        ({}, 3, r"the block has no passes"),
        ({"0F": 0, "0I": 1}, 2, r"rank 0 has 3 slots .* every 2 slots\n  try: interval=3"),
    ],
)
def test_a_block_that_cannot_be_is_refused_with_its_slots(passes, interval, told):
    with pytest.raises(UsageError, match=told):
        building_block(passes, interval)


@pytest.mark.parametrize("place", [[0], [1, -1], [0, 2]])
def test_a_place_that_leaves_a_stage_or_a_rank_out_is_refused(place):
    with pytest.raises(UsageError, match="place="):
        building_block(ONE, 6, place)


@pytest.mark.sweep
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 8), (3, 9), (4, 8), (4, 12), (4, 16)])
@pytest.mark.parametrize("group_size", [1, 2, 3, 4, 6, 8, 16])
@pytest.mark.parametrize("stages_per_rank", [1, 2, 3])
def test_groups_change_the_peak_and_not_the_makespan(ranks, microbatches, group_size, stages_per_rank):
    def made():
        return pipelab.Interleaved1F1B(ranks, microbatches, stages_per_rank, group_size)

    if group_size < ranks:
        with pytest.raises(UsageError, match=f"try: group_size={ranks} or more"):
            made()
    elif microbatches > group_size and microbatches % group_size:
        with pytest.raises(UsageError, match="does not divide"):
            made()
    else:
        trace = simulate(made())
        assert trace.makespan == pytest.approx(3 * (microbatches + (ranks - 1) / stages_per_rank))
        ahead = (stages_per_rank - 1) * min(group_size, microbatches) + 1
        most = stages_per_rank * microbatches
        assert trace.peak_activations == tuple(min(most, ahead + 2 * (ranks - 1 - rank)) for rank in range(ranks))
