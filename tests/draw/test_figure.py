"""Figures: every action once, at its place; idle time visible; labels only where they fit."""

from __future__ import annotations

import itertools
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

import pipelab
from pipelab import B, Cost, F, Plan
from pipelab.draw import colours, figure, page
from pipelab.draw.bars import Lanes
from pipelab.plan.actions import KINDS, OPTIONAL, Traits

TEXT = "{http://www.w3.org/2000/svg}text"


def boxes(ax, letter):
    """Return the (start, end, top, bottom) of every bar of a kind."""
    found = []
    for collection in ax.collections:
        if (collection.get_gid() or "").startswith(f"{letter} "):
            for path in collection.get_paths():
                (left, top), (right, bottom) = path.vertices.min(axis=0), path.vertices.max(axis=0)
                found.append((left, right, top, bottom))
    return found


@pytest.fixture
def trace():
    return pipelab.simulate(pipelab.OneFOneB(4, 8))


def test_every_action_is_drawn_once_from_its_start_to_its_end_in_its_ranks_lane(trace):
    ax = figure.plot(trace)
    for kind in "FB":
        drawn = sorted((round(top + 0.43), left, right) for left, right, top, _ in boxes(ax, kind))
        real = sorted((event.rank, event.start, event.end) for event in trace.events if event.action.kind == kind)
        assert drawn == real


def test_rank_0_is_on_top_and_idle_lies_under_every_lane(trace):
    ax = figure.plot(trace)
    bottom, top = ax.get_ylim()
    assert (bottom, top) == (3.5, -0.5)
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    idle = [shapes for shapes in ax.collections if shapes.get_gid() == "idle" and len(shapes.get_paths())]
    drawn = {(*path.vertices[0], *path.vertices[2]) for shapes in idle for path in shapes.get_paths()}
    assert drawn == {(each.start, each.rank - 0.43, each.end, each.rank + 0.43) for each in trace.idle}
    assert [shapes.get_hatch() for shapes in idle] == ["//", "", "\\\\"]  # fill, dependency, drain


def test_idle_time_says_what_it_is_and_one_arrow_comes_from_the_late_giver(trace):
    ax = figure.plot(trace)
    (arrow,) = (text for text in ax.texts if getattr(text, "arrow_patch", None))
    said = {(round(text.get_position()[1]), text.get_text()) for text in ax.texts if text.get_gid() and text != arrow}
    assert {(0, "wait 6 for B0 of rank 1"), (1, "for B0 of rank 2"), (2, "r3"), (3, "fill 3"), (3, "drain 6")} < said
    assert not any(text.isdecimal() for _, text in said)  # a bare number is a micro-batch
    assert (round(arrow.xy[1]), round(arrow.xyann[1])) == (0, 1)
    assert 9 < arrow.xyann[0] < 10  # 1B0 ends at 10, when 0B0 begins
    assert 9 < arrow.xy[0] < 10


def named(ax):
    """Return the labels of actions."""
    return [text for text in ax.texts if text.get_gid() != "idle"]


def test_every_action_of_a_small_trace_is_labelled_in_its_middle(trace):
    ax = figure.plot(trace)
    places = {(round(label.get_position()[1]), label.get_text()): label.get_position()[0] for label in named(ax)}
    assert len(named(ax)) == len(trace.events)
    for event in trace.events:
        name = f"{event.action.kind}{event.action.microbatch}"
        assert places[event.rank, name] == pytest.approx((event.start + event.end) / 2)


@pytest.mark.parametrize("size", [(4, 8), (8, 32), (16, 64)])
def test_no_label_is_wider_than_its_bar(size):
    trace = pipelab.simulate(pipelab.OneFOneB(*size))
    ax = figure.plot(trace)
    renderer_figure = ax.get_figure()
    renderer_figure.draw_without_rendering()
    ends = {(each.rank, (each.start + each.end) / 2): each for each in (*trace.events, *trace.idle)}
    for label in ax.texts:
        if not label.get_text():
            continue  # the arrow
        middle, row = label.get_position()
        event = ends[round(row), middle]
        room = ax.transData.transform((event.end, 0))[0] - ax.transData.transform((event.start, 0))[0]
        assert label.get_window_extent().width <= room


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_actions_that_take_next_to_no_time_do_not_shrink_the_labels_of_the_others(ranks):
    """As the first stage's input gradients do, in every measured step of a split backward."""
    none = [0.001] + [1.0] * (ranks - 1)
    trace = pipelab.simulate(pipelab.ZBH1(ranks, 8), Cost(forward=1, input_grad=none, weight_grad=1))
    ax = figure.plot(trace)
    drawn = {(round(label.get_position()[1]), label.get_text()) for label in named(ax)}
    seen = [event for event in trace.events if event.end - event.start > 0.5]
    assert drawn == {(event.rank, f"{event.action.kind}{event.action.microbatch}") for event in seen}
    assert {label.get_fontsize() for label in named(ax)} == {9.0}


