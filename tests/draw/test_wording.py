"""Numbers, names and colours as readers get them."""

from __future__ import annotations

import re

import pytest

import pipelab
from pipelab import B, Cost, F, GPipe, OneFOneB
from pipelab.draw import colours, differences, wording
from pipelab.draw.bars import Lanes
from pipelab.draw.figure import strip
from pipelab.draw.page import _column, _runs


@pytest.mark.parametrize(
    ("number", "words"),
    [(33.0, "33"), (12285, "12,285"), (58.25, "58.25"), (0.123456, "0.123"), (1234.567, "1,235")],
)
def test_a_number_has_at_most_two_decimals_in_full_and_three_digits_otherwise(number, words):
    assert wording.number(number) == words


def test_shares_have_a_decimal_where_all_are_small():
    assert wording.percent(3 / 11) == "27.3 %"
    assert wording.percents([0.5, 0.375, 0.25, 0.125]) == "50 38 25 13 %"
    assert wording.percents([0.032, 0.001]) == "3.2 0.1 %"


def test_of_many_values_the_middle_is_left_out():
    assert wording.elided([4, 3, 2, 1]) == "4 3 2 1"
    assert wording.elided(range(32, 0, -1)) == "32 31 30 … 2 1"


def test_a_difference_has_a_sign_unless_it_is_none():
    assert [differences.signed(number) for number in (4.0, -1.9, 0.0)] == ["+4", "-1.9", "0"]


def test_long_heads_are_wrapped_where_the_lines_would_be_too_wide():
    rows = [("name", "busy share per rank"), ("GPipe", "73 73 73 73 %")]
    assert wording.columns(rows, 80) == ["name   busy share per rank", "GPipe        73 73 73 73 %"]
    assert wording.columns(rows, 24) == ["name      busy share", "            per rank", "GPipe  73 73 73 73 %"]


def test_own_spans_are_named_where_all_are_shorter_than_the_makespan():
    shown = "Every rank holds up to 7 activations. From first start to last end, ranks take 24 24 24 24."
    assert wording.caption(pipelab.simulate(pipelab.ZBH2(4, 8))).endswith(shown)
    assert "ranks take" not in wording.caption(pipelab.simulate(OneFOneB(4, 8)))


def test_a_caption_says_time_bubble_who_limits_it_and_memory():
    said = "A step takes 33 units. The ranks idle 27.3 % of it (the bubble); "
    assert wording.caption(pipelab.simulate(OneFOneB(4, 8))) == (
        f"{said}rank 3 limits it. Rank 0 holds up to 4 activations (by rank: 4 3 2 1)."
    )
    # Its critical path is as long on rank 0 as on the others together.
    alone = f"{said}no rank alone limits it. Every rank holds up to 8 activations."
    assert wording.caption(pipelab.simulate(GPipe(4, 8))) == alone
    slow = pipelab.simulate(GPipe(4, 8), Cost(forward=[1, 1, 4, 1], backward=[2, 2, 6, 2]))
    assert "; rank 2 limits it." in wording.caption(slow)


def test_of_slices_a_caption_and_the_example_say_how_much_of_a_sequence_they_are():
    sliced = pipelab.simulate(pipelab.Seq1F1B(4, 8))
    held = "Rank 0 holds up to 5 activations of slices, each 1/2 of a sequence (by rank: 5 4 3 2)."
    assert wording.caption(sliced).endswith(held)
    assert wording.example([sliced]) == ("F3 = forward of slice 3, 1/2 of a sequence", "")


def test_a_comparison_says_each_meaning_of_a_box_once():
    def example(*plans):
        return wording.example([pipelab.simulate(plan) for plan in plans])

    micro, half = "F1 = forward of micro-batch 1", "F1 = forward of slice 1, 1/2 of a sequence"
    assert example(OneFOneB(4, 8), pipelab.Seq1F1B(4, 2)) == (f"{micro} or {half}", "")
    assert example(OneFOneB(4, 2), GPipe(4, 8)) == (micro, "")
    words, paler = example(pipelab.Seq1F1B(2, 4), pipelab.Hanayo(2, 4), pipelab.SlimPipe(4, 8))
    assert re.findall(r"\d/\d", words) == ["1/2", "1/4"]
    assert (paler, example(pipelab.Hanayo(2, 4, 4))[1]) == ("paler: 2nd stage", "paler: every 2nd stage")


