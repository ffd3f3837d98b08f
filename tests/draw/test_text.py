"""Text timelines and tables, compared with the readable files in tests/golden/."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest

import pipelab
from pipelab import B, Cost, F, Plan, R
from pipelab.draw import FORMATS, TRACE, text
from pipelab.draw.bars import Lanes

GOLDEN = Path(__file__).parents[1] / "golden"

PLAIN = [
    *("naive", "gpipe", "1f1b", "delayed", "interleaved-1f1b", "looped-bfs"),
    *("zb-h1", "zb-h2", "interleaved-zb", "zbv", "dualpipev"),
]
OVERLAPPED = Plan([[F(0), F(1), F(2) & B(0), B(1), B(2)], [F(0), B(0), F(1), B(1), F(2), B(2)]])
DRAWINGS = {f"{name}-4x8": (pipelab.schedules[name](4, 8), Cost()) for name in PLAIN} | {
    "eager-1f1b-4x8-latency": (pipelab.Eager1F1B(4, 8), Cost(latency=1)),
    "dualpipev-4x8-pairs-as-one-slot": (pipelab.DualPipeV(4, 8), Cost(pair=2.5)),
    "1f1b-2x4": (pipelab.OneFOneB(2, 4), Cost()),
    "1f1b-4x8-latency-ms": (pipelab.OneFOneB(4, 8), Cost(forward=1.3, backward=2.15, latency=0.4, unit="ms")),
    "1f1b-32x1024": (pipelab.OneFOneB(32, 1024), Cost()),
    "pair-as-one-slot": (OVERLAPPED, Cost(pair=3)),
}
"""To write a golden file anew: `trace.save("tests/golden/NAME.txt")`, then read what changed."""

IN_WORDS = re.compile(r"(?<=·)[a-z]+[^·]*(?=·)")


def dotted(drawn: str) -> str:
    """Return a drawing whose idle times are dots, without words."""
    return IN_WORDS.sub(lambda words: "·" * len(words[0]), drawn)


def lanes(drawn: str) -> list[str]:
    """Return what stands right of the bar, rank by rank, without the words of idle times."""
    return [line.split("│")[1] for line in dotted(drawn).splitlines() if "│" in line]


@pytest.fixture
def one_f_one_b():
    return pipelab.simulate(pipelab.OneFOneB(4, 8))


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_saved_timeline_is_the_golden_one(name, tmp_path):
    drawn = pipelab.simulate(*DRAWINGS[name]).save(tmp_path / "drawn.txt").read_text(encoding="utf-8")
    assert drawn == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "kinds", "golden"),
    [
        ("naive GPipe 1F1B", (pipelab.Naive, pipelab.GPipe, pipelab.OneFOneB), "comparison-4x8"),
        (  # captions name own spans where all are shorter than the step
            "1F1B ZB-H1 ZB-H2 ZB-V",
            (pipelab.OneFOneB, pipelab.ZBH1, pipelab.ZBH2, pipelab.ZBV),
            "comparison-zero-bubble-4x8",
        ),
    ],
)
def test_a_comparison_is_the_golden_one(name, kinds, golden, tmp_path):
    traces = [pipelab.simulate(kind(4, 8)) for kind in kinds]
    drawn = pipelab.compare(*traces, names=name.split()).save(tmp_path / "drawn.txt")
    assert drawn.read_text(encoding="utf-8") == (GOLDEN / f"{golden}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [76, 120, 300])
def test_every_action_starts_and_ends_where_its_times_say(one_f_one_b, width):
    rows = lanes(text.timeline(one_f_one_b, width, colour=False))
    scale = {76: 2, 120: 3, 300: 3}[width]
    for event in one_f_one_b.events:
        label = f"{event.action.kind}{event.action.microbatch}"
        cell = f"{rows[event.rank]} "[int(event.start * scale) : int(event.end * scale)]
        assert cell.startswith(label)
        assert "·" not in cell
        assert rows[event.rank].count(label) == 1


def test_idle_time_is_as_many_dots_as_the_bubble_is_long(one_f_one_b):
    rows = lanes(text.timeline(one_f_one_b, 120, colour=False))
    assert sum(row.count("·") for row in rows) == pytest.approx(one_f_one_b.bubble * 4 * 33 * 3)


def test_idle_time_says_how_long_and_for_what_where_there_is_room(one_f_one_b):
    drawn = text.timeline(one_f_one_b, 300, colour=False).splitlines()
    assert "F3 ·for B0 of rank 1·B0" in drawn[2]
    assert "··drain 6··" in drawn[5]
    assert "F1 ··r3··B0" in drawn[4]
    assert drawn[-1].endswith("; · wait (r1: rank 1), not begun, done")
    alone = text.timeline(pipelab.simulate(pipelab.OneFOneB(1, 2)), colour=False)
    assert alone.endswith("F1 = forward of micro-batch 1; B backward")  # nothing is idle
    assert not re.search(r"·\d", "".join(drawn))  # a bare number is a micro-batch


def test_a_timeline_that_is_too_wide_keeps_its_begin_and_its_end_and_counts_the_rest():
    drawn = text.timeline(pipelab.simulate(pipelab.OneFOneB(4, 1000)), 100, colour=False)
    first = lanes(drawn)[0]
    assert first.startswith("F0")
    assert "B999" in first
    shown = sum(part.count(kind) for part in (first.split("┄")[0], first.split("┄")[-1]) for kind in "FB")
    assert f"┄ {2000 - shown:,} more: " in first
    assert max(map(len, drawn.splitlines()[1:])) <= 100


@pytest.mark.sweep
@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", sorted(pipelab.schedules))
def test_a_timeline_folded_into_bands_has_every_action_once(name, width):
    trace = pipelab.simulate(pipelab.schedules[name](4, 8))
    drawn = text.timeline(trace, width, colour=False)
    assert max(map(len, drawn.splitlines())) <= width
    several = Lanes(trace).names_stages
    for rank in range(4):
        row = " ".join(line.split("│")[1] for line in dotted(drawn).splitlines() if line.startswith(f"rank {rank} "))
        listed = [event.action for event in trace.events if event.rank == rank and event.action.kind != "R"]
        assert sorted(re.findall("[FBIW]", row)) == sorted(action.kind for action in listed)
        if several:
            assert re.findall(r"\d+[FBIW]\d+", row) == list(map(str, listed))


@pytest.mark.parametrize(
    ("schedule", "width"),
    [(pipelab.OneFOneB(4, 8), 48), (pipelab.Naive(4, 8), 110), (pipelab.OneFOneB(4, 16), 120)],
)
def test_in_a_narrow_drawing_forwards_are_cut_and_backwards_keep_numbers(schedule, width):
    trace = pipelab.simulate(schedule)
    drawn = text.timeline(trace, width, colour=False)
    assert "┄" not in drawn
    assert max(map(len, drawn.splitlines()[1:])) <= width
    for row in lanes(drawn):
        assert re.findall(r"B\d+", row) == [f"B{m}" for m in range(schedule.microbatches)]
        assert row.count("F") == schedule.microbatches


@pytest.mark.parametrize(
    ("plan", "width"),
    [
        (pipelab.OneFOneB(4, 8), 40),  # 33 units in 32 columns
        (pipelab.GPipe(4, 12), 80),  # B10 has 3.2 columns, but F1 only 1.6
        (Plan.parse(["0F0 2F0 0F1 2F1 2B0 0B0 2B1 0B1", "1F0 1F1 1B0 1B1"]), 60),  # which stage, nobody can guess
    ],
)
def test_where_numbers_would_be_lost_it_is_folded_into_bands_and_all_labels_are_whole(plan, width):
    drawn = text.timeline(pipelab.simulate(plan), width, colour=False)
    assert "┄" not in drawn
    assert len(lanes(drawn)) > plan.ranks
    assert not re.findall(r"[FB](?!\d)", "".join(lanes(drawn)))


@pytest.mark.parametrize(
    ("schedule", "elided"),
    [
        (pipelab.OneFOneB, r"┄ [\d,]+ more: (FB|BF) x 99\d ┄"),
        (pipelab.ZBH1, r"┄ [\d,]+ more: (FIW|IWF|WFI) x 99\d ┄"),
        (pipelab.GPipe, "more ┄"),  # nothing repeats
    ],
)
def test_what_repeats_in_the_left_out_middle_is_named_with_its_count(schedule, elided):
    for row in lanes(text.timeline(pipelab.simulate(schedule(4, 1000)), 80, colour=False))[:1]:
        assert re.search(elided, row)


def test_sixty_four_ranks_take_a_dozen_lines_and_make_no_cell_of_the_elided_part(monkeypatch):
    trace = pipelab.simulate(pipelab.OneFOneB(64, 512))
    made = []
    monkeypatch.setattr(text, "cell", lambda label, width, cell=text.cell: made.append(label) or cell(label, width))
    lines = text.timeline(trace, 120, colour=False).splitlines()
    assert len(lines) == 3 + 8 + 1 + 4 + 2 + 1
    assert any("52 more ranks" in line for line in lines)
    assert "(by rank: 64 63 62 … 2 1)" in " ".join(lines[1:3])
    assert len(made) < 300


def test_a_label_that_does_not_fit_never_reads_as_another_action():
    assert text.cell("B10", 2) == "B…"
    assert text.cell("2F0", 1) == "F"
    assert text.cell("F0", 0) == ""


def test_nothing_that_takes_time_still_draws():
    trace = pipelab.simulate(pipelab.OneFOneB(2, 300), Cost(forward=0, backward=0, latency=1))
    drawn = text.timeline(trace, 120, colour=False)
    assert "idle 100.0 %" in drawn
    assert all(set(row) <= set("·┄ more: FBx0123456789") for row in lanes(drawn))


def test_a_measured_trace_begins_at_zero_and_what_takes_no_time_moves_nobody():
    plan = pipelab.OneFOneB(1, 1).plan()
    trace = pipelab.Trace(plan, [[5000.0, 5001.0]], [[5001.0, 5003.0]], unit="ms", source="measured")
    drawn = text.timeline(trace, colour=False)
    assert "measured\nA step takes 3 ms" in drawn
    assert "0 ms" in drawn.splitlines()[-2]
    reduced = text.timeline(pipelab.simulate(Plan([[F(0), B(0), R(stage=0)]])), colour=False)
    assert lanes(drawn) == lanes(reduced) == ["F0 B0───"]


def test_names_cannot_move_the_cursor(one_f_one_b):
    named = pipelab.Trace(one_f_one_b.plan, one_f_one_b.starts, one_f_one_b.ends, name="red\x1b[31m\nname")
    drawn = text.timeline(named, colour=False)
    assert "\x1b" not in drawn
    assert "red\\x1b[31m\\nname" in drawn.splitlines()[0]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_colour_is_for_terminals_only(one_f_one_b, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b" not in text.timeline(one_f_one_b)
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert "\x1b[" in text.timeline(one_f_one_b)
    assert "\x1b" not in str(one_f_one_b)  # which may be written anywhere
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in text.timeline(one_f_one_b)


def test_colour_changes_no_letter(one_f_one_b):
    coloured = text.timeline(one_f_one_b, 120, colour=True)
    plain = text.timeline(one_f_one_b, 120, colour=False)
    bare = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert [line.rstrip() for line in bare.splitlines()] == plain.splitlines()


def test_columns_are_heard_in_a_terminal_and_without(one_f_one_b, monkeypatch):
    trace = pipelab.simulate(pipelab.GPipe(4, 128))
    monkeypatch.delenv("COLUMNS", raising=False)
    assert max(map(len, text.timeline(trace).splitlines())) <= 120
    assert "more ┄" in text.timeline(trace)
    monkeypatch.setenv("COLUMNS", "2000")
    assert "more ┄" not in text.timeline(trace)
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, text.timeline(one_f_one_b, colour=False).splitlines()[1:])) <= 60


def test_a_comparison_on_one_axis_has_one_scale():
    short, long = (pipelab.simulate(pipelab.OneFOneB(2, count)) for count in (2, 6))
    drawn = text.comparison(pipelab.compare(short, long), 120, colour=False)
    first_of_short, first_of_long = lanes(drawn)[0], lanes(drawn)[2]
    assert first_of_short.index("B0") == first_of_long.index("B0")
    assert sum(line.strip().startswith("0 units") for line in drawn.splitlines()) == 1
    assert "differ" not in drawn


def test_the_table_of_a_comparison_fits_eighty_columns():
    kinds = (pipelab.Naive, pipelab.OneFOneB, pipelab.ZBH2)
    drawn = text.comparison(pipelab.compare(*(pipelab.simulate(kind(4, 8)) for kind in kinds)), 80, colour=False)
    table = drawn.split("\n\n")[0]
    assert max(map(len, table.splitlines())) <= 80
    assert table.splitlines()[0].split() == ["name", "step", "time", "bubble", "peak", "activations"]


def test_a_short_trace_beside_one_that_is_too_long_is_whole_on_the_same_scale():
    kinds = (pipelab.Naive, pipelab.GPipe)
    drawn = text.comparison(pipelab.compare(*(pipelab.simulate(kind(4, 8)) for kind in kinds)), 80, colour=False)
    naive, gpipe = lanes(drawn)[:4], lanes(drawn)[4:]
    assert all("more: " in row for row in naive)
    assert not any("┄" in row for row in gpipe)
    assert "B7" in gpipe[0]
    assert naive[3].index("B0") - naive[3].index("F0") == gpipe[3].index("F1") - gpipe[3].index("F0")
    assert sum(line.strip().startswith("0 units") for line in drawn.splitlines()) == 2
    assert max(map(len, drawn.splitlines())) <= 80


def test_a_comparison_of_different_units_says_so():
    plan = pipelab.OneFOneB(2, 2)
    both = pipelab.compare(pipelab.simulate(plan), pipelab.simulate(plan, Cost(forward=40, backward=80, unit="ms")))
    drawn = text.comparison(both, 120, colour=False)
    assert "The units of time differ (units, ms)" in drawn
    assert "0 units" in drawn
    assert "0 ms" in drawn


def test_an_unknown_suffix_lists_the_known_ones_which_are_a_table(one_f_one_b, tmp_path, monkeypatch):
    with pytest.raises(pipelab.PipelabError, match=r"\.gif; use one of \.html \.svg \.png \.pdf \.txt \.json"):
        one_f_one_b.save(tmp_path / "timeline.gif")
    with pytest.raises(pipelab.PipelabError, match=r"without a suffix; use one of \.html"):
        pipelab.compare(one_f_one_b).save(tmp_path / "timeline")
    monkeypatch.setitem(FORMATS[TRACE], ".words", lambda trace, path: path.write_text(trace.name) and path)
    assert one_f_one_b.save(tmp_path / "TIMELINE.Words").read_text() == one_f_one_b.name


@pytest.mark.parametrize("suffix", [".csv", ".txt"])
def test_whatever_is_made_can_be_saved(one_f_one_b, tmp_path, suffix):
    memory = pipelab.Memory(weights=10, activations=1)
    shown = (one_f_one_b.ledger, pipelab.memory_use(one_f_one_b, memory), pipelab.lower(one_f_one_b.plan))
    for number, each in enumerate(shown):
        text = each.save(tmp_path / f"{number}{suffix}").read_text()
        assert len(text.splitlines()) >= one_f_one_b.ranks


def test_an_action_shorter_than_a_character_is_a_thin_line_that_is_explained():
    cost = Cost(forward=[1, 1, 1, 0.1], backward=[1, 1, 1, 0.1], latency=1)
    drawn = text.timeline(pipelab.simulate(pipelab.OneFOneB(4, 8), cost), width=110, colour=False)
    (last,) = [line for line in drawn.splitlines() if line.startswith("rank 3")]
    assert sum(last.count(mark) for mark in "▏FB") >= 8  # of 16, two may share a column
    assert " ".join(drawn.split()).endswith("▏ actions too short to be drawn")
    assert "▏" in text.comparison(pipelab.compare(pipelab.OneFOneB(4, 8), cost=cost), width=110, colour=False)
    assert "▏" not in text.timeline(pipelab.simulate(pipelab.OneFOneB(4, 8)), width=110, colour=False)


def test_a_gap_says_how_often_what_fills_it_repeats():
    assert text.gap_mark(7, "BFBFBFB") == "┄ 7 more: BF x 3 ┄"
    assert text.gap_mark(8, "FFFFBBBB") == "┄ 8 more ┄"


def test_an_axis_has_round_steps_and_the_unit_once():
    assert [text.nice_step(least) for least in (2.67, 0.3, 11)] == [5, 0.5, 20]
    ruler = text.Ruler(scale=3, columns=33, bands=(((0, 33),),))
    assert ruler.axis("ms") == ("┬──────────────┬──────────────┬──", "0 ms           5              10")


def test_a_cell_that_is_too_narrow_is_cut():
    assert [text.cell("B10", width) for width in (7, 4, 3, 2, 1)] == ["B10─── ", "B10 ", "B10", "B…", "B"]
    pair = [text.pair_cell("F3", "B1", width) for width in (9, 5, 4, 3, 2)]
    assert pair == ["F3&B1─── ", "F3&B1", "F&B ", "F&B", "& "]


def test_an_action_on_two_bands_has_its_label_in_the_longer_part():
    ruler = text.Ruler(1, 20, (((0, 10),), ((10, 20),)))
    assert [ruler.names_here(9, 14, window, label=3) for (window,) in ruler.bands] == [False, True]