def test_neither_a_long_all_reduce_nor_one_freak_reading_sets_the_scale():
    reduced = pipelab.simulate(pipelab.replicate(pipelab.OneFOneB(2, 4), 2), Cost(all_reduce=500))
    usual = pipelab.simulate(pipelab.OneFOneB(2, 16))
    starts = [[start + 2000 * (at > 0) for at, start in enumerate(row)] for row in usual.starts]
    freak = pipelab.Trace(usual.plan, starts, [[end + 2000 for end in row] for row in usual.ends])
    for trace in (reduced, freak):
        typical = Lanes(trace).typical(range(trace.ranks))
        assert (typical["F"], typical["B"]) == (1.0, 2.0)


def test_a_comparisons_labels_fit_its_common_axis():
    traces = [pipelab.simulate(kind(4, 8)) for kind in (pipelab.Naive, pipelab.GPipe)]
    drawn = figure.plot_comparison(pipelab.compare(*traces))
    assert drawn.axes[0].get_xlim() == drawn.axes[1].get_xlim() == (0, 96)
    widest = max(label.get_window_extent().width for label in drawn.axes[1].texts if label.get_text().startswith("F"))
    unit = np.diff(drawn.axes[1].transData.transform([(0, 0), (1, 0)])[:, 0])[0]
    assert widest <= unit


def test_different_units_get_axes_of_their_own():
    plan = pipelab.OneFOneB(2, 2)
    slow = pipelab.simulate(plan, Cost(forward=40, backward=80, unit="ms"))
    drawn = figure.plot_comparison(pipelab.compare(pipelab.simulate(plan), slow))
    assert [ax.get_xlabel() for ax in drawn.axes] == [
        "time (units); F1 = forward of micro-batch 1",
        "time (ms); F1 = forward of micro-batch 1",
    ]
    assert [ax.get_xlim()[1] for ax in drawn.axes] == [9, 360]


@pytest.mark.parametrize("width", [None, "column"])
@pytest.mark.parametrize("name", ["measured on two machines, one of them with a GPU, and on rank 0's", "x" * 200])
def test_a_long_title_is_cut_in_its_middle_and_keeps_its_end(trace, name, width):
    drawn = figure.plot_comparison(pipelab.compare(trace, trace, names=[f"A {name * 2} B", f"A {name * 2} C"]), width)
    for ax, end in zip(drawn.axes, "BC", strict=True):
        shown = ax.get_title(loc="left").splitlines()[0]
        assert (shown[:2], shown[-1]) == ("A ", end)
        assert ax.bbox.width * 0.9 <= ax._left_title.get_window_extent().width <= ax.bbox.width


def test_the_title_holds_the_figures_and_the_legend_the_kinds(trace):
    ax = figure.plot(trace)
    title = ax.get_title(loc="left").replace("\n", " ")
    assert "A step takes 33 units. The ranks idle 27.3 % of it (the bubble); rank 3" in title
    legend = [entry.get_text() for entry in ax.get_legend().get_texts()]
    assert legend == ["F forward", "B backward", WAIT, "not begun, done", ARROW]
    assert ax.get_xlabel() == "time (units); F3 = forward of micro-batch 3"
    assert trace.plot(label=str).get_xlabel() == "time (units)"  # what a label of one's own means, its writer says


def test_a_measured_trace_begins_at_zero():
    plan = pipelab.OneFOneB(1, 1).plan()
    measured = pipelab.Trace(plan, [[5000.0, 5001.0]], [[5001.0, 5003.0]], unit="ms", source="measured")
    ax = figure.plot(measured)
    assert ax.get_xlim() == (0, 3)
    assert ax.get_xlabel() == "time (ms); F0 = forward of micro-batch 0"
    assert [box[:2] for box in boxes(ax, "F")] == [(0, 1)]