@pytest.mark.parametrize(
    ("plan", "found", "share"),
    [
        (OneFOneB(2, 4), [], ""),
        (pipelab.SlimPipe(4, 8), [4, 4, 4, 4], "1/4"),
        (pipelab.replicate(pipelab.Seq1F1B(2, 4), 2), [2, 2, 2, 2], "1/2"),
        (pipelab.Plan.parse("0F0 0F1 0F2 0F3 0B3 0B2 0B1 0B0", after=lambda m, s: [m - 2] * (m > 1)), [], "1/2"),
        (pipelab.Plan.parse("0F0 0F1 0F2 0B2 0B1 0B0", after=lambda m, s: [0] * (m == 1)), [2], "part"),
        (pipelab.Plan.parse(["0F0 0F1 1F0 1F1 1B1 1B0 0B1 0B0", ""], after=lambda m, s: [0] * m), [2, 0], "1/2"),
    ],
)
def test_a_bracket_holds_the_slices_of_one_sequence_and_no_others(plan, found, share):
    trace = pipelab.simulate(plan)
    assert wording.brackets(trace) == found
    assert wording.marks([trace]) == [f"┌┐ {max(found)} slices: a sequence" for _ in found[:1]]
    said = re.findall(r"(?:, |each )(\S+) of a sequence", wording.example([trace])[0] + wording.caption(trace))
    assert said == [share, share] * bool(share)


def test_a_caption_tells_recomputation_from_work():
    again = pipelab.simulate(pipelab.Plan.parse("0F0 0C0 0B0"))
    assert "idle 0.0 % of it (the bubble) and recompute 25.0 %." in wording.caption(again)


@pytest.mark.parametrize(
    ("plan", "cost", "says"),
    [
        (pipelab.OneFOneB(4, 8), None, "rank 3 limits it"),
        (pipelab.GPipe(4, 8), None, "no rank alone limits it"),  # each works 24 of 33 units on the longest paths
        (pipelab.DualPipe(4, 8), None, "no rank alone limits it"),  # two ranks are alike
        (pipelab.GPipe(4, 8), pipelab.Cost(forward=[1, 1, 2, 1]), "rank 2 limits it"),
    ],
)
def test_a_rank_limits_a_step_if_only_its_time_makes_the_step_longer(plan, cost, says):
    assert says in wording.caption(pipelab.simulate(plan, cost) if cost else pipelab.simulate(plan))


def test_an_idea_is_the_first_sentence_of_the_schedule_that_was_written_last_under_a_name():
    def idea(plan):
        return wording.idea(pipelab.simulate(plan))

    class Mine(pipelab.OneFOneB):
        """Says `what` it is. And
        more.
        """

    class Silent(pipelab.OneFOneB):
        pass

    fill = "Fill the pipe, then one backward for every new forward."
    assert idea(OneFOneB(2, 2)) == idea(pipelab.replicate(OneFOneB(2, 2), 2)) == fill
    assert (idea(Mine(2, 2)), idea(Silent(2, 2))) == ("Says what it is.", "")
    assert idea(pipelab.Plan.parse("0F0 0B0")) == ""
    theirs = type("Mine", (pipelab.Schedule,), {"actions": lambda self, rank: OneFOneB(2, 2).actions(rank)})
    assert idea(theirs(2, 2)) == ""
    again = type("Mine", (OneFOneB,), {"__doc__": "Like GPipe, e.g. and 1F1B vs. GPipe: as\nin a notebook"})
    assert idea(again(2, 2)) == "Like GPipe, e.g. and 1F1B vs. GPipe: as in a notebook."
    type("Mine", (pipelab.Schedule,), {"__doc__": "My `schedule`:\n\n    rank 0 | F0"})
    assert idea(again(2, 2)) == "My schedule."
    for other in (OneFOneB(2, 2).plan().forwards(), GPipe(2, 2).plan().with_rows(OneFOneB(2, 2).plan().rows)):
        assert idea(other) == ""


def test_an_idea_is_true_of_its_own_picture():
    half = pipelab.simulate(pipelab.VHalf(4, 8))
    assert max(half.peak_activations) == 6  # of halves: 3, and 1F1B holds 4
    assert "towards half" in wording.idea(half)
    assert "once or several times" in wording.idea(pipelab.simulate(pipelab.Hanayo(4, 8)))