def test_the_two_halves_of_a_slot_lie_one_above_the_other():
    plan = Plan([[F(0), F(1), F(2) & B(0), B(1), B(2)], [F(0), B(0), F(1), B(1), F(2), B(2)]])
    ax = figure.plot(pipelab.simulate(plan, Cost(pair=2.5)))
    (forward,) = (box for box in boxes(ax, "F") if box[:2] == (4, 6.5))
    (backward,) = (box for box in boxes(ax, "B") if box[:2] == (4, 6.5))
    assert forward[3] == backward[2] == 0


def test_text_in_an_svg_is_text_and_two_drawings_are_the_same_bytes(trace):
    drawn = figure.svg(trace)
    words = [element.text for element in ET.fromstring(drawn).iter(TEXT)]  # noqa: S314 - our own drawing
    for event in trace.events:
        assert words.count(f"{event.action.kind}{event.action.microbatch}") == 4
    assert "time (units); F3 = forward of micro-batch 3" in words
    assert drawn == figure.svg(trace)
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or pyplot.get_fignums() == []
    ax = Figure(figsize=(6, 2)).add_subplot()
    assert figure.plot(trace, ax) is ax
    assert boxes(ax, "F")


def test_an_svg_repeats_no_fonts_styles_and_digits(trace):
    drawn = figure.svg(trace)
    assert len(drawn) < 250 * drawn.count("<text") < 30_000  # Matplotlib's own is three times as long
    bars = re.findall(r'id="F #[^>]*fill: #00598a[^>]*>\n((?:<path d="M[^"]*z"/>\n)+)', drawn)
    assert "".join(bars).count("<path") == 4 * trace.plan.microbatches
    left, right = re.search(r"M([\d.]+) [\d.]+H([\d.]+)V", bars[0]).groups()
    assert float(right) - float(left) == pytest.approx(576 / 33, abs=0.1)


def test_a_name_is_text_whatever_it_holds(trace):
    name = "<script>&$x_1$ 名\x1b\n"
    named = pipelab.Trace(trace.plan, trace.starts, trace.ends, name=name)
    words = [element.text for element in ET.fromstring(figure.svg(named)).iter(TEXT)]  # noqa: S314 - our own drawing
    assert any(word and word.startswith("<script>&$x_1$ 名\\x1b\\n, simulated") for word in words)


@pytest.mark.parametrize("suffix", ["svg", "png", "pdf"])
def test_a_figure_is_saved_as_its_suffix_says(trace, suffix, tmp_path):
    magic = {"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF"}[suffix]
    assert trace.save(tmp_path / f"timeline.{suffix}").read_bytes().startswith(magic)
    both = pipelab.compare(trace, trace)
    assert both.save(tmp_path / f"both.{suffix}").read_bytes().startswith(magic)


@pytest.mark.thorough
def test_65536_actions_become_pictures_of_a_few_kilobytes():
    trace = pipelab.simulate(pipelab.OneFOneB(32, 1024))
    ax = figure.plot(trace)
    assert len(ax.images) == 32
    assert not ax.texts
    assert len(figure.svg(trace)) < 1_000_000


def test_each_pixel_of_a_coarse_lane_is_the_mean_of_what_it_stands_for(trace):
    pixels = figure.strip(Lanes(trace), 0, 33)[0]
    lane = ["F0"] * 33
    for event in trace.events_of(0):
        for unit in range(int(event.start), int(event.end)):
            lane[unit] = colours.of(event.action)
    for pixel, colour in zip(pixels, lane, strict=True):
        if colour == "F0":
            assert pixel[3] == pytest.approx(0)
        else:
            assert pixel == pytest.approx([*(channel / 255 for channel in colours.channels(colour)), 1])
    assert figure.strip(Lanes(trace), 0, 7)[0, :, 3].sum() / 7 == pytest.approx(trace.busy[0] / trace.makespan)


# What people with one missing receptor see, in linear light (Viénot, Brettel and Mollon 1999; Machado et al. 2009).
VISION = {
    "full": np.eye(3),
    "no red": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "no green": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "no blue": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
    "none": np.full((3, 1), 1.0) @ np.array([[0.2126, 0.7152, 0.0722]]),
}


def lab(colour, vision):
    """Return a colour in CIE Lab, as it is seen."""
    channel = np.array(colours.channels(colour)) / 255
    linear = np.where(channel <= 0.04045, channel / 12.92, ((channel + 0.055) / 1.055) ** 2.4)
    seen = np.clip(VISION[vision] @ linear, 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ seen / np.array([0.95047, 1.0, 1.08883])
    root = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * root[1] - 16, 500 * (root[0] - root[1]), 200 * (root[1] - root[2])])


def grounds(scheme):
    """Return the grounds of idle times and the page's own, in the light or in the dark."""
    if scheme == "light":
        return {"idle": colours.REST.paper, "wait": colours.WAIT.paper, "paper": "#FFFFFF"}
    css = (Path(page.__file__).parent / "page.css").read_text(encoding="utf-8").partition('data-theme="dark"]')[2]
    return {name: re.search(rf"--{name}: (#\w+)", css)[1] for name in ("idle", "wait", "paper")}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("vision", VISION)
def test_kinds_and_idle_are_told_apart_by_everybody(vision, scheme):
    """Distances in CIE Lab (1976)."""
    ground = grounds(scheme)
    paints = {kind: colours.PALETTE[kind][0] for kind in KINDS} | {each: ground[each] for each in ("idle", "wait")}
    for one, other in itertools.combinations(paints, 2):
        optional = {one, other}.intersection(OPTIONAL) and vision == "none"  # a grey copy has room for five
        if one in KINDS and not optional:
            distance = np.linalg.norm(lab(paints[one], vision) - lab(paints[other], vision))
            assert distance >= 15, f"{one} {paints[one]} and {other} {paints[other]} are {distance:.1f} apart"
    new = Traits("new", (), ()).colours[0]
    for each in ("F", "B", "I", "R", "idle"):
        assert np.linalg.norm(lab(new, vision) - lab(paints[each], vision)) >= 15, each


@pytest.mark.parametrize("kind", KINDS)
def test_a_ranks_second_stage_is_told_apart_by_its_lightness(kind):
    low, high = sorted(map(colours.luminance, colours.PALETTE[kind]))
    assert (high + 0.05) / (low + 0.05) >= 1.25


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_are_legible_also_on_dimmed_bars(scheme):
    def contrast(one, other):
        low, high = sorted(map(colours.luminance, (one, other)))
        return (high + 0.05) / (low + 0.05)

    ground, text = grounds(scheme)["paper"], {"light": "#1c1c1c", "dark": "#ececec"}[scheme]
    for colour in itertools.chain(*colours.PALETTE.values(), colours.HUES):
        assert contrast(colour, colours.ink(colour)) >= 4.5
        mixed = [0.4 * one + 0.6 * other for one, other in zip(*map(colours.channels, (colour, ground)), strict=True)]
        assert contrast("#{:02X}{:02X}{:02X}".format(*map(round, mixed)), text) >= 4.5
    if scheme == "light":
        for look in (colours.REST, colours.WAIT):
            assert contrast(look.paper, look.ink) >= 4.5
            assert contrast(ground, look.border) >= 3


@pytest.mark.parametrize("width", ["column", "page", "beamer", 4])
def test_a_papers_figure_has_its_whole_legend_inside(width):
    ax = figure.plot(pipelab.simulate(pipelab.ZBV(4, 8)), width=width)
    figure.owner(ax).draw_without_rendering()
    inside, legend = figure.owner(ax).bbox, ax.get_legend().get_window_extent()
    assert inside.x0 <= legend.x0 < legend.x1 <= inside.x1
    assert inside.y0 <= legend.y0
    assert legend.y1 <= ax.xaxis.get_tightbbox().y0 + 1 or legend.x0 > ax.xaxis.label.get_window_extent().x1


WAIT, ARROW = "wait (r1: rank 1)", "arrow: longest"
PAPER = ("gpipe", "1f1b", "zb-h1", "dualpipe")


def texts(ax):
    inside = [tick.label1 for tick in ax.xaxis.get_major_ticks() if 0 <= tick.get_loc() <= ax.get_xlim()[1]]
    drawn = [*ax.texts, *inside, *ax.get_yticklabels(), ax.xaxis.label, ax._left_title]
    if ax.get_legend() and ax.get_legend().get_visible():
        drawn += ax.get_legend().get_texts()
    return [each for each in drawn if each.get_text() and each.get_visible()]


def overlapping(found):
    boxes = [(each.get_text(), each.get_window_extent().padded(-0.5)) for each in found]
    return [(one, other) for (one, a), (other, b) in itertools.combinations(boxes, 2) if a.overlaps(b)]