@pytest.mark.parametrize(
    ("plan", "found"),
    [
        (pipelab.DualPipe(4, 8), {0: (0, 1, 2, 3), 4: (3, 2, 1, 0)}),
        (pipelab.ZBV(2, 4), {0: (0, 1, 1, 0)}),
        (pipelab.LoopedBFS(2, 4), {}),  # from the last rank to the first is no turn
        (pipelab.replicate(OneFOneB(2, 4), 2), {}),
        (pipelab.Plan.parse("0F0 1F0 1B0 0B0; 2F0 3F0 3B0 2B0"), {}),
    ],
)
def test_ways_are_those_of_which_one_goes_up(plan, found):
    assert wording.ways(pipelab.simulate(plan)) == found


def test_a_comparison_is_a_row_of_figures_for_each_trace():
    heads, row = wording.table(pipelab.compare(pipelab.simulate(OneFOneB(4, 8)), names=["1F1B"]))
    assert heads == ("name", "step time", "bubble", "peak activations")
    assert row == ("1F1B", "33 units", "27.3 %", "4 3 2 1")


def test_a_schedule_is_called_what_papers_call_it_with_its_sizes():
    assert wording.called("ZBH1(ranks=4, microbatches=8), simulated") == "ZB-H1 · 4 ranks, 8 micro-batches, simulated"
    assert wording.called("Mine(ranks=1, microbatches=2, lag=3)") == "Mine · 1 rank, 2 micro-batches, lag=3"


def test_costs_are_named_by_kind_with_their_unit():
    trace = pipelab.simulate(GPipe(4, 8), Cost(backward=2.5, latency=0.5, unit="ms"))
    assert wording.costs(trace) == "F = 1, B = 2.5, transfer 0.5 (ms)"
    assert wording.costs(pipelab.simulate(pipelab.DualPipe(4, 8))) == "F = 1, I = 1, W = 1, B = 2"  # R takes no time


def test_two_equal_traces_take_as_long():
    same = pipelab.simulate(OneFOneB(2, 2))
    assert differences.sentence(pipelab.diff(same, same, names=["a", "b"])) == "b takes as long as a (9 units)"


def test_the_first_action_that_differs_is_named_with_both_times():
    one, two = (pipelab.simulate(OneFOneB(2, 2), Cost(latency=latency)) for latency in (0, 0.5))
    told = "the first action that differs is 1F0 on rank 1: it starts at 1.5 instead of 1 (+0.5)"
    assert differences.first(pipelab.diff(one, two)) == told


def test_a_colour_is_the_kinds_and_lighter_on_a_ranks_second_stage():
    assert [colours.of(F(0)), colours.of(F(0), 1), colours.of(B(0))] == ["#00598A", "#1F78AF", "#DA9700"]
    assert [colours.ink("#00598A"), colours.ink("#DFD112")] == ["#FFFFFF", "#000000"]
    assert colours.channels("#FF8000") == (255, 128, 0)
    assert colours.ansi("#0072B2") == 25


def test_idle_time_says_what_it_waits_for_in_ever_fewer_words():
    (gap,) = Lanes(pipelab.simulate(OneFOneB(2, 1))).gaps(0)
    assert (gap.start, gap.end) == (1, 4)
    assert gap.words == ("wait 3 for B0 of rank 1", "wait for B0 of rank 1", "for B0 of rank 1", "for rank 1", "r1")


def test_a_pixel_of_a_strip_is_as_busy_as_its_time():
    assert strip(Lanes(pipelab.simulate(GPipe(2, 1))), 1, 3)[0, :, 3].tolist() == [0.5, 1, 0]


def test_a_pages_numbers_are_differences_and_runs_of_them_are_short():
    assert _column("AABABAB", [0, 1, 0, 2, 1, 3, 2]) == [0, 1, 0, [1, 4]]
    assert _runs([1, 2, 2, 2, 2, 2, 3, 3]) == [1, [2, 5], 3, 3]


def test_a_diffs_table_counts_the_actions_that_it_leaves_out():
    even, uneven = (pipelab.simulate(GPipe(2, 1), Cost(forward=forward)) for forward in (1, [1, 1.5]))
    notes = [differences.table(pipelab.diff(even, uneven), most=most).notes[-1] for most in (2, 1)]
    assert notes == ["1 more action changes, with a smaller effect", "2 more actions change, with a smaller effect"]