@pytest.mark.parametrize("width", ["column", "page", "beamer", 9])
@pytest.mark.parametrize("name", ["dualpipe", "all"])
def test_on_paper_labels_have_7_points_or_are_numbers_and_nothing_overlaps(name, width):
    traces = [pipelab.simulate(pipelab.schedules[each](4, 8)) for each in (PAPER if name == "all" else [name])]
    if name == "all":
        drawn = figure.plot_comparison(pipelab.compare(*traces, names=PAPER), width)
        assert [bool(ax.get_xlabel()) for ax in drawn.axes] == [False, False, False, True]
        assert len({ax.get_xlim() for ax in drawn.axes}) == 1
    else:
        drawn = figure.owner(figure.plot(traces[0], width=width))
    drawn.draw_without_rendering()
    every = [each for ax in drawn.axes for each in texts(ax)]
    assert not overlapping(every)
    assert all(drawn.bbox.x0 <= each.get_window_extent().x0 for each in every)
    assert all(each.get_window_extent().x1 <= drawn.bbox.x1 for each in every)
    sizes = {each.get_fontsize() for each in every}
    assert min(sizes) >= 7
    assert (sizes == {7}) is (width in ("column", "beamer"))
    assert drawn.axes[-1].get_legend().get_window_extent().height <= drawn.bbox.height / 6


@pytest.mark.parametrize("size", [(6.75, 4), (3.25, 4)])
def test_a_timeline_keeps_to_the_axes_that_it_is_given(size):
    drawn = Figure(figsize=size)
    grid = drawn.subplots(2, 2 if size[0] > 4 else 1, sharex=True).ravel()
    for ax, count in zip(grid, (8, 6, 4, 2), strict=False):
        pipelab.simulate(pipelab.OneFOneB(4, count)).plot(ax)
    drawn.draw_without_rendering()
    assert {ax.get_xlim() for ax in grid} == {(0, 33)}  # the longest one's
    every = [each for ax in grid for each in texts(ax)]
    assert not overlapping(every)
    assert all(each.get_window_extent().x0 >= 0 for each in every)
    for ax in grid:
        assert ax._left_title.get_window_extent().x1 <= ax.bbox.x1
        assert [each.get_text() for each in ax.get_yticklabels()] == [f"rank {rank}" for rank in range(4)]


def test_axes_that_share_their_time_never_cut_an_earlier_timeline_and_labels_still_fit(trace):
    drawn = Figure(figsize=(5, 4))
    first, second = drawn.subplots(2, 1, sharex=True, sharey=True)
    short = pipelab.simulate(pipelab.OneFOneB(2, 2))
    short.plot(first)
    trace.plot(second)
    drawn.draw_without_rendering()
    assert first.get_xlim() == (0, 33)
    assert first.get_ylim() == (3.5, -0.5)
    assert not overlapping(first.texts)


def test_colours_and_labels_may_be_ones_own(trace):
    ax = trace.plot(colours={"F": "#4477aa"}, label=lambda action: f"mb {action.microbatch}")
    assert {each.get_text() for each in named(ax)} <= {f"mb {m}" for m in range(8)}
    assert {each.get_gid() for each in ax.collections if (each.get_gid() or "").startswith("F ")} == {"F #4477aa"}
    legend = ax.get_legend()
    swatches = [to_hex(patch.get_facecolor()) for patch in legend.legend_handles[:2]]
    assert swatches == ["#4477aa", colours.PALETTE["B"][0].lower()]
    both = pipelab.compare(trace, trace).plot(width="page", colours={"B": "#cc3311"}, label=lambda _: "x")
    assert {each.get_text() for ax in both.axes for each in named(ax)} == {"x"}


def several_of(ax):
    return ax.get_legend().get_texts(), ax.get_legend().legend_handles


def test_a_figure_says_its_idea_and_marks_ways_slices_and_the_stage_of_each_gather():
    ways = figure.plot(pipelab.simulate(pipelab.DualPipe(4, 10)))
    arrows = [each for each in ways.texts if getattr(each, "arrow_patch", None) and each.arrowprops["color"] == "black"]
    found = {(round(each.xyann[1]), round(each.xy[1])) for each in arrows}
    assert (len(arrows), found) == (6, {(rank, rank + by) for by in (1, -1) for rank in range(4) if 0 <= rank + by < 4})
    assert ways.get_legend().get_texts()[-1].get_text() == "→ way of F0, F5"
    assert "Half of the micro-batches enter at each end" in ways.get_title(loc="left").replace("\n", " ")
    slices = figure.plot(pipelab.simulate(pipelab.SlimPipe(4, 8)))
    assert [(min(each.get_xdata()), max(each.get_xdata())) for each in slices.lines] == [
        (0.5 * rank, 0.5 * rank + 2) for rank in range(4)
    ]
    empty = Plan.parse(["0F0 0F1 1F0 1F1 1B1 1B0 0B1 0B0", ""], after=lambda m, s: [0] * m)
    assert len(figure.plot(pipelab.simulate(empty)).lines) == 1
    sharded = pipelab.simulate(pipelab.with_gathers(pipelab.LoopedBFS(2, 4), 1), Cost(gather=1))
    said = [each.get_text() for each in figure.plot(sharded).texts]
    stages = [str(move.action.stage) for move in sharded.moves if move.duration]
    assert sorted(each for each in said if each.isdecimal()) == sorted(stages)


def test_a_long_idea_is_cut_so_that_the_headline_stays_in_the_figure():
    class Wordy(pipelab.OneFOneB):
        __doc__ = "One forward, one backward, and so on. ".replace(". ", ", ") * 9

    for schedule in (Wordy(4, 8), pipelab.ZBH2(8, 8), pipelab.Seq1F1B(2, 4)):
        ax = figure.plot(pipelab.simulate(schedule, Cost(latency=0.25)))
        figure.owner(ax).draw_without_rendering()
        title = ax.get_title(loc="left")
        assert "A step takes" in title.replace("\n", " ")
        assert "activations" in title.replace("\n", " ")
        assert ax._left_title.get_window_extent().y1 <= figure.owner(ax).bbox.y1


def test_a_legend_names_what_is_drawn():
    def entries(trace):
        return [each.get_text() for each in figure.plot(trace).get_legend().get_texts()]

    late = pipelab.simulate(pipelab.OneFOneB(2, 2), Cost(latency=0.5))
    both = ["F forward", "B backward"]
    assert entries(late) == [*both, WAIT, "transfer", "not begun, done", ARROW]
    assert entries(pipelab.simulate(pipelab.GPipe(1, 2))) == both
    assert entries(pipelab.simulate(pipelab.GPipe(8, 700))) == [*both, "idle"]
    several = figure.plot(pipelab.simulate(pipelab.ZBV(4, 8)))
    shown = {each.get_text(): swatch for each, swatch in zip(*several_of(several), strict=True)}
    assert list(shown) == [
        "F forward",
        "I backward: input",
        "W backward: weight",
        "paler: 2nd stage",
        "not begun, done",
        "→ way of F0",
    ]
    assert to_hex(shown["paler: 2nd stage"].get_facecolor()) == colours.PALETTE["F"][1].lower()
    assert several.get_xlabel().endswith("; 2F3 = stage 2, forward, micro-batch 3")


@pytest.mark.parametrize(("suffix", "encoding"), [("svg", "utf-8"), ("pdf", "utf-16-be")])
def test_a_figure_tells_its_title_and_its_figures_to_who_does_not_see_it(trace, suffix, encoding, tmp_path):
    written = trace.save(tmp_path / f"drawn.{suffix}", width=4).read_bytes().replace(b"\\", b"")
    assert "1F1B · 4 ranks, 8 micro-batches, simulated, F = 1, B = 2".encode(encoding) in written
    assert b"A step takes 33 units. The ranks idle 27.3 %" in written
    assert suffix == "pdf" or ET.fromstring(written).get("role") == "img"  # noqa: S314  # written above


def test_the_title_names_how_long_values_travel_only_where_all_travel_as_long(trace):
    def titled(cost):
        return figure.plot(pipelab.simulate(trace.plan, cost)).get_title(loc="left").splitlines()[0]

    assert titled(Cost(latency=0.5)).endswith("B = 2, transfer 0.5")
    assert titled(Cost(bandwidth=2, activation_bytes=1, boundary_gradient_bytes=1)).endswith("transfer 0.5")
    assert "transfer" not in titled(
        Cost(bandwidth=2, activation_bytes=lambda m, s: 1 + m % 2, boundary_gradient_bytes=1)
    )
